"""ElasticBuffer's dispatch and combine in one CUDA graph, replayed with new inputs; one process per GPU.

    mpirun -n 2 python tests/cuda/elastic_graph_main.py [--expand] [--shared]

Without CPU sync nothing on the way needs the CPU. The exit code is 0 if every replay gave what the reference says.
A graph that holds one dispatch twice in a row takes the halves of the buffer in turn, however often it is replayed.
"""

import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import mpi_main  # sets the environment, so it comes first
from arrays import to_numpy, to_target
from cases import Case, make_case
from elastic import ElasticExpected, ElasticOptions, ElasticOutcome, dispatch_arguments, form, make_elastic_buffer
from graphs import NUM_REPLAYS, NUM_TOKENS, replay
from mpi4py import MPI

from nbep.specimens.workloads.elastic import HANDLE_ARRAYS, num_max_tokens
from nbep.specimens.workloads.intranode import FACTORS


def case_of(seed: int, num_ranks: int) -> Case:
    """Inputs of one replay: the sizes are those of the capture, the routes are new."""
    return make_case(seed, num_ranks=num_ranks, num_tokens=NUM_TOKENS[:num_ranks], hidden=256, num_topk=4)


class Layer:
    """One rank's inputs, in memory that stays, and the calls on them."""

    def __init__(self, comm: MPI.Intracomm):
        self.rank = comm.rank
        self.options = ElasticOptions(do_expand="--expand" in sys.argv, do_cpu_sync=False, is_cached=True)
        case = case_of(0, comm.size)
        self.buffer = make_elastic_buffer(comm, [(case, self.options)])
        self.arguments = dispatch_arguments(case, self.options, comm.rank)
        self.output: Any = None
        if "--shared" in sys.argv:
            x, most = self.arguments["x"], comm.size * num_max_tokens(case, self.options)
            rows = self.buffer.make_rows(2 * most, case.hidden).like(x.new_empty(2 * most, case.hidden))
            self.arguments["x"] = rows[: len(x)].copy_(x)
            self.output = rows[most:]
        self.inputs = tuple(self.arguments[name] for name in ("x", "topk_idx", "topk_weights"))

    def arrays(self, case: Case) -> tuple:
        return to_target((case.x[self.rank], case.topk_idx[self.rank], case.topk_weights[self.rank]))

    def load(self, arrays: tuple) -> None:
        for array, new in zip(self.inputs, arrays, strict=True):
            array.copy_(new)

    def forward(self) -> tuple:
        x, _, topk_weights = self.inputs
        *first, handle, _ = self.buffer.dispatch(**self.arguments)
        *again, _, _ = self.buffer.dispatch(x, topk_weights=topk_weights, handle=handle, **form(self.options))
        output = (again[0].float() * float(FACTORS[self.rank])).bfloat16()
        if self.output is not None:
            output = self.output[: len(output)].copy_(output)
        combined = self.buffer.combine(output, handle, topk_weights=again[2])
        return first, again, handle, combined

    def outcome(self, arrays: tuple) -> ElasticOutcome:
        first, again, handle, combined = arrays
        of_handle = {name: to_numpy(getattr(handle, name)).copy() for name in HANDLE_ARRAYS}
        of_handle["num_recv_tokens_per_expert_list"] = handle.num_recv_tokens_per_expert_list
        received = map(to_numpy, first)
        return ElasticOutcome(*received, of_handle, None, tuple(map(to_numpy, again)), *map(to_numpy, combined[:2]))


def wrong_replays(comm: MPI.Intracomm) -> int:
    """How many forwards went wrong on this rank."""
    layer = Layer(comm)
    wrong = 0

    def compare(seed: int, arrays: tuple, what: str) -> None:
        nonlocal wrong
        try:
            expected = Plain(case_of(seed, comm.size), layer.options)
            expected.check(comm.rank, layer.outcome(arrays), f"{what}, inputs {seed}, rank {comm.rank}")
        except AssertionError:
            traceback.print_exc()
            wrong += 1

    replay(comm, layer, [layer.arrays(case_of(seed, comm.size)) for seed in range(NUM_REPLAYS)], compare)
    layer.buffer.destroy()
    return wrong


class Plain(ElasticExpected):
    """Experts that only multiply by the factor of their rank, as a graph can."""

    def rows_of_experts(self, rows, rank):
        return (rows.astype("float32") * FACTORS[rank]).astype(rows.dtype)


def main() -> int:
    comm = MPI.COMM_WORLD
    wrong = mpi_main.on_own_gpu(comm, lambda: comm.allreduce(wrong_replays(comm)))
    if comm.rank == 0:
        print(f"{2 * NUM_REPLAYS} replays on {comm.size} GPUs: {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
