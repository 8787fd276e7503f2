"""Every wait between nodes is bounded: a rank, a node or a NIC that stops is named by those that wait for it."""

import importlib

import pytest
from internode import NIC, Options, make_node_case, run
from intranode import combine, dispatch, make_buffer
from parts import both_parts
from target import TARGET, spawn

import nbep
from nbep.emulator import current_thread

pytestmark = pytest.mark.long

KERNELS = "nbep.device.kernels.internode"
TIMEOUT_MS = 500 if TARGET == "cuda" else 2000


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setenv("NBEP_TIMEOUT_MS", str(TIMEOUT_MS))


def errors_of(case, options: Options, absent=(), seed: int = 0) -> list[nbep.PeerTimeout | None]:
    """The error of each rank in a dispatch and a combine, None if nothing; the absent ones call neither.

    The buffer can be destroyed, and another one gives right results.
    """

    def main(comm):
        buffer = make_buffer(comm, case, options)
        said = None
        if comm.rank not in absent:
            try:
                outcome = dispatch(buffer, case, options, comm.rank)
                combine(buffer, case, options, comm.rank, outcome)
            except nbep.PeerTimeout as error:
                said = error
                with pytest.raises(nbep.PeerTimeout, match=f"rank {error.peer}"):
                    dispatch(buffer, case, options, comm.rank)
        comm.barrier()
        buffer.destroy()
        return said

    results = spawn(main, case.num_ranks, (), seed, on_deadlock="expire")
    assert all(error is None or error.rank == rank for rank, error in enumerate(results))
    return results


@pytest.mark.parametrize(
    ("transport", "absent"), both_parts([("ibgda", 3)], thorough=[("direct", 0), ("direct", 3), ("ibgda", 0)])
)
def test_a_rank_that_never_calls_is_named_in_its_node_and_at_its_place_in_others(transport, absent):
    case = make_node_case(1, num_tokens=6)
    results = errors_of(case, Options(transport=transport), absent=(absent,))
    for rank, error in enumerate(results):
        if rank != absent and (rank // 2 == absent // 2 or rank % 2 == absent % 2):
            assert error is not None
            assert error.peer == absent, error
    run(case)  # the card is as good as before


def test_a_node_that_never_calls_is_named_by_all_others():
    case = make_node_case(2, num_nodes=3, num_tokens=4)
    results = errors_of(case, Options(), absent=(2, 3))
    assert [None if error is None else error.peer for error in results] == [2, 3, None, None, 2, 3]


@pytest.mark.emulator_only("the software NIC misbehaves on request")
def test_a_nic_that_stops_is_named_with_its_queue_pair():
    """That of rank 1: what it serves goes to rank 3 alone."""
    case = make_node_case(3, num_tokens=6, routing="everywhere", num_topk=4)
    nic = nbep.NicOptions(num_entries=NIC.num_entries, chunk_bytes=NIC.chunk_bytes, stopped=(1, 0))
    results = errors_of(case, Options(transport="ibgda", nic=nic))
    assert results[3] is not None
    assert results[3].peer == 1
    assert "the network from rank 1: queue 0" in str(results[3])


# (kernel, function): the role of one rank that does nothing.
IDLE_ROLES = both_parts(
    [("dispatch", "forward_tokens")],
    thorough=[
        ("combine", "coordinate_receivers"),
        ("dispatch", "send_tokens"),
        ("dispatch", "coordinate_senders"),
        ("dispatch", "coordinate_forwarders"),
        ("dispatch", "receive_tokens"),
        ("combine", "forward_sums"),
        ("combine", "coordinate_sums"),
        ("combine", "publish_nvl_heads"),
        ("combine", "receive_sums"),
    ],
)


@pytest.mark.emulator_only("a role of one rank is made idle")
@pytest.mark.parametrize(("kernel", "role"), IDLE_ROLES)
def test_a_role_of_one_rank_that_does_nothing_is_named_by_those_that_wait_for_it(kernel, role, monkeypatch):
    module = importlib.import_module(f"{KERNELS}.{kernel}")
    function = getattr(module, role)
    monkeypatch.setattr(module, role, lambda *args: None if current_thread().rank == 2 else function(*args))
    # More tokens than the rings have slots for, so that somebody waits for each role.
    case = make_node_case(4, num_tokens=12, routing="everywhere", num_topk=4)
    # Where waits stand behind each other the emulator ends them all at once: only one role may wait for the forwarders.
    num_rdma_slots = 64 if role == "receive_tokens" else 2
    results = errors_of(case, Options(nbep.Config(2, 1, 2, 1, num_rdma_slots)))
    named = {error.peer for error in results if error is not None}
    assert 2 in named, results
