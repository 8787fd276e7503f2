"""A NIC that loses a message or stops, one that is not ended, and options that a NIC cannot have."""

import pytest
from low_latency import HOOK, Options, Trip, check, make_low_latency_case, num_rdma_bytes
from own_network import SOURCE, TARGET, fill_source, run

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.transport import IbgdaNetwork, post_write
from nbep.device.network.seam import Place
from nbep.device.primitives import thread_idx
from nbep.device.types import I32
from nbep.host.transport.base import NicOptions, chosen_options

pytestmark = pytest.mark.emulator_only("the software NIC misbehaves on request")

CASE = make_low_latency_case(1, num_tokens=4, hidden=256, num_topk=3)
PLAIN = Options()
TIMEOUT_MS = 2000
NUM_QPS = 2


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setenv("NBEP_TIMEOUT_MS", str(TIMEOUT_MS))


def make_buffer(comm, **nic) -> nbep.Buffer:
    return nbep.Buffer(
        comm,
        num_rdma_bytes=num_rdma_bytes(CASE, PLAIN),
        low_latency_mode=True,
        transport="ibgda",
        num_nvl_peers=1,
        num_qps_per_rank=NUM_QPS,
        nic=nbep.NicOptions(num_entries=64, **nic),
    )


def dispatch(buffer: nbep.Buffer) -> str:
    """What the rank reports of a dispatch, at the latest when it sends the next one; "" if all is well."""
    try:
        trip = Trip(buffer, CASE, PLAIN)
        trip.send_dispatch()
        trip.receive_dispatch()
        Trip(buffer, CASE, Options(dispatch_as=HOOK)).send_dispatch()
    except nbep.PeerTimeout as error:
        return str(error)
    return ""


def dispatch_then_a_healthy_trip(comm, nic):
    buffer = make_buffer(comm, **nic)
    said = dispatch(buffer)
    comm.barrier()
    buffer.destroy()
    healthy = make_buffer(comm)
    outcome = Trip(healthy, CASE, PLAIN).whole()
    healthy.destroy()
    return said, outcome


def reported(nic, seed: int = 0) -> list[str]:
    """What each rank reports of the troubles. Its buffer can be destroyed, and the next one has right results."""
    results = nbep.spawn(dispatch_then_a_healthy_trip, 2, "emulator", (nic,), seed, on_deadlock="expire")
    said, outcomes = zip(*results, strict=True)
    check(CASE, PLAIN, outcomes, f"after {nic}")
    return list(said)


@pytest.mark.parametrize("seed", range(2))
def test_a_lost_message_ends_the_wait_with_the_queue_pair_and_its_last_completed_entry(seed):
    """The NIC of rank 0 never serves entry 1 of queue 1 to rank 1."""
    sender, receiver = reported({"lost": (0, 1, 1, 1)}, seed)
    assert sender == ""
    waited, to, came = receiver.split("\n  ")
    assert waited.startswith("rank 1: the low-latency dispatch receiver")
    assert f"waited more than {TIMEOUT_MS} ms for rank 0: the peer's tokens and their number" in waited
    assert to.startswith("the network to rank 0: queue 0 (queue pair 64): ")
    assert "done up to entry" in to
    assert came.startswith("the network from rank 0: queue 0 (its queue pair 66): done up to entry ")
    assert came.endswith("; queue 1 (its queue pair 67): done up to entry 0")


def test_a_nic_that_stops_ends_the_wait_with_each_of_its_queue_pairs():
    receiver, sender = reported({"stopped": (1, 1)})
    assert sender == ""
    assert receiver.split("\n  ")[2] == (
        "the network from rank 1: queue 0 (its queue pair 64): done up to entry 1; "
        "queue 1 (its queue pair 65): done up to entry 1"
    )


def test_a_nic_that_loses_the_first_message_has_sent_nothing_on_that_queue():
    _, receiver = reported({"lost": (0, 1, 0, 0)})
    assert "queue 0" not in receiver.split("\n  ")[2]


@kernel()
def fill_the_queue(network: IbgdaNetwork, num_writes: I32):
    """One warp: more writes than the queue has entries."""
    lane = thread_idx()
    fill_source(network, SOURCE, 16, lane)
    for _ in range(num_writes):
        post_write(network, Place(TARGET, SOURCE, 1 - network.rank, 0), 16, True, lane)


def test_who_waits_for_room_reports_the_last_entry_that_is_done():
    """Entry 70 wants the slot of entry 6, which comes behind entry 2 that is lost."""
    with pytest.raises(nbep.PeerTimeout) as caught:
        run(
            fill_the_queue,
            1,
            32,
            71,
            ranks=[0],
            nic={"lost": (0, 1, 0, 2)},
            timeout_ms=TIMEOUT_MS,
            on_deadlock="expire",
        )
    error = caught.value
    assert (error.rank, error.peer, error.role, error.cell) == (0, 1, "sender on a queue pair", "completion")
    waited, to, came = str(error).split("\n  ")
    assert waited.endswith("the NIC to be done with an entry. It polled completion, expected 2, saw 1")
    entries = "66 entries of 71 that are reserved, done up to entry 1"
    assert to == f"the network to rank 1: queue 0 (queue pair 65): {entries}"
    assert came == "the network from rank 1: nothing has come"


@pytest.mark.parametrize("nic", [{"lost": (0, 1, 1, 1)}, {"stopped": (0, 0)}], ids=str)
def test_a_deadlock_is_reported_without_the_nics_that_have_nothing_to_do(nic):
    with pytest.raises(nbep.DeadlockError) as caught:
        nbep.spawn(dispatch_then_a_healthy_trip, 2, "emulator", (nic,))
    text = str(caught.value)
    assert "rank 1, kernel `low_latency_dispatch`" in text
    assert "counts[half 0, rank 0, local expert" in text
    assert "\n  the NIC of rank" not in text  # a group of threads


