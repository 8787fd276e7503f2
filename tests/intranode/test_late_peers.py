"""A peer that comes after a rank's wait was over time misses tokens and says so; it never takes others for them."""

import pytest
from cases import make_case
from intranode import Options, combine, dispatch, make_buffer
from target import spawn

import nbep
from nbep.host.runtime.base import current_runtime

pytestmark = pytest.mark.emulator_only("the late launch is arranged")


def hold_back(patch: pytest.MonkeyPatch, kernel: str, arrived: list) -> None:
    """Launch this rank's kernel of that name only when `arrived` is not empty."""
    runtime = current_runtime()
    launch = runtime.launch

    def late(stream, function, *args):
        if function.__name__ == kernel:
            runtime.wait_until(lambda: bool(arrived), lambda: "the fault of the other rank")
        launch(stream, function, *args)

    patch.setattr(runtime, "launch", late)


@pytest.mark.parametrize("memory_model", ["sc", "delayed"])
@pytest.mark.parametrize("num_threads", [64, 128])
@pytest.mark.parametrize(("kernel", "num_tokens"), [("dispatch", (24, 0)), ("combine", (0, 24))])
def test_a_late_peer_is_told_that_tokens_are_missing(kernel, num_tokens, num_threads, memory_model):
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
