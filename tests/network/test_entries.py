"""What the GPU writes for a NIC, and what the software NIC answers, byte by byte, against headers of others."""

import mlx5_layouts as mlx5
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nbep.device.primitives as ptx
from nbep.device.network import nic
from nbep.device.network.ibgda import completion, entry, queue_pair
from nbep.device.primitives import byteswap_u32, s32
from nbep.emulator import World

pytestmark = pytest.mark.emulator_only("it looks at what single functions store")

GARBAGE = bytes((37 * i + 11) % 256 for i in range(mlx5.ENTRY_BYTES))  # what was in the slot before

FEW = settings(max_examples=25)

indices = st.integers(0, (1 << 31) - 1)
qpns = st.integers(0, (1 << 24) - 1)
addresses = st.integers(0, (1 << 63) - 1)
keys = st.integers(0, (1 << 32) - 1)
sizes = st.integers(1, (1 << 31) - 1)
s32s = st.integers(-(1 << 31), (1 << 31) - 1)
s64s = st.integers(-(1 << 63), (1 << 63) - 1)


def key_word(key: int) -> int:
    """A key as kernels have it: the word whose bytes are big-endian, loaded as s32."""
    return s32(byteswap_u32(key))


def place(address: int, key: int) -> entry.Registered:
    return entry.Registered(address, key_word(key))


def stored(store, *args, before: bytes = GARBAGE) -> bytes:
    """What store(address, *args) leaves of some bytes."""
    world = World(1)
    memory = world.ranks[0].space.allocate(len(before), "memory", zero=True)
    memory.array("u1")[:] = list(before)
    stream = world.ranks[0].create_stream("main")
    stream.launch(lambda address: store(address, *args), (memory.address,), 1, 1)
    stream.synchronize()
    return memory.array("u1").tobytes()


def written(write, index: int, qpn: int, *args) -> bytes:
    """The entry that is written as number `index` of a queue pair."""
    return stored(lambda address: write(entry.Slot(address, index, qpn), *args))


def assert_entry(got: bytes, want: bytes) -> None:
    """Compare all that the segments of an entry have; the NIC reads no further."""
    num_bytes = 16 * mlx5.unpack(mlx5.CONTROL, want)["ds"]
    assert got[: len(want)].hex(" ", 4) == want.hex(" ", 4)
    assert got[num_bytes:] == GARBAGE[num_bytes:]


@FEW
@given(indices, qpns, addresses, keys, addresses, keys, sizes)
@example(0x1_2345, 0xABCDEF, 0x0102_0304_0506_0708, 0x11121314, 0x2122_2324_2526_2728, 0x31323334, 0x41424344)
def test_a_write_has_a_control_a_remote_address_and_a_data_segment(index, qpn, raddr, rkey, laddr, lkey, num_bytes):
    got = written(entry.write_rdma_write, index, qpn, place(raddr, rkey), place(laddr, lkey), num_bytes, 0, 0)
    assert_entry(got, mlx5.write_entry(index, qpn, raddr, rkey, (laddr, lkey, num_bytes)))


@FEW
@given(indices, qpns, addresses, keys, addresses, keys, sizes, keys, sizes)
def test_a_write_from_two_chunks_has_two_data_segments(
    index, qpn, raddr, rkey, laddr, lkey, num_bytes, next_key, num_more
):
    laddr = min(laddr, (1 << 63) - 1 - num_bytes)
    got = written(
        entry.write_rdma_write,
        *(index, qpn, place(raddr, rkey), place(laddr, lkey), num_bytes, key_word(next_key), num_more),
    )
    pieces = (laddr, lkey, num_bytes), (laddr + num_bytes, next_key, num_more)
    assert_entry(got, mlx5.write_entry(index, qpn, raddr, rkey, *pieces))


