"""Layout, dispatch and combine in one CUDA graph, replayed with new inputs; one process per GPU.

    mpirun -n 2 python tests/cuda/graph_main.py [--async] [--zero-copy]

With num_worst_tokens nothing on the way needs the CPU. The exit code is 0 if every replay gave what the reference says.
With --async the calls return at once, and their outputs belong to the comm stream. With --zero-copy there are no rings.
"""

import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mpi_main  # sets the environment, so it comes first
from arrays import to_target
from cases import Case, make_case
from graphs import NUM_REPLAYS, NUM_TOKENS, replay
from intranode import FACTORS, Expected, Options, Outcome
from mpi4py import MPI

import nbep


def case_of(seed: int, num_ranks: int) -> Case:
    """Inputs of one replay: the sizes are those of the capture, the routes are new."""
    return make_case(seed, num_ranks=num_ranks, num_tokens=NUM_TOKENS[:num_ranks], hidden=256, num_topk=4)


class Layer:
    """One rank's inputs, in memory that stays, and the calls on them."""

    def __init__(self, comm: MPI.Intracomm):
        self.rank = comm.rank
        case = case_of(0, comm.size)
        self.num_experts = case.num_experts
        self.options = Options(
            nbep.Config(4, 3, 8), num_worst_tokens=sum(case.num_tokens) + 3, zero_copy="--zero-copy" in sys.argv
        )
        self.buffer = nbep.Buffer(comm, **self.options.buffer_arguments(case))
        self.inputs = self.arrays(case)
        self.is_async = "--async" in sys.argv

    def arrays(self, case: Case) -> tuple:
        return to_target((case.x[self.rank], case.topk_idx[self.rank], case.topk_weights[self.rank]))

    def load(self, arrays: tuple) -> None:
        for array, new in zip(self.inputs, arrays, strict=True):
            array.copy_(new)

    def order(self, event: nbep.EventOverlap | None = None) -> dict:
        """Where a call stands among others: behind the event, or behind the current stream."""
        if not self.is_async:
            return {}
        event = event or nbep.Buffer.capture()
        return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}

    def forward(self) -> Outcome:
        x, topk_idx, topk_weights = self.inputs
        *layout, event = self.buffer.get_dispatch_layout(topk_idx, self.num_experts, **self.order())
        recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = self.buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            num_worst_tokens=self.options.num_worst_tokens,
            config=self.options.config,
            **self.options.way,
            **self.order(event),
        )
        event.current_stream_wait()
        heads = (handle.send_head.clone(),)
        outcome = Outcome(tuple(layout), recv_x, recv_topk_idx, recv_topk_weights, counts, handle, heads)
        expert_output = (recv_x.float() * float(FACTORS[self.rank])).bfloat16()
        outcome.combined_x, outcome.combined_topk_weights, event = self.buffer.combine(
            expert_output,
            handle,
            topk_weights=recv_topk_weights,
            config=self.options.config,
            **self.options.way,
            **self.order(),
        )
        event.current_stream_wait()
        return outcome


def wrong_replays(comm: MPI.Intracomm) -> int:
    """How many forwards went wrong on this rank."""
    layer = Layer(comm)
    wrong = 0

    def compare(seed: int, outcome: Outcome, what: str) -> None:
        nonlocal wrong
        try:
            expected = Expected(case_of(seed, comm.size), layer.options)
            expected.check(comm.rank, outcome, f"{what}, inputs {seed}, rank {comm.rank}")
        except AssertionError:
            traceback.print_exc()
            wrong += 1

    replay(comm, layer, [layer.arrays(case_of(seed, comm.size)) for seed in range(NUM_REPLAYS)], compare)
    layer.buffer.destroy()
    return wrong


def main() -> int:
    comm = MPI.COMM_WORLD
    wrong = mpi_main.on_own_gpu(comm, lambda: comm.allreduce(wrong_replays(comm)))
    if comm.rank == 0:
        print(f"{2 * NUM_REPLAYS} replays on {comm.size} GPUs: {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
