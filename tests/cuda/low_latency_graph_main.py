"""Low-latency dispatch and combine in one CUDA graph, replayed with new inputs; one process per GPU.

    mpirun -n 2 python tests/cuda/low_latency_graph_main.py [--hooks | --odd]
        [--transport direct|ibgda|nvshmem] [--num-nvl-peers 1] [--num-qps 24]

The exit code is 0 if every replay gave what the reference says. With --hooks each call is two launches. With --odd the
graph holds one call: its second replay finds that the other half of the buffer is next, and the buffer says so.
"""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mpi_main  # sets the environment, so it comes first
import torch
from arrays import to_numpy, to_target
from cases import Case
from graphs import NUM_REPLAYS, NUM_TOKENS, capture, replay
from low_latency import FACTORS, Options, Outcome, make_buffer, make_low_latency_case, num_max_tokens
from low_latency_rounds import wrong_names
from mpi4py import MPI
from network_options import add_network_options, network_arguments

import nbep
from nbep import reference

KINDS = [Options(use_fp8=True), Options(), Options(deduplicate=True, use_fp8=True, round_scale=True)]


def case_of(seed: int, num_ranks: int) -> Case:
    """Inputs of one replay: the sizes are those of the capture, the routes are new."""
    return make_low_latency_case(
        seed, num_ranks=num_ranks, num_tokens=NUM_TOKENS[:num_ranks], hidden=512, num_topk=4, experts_per_rank=3
    )


class Layer:
    """One rank's inputs, in memory that stays, and the calls on them."""

    def __init__(self, buffer: nbep.Buffer, options: Options, with_hooks: bool):
        self.buffer = buffer
        self.options = options
        self.with_hooks = with_hooks
        self.case = case_of(0, buffer.group_size)
        self.inputs = self.arrays(self.case)
        num_local_experts = self.case.num_experts // buffer.group_size
        experts = range(buffer.rank * num_local_experts, (buffer.rank + 1) * num_local_experts)
        self.factors = torch.tensor([float(FACTORS[e % len(FACTORS)]) for e in experts], device="cuda").view(-1, 1, 1)

    def arrays(self, case: Case) -> tuple:
        rank = self.buffer.rank
        return to_target((case.x[rank], case.topk_idx[rank], case.topk_weights[rank]))

    def load(self, arrays: tuple) -> None:
        for array, new in zip(self.inputs, arrays, strict=True):
            array.copy_(new)

    def dispatch(self) -> tuple:
        x, topk_idx, topk_weights = self.inputs
        recv_x, recv_count, handle, _, hook = self.buffer.low_latency_dispatch(
            x,
            topk_idx,
            num_max_tokens(self.case, self.options),
            self.case.num_experts,
            use_fp8=self.options.use_fp8,
            round_scale=self.options.round_scale,
            return_recv_hook=self.with_hooks,
            deduplicate=self.options.deduplicate,
            topk_weights=topk_weights if self.options.deduplicate else None,
        )
        if hook is not None:
            hook()
        return recv_x, recv_count, handle

    def forward(self) -> tuple:
        """Dispatch, experts, combine: the arrays that come out. Rows past recv_count hold anything, also in combine."""
        _, topk_idx, topk_weights = self.inputs
        recv_x, recv_count, handle = self.dispatch()
        values, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
        rows = values.float() if scales is None else values.float() * scales.repeat_interleave(128, dim=2)
        x = (rows.bfloat16().float() * self.factors).bfloat16()
        combined_x, _, hook = self.buffer.low_latency_combine(
            x, topk_idx, topk_weights, handle, return_recv_hook=self.with_hooks
        )
        if hook is not None:
            hook()
        return values, scales, recv_count, handle, combined_x

    def wrong(self, seed: int, arrays: tuple) -> list[str]:
        """The names of what is wrong in the arrays of a forward of some inputs."""
        values, scales, recv_count, handle, combined_x = arrays
        src_info, layout_range, most, hidden, num_experts = handle
        dispatched = reference.LowLatencyDispatched(*to_numpy([values, scales, recv_count, src_info, layout_range]))
        outcome = Outcome(dispatched, most, hidden, num_experts, to_numpy(combined_x))
        return wrong_names(case_of(seed, self.buffer.group_size), self.options, self.buffer.rank, outcome)


def wrong_replays(comm: MPI.Intracomm, buffer: nbep.Buffer, options: Options, with_hooks: bool) -> int:
    """How many forwards went wrong on this rank."""
    layer = Layer(buffer, options, with_hooks)
    num_wrong = 0

    def compare(seed: int, arrays: tuple, what: str) -> None:
        nonlocal num_wrong
        if wrong := layer.wrong(seed, arrays):
            print(f"{what}, {options}, inputs {seed}, rank {comm.rank}: {', '.join(wrong)} wrong", flush=True)
            num_wrong += 1

    replay(comm, layer, [layer.arrays(case_of(seed, comm.size)) for seed in range(NUM_REPLAYS)], compare)
    return num_wrong


def raises_for_an_odd_graph(comm: MPI.Intracomm, buffer: nbep.Buffer) -> bool:
    """Whether the second replay of a graph of one call ends in the ValueError that says what is wrong with it."""
    layer = Layer(buffer, KINDS[0], False)
    layer.forward()
    torch.cuda.synchronize()
    comm.barrier()
    graph, _ = capture(layer.dispatch)
    comm.barrier()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    try:
        layer.dispatch()
    except ValueError as error:
        print(f"rank {comm.rank}: {error}", flush=True)
        return re.search("CUDA graph holds an even number", str(error)) is not None
    return False


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--hooks", action="store_true")
    kinds.add_argument("--odd", action="store_true")
    add_network_options(parser)
    return parser.parse_args()


def run(comm: MPI.Intracomm, options: argparse.Namespace) -> int:
    """How many things went wrong on all ranks."""
    trips = [(case_of(0, comm.size), replace(kind, deduplicate=True)) for kind in KINDS]
    buffer = make_buffer(comm, trips, **network_arguments(options))
    if options.odd:
        num_wrong = 0 if raises_for_an_odd_graph(comm, buffer) else 1
    else:
        num_wrong = sum(wrong_replays(comm, buffer, kind, options.hooks) for kind in KINDS)
    buffer.destroy()
    return comm.allreduce(num_wrong)


def main() -> int:
    comm, options = MPI.COMM_WORLD, parse()
    num_wrong = mpi_main.on_own_gpu(comm, lambda: run(comm, options))
    if comm.rank == 0:
        what = "an odd graph" if options.odd else f"{2 * NUM_REPLAYS * len(KINDS)} replays"
        print(f"{what} on {comm.size} GPUs: {num_wrong} wrong", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
