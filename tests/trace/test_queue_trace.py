"""A trace of send queues: the bytes of an entry have names, and each entry has a life."""

import pytest

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.transport import IbgdaNetwork, post_add, post_value, post_write, wait_written
from nbep.device.network.seam import Place
from nbep.device.primitives import FULL_MASK, syncwarp, thread_idx
from nbep.device.types import I32
from nbep.lab.trace import Trace
from nbep.lab.trace.table import entry_lives
from notebooks.queue_entries import entry_fields, entry_table
from notebooks.slot_pictures import plot_queue

# A write of 64 bytes: entry 0x1234 of queue pair 65, key 0x112 there and 0x1 here
CONTROL = "00 1234 08 000041 03 00000008 00000000"
REMOTE = "0080000100000400 00000112 00000000"
WRITE = bytes.fromhex(f"{CONTROL} {REMOTE} 00000040 00000001 0040000100000080" + "00" * 16)
INLINE = bytes.fromhex(f"{CONTROL} {REMOTE} 80000004 07000000 0000000000000000" + "00" * 16)
ADD_64 = bytes.fromhex(
    "09 1234 15 000041 04 00000008 00000000"
    f"{REMOTE} 0000000000000005 0000000000000000 00000008 00000506 0040000400000440"
)


def test_each_byte_that_means_something_has_one_name():
    for raw, unnamed in ((WRITE, 4 + 16), (ADD_64, 4)):  # behind the key of the remote address; the unused segment
        fields = entry_fields(raw)
        assert sum(len(field.data) for field in fields) == 64 - unnamed
        assert all(raw[field.offset : field.offset + len(field.data)] == field.data for field in fields)
        ends = [field.offset + len(field.data) for field in fields]
        assert all(end <= later.offset for end, later in zip(ends, fields[1:], strict=False))


def test_numbers_are_big_endian():
    values = {(field.segment, field.name): field.value for field in entry_fields(WRITE)}
    assert values["control", "index"] == 0x1234
    assert values["control", "queue pair"] == 65
    assert values["remote address", "address"] == 0x80000100000400
    assert values["remote address", "key"] == 0x112
    assert values["data", "num_bytes"] == 64
    assert values["data", "address"] == 0x40000100000080


def test_data_in_the_entry_are_shown_as_bytes():
    assert [line.split()[-4:] for line in entry_table(INLINE).splitlines() if "the bytes" in line] == [
        ["00", "00", "the", "bytes"]
    ]
    assert entry_fields(INLINE)[-1].data == bytes([7, 0, 0, 0])


def test_an_addition_of_64_bits_has_wide_numbers():
    names = [(field.name, field.offset, field.value) for field in entry_fields(ADD_64) if field.segment == "atomic"]
    assert names == [("what to add", 32, 5), ("boundary", 40, 0)]


def test_an_entry_has_64_bytes():
    with pytest.raises(ValueError, match="got 63 bytes"):
        entry_fields(WRITE[:-1])


@kernel(max_threads=32)
def post(network: IbgdaNetwork, peer: I32, offset: I32):
    """Five writes that need not leave at once, then one that does and an addition at `offset`."""
    lane = thread_idx()
    for _ in range(5):
        post_write(network, Place(256, 0, peer, 0), 16, False, lane)
    syncwarp(FULL_MASK)
    if lane == 0:
        post_value(network, 512, 7, 4, peer, 0)
        wait_written(network, peer, 0, post_add(network, offset, 1, False, peer, 0))


def main(comm, offset):
    options = nbep.NicOptions(num_entries=64, seed=1)
    memory = nbep.SharedMemory.create(comm, 1024, transport="ibgda", num_nvl_peers=1, nic=options)
    if comm.rank == 0:
        memory.runtime.launch(memory.comm_stream, post, 1, 32, 0, memory.network, 1, offset)
    memory.wait()
    memory.close()


def traced(offset: int) -> Trace:
    trace = Trace()
    nbep.spawn(main, 2, "emulator", (offset,), tracer=trace)
    return trace


def test_entries_are_rung_for_in_batches_and_done_in_order():
    lives = entry_lives(traced(640), 0, 1, 0)
    assert [life.number for life in lives] == list(range(7))
    rung = [life.rung for life in lives]
    assert len(set(rung[:4])) == 1  # the fourth completes a batch
    assert rung[4] == rung[5] > rung[3]  # the value leaves at once, and takes the write before it along
    assert rung[6] > rung[5]
    for life in lives:
        assert life.reserved < min(life.ready, life.rung) < life.done
        assert not life.is_refused
    assert [life.done for life in lives] == sorted({life.done for life in lives})


def test_a_refused_entry_is_the_last_that_is_done():
    trace = Trace()
    with pytest.raises(nbep.NetworkError):
        nbep.spawn(main, 2, "emulator", (642,), tracer=trace)
    lives = entry_lives(trace, 0, 1, 0)
    assert [life.is_refused for life in lives] == [False] * 6 + [True]
    assert trace.queue().splitlines()[-1].endswith("refused")


def test_a_queue_without_entries_is_refused():
    with pytest.raises(ValueError, match="none of rank 1's entries for rank 0, queue 0"):
        traced(640).queue(rank=1, peer=0)


def test_the_picture_has_a_bar_for_each_part_of_a_life():
    trace = traced(640)
    axes = plot_queue(trace).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == [f"entry {number}" for number in range(7)]
    wait_for_a_ring = sum(life.ready < life.rung for life in entry_lives(trace, 0, 1, 0))
    assert wait_for_a_ring > 0
    assert len(axes.patches) == 2 * 7 + wait_for_a_ring


def test_a_nic_has_a_name_in_the_table():
    rows = traced(640).table("atomic", kernel="software_nic").splitlines()
    assert [row.split()[1:3] for row in rows[1:]] == [["NIC", "0"]]
