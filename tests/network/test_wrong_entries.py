"""Entries that are wrong: each such fault is planted once, and the NIC refuses it with its syndrome."""

import mlx5_layouts as mlx5
import numpy as np
import pytest
from own_network import CHUNK_BYTES, FLAGS, RESULTS, SOURCE, TARGET, Stores, fill_source, run, sent_by

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda import transport
from nbep.device.network.ibgda.completion import FLUSHED
from nbep.device.network.ibgda.entry import OPMOD_32_BITS
from nbep.device.network.ibgda.queue_pair import entry_at
from nbep.device.network.ibgda.transport import IbgdaNetwork, post_add, post_value, post_write, wait_written
from nbep.device.network.seam import Place, own_ptr
from nbep.device.primitives import ld_weak_u8, st_weak_s32, st_weak_u8, thread_idx

pytestmark = pytest.mark.emulator_only("the device code is broken in Python")

FIRST_QPN = 0x40  # of the software NIC's queue pairs

WRITE, WRITE_OF_TWO, VALUE, ADD_32, ADD_64, NUM_KINDS = 1, 2, 3, 4, 5, 6


@kernel()
def one_of_each(network: IbgdaNetwork):
    """One warp of rank 0: an entry of each kind, numbered from 1, and a wait for the last one."""
    lane = thread_idx()
    fill_source(network, SOURCE, 1024, lane)
    post_write(network, Place(TARGET, SOURCE, 1, 0), 64, True, lane)
    post_write(network, Place(TARGET + 64, SOURCE + 64, 1, 0), 48, True, lane)
    post_write(network, Place(TARGET + 128, SOURCE + 240, 1, 0), 64, True, lane)
    if lane == 0:
        post_value(network, TARGET + 192, 0x11223344, 4, 1, 0)
        post_add(network, FLAGS, 0x01020304, False, 1, 0)
        last = post_add(network, FLAGS + 8, 0x0102030405060708, True, 1, 0)
        st_weak_s32(own_ptr(network, RESULTS), wait_written(network, 1, 0, last))


def spoil_entry(number: int, spoil, patch: pytest.MonkeyPatch) -> None:
    """Change the bytes of an entry right before it is handed to the NIC: spoil(bytes, network)."""
    submit = transport.submit

    def submit_spoilt(network, qp, peer, queue, entries, leaves_now):
        index = entries[0]
        if index == number:
            entry = entry_at(qp, index)
            before = bytes(ld_weak_u8(entry + i) for i in range(mlx5.ENTRY_BYTES))
            after = spoil(before, network)
            assert after != before
            for i, byte in enumerate(after):
                st_weak_u8(entry + i, byte)
        submit(network, qp, peer, queue, entries, leaves_now)

    patch.setattr(transport, "submit", submit_spoilt)


def spoilt(segment: int, field: mlx5.Field, make):
    """Replace a field of a segment: make(its bytes, network)."""

    def spoil(data, network):
        begin = 16 * segment + field.offset
        end = begin + field.num_bytes
        return data[:begin] + make(data[begin:end], network) + data[end:]

    return spoil


def swapped(segment: int, field: mlx5.Field):
    return spoilt(segment, field, lambda data, network: data[::-1])


def plus(segment: int, field: mlx5.Field, number: int):
    return spoilt(segment, field, lambda data, network: (int.from_bytes(data) + number).to_bytes(field.num_bytes))


def with_key(segment: int, field: mlx5.Field, key_of):
    """Put in another key: key_of(network), the word that a kernel has of it."""
    return spoilt(segment, field, lambda data, network: (key_of(network) % (1 << 32)).to_bytes(4, "little"))


