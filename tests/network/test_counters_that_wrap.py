"""Counters of a queue pair wrap: indexes at 2**16, those of the GPU at 2**31 and 2**32. No result changes."""

import pytest
from own_network import FLAGS, SEEN, SOURCE, TARGET, fill_source, run, see, sent_by, wait_flag
from parts import crossed

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.transport import IbgdaNetwork, post_add, post_write
from nbep.device.network.seam import Place
from nbep.device.primitives import thread_idx

pytestmark = pytest.mark.emulator_only("the software NIC misbehaves on request")

WRAPS = [1 << 15, 1 << 16, (1 << 31) - (1 << 16), 1 << 31, (1 << 31) + (1 << 16), 1 << 32]
NUM_BLOCKS = 12


@kernel()
def some_blocks(network: IbgdaNetwork):
    """One warp: blocks of 16 bytes on one queue, of which some share a doorbell, then a flag."""
    lane = thread_idx()
    peer = 1 - network.rank
    fill_source(network, SOURCE, 16 * NUM_BLOCKS, lane)
    for i in range(NUM_BLOCKS):
        post_write(network, Place(TARGET + 16 * i, SOURCE + 16 * i, peer, 0), 16, False, lane)
    if lane == 0:
        post_add(network, FLAGS, 1, False, peer, 0)
    wait_flag(network, 0, 1, lane)
    see(network, 0, 16 * NUM_BLOCKS, lane)


@pytest.mark.parametrize(("wrap", "from_record"), crossed([(WRAPS[0], False), (WRAPS[-1], True)], WRAPS, (False, True)))
def test_a_queue_goes_on_where_a_counter_wraps(wrap, from_record):
    nic = {"first_entry": wrap - 5, "from_record": from_record, "seed": 1}
    for rank, memory in enumerate(run(some_blocks, 1, 32, nic=nic, memory_model="checked")):
        assert memory[SEEN : SEEN + 16 * NUM_BLOCKS].tolist() == sent_by(1 - rank, SOURCE, 16 * NUM_BLOCKS)


@pytest.mark.parametrize("wrap", [1 << 16, 1 << 31, 1 << 32], ids=hex)
def test_a_report_names_entries_across_a_wrap(wrap):
    nic = {"first_entry": wrap - 5, "lost": (0, 1, 0, 7)}
    with pytest.raises(nbep.PeerTimeout) as caught:
        run(full_queue, 1, 32, ranks=[0], nic=nic, timeout_ms=2000, on_deadlock="expire")
    sent = str(caught.value).split("\n  ")[1]
    done = (wrap + 1) & 0xFFFFFFFF
    assert sent.endswith(f": 71 entries of 72 that are reserved, done up to entry {done}")


@kernel()
def full_queue(network: IbgdaNetwork):
    """One warp of rank 0: more writes than the queue has slots, and the entry of the eighth is lost."""
    lane = thread_idx()
    fill_source(network, SOURCE, 16, lane)
    for _ in range(72):
        post_write(network, Place(TARGET, SOURCE, 1, 0), 16, True, lane)


def test_a_full_queue_waits_for_room_across_a_wrap():
    for wrap in (1 << 16, 1 << 31, 1 << 32):
        run(full_queue, 1, 32, ranks=[0], nic={"first_entry": wrap - 30, "seed": 3, "max_delay_ns": 500})


def test_options_of_the_counters_are_checked_and_read_from_a_text():
    with pytest.raises(ValueError, match="nic: first_entry: got -1"):
        nbep.NicOptions(first_entry=-1)
    with pytest.raises(ValueError, match="nic: from_record: got 2; must be None, False or True"):
        nbep.NicOptions(from_record=2)
    options = nbep.NicOptions.parse("from_record=1,first_entry=65530")
    assert options == nbep.NicOptions(from_record=True, first_entry=65530)
