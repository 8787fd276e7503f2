"""Message rate and bandwidth of each transport: every rank sends to the next and receives from the one before.

    mpirun -n 2 nbep bench network [--sizes 16,1024,1048576] [--json [FILE.json]] [--plot FILE]
    nbep bench network --ranks 2          virtual ranks on one card: the kernels run, the wire is its memory

 direct    the next rank's memory is mapped: bulk copies, or 16-byte stores
 ibgda     the GPU writes entries into send queues; the software NIC, a block on the same GPU, serves them
 nvshmem   NVSHMEM's device calls; where its package is installed, with a process for each GPU

No NIC is measured: what carries the bytes is NVLink, or the memory of a card. All warps of `network_push` send at once.
A launch ends when all has arrived, and everybody knows; us is that of one of many launches in a row, the mean over
ranks. M/s counts the messages of a rank, GB/s their bytes. A message of more than 32768 bytes goes in parts. "of copy"
is the time in which the driver copies as many bytes to the next rank, in the same run, over that of the launch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import count, product
from typing import Any, NamedTuple, get_args

import numpy as np

import nbep
from nbep.bench.harness.clocks import driver_us
from nbep.bench.harness.command import Parser, numbers, positive, run, some_of
from nbep.bench.harness.report import Case, Report, Row, carrier, draw
from nbep.device.jit import over
from nbep.device.kernels.network_push import (
    CELLS_BYTES,
    MAX_QUEUES,
    MAX_WARPS,
    PushSizes,
    buffer_bytes,
    messages_bytes,
    network_push,
    smem_bytes,
)
from nbep.device.layout.intranode import ALIGNMENT_BYTES, MAX_NVL_PEERS, align_up
from nbep.device.network.nvshmem_library import NvshmemMissing, archive
from nbep.host.transport.base import TransportName

NUM_THREADS = 32 * MAX_WARPS
LAUNCHES = 10  # in a row
COLUMNS = {
    "bytes": "num_bytes",
    "messages": "num_messages",
    "us": "us:.1f",
    "M/s": "million_per_s:.2f",
    "GB/s": "gbps:.2f",
    "of copy": "of_copy:.2f",
}


class Setting(NamedTuple):
    """A transport and how its queues are used.

    batch, num_queues: entries a doorbell and queue pairs for each peer; 0 where there are none
    """

    transport: TransportName
    batch: int
    num_queues: int

    def __str__(self) -> str:
        if self.num_queues == 0:
            return self.transport
        return f"{self.transport}, {self.batch} a doorbell, {self.num_queues} queue pairs"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        found = numbers(text)
        if any(size % 16 for size in found):
            raise argparse.ArgumentTypeError(f"{text}: messages have multiples of 16 bytes")
        return found

    parser = Parser("network", __doc__)
    transports = some_of(get_args(TransportName))
    parser.add_argument("--transports", type=transports, default=None, help="some of: direct,ibgda,nvshmem")
    parser.add_argument("--sizes", type=sizes, default=[16 << 2 * i for i in range(9)], help="bytes of a message")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16], help="entries a doorbell to try, powers of two")
    parser.add_argument("--queues", type=numbers, default=[1, 4, 16], help="queue pairs for each peer to try")
    parser.add_argument("--sms", type=positive, default=8, help="blocks that send")
    parser.add_argument("--messages", type=positive, default=64, help="of each warp in a launch, at most")
    parser.add_argument("--bytes", type=positive, default=1 << 26, help="of each rank in a launch, at most")
    parser.add("repeat", default=5, help=f"times that {LAUNCHES} launches are timed")
    parser.add_ranks(MAX_NVL_PEERS)
    parser.add("json")
    parser.add("plot", help="draw GB/s over the size of messages there")
    options = parser.parse_args(argv)
    if max(options.queues) > min(MAX_QUEUES, MAX_WARPS * options.sms):
        parser.error(f"--queues: at most {min(MAX_QUEUES, MAX_WARPS * options.sms)} with --sms {options.sms}")
    for batch in options.batches:
        try:
            nbep.NicOptions(batch=batch)
        except ValueError as error:
            parser.error(f"--batches: {error}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    return run("network", parse(argv), measure_rank, fill_in, with_torch=False)


def fill_in(options: argparse.Namespace, comm: Any) -> str | None:
    """Set the transports. Returns what cannot be measured."""
    missing = why_no_nvshmem(comm)
    if options.transports is None:
        options.transports = [name for name in get_args(TransportName) if name != "nvshmem" or not missing]
    return missing if "nvshmem" in options.transports else None


def why_no_nvshmem(comm: Any) -> str | None:
    if comm is None:
        return "nvshmem takes a process for each GPU: mpirun -n 2 nbep bench network"
    try:
        archive()
    except NvshmemMissing as missing:
        return str(missing)
    return None


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    for transport in options.transports:
        if transport == "ibgda":
            yield from (Setting(transport, *pair) for pair in product(options.batches, options.queues))
        else:
            yield Setting(transport, 0, 0)


def sizes_of(options: argparse.Namespace, num_bytes: int, num_queues: int) -> PushSizes:
    """As many messages of this size as the options allow, at least one of each warp."""
    num_warps = MAX_WARPS * options.sms
    most = options.bytes // (num_warps * num_bytes)
    return PushSizes(num_bytes, max(1, min(options.messages, most)), max(1, num_queues), 0)


def measure_rank(comm: Any, options: argparse.Namespace) -> None:
    """Measure everything on this rank; rank 0 prints and writes."""
    carries = carrier("the wire", comm)
    report = Report(options, num_ranks=comm.size, wire=carries, sms=options.sms)
    copies = copy_times(comm, options)
    if comm.rank == 0:
        report.say(f"{comm.size} ranks, {options.sms} blocks each; {carries}")
    points: list[tuple[str, float, float]] = []
    for setting in settings(options):
        rows = measure_setting(comm, options, setting, copies)
        points += [(str(setting), row["num_bytes"], row["gbps"]) for row in rows]
        if comm.rank == 0:
            report.table(rows, COLUMNS, str(setting))
            report.add(rows=rows)
    if comm.rank == 0:
        report.close()
        if options.plot:
            texts = {"xlabel": "bytes of a message", "ylabel": "GB/s, each rank"}
            title = f"{comm.size} ranks; {carries}"
            draw(options.plot, points, dashed="", small=title, xscale="log", yscale="log", **texts)


def create_memory(comm: Any, options: argparse.Namespace, setting: Setting) -> nbep.SharedMemory:
    num_warps = MAX_WARPS * options.sms
    most = max(buffer_bytes(num_warps, sizes_of(options, size, setting.num_queues)) for size in options.sizes)
    network: dict[str, Any] = {"transport": setting.transport}
    if setting.transport != "direct":
        network |= {"num_nvl_peers": 1}  # each rank is a node: nothing is mapped
    if setting.transport == "ibgda":
        network |= {"num_qps": setting.num_queues, "nic": nbep.NicOptions(batch=setting.batch)}
    return nbep.SharedMemory.create(comm, align_up(most, ALIGNMENT_BYTES), **network)


def measure_setting(comm: Any, options: argparse.Namespace, setting: Setting, copies: dict[int, float]) -> list[Row]:
    memory = create_memory(comm, options, setting)
    kernel = over(network_push, memory.transport.network_type)
    memory.runtime.load(kernel)
    num_warps, rows = MAX_WARPS * options.sms, []
    for size in options.sizes:
        sizes = sizes_of(options, size, setting.num_queues)
        comm.barrier()
        # The cells lie behind the messages, so their place depends on the size, and they begin as zeros.
        memory.symmetric.write(2 * messages_bytes(num_warps, sizes), np.zeros(CELLS_BYTES // 4, np.int32))
        launches = count(1)

        def push(sizes: PushSizes = sizes, launches: Iterator[int] = launches) -> None:
            args = (sizes._replace(round=next(launches)), memory.network, memory.bounds)
            smem = smem_bytes(NUM_THREADS, sizes.num_bytes)
            memory.runtime.launch(memory.comm_stream, kernel, options.sms, NUM_THREADS, smem, *args)

        num_messages = num_warps * sizes.num_messages
        moved = num_messages * size
        settings = {**setting._asdict(), "num_bytes": size, "num_messages": num_messages}
        case = Case(settings, push, {"gbps": moved}, {"of_copy": copies[moved]})
        us = timed(comm, options, memory, case.call)
        rows.append(case.row(us, million_per_s=num_messages / us))
    memory.close()
    return rows


def copy_times(comm: Any, options: argparse.Namespace) -> dict[int, float]:
    """Bytes of a launch -> microseconds in which the driver copies them to the next rank."""
    num_warps = MAX_WARPS * options.sms
    totals = sorted({messages_bytes(num_warps, sizes_of(options, size, 1)) for size in options.sizes})
    memory = nbep.SharedMemory.create(comm, align_up(2 * totals[-1], ALIGNMENT_BYTES))
    after = (comm.rank + 1) % comm.size
    there = int(memory.symmetric.read(memory.peers.buffer_ptrs - memory.symmetric.address, comm.size, "int64")[after])
    here = memory.symmetric.address + totals[-1]
    times = {}
    for total in totals:
        times[total] = timed(comm, options, memory, lambda total=total: copy(memory, there, here, total))  # type: ignore[misc]
    memory.close()
    return times


def copy(memory: nbep.SharedMemory, dst: int, src: int, num_bytes: int) -> None:
    from cuda.bindings import driver as cu

    from nbep.host.target.cuda.driver import check

    check("cuMemcpyAsync", cu.cuMemcpyAsync(dst, src, num_bytes, memory.comm_stream.handle))  # type: ignore[attr-defined]


def timed(comm: Any, options: argparse.Namespace, memory: nbep.SharedMemory, call: Callable[[], None]) -> float:
    """Microseconds of one of LAUNCHES calls in a row: the median over repetitions, the mean over ranks. Collective."""
    samples = []
    for repetition in range(1 + options.repeat):  # the first is not counted
        memory.wait()
        comm.barrier()
        us = driver_us(memory.comm_stream, call, LAUNCHES)
        memory.wait()
        if repetition > 0:
            samples.append(us / LAUNCHES)
    return statistics.fmean(comm.allgather(statistics.median(samples)))