@FEW
@given(indices, qpns, addresses, keys, s64s, st.integers(1, 8))
@example(0, 1, 2, 3, 0x0102_0304_0506_0708, 8)
@example(0, 1, 2, 3, -2, 3)
def test_a_write_with_its_data_inside_has_the_low_bytes_of_the_number(index, qpn, raddr, rkey, value, num_bytes):
    got = written(entry.write_rdma_write_inline, index, qpn, place(raddr, rkey), value, num_bytes)
    data = value.to_bytes(8, "little", signed=True)[:num_bytes]
    assert_entry(got, mlx5.inline_entry(index, qpn, raddr, rkey, data))


@FEW
@given(indices, qpns, addresses, keys, s32s, addresses, keys)
@example(7, 0x40, 0x1000, 0x100, -1, 0x2000, 0x200)
def test_a_fetch_and_add_of_four_bytes_is_the_extended_one_without_field_boundaries(
    index, qpn, raddr, rkey, value, result, lkey
):
    got = written(entry.write_fetch_add_32, index, qpn, place(raddr, rkey), value, place(result, lkey))
    assert_entry(got, mlx5.add_entry(index, qpn, raddr, rkey, value, 4, result, lkey))


@FEW
@given(indices, qpns, addresses, keys, s64s, addresses, keys)
@example(7, 0x40, 0x1000, 0x100, 0x0102_0304_0506_0708, 0x2000, 0x200)
@example(7, 0x40, 0x1000, 0x100, -1, 0x2000, 0x200)
def test_a_fetch_and_add_of_eight_bytes_is_the_extended_one_without_field_boundaries(
    index, qpn, raddr, rkey, value, result, lkey
):
    got = written(entry.write_fetch_add_64, index, qpn, place(raddr, rkey), value, place(result, lkey))
    assert_entry(got, mlx5.add_entry(index, qpn, raddr, rkey, value, 8, result, lkey))


@FEW
@given(indices)
@example(0xFFFF)
@example(0x1_0000)
def test_the_doorbell_record_has_sixteen_bits_of_the_number_of_entries(num_entries):
    got = stored(queue_pair.write_record, num_entries, before=GARBAGE[:8])
    want = mlx5.pack(mlx5.DOORBELL_RECORD, queue_pair.RECORD_BYTES, num_entries=num_entries & 0xFFFF)
    assert got == want + GARBAGE[queue_pair.RECORD_BYTES : 8]


@FEW
@given(indices, qpns)
@example(0x1_2345, 0xABCDEF)
def test_the_doorbell_has_the_first_eight_bytes_of_a_control_segment(num_entries, qpn):
    got = stored(queue_pair.ring, num_entries, qpn, before=GARBAGE[:16])
    want = mlx5.pack(mlx5.DOORBELL, queue_pair.DOORBELL_BYTES, index=num_entries & 0xFFFF, qpn=qpn)
    assert got == want + GARBAGE[queue_pair.DOORBELL_BYTES : 16]


NONE_YET = mlx5.pack(mlx5.COMPLETION, mlx5.COMPLETION_BYTES, wqe_counter=0xFFFF, op_own=mlx5.CQE_INVALID << 4)


def completed(index: int, error: int, before: bytes = NONE_YET) -> bytes:
    """What the software NIC makes of a completion, whose words follow the NIC's queue pair here."""

    def complete(qp):
        ptx.st_weak_s64(qp + 8 * nic.COMPLETION, qp + nic.QUEUE_PAIR_BYTES)
        nic.complete(qp, index, error)

    return stored(complete, before=bytes(nic.QUEUE_PAIR_BYTES) + before)[nic.QUEUE_PAIR_BYTES :]


@FEW
@given(indices)
@example(0xFFFF)
@example(0x1_2345)
def test_the_nic_completes_an_entry_with_its_index(index):
    want = mlx5.pack(mlx5.COMPLETION, mlx5.COMPLETION_BYTES, wqe_counter=index & 0xFFFF, op_own=mlx5.CQE_REQ << 4)
    assert completed(index, nic.NO_ERROR) == want


