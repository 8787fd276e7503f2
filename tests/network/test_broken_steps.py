"""Queue pairs and the software NIC broken on purpose are caught: every step that orders memory is left out once.

As tests/low_latency/test_broken_kernels.py, with kernels of these tests' own: they are small, and use slots again.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import numpy as np
import pytest
from fault_reasons import ADDS_64_BITS, SLOTS_ALONE, reason_for
from own_network import FLAGS, RESULTS, SEEN, SOURCE, TARGET, fill_source, run, see, sent_by, wait_flag, wait_wide_flag
from parts import both_parts, dear

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.transport import IbgdaNetwork, fetched_32, fetched_64, post_add, post_write, wait_written
from nbep.device.network.seam import Place, own_ptr
from nbep.device.primitives import st_weak_s64, thread_idx
from nbep.device.types import I32
from nbep.lab.check import Fault, broken, faults_of

pytestmark = pytest.mark.emulator_only("the device code is broken in Python")

MODULES = [
    *(f"nbep.device.network.ibgda.{name}" for name in ("transport", "queue_pair", "completion", "entry")),
    "nbep.device.network.nic",
]
NUM_ADDS = 3


@kernel()
def blocks_of_warps(network: IbgdaNetwork, num_blocks: I32, num_bytes: I32, is_waited: I32):
    """Each warp writes blocks, all on one queue, then adds to its flag. The other rank's warp looks at what came.

    is_waited: the last block's completion comes before the flag, which then goes through another queue pair
    """
    warp, lane = thread_idx() // 32, thread_idx() % 32
    peer = 1 - network.rank
    begin = warp * num_blocks * num_bytes
    fill_source(network, SOURCE + begin, num_blocks * num_bytes, lane)
    last = 0
    for i in range(num_blocks):
        at = begin + i * num_bytes
        last = post_write(network, Place(TARGET + at, SOURCE + at, peer, 0), num_bytes, is_waited != 0, lane)
    if lane == 0:
        if is_waited != 0:
            wait_written(network, peer, 0, last)
        post_add(network, FLAGS + 8 * warp, 1, warp % 2 == 0, peer, is_waited)
    if warp % 2 == 0:
        wait_wide_flag(network, warp, 1, lane)
    else:
        wait_flag(network, 2 * warp, 1, lane)
    see(network, begin, num_blocks * num_bytes, lane)


@kernel()
def old_values(network: IbgdaNetwork, is_64_bits: I32):
    """One thread adds at the peer, and writes down what was there before."""
    peer = 1 - network.rank
    for i in range(NUM_ADDS):
        index = post_add(network, FLAGS, 1, is_64_bits != 0, peer, 0)
        wait_written(network, peer, 0, index)
        old = fetched_64(network, peer, 0) if is_64_bits != 0 else fetched_32(network, peer, 0)
        st_weak_s64(own_ptr(network, RESULTS + 8 * i), old)


def run_blocks(num_warps: int, num_blocks: int, num_bytes: int, is_waited: bool, **options) -> None:
    size = num_warps * num_blocks * num_bytes
    args = num_blocks, num_bytes, int(is_waited)
    for rank, memory in enumerate(run(blocks_of_warps, 1, 32 * num_warps, *args, num_qps=2, **options)):
        assert memory[SEEN : SEEN + size].tolist() == sent_by(1 - rank, SOURCE, size)


def run_adds(is_64_bits: bool, **options) -> None:
    for memory in run(old_values, 1, 1, int(is_64_bits), **options):
        assert memory[RESULTS : RESULTS + 8 * NUM_ADDS].view(np.int64).tolist() == list(range(NUM_ADDS))


PROGRAMS: list[Callable[..., None]] = [
    partial(run_adds, False),
    partial(run_adds, True),
    partial(run_blocks, 2, 2, 640, False),  # several entries each, some with two data segments
    partial(run_blocks, 1, 1, 640, True),
]


def is_caught(memory_model: str) -> bool:
    """Whether a program ends in wrong results or in an error, under one of the schedules."""
    for seed in range(1, 5):
        for program in PROGRAMS:
            try:
                program(memory_model=memory_model, seed=seed, nic={"seed": seed, "max_delay_ns": 300})
            except (AssertionError, nbep.NetworkError, nbep.EmulatorError):
                return True
    return False


# The other kinds are in the table of records/faults.md.
KINDS = ("release", "acquire", "barrier", "copies", "network")
FAULTS = [fault for module in MODULES for fault in faults_of(import_module(module)) if fault.kind in KINDS]


@dear
@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc", "delayed"]))
@pytest.mark.parametrize("program", PROGRAMS, ids=["add-32", "add-64", "warps", "completion"])
def test_unbroken_queues_are_not_caught(program, memory_model):
    program(memory_model=memory_model, seed=1, nic={"seed": 1, "max_delay_ns": 300})


# A reason that holds for nbep's own kernels need not hold here.
# These programs do not find one of the rest, which the table's run of network.wrap finds.
ELSEWHERE = {"network.ibgda.transport.post_few: syncwarp"}
NEEDED = [
    fault
    for fault in FAULTS
    if reason_for(fault.name) in ("", SLOTS_ALONE, ADDS_64_BITS) and fault.name not in ELSEWHERE
]


@pytest.mark.parametrize("fault", NEEDED, ids=str)
def test_a_step_that_is_left_out_is_caught(fault: Fault):
    with broken(fault):
        assert is_caught("checked")