CONTROL, REMOTE, LOCAL, MORE = range(4)  # segments
RKEY, RADDR = mlx5.REMOTE_ADDRESS["rkey"], mlx5.REMOTE_ADDRESS["raddr"]
LKEY, LADDR, LENGTH = mlx5.DATA["lkey"], mlx5.DATA["addr"], mlx5.DATA["byte_count"]
FIRST_WORD, SECOND_WORD = mlx5.Field(0, 4), mlx5.Field(4, 4)
NOT_OURS = mlx5.SYNDROMES["LOCAL_QP_OP_ERR"]
LOCAL_KEY = mlx5.SYNDROMES["LOCAL_PROT_ERR"]
REMOTE_KEY = mlx5.SYNDROMES["REMOTE_ACCESS_ERR"]
TOO_LONG = mlx5.SYNDROMES["LOCAL_LENGTH_ERR"]
UNALIGNED = mlx5.SYNDROMES["REMOTE_INVAL_REQ_ERR"]

WRONG_ENTRIES = {
    "index of the entry before": (WRITE, plus(CONTROL, mlx5.CONTROL["index"], -1), NOT_OURS),
    "index of the entry after, inline": (VALUE, plus(CONTROL, mlx5.CONTROL["index"], 1), NOT_OURS),
    "index of the slot's last use, add": (ADD_32, plus(CONTROL, mlx5.CONTROL["index"], 64), NOT_OURS),
    "number of another queue pair": (WRITE, plus(CONTROL, mlx5.CONTROL["qpn"], 1), NOT_OURS),
    "number of another queue pair, add": (ADD_64, plus(CONTROL, mlx5.CONTROL["qpn"], -1), NOT_OURS),
    "opcode unknown": (WRITE, plus(CONTROL, mlx5.CONTROL["opcode"], 0x20), NOT_OURS),
    "opmod of no size": (ADD_32, plus(CONTROL, mlx5.CONTROL["opmod"], 8), NOT_OURS),
    "opmod of the other size": (ADD_32, plus(CONTROL, mlx5.CONTROL["opmod"], 1), LOCAL_KEY),
    "opmod of a write": (WRITE, plus(CONTROL, mlx5.CONTROL["opmod"], 1), NOT_OURS),
    "opmod of a number": (VALUE, plus(CONTROL, mlx5.CONTROL["opmod"], OPMOD_32_BITS), NOT_OURS),
    "reserved bit of the segments": (WRITE, plus(CONTROL, mlx5.CONTROL["ds"], 0x40), NOT_OURS),
    "signature": (VALUE, plus(CONTROL, mlx5.Field(8, 1), 1), NOT_OURS),
    "reserved bits before the flags": (ADD_32, plus(CONTROL, mlx5.Field(9, 2), 1), NOT_OURS),
    "flag unknown": (WRITE, plus(CONTROL, mlx5.Field(11, 1), 1), NOT_OURS),
    "immediate of a plain write": (WRITE, plus(CONTROL, mlx5.Field(12, 4), 1), NOT_OURS),
    "reserved word of the remote address": (WRITE, plus(REMOTE, mlx5.Field(12, 4), 1), NOT_OURS),
    "reserved word of the remote address, add": (ADD_64, plus(REMOTE, mlx5.Field(12, 4), 1), NOT_OURS),
    "reserved word of a sum": (ADD_32, plus(LOCAL, mlx5.Field(12, 4), 1), NOT_OURS),
    "inline length past its segment": (VALUE, plus(LOCAL, LENGTH, 9), TOO_LONG),
    "boundary that splits a sum": (ADD_32, plus(LOCAL, mlx5.MASKED_FETCH_ADD_32["field_boundary"], 1 << 31), NOT_OURS),
    "boundary that splits a long sum, high": (ADD_64, plus(LOCAL, mlx5.MASKED_FETCH_ADD_64["field_boundary"], 1 << 63),
        NOT_OURS),
    "boundary that splits a long sum, low": (ADD_64, plus(LOCAL, mlx5.MASKED_FETCH_ADD_64["field_boundary"], 1),
        NOT_OURS),
    "too many segments": (WRITE_OF_TWO, plus(CONTROL, mlx5.CONTROL["ds"], 1), NOT_OURS),
    "too few segments": (ADD_64, plus(CONTROL, mlx5.CONTROL["ds"], -1), NOT_OURS),
    "remote key of another chunk": (WRITE,
        with_key(REMOTE, RKEY, lambda network: transport.remote_key(network, TARGET + CHUNK_BYTES, 1)), REMOTE_KEY),
    "remote key of another rank": (VALUE, with_key(REMOTE, RKEY, lambda network: transport.local_key(network, TARGET)),
        REMOTE_KEY),
    "remote key of old": (ADD_64, plus(REMOTE, RKEY, 1), REMOTE_KEY),
    "remote key of no region": (ADD_32, plus(REMOTE, RKEY, 1 << 24), REMOTE_KEY),
    "local key of another chunk": (WRITE,
        with_key(LOCAL, LKEY, lambda network: transport.local_key(network, SOURCE + CHUNK_BYTES)), LOCAL_KEY),
    "second local key is the first one": (WRITE_OF_TWO,
        with_key(MORE, LKEY, lambda network: transport.local_key(network, SOURCE + 240)), LOCAL_KEY),
    "old value's key of a chunk": (ADD_32, with_key(MORE, LKEY, lambda network: transport.local_key(network, SOURCE)),
        LOCAL_KEY),
    "length past the remote region": (WRITE, plus(LOCAL, LENGTH, CHUNK_BYTES), REMOTE_KEY),
    "length past the local region": (WRITE_OF_TWO, plus(LOCAL, LENGTH, 1), LOCAL_KEY),
    "address before the remote region": (WRITE, plus(REMOTE, RADDR, -CHUNK_BYTES), REMOTE_KEY),
    "inline length past the entry": (VALUE, plus(LOCAL, LENGTH, 25), TOO_LONG),
    "address of an add that is not aligned": (ADD_64, plus(REMOTE, RADDR, 4), UNALIGNED),
    "old value of the wrong length": (ADD_64, plus(MORE, LENGTH, -4), LOCAL_KEY),
    "swapped first word": (WRITE, swapped(CONTROL, FIRST_WORD), NOT_OURS),
    "swapped index": (VALUE, swapped(CONTROL, mlx5.CONTROL["index"]), NOT_OURS),
    "swapped second word": (WRITE, swapped(CONTROL, SECOND_WORD), NOT_OURS),
    "swapped number of the queue pair": (ADD_32, swapped(CONTROL, mlx5.CONTROL["qpn"]), NOT_OURS),
    "swapped remote address": (WRITE, swapped(REMOTE, RADDR), REMOTE_KEY),
    "swapped remote address, inline": (VALUE, swapped(REMOTE, RADDR), REMOTE_KEY),
    "swapped remote address, add": (ADD_32, swapped(REMOTE, RADDR), REMOTE_KEY),
    "swapped remote key": (WRITE_OF_TWO, swapped(REMOTE, RKEY), REMOTE_KEY),
    "swapped local address": (WRITE, swapped(LOCAL, LADDR), LOCAL_KEY),
    "swapped second local address": (WRITE_OF_TWO, swapped(MORE, LADDR), LOCAL_KEY),
    "swapped local key": (WRITE, swapped(LOCAL, LKEY), LOCAL_KEY),
    "swapped length": (WRITE, swapped(LOCAL, LENGTH), REMOTE_KEY),
    "swapped inline length": (VALUE, swapped(LOCAL, LENGTH), REMOTE_KEY),
    "swapped address of the old value": (ADD_64, swapped(MORE, LADDR), LOCAL_KEY),
}  # fmt: skip


