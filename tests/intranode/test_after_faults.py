"""After a fault: a late peer gets its tokens or raises because they are missing, and nothing goes out of bounds."""

import numpy as np
import pytest
from calls import hold_back
from cases import make_case
from intranode import Options, combine, dispatch, dispatch_arguments, make_buffer
from parts import both_parts
from target import MEMORY_MODELS, spawn

import nbep
from nbep import reference

pytestmark = pytest.mark.emulator_only("the late launch is arranged")


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("num_threads", both_parts([128], thorough=[64]))
@pytest.mark.parametrize(("kernel", "num_tokens"), [("dispatch", (24, 0)), ("combine", (0, 24))])
def test_a_late_peer_raises_because_tokens_are_missing(kernel, num_tokens, num_threads, memory_model):
    """Rank 0 has 24 tokens for rank 1, and nothing comes the other way: only the missing tokens can tell."""
    case = make_case(4, num_tokens=num_tokens, routing="everywhere")
    failed: list[int] = []
    options = Options(nbep.Config(2, 2, 5, num_threads=num_threads))  # the ring holds a fifth of the traffic

    def main(comm):
        buffer = make_buffer(comm, case, options)
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1:
                hold_back(patch, kernel, failed)
            with pytest.raises(nbep.PeerTimeout, match=f"{kernel} .* for rank {1 - comm.rank}") as error:  # noqa: PT012
                outcome = dispatch(buffer, case, options, comm.rank)
                combine(buffer, case, options, comm.rank, outcome)
            failed.append(error.value.rank)
        buffer.destroy()

    spawn(main, 2, on_deadlock="expire", memory_model=memory_model)
    assert failed == [0, 1]


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("queued", ["dispatch", "combine"])
def test_what_a_failed_rank_has_queued_does_not_reach_a_late_peer(queued, memory_model):
    """Rank 0 has sent all when its wait for rank 1 times out, and has queued another call. Rank 1 is only late."""
    config = nbep.Config(2, 4, 16)
    failed: list[int] = []

    def send(buffer, num_tokens, dst, value):
        """Start a dispatch of equal tokens to one rank."""
        topk_idx = np.full((num_tokens, 1), dst, np.int64)
        return buffer.dispatch(
            np.full((num_tokens, 64), value, reference.BF16),
            topk_idx=topk_idx,
            topk_weights=np.ones((num_tokens, 1), np.float32),
            num_tokens_per_rank=num_tokens * np.eye(2, dtype=np.int32)[dst],
            num_tokens_per_expert=num_tokens * np.eye(2, dtype=np.int32)[dst],
            is_token_in_rank=np.arange(2) == topk_idx,
            num_worst_tokens=16,
            config=config,
            async_finish=True,
        )

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
        earlier, _, _, _, handle, event = send(buffer, 4, 1 - comm.rank, 3)
        event.current_stream_wait()
        if comm.rank == 0:
            send(buffer, 8, 1, 1)
            if queued == "dispatch":
                *_, event = send(buffer, 3, 1, 5)
            else:
                *_, event = buffer.combine(earlier, handle, config=config, async_finish=True)
            with pytest.raises(nbep.PeerTimeout, match=r"dispatch receiver .* for rank 1"):
                event.current_stream_wait()
            failed.append(0)
        else:
            with pytest.MonkeyPatch.context() as patch:
                hold_back(patch, "dispatch", failed)
                recv_x, *_, event = send(buffer, 4, 1, 2)
                event.current_stream_wait()
            assert recv_x[:12, 0].tolist() == [1] * 8 + [2] * 4
            assert (recv_x[:12] == recv_x[:12, :1]).all()
        buffer.destroy()

    spawn(main, 2, on_deadlock="expire", memory_model=memory_model)


def test_rows_that_do_not_fit_are_reported_although_a_combine_is_queued_behind():
    """Its own tokens come behind those of rank 0: the copiers have no rows for them, and combine must not read any."""
    case = make_case(4, num_tokens=8, routing="everywhere")
    options = Options(nbep.Config(2, 2, 4), num_worst_tokens=9)

    def main(comm):
        buffer = make_buffer(comm, case, options)
        _, arguments = dispatch_arguments(buffer, case, options, comm.rank)
        recv_x, _, weights, _, handle, _ = buffer.dispatch(**arguments, async_finish=True)
        *_, event = buffer.combine(
            np.zeros_like(recv_x), handle, topk_weights=weights, config=options.config, async_finish=True
        )
        with pytest.raises(ValueError, match=f"recv_x: got 9 rows on rank {comm.rank}"):
            event.current_stream_wait()
        buffer.destroy()

    spawn(main, 2, on_deadlock="expire")