@FEW
@given(indices, st.sampled_from(sorted(mlx5.SYNDROMES.values())))
def test_the_nic_refuses_an_entry_with_its_index_and_a_syndrome(index, syndrome):
    want = mlx5.pack(
        mlx5.ERROR_COMPLETION,
        mlx5.COMPLETION_BYTES,
        wqe_counter=index & 0xFFFF,
        op_own=mlx5.CQE_REQ_ERR << 4,
        syndrome=syndrome,
    )
    assert completed(index, syndrome) == want


def observed(read, data: bytes) -> list[int]:
    """What read(address) says of some bytes."""
    seen = []
    stored(lambda address: seen.append(read(address)), before=data)
    return seen


@FEW
@given(indices, st.integers(0, 1), st.integers(0, 0xFF))
def test_who_waits_reads_index_and_opcode_of_any_completion_whoever_owns_it(index, owner, signature):
    data = mlx5.pack(
        mlx5.COMPLETION,
        mlx5.COMPLETION_BYTES,
        wqe_counter=index & 0xFFFF,
        signature=signature,
        op_own=mlx5.CQE_REQ << 4 | owner,
    )

    def read(address):
        status = ptx.ld_acquire_sys_s32(address + completion.STATUS_WORD)
        return [
            completion.index_of(status),
            completion.opcode_of(status),
            completion.is_done(status, index),
            completion.is_done(status, index - 1),
            completion.is_done(status, index + 1),
            completion.is_done(status, index - 0x7FFF),
        ]

    assert observed(read, data) == [[index & 0xFFFF, mlx5.CQE_REQ, True, True, False, True]]


@FEW
@given(indices, st.integers(1, 0xFF), st.integers(0, 0xFF))
def test_who_waits_reads_the_syndrome_of_an_error_and_nothing_counts_as_done(index, syndrome, vendor_syndrome):
    data = mlx5.pack(
        mlx5.ERROR_COMPLETION,
        mlx5.COMPLETION_BYTES,
        wqe_counter=index & 0xFFFF,
        op_own=mlx5.CQE_REQ_ERR << 4 | 1,
        syndrome=syndrome,
        vendor_err_synd=vendor_syndrome,
    )

    def read(address):
        status = ptx.ld_acquire_sys_s32(address + completion.STATUS_WORD)
        return [
            completion.index_of(status),
            completion.opcode_of(status),
            completion.is_done(status, index),
            completion.syndrome_at(address),
        ]

    assert observed(read, data) == [[index & 0xFFFF, mlx5.CQE_REQ_ERR, False, syndrome]]


def test_before_the_first_completion_no_entry_is_done():
    def read(address):
        status = ptx.ld_acquire_sys_s32(address + completion.STATUS_WORD)
        return [status == completion.NONE_YET, *(completion.is_done(status, index) for index in (-64, -1, 0, 1, 64))]

    data = b"\xff" * mlx5.COMPLETION_BYTES  # as the host writes it
    assert observed(read, data) == [[True, True, True, False, False, False]]


def test_the_numbers_of_opcodes_syndromes_and_flags_are_the_headers():
    assert (entry.RDMA_WRITE, entry.MASKED_FETCH_ADD) == (mlx5.OPCODE_RDMA_WRITE, mlx5.OPCODE_MASKED_FETCH_ADD)
    assert (entry.CQ_UPDATE, entry.INLINE) == (mlx5.CQ_UPDATE, mlx5.INLINE_SEG)
    assert (completion.REQ, completion.REQ_ERR, completion.INVALID) == (
        mlx5.CQE_REQ,
        mlx5.CQE_REQ_ERR,
        mlx5.CQE_INVALID,
    )
    assert {name: getattr(nic, name) for name in mlx5.SYNDROMES} == mlx5.SYNDROMES