def test_a_nic_that_is_not_ended_does_not_keep_the_run_from_ending():
    def main(comm):
        buffer = make_buffer(comm)
        return Trip(buffer, CASE, PLAIN).whole()

    check(CASE, PLAIN, nbep.spawn(main, 2, "emulator"), "never destroyed")


def test_an_error_of_a_rank_ends_a_run_with_nics():
    def main(comm):
        make_buffer(comm)
        comm.barrier()
        if comm.rank == 1:
            raise KeyError("mine")
        comm.barrier()

    with pytest.raises(KeyError, match="mine"):
        nbep.spawn(main, 2, "emulator")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_entries": 32}, "nic: num_entries: got 32; must be an integer of at least 64"),
        ({"num_entries": 96}, "nic: num_entries: got 96; must be a power of two from 64 to 16384"),
        ({"num_entries": 1 << 15}, "nic: num_entries: got 32768; must be a power of two from 64 to 16384"),
        ({"num_entries": 64.0}, r"nic: num_entries: got 64\.0; must be an integer"),
        ({"chunk_bytes": 128}, "nic: chunk_bytes: got 128; must be an integer of at least 256"),
        ({"chunk_bytes": 300}, "nic: chunk_bytes: got 300; must be a power of two from 256"),
        ({"seed": -1}, "nic: seed: got -1; must be an integer of at least 0"),
        ({"max_delay_ns": -1}, "nic: max_delay_ns: got -1; must be an integer of at least 0"),
        ({"max_delay_ns": 1 << 31}, "nic: max_delay_ns: got 2147483648; must be less than 2147483648"),
        ({"lost": (0, 1, 2)}, r"nic: lost: got \(0, 1, 2\); must be 4 integers"),
        ({"lost": 7}, "nic: lost: got 7; must be 4 integers"),
        ({"lost": (0, 1, 0, -1)}, "nic: lost: got -1; must be an integer of at least 0"),
        ({"stopped": (0, 1, 2)}, r"nic: stopped: got \(0, 1, 2\); must be 2 integers"),
        ({"stopped": (0, "all")}, "nic: stopped: got 'all'; must be an integer of at least 0"),
    ],
    ids=str,
)
def test_options_that_a_nic_cannot_have_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nbep.NicOptions(**options)


def test_options_are_read_from_a_text():
    options = nbep.NicOptions(num_entries=128, chunk_bytes=4096, seed=3, max_delay_ns=500)
    assert nbep.NicOptions.parse("seed=3,max_delay_ns=500,num_entries=128,chunk_bytes=4096") == options
    assert nbep.NicOptions.parse("") == nbep.NicOptions()


@pytest.mark.parametrize("text", ["seed", "seed=", "seed=-1", "speed=3", "lost=1", "seed=3 max_delay_ns=4"])
def test_a_text_that_names_no_option_is_refused(text):
    message = r"NBEP_NIC: got '.*'; must be name=integer pairs.*: num_entries, batch, chunk_bytes, seed, max_delay_ns"
    with pytest.raises(ValueError, match=message):
        nbep.NicOptions.parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transport": "ibverbs"}, "transport: got 'ibverbs'; must be one of direct, ibgda, nvshmem"),
        ({"num_nvl_peers": 0}, "num_nvl_peers: got 0; must be an integer of at least 1"),
        ({"num_qps": 0}, "num_qps: got 0; must be an integer of at least 1"),
        ({"nic": "seed=3"}, "nic: got 'seed=3'; must be NicOptions"),
    ],
    ids=str,
)
def test_arguments_of_a_network_that_are_wrong_are_refused_on_all_ranks(arguments, message):
    def main(comm):
        with pytest.raises(ValueError, match=message):
            nbep.SharedMemory.create(comm, 1024, **{"transport": "ibgda", **(arguments if comm.rank == 1 else {})})

    nbep.spawn(main, 2, "emulator")


def test_options_that_differ_between_ranks_are_refused():
    def main(comm):
        with pytest.raises(ValueError, match=r"transport and its options: got .* must be the same on all"):
            nbep.SharedMemory.create(comm, 1024, transport="ibgda", nic=nbep.NicOptions(seed=comm.rank))

    nbep.spawn(main, 2, "emulator")


@pytest.mark.parametrize("options", [{"lost": (2, 0, 0, 0)}, {"lost": (0, 2, 0, 0)}, {"stopped": (2, 0)}])
def test_troubles_of_ranks_that_are_not_there_are_refused(options):
    with pytest.raises(ValueError, match=r"^nic: (lost|stopped): got \(.*\); must be of ranks below 2"):
        chosen_options(2, "ibgda", 1, 1, True, NicOptions(**options))


@pytest.mark.parametrize(
    ("variable", "text"), [("NBEP_TRANSPORT", "roce"), ("NBEP_NUM_NVL_PEERS", "three"), ("NBEP_NIC", "batch=3")]
)
def test_a_wrong_environment_variable_is_named(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"^{variable}: "):
        chosen_options(2, None, None, 1, True, None)


def test_queue_pairs_that_differ_are_named_as_the_argument():
    def main(comm):
        with pytest.raises(ValueError, match=r"^num_qps_per_rank: got"):
            nbep.Buffer(comm, 0, 1 << 12, True, 1 + comm.rank)

    nbep.spawn(main, 2, "emulator")
