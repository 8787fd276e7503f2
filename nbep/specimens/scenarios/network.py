"""The benchmark's kernel: every rank sends messages to the next one, through its network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import nbep
from nbep.device.jit import over
from nbep.device.kernels.network_push import PushSizes, buffer_bytes, messages_bytes, network_push, smem_bytes
from nbep.lab.check.scenario import Scenario
from nbep.specimens.workloads.cases import Report

# bytes: of a message, a multiple of 16. messages: of each warp. nic: through the software NIC. log2_chunk: of the bytes
# for which there is a key; a message has an entry for each that it touches.
PARAMETERS = {
    "ranks": 2,
    "blocks": 2,
    "warps": 2,
    "bytes": 528,
    "messages": 3,
    "queues": 3,
    "rounds": 2,
    "nic": 0,
    "log2_chunk": 26,
}
LEAST = {"ranks": 2, "bytes": 16, "nic": 0, "log2_chunk": 8}
# With 64 entries, and so slow that queues fill.
NIC = nbep.NicOptions(num_entries=64, seed=1, max_delay_ns=8000)
# So many messages that the send queue is full, and its slots are used again at once.
WRAPPING = {"nic": 1, "blocks": 1, "warps": 1, "bytes": 16, "messages": 70, "queues": 1}
# The same of messages of several entries: some lie at the end of the queue and at its beginning.
OVER_THE_END = {**WRAPPING, "bytes": 784, "messages": 24, "rounds": 1, "log2_chunk": 8}
ALIGNMENT = 128


def sizes_of(parameters: dict[str, int]) -> tuple[PushSizes, int]:
    """The arguments of a launch, and its warps; each queue has one at least."""
    num_warps = parameters["blocks"] * parameters["warps"]
    return PushSizes(parameters["bytes"], parameters["messages"], min(parameters["queues"], num_warps), 0), num_warps


def main(comm: Any, **parameters: int) -> np.ndarray:
    """What has come to this rank, as vectors of four words: [warps, messages, vectors, 4]."""
    sizes, num_warps = sizes_of(parameters)
    num_bytes = -(-buffer_bytes(num_warps, sizes) // ALIGNMENT) * ALIGNMENT
    network: dict[str, Any] = {"transport": "direct"}
    if parameters["nic"]:
        nic = replace(NIC, chunk_bytes=1 << parameters["log2_chunk"])
        network = {"transport": "ibgda", "num_nvl_peers": 1, "nic": nic}
    memory = nbep.SharedMemory.create(comm, num_bytes, num_qps=sizes.num_queues, **network)
    kernel, block = over(network_push, memory.transport.network_type), 32 * parameters["warps"]
    for number in range(1, 1 + parameters["rounds"]):
        args = sizes._replace(round=number), memory.network, memory.bounds
        smem = smem_bytes(block, sizes.num_bytes)
        memory.runtime.launch(memory.comm_stream, kernel, parameters["blocks"], block, smem, *args)
    memory.wait()
    shape = num_warps, sizes.num_messages, sizes.num_bytes // 16, 4
    came = memory.symmetric.read(0, messages_bytes(num_warps, sizes) // 4, np.int32).reshape(shape)
    memory.close()
    return came


def check(results: list[np.ndarray], **parameters: int) -> None:
    """Each message says whose it is: its sender's rank and warp, and where in the message the bytes are."""
    for rank, came in enumerate(results):
        want = np.empty_like(came)
        want[..., 0] = (rank - 1) % len(results)
        want[..., 1] = np.arange(len(came))[:, None, None]
        want[..., 2] = 16 * np.arange(came.shape[2])
        want[..., 3] = 0x5EED
        Report(f"rank {rank}").same("messages", came, want)


def make(name: str, about: str, variants: tuple[dict[str, int], ...], **changed: int) -> Scenario:
    kernels = ("network_push", "network.nic")
    return Scenario(f"network.{name}", about, main, check, {**PARAMETERS, **changed}, LEAST, kernels, variants)


SCENARIOS = (
    make(
        "push",
        "every rank sends messages to the next one",
        ({"blocks": 1, "messages": 2}, {"nic": 1, "blocks": 1, "messages": 2}, WRAPPING),
    ),
    make("wrap", "messages of several entries each, more than a queue has, to the next rank", ({},), **OVER_THE_END),
)