def test_one_entry_of_each_kind_is_served():
    there = run(one_of_each, 1, 32, ranks=[0])[1]
    assert there[TARGET : TARGET + 112].tolist() == sent_by(0, SOURCE, 112)
    assert there[TARGET + 128 : TARGET + 192].tolist() == sent_by(0, SOURCE + 240, 64)
    assert there[TARGET + 192 : TARGET + 200].view(np.int32).tolist() == [0x11223344, 0]
    assert there[FLAGS : FLAGS + 4].view(np.int32)[0] == 0x01020304
    assert there[FLAGS + 8 : FLAGS + 16].view(np.int64)[0] == 0x0102030405060708


@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_a_wrong_entry_ends_in_an_error_that_names_peer_queue_entry_and_syndrome(name, monkeypatch):
    number, spoil, syndrome = WRONG_ENTRIES[name]
    spoil_entry(number, spoil, monkeypatch)
    with pytest.raises(nbep.NetworkError) as caught:
        run(one_of_each, 1, 32, ranks=[0])
    error = caught.value
    assert (error.rank, error.peer, error.queue, error.entry) == (0, 1, 0, number)
    assert error.syndrome == syndrome
    text = str(error)
    assert text.startswith(f"rank 0: the NIC has refused entry {number} of queue 0 to rank 1: ")
    assert f"(syndrome {syndrome:#04x})" in text
    assert f"queue 0 (queue pair {FIRST_QPN + 1}): " in text
    assert f"entry {number} refused" in text


