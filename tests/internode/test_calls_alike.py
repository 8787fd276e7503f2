"""Ranks that live in processes of their own and pass something else: each reports what both have passed.

Here they live in one process, which would compare them before; that is switched off.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from internode import CONFIG, Options, make_node_case
from intranode import dispatch, dispatch_input, make_buffer
from parts import both_parts
from target import spawn

import nbep
from nbep.host.calls import CallLog

pytestmark = pytest.mark.emulator_only("a GPU's virtual ranks live in one process: what they launch is compared before")
SLOTS = "config.num_max_rdma_chunked_recv_tokens"
OTHER = replace(CONFIG, num_max_rdma_chunked_recv_tokens=6)
LARGE = Options(OTHER)  # its buffer is large enough for both


@pytest.fixture(autouse=True)
def like_processes(monkeypatch):
    monkeypatch.setattr(CallLog, "shared", classmethod(lambda cls, comm: None))


def refused(comm, odd: int, name: str, values: tuple[str, str], verb: str = "dispatch"):
    """The error of a rank, which names its own value and another rank's: the odd one's, if it is not that itself."""
    own, theirs = values if comm.rank != odd else values[::-1]
    other = str(odd) if comm.rank != odd else rf"[^{odd}]"
    got = rf"{re.escape(own)} on rank {comm.rank}, {re.escape(theirs)} on rank {other} in the same {verb}"
    return pytest.raises(ValueError, match=rf"^{name}: got {got}; must be the same on all ranks$")


def run(case, options, fn, memory_model: str = "sc", seeds: range = range(1)) -> None:
    def main(comm):
        buffer = make_buffer(comm, case, replace(options, config=OTHER))
        fn(comm, buffer)
        buffer.destroy()

    for seed in seeds:
        spawn(main, case.num_ranks, (), seed, on_deadlock="expire", memory_model=memory_model)


@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=[], long=["sc", "delayed"]))
@pytest.mark.parametrize(
    ("transport", "odd", "shape"),
    both_parts(
        [("direct", 2, (2, 2))],
        thorough=[("ibgda", 1, (2, 2)), ("direct", 5, (3, 2)), ("direct", 7, (2, 4)), ("ibgda", 3, (3, 2))],
    ),
)
def test_a_dispatch_that_differs_on_one_rank_is_refused_on_all(transport, odd, shape, memory_model):
    case = make_node_case(1, *shape, num_tokens=4)
    options = Options(transport=transport)

    def main(comm, buffer):
        mine = replace(options, config=OTHER) if comm.rank == odd else options
        for _ in range(2):
            with refused(comm, odd, SLOTS, ("4", "6")):
                dispatch(buffer, case, mine, comm.rank)

    run(case, options, main, memory_model)


def test_nodes_that_differ_are_refused_on_all_ranks():
    case = make_node_case(1, num_tokens=4)

    def main(comm, buffer):
        mine = Options(OTHER) if comm.rank < 2 else Options()
        got = ("6", "4") if comm.rank < 2 else ("4", "6")
        theirs = "[23]" if comm.rank < 2 else "[01]"
        with pytest.raises(
            ValueError, match=rf"^{SLOTS}: got {got[0]} on rank {comm.rank}, {got[1]} on rank {theirs} "
        ):
            dispatch(buffer, case, mine, comm.rank)

    run(case, Options(), main, "checked")


@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=[], long=["sc", "delayed"]))
@pytest.mark.parametrize(
    ("verb", "transport", "odd", "shape"),
    both_parts(
        [],
        thorough=[
            ("combine", "direct", 3, (2, 2)),
            ("dispatch", "direct", 3, (2, 2)),
            ("combine", "ibgda", 0, (2, 2)),
            ("dispatch", "ibgda", 2, (3, 2)),
            ("combine", "direct", 6, (2, 4)),
        ],
    ),
)
def test_a_call_with_a_handle_that_differs_on_one_rank_raises_on_all(verb, transport, odd, shape, memory_model):
    """Those of another node and place have gone on: they raise when they have waited in vain.

    Where there are more ranks than that, some get all that they need: they wait in vain in their next call.
    """
    case = make_node_case(1, *shape, num_tokens=6)
    options = Options(transport=transport)

    def main(comm, buffer):
        outcome = dispatch(buffer, case, options, comm.rank)
        config = OTHER if comm.rank == odd else options.config

        def call():
            if verb == "dispatch":
                x = dispatch_input(case, options, comm.rank)
                buffer.dispatch(x, handle=outcome.handle, config=config)
            else:
                buffer.combine(np.zeros_like(outcome.recv_x), outcome.handle, config=config)
            buffer._memory.wait()

        world, num_calls = buffer._memory.runtime.world, 1 if case.num_ranks == 4 else 2
        start = world.host_now
        with refused(comm, odd, SLOTS, ("4", "6"), verb):
            for _ in range(num_calls):
                call()
        # A coordinator does not wait on for warps that have stopped at their time-out: destroy waits twice as long.
        assert world.host_now - start < 1.5 * num_calls * buffer._memory.timeout_ms * 1e6

    run(case, options, main, memory_model)


def test_a_peer_that_does_not_come_is_a_time_out_where_no_call_differs():
    case = make_node_case(1, num_tokens=6)

    def main(comm, buffer):
        outcome = dispatch(buffer, case, Options(), comm.rank)

        def call():
            buffer.combine(np.zeros_like(outcome.recv_x), outcome.handle, config=CONFIG)
            buffer._memory.wait()

        if comm.rank != 3:
            with pytest.raises(nbep.PeerTimeout):
                call()

    run(case, Options(), main)