@pytest.mark.parametrize("number", [WRITE, VALUE, ADD_32])
def test_nothing_behind_a_wrong_entry_is_served(number, monkeypatch):
    spoil_entry(number, plus(CONTROL, mlx5.CONTROL["index"], 1), monkeypatch)
    there = []

    def main_of_both(comm):
        memory = nbep.SharedMemory.create(comm, 45056, transport="ibgda", num_nvl_peers=1)
        if comm.rank == 0:
            memory.runtime.launch(memory.comm_stream, one_of_each, 1, 32, 0, memory.network)
            with pytest.raises(nbep.NetworkError, match=f"refused entry {number} "):
                memory.wait()
        comm.barrier()
        there.append(memory.symmetric.read(0, 45056, np.uint8))
        memory.close()

    nbep.spawn(main_of_both, 2, "emulator")
    arrived = there[1]
    assert arrived[TARGET + 128 : TARGET + 192].any() == (number > WRITE_OF_TWO)
    assert arrived[TARGET + 192 : TARGET + 200].any() == (number > VALUE)
    assert not arrived[FLAGS : FLAGS + 16].any()


def test_flushes_overwrite_the_completion_of_the_entry_that_is_refused_and_the_error_still_names_it(monkeypatch):
    spoil_entry(WRITE, plus(REMOTE, RKEY, 1), monkeypatch)
    completed = []

    class Completions(Stores):
        def on_store(self, thread, allocation, offset, kind, value, order, scope):
            if "completion of" in allocation.cell(offset) and "+ 52" in allocation.cell(offset):
                completed.append(value >> 24 & 0xFF)

    with pytest.raises(nbep.NetworkError) as caught:
        run(one_of_each, 1, 32, ranks=[0], tracer=Completions())
    assert (caught.value.entry, caught.value.syndrome) == (WRITE, REMOTE_KEY)
    assert completed[0] == REMOTE_KEY
    assert completed[1:]
    assert set(completed[1:]) == {FLUSHED}


@pytest.mark.parametrize(("number", "offset"), [(ADD_32, 0), (ADD_64, 8)])
def test_a_swapped_number_to_add_shows_in_the_cell(number, offset, monkeypatch):
    layout = mlx5.MASKED_FETCH_ADD_32 if number == ADD_32 else mlx5.MASKED_FETCH_ADD_64
    field = layout["add_data"]
    spoil_entry(number, swapped(LOCAL, field), monkeypatch)
    there = run(one_of_each, 1, 32, ranks=[0])[1]
    value = bytes(range(1, field.num_bytes + 1))
    assert (
        there[FLAGS + offset : FLAGS + offset + field.num_bytes].tobytes() == value
    )  # it should be the other way round
