"""Bytes of NVSHMEM's state become the description of queue pairs, or an error that names what is missing."""

import numpy as np
import pytest
from nvshmem_images import HEAP, HEAP_BYTES, FakeNic

from nbep.host.network import nvshmem_state
from nbep.host.network.nvshmem_state import NUM_WORDS, describe

BUFFER, NUM_BYTES = HEAP + (3 << 16) + 4096, 1 << 18


def described(nic, buffer=BUFFER, num_bytes=NUM_BYTES):
    return describe(nic.images, nic.read, buffer, num_bytes)


def test_a_queue_pair_is_described_word_by_word():
    pairs = described(FakeNic()).queue_pairs
    assert pairs.shape == (4, 2, NUM_WORDS)
    assert pairs.dtype == np.int64
    number = 0x100 * 1 + 3
    words = [0xC000_0000, 0xD000_0000, 0xE000_0000, 0xF000_0000, 0xB000_0000]
    expected = [word + number for word in words] + [1024, number, 0xA000_0000 + number, number, number]
    assert pairs[3, 1].tolist() == expected + [0] * (NUM_WORDS - len(expected))


def test_counters_begin_at_the_low_half_of_the_queues_head():
    nic = FakeNic()
    nic.planted[0, 2] = {"mvars__tx_wq__resv_head": 0x7_F000_0001, "mvars__tx_wq__ready_head": 0x7_F000_0001}
    words = described(nic).queue_pairs[2, 0]
    assert words[nvshmem_state.RESERVED] == words[nvshmem_state.READY] == 0xF000_0001


def test_a_rank_has_no_queue_pair_to_itself():
    nic = FakeNic()
    nic.planted[0, 1] = {"qpn": 0xFFFFFFFF, "qp_type": 0, "tx_wq__wqe": 0}
    pairs = described(nic).queue_pairs
    assert not pairs[1].any()
    assert all(pairs[peer].any() for peer in (0, 2, 3))


def test_queue_pairs_made_on_request_are_taken_where_there_are_any():
    assert described(FakeNic(num_rows=5, num_default=2)).queue_pairs[0, :, nvshmem_state.QPN].tolist() == [
        0x200,
        0x300,
        0x400,
    ]


def test_of_two_nics_the_first_is_taken_with_its_keys():
    nic = FakeNic(num_rows=4, num_default=4, num_nics=2)
    found = described(nic)
    assert found.queue_pairs[2, :, nvshmem_state.QPN].tolist() == [0x002, 0x102]
    assert found.local_keys[3] == np.uint32(nic.local_key(3, 0)).view(np.int32)
    assert found.remote_keys[2, 3] == nic.remote_key(3, 2, 0)


@pytest.mark.parametrize("log2", [16, 17, 22])
def test_keys_are_those_of_the_chunks_up_to_the_buffers_end(log2):
    nic = FakeNic(log2=log2)
    found = described(nic)
    num_chunks = (BUFFER + NUM_BYTES - 1 - HEAP) // (1 << log2) + 1
    assert found.log2_chunk == log2
    assert found.local_keys.view(np.uint32).tolist() == [nic.local_key(chunk) for chunk in range(num_chunks)]
    assert found.remote_keys.tolist() == [
        [nic.remote_key(chunk, peer) for chunk in range(num_chunks)] for peer in range(4)
    ]


def test_keys_that_have_no_room_in_the_constant_are_read_from_memory():
    nic = FakeNic()
    found = described(nic, HEAP, 100 << 16)  # 100 local keys and 400 of peers; the constant has 64 of each
    assert found.local_keys.view(np.uint32).tolist() == [nic.local_key(chunk) for chunk in range(100)]
    assert found.remote_keys[3].tolist() == [nic.remote_key(chunk, 3) for chunk in range(100)]


def test_a_buffer_is_at_the_same_place_of_each_ranks_heap():
    found = described(FakeNic())
    assert found.heap_offset == BUFFER - HEAP
    assert found.remote_bases.tolist() == [BUFFER + (peer << 32) for peer in range(4)]


MISSING = {
    "NVSHMEM is not initialised": ("host", "nvshmemi_is_nvshmem_initialized", False),
    "IBGDA is not initialised: it takes an mlx5 NIC": ("host", "ibgda_is_initialized", False),
    "RAIL_OPT": ("host", "enable_rail_opt", True),
    "no addresses of the peers' heaps": ("host", "peer_heap_base_remote", 0),
    r"no reliable connections \(num_rc_per_pe 0\): it takes": ("state", "num_rc_per_pe", 0),
    r"no reliable connections \(num_rc_per_pe 4294967295\)": ("state", "num_rc_per_pe", 0xFFFFFFFF),
    r"no NIC for IBGDA \(-1\)": ("state", "num_devices_initialized", -1),
    "globalmem.rcs is 0": ("state", "globalmem__rcs", 0),
    "globalmem.rkeys is 0": ("state", "globalmem__rkeys", 0),
    "not registered its heap": ("state", "log2_cumem_granularity", (1 << 64) - 1),
    "NVSHMEM_IBGDA_NIC_HANDLER=gpu": ("state", "use_async_postsend", True),
    "no reliable connection: got type 1": ("pair", "qp_type", 1),
    r"32768 entries; must be .*NVSHMEM_QP_DEPTH": ("pair", "tx_wq__nwqes", 1 << 15),
    "1000 entries": ("pair", "tx_wq__nwqes", 1000),
    "queue pair 0 to rank 0 has no tx_wq.bf": ("pair", "tx_wq__bf", 0),
    "is in use": ("pair", "mvars__tx_wq__ready_head", 0),
}


@pytest.mark.parametrize("message", MISSING, ids=[field for _, field, _ in MISSING.values()])
def test_what_is_missing_is_named(message):
    attribute, field, value = MISSING[message]
    nic = FakeNic()
    getattr(nic, attribute)[field] = value
    with pytest.raises(RuntimeError, match=message):
        described(nic, num_bytes=1 << 21)


def test_a_queue_pair_without_a_completion_is_named():
    nic = FakeNic()
    nic.cqe_of_none = True
    with pytest.raises(RuntimeError, match="queue pair 0 to rank 0 has no completion queue"):
        described(nic)


def test_a_nic_without_queue_pairs_of_its_own_is_named():
    nic = FakeNic()
    nic.pair["dev_idx"] = 1
    with pytest.raises(RuntimeError, match="no queue pairs of NIC 0"):
        described(nic)


def test_a_chunk_without_a_key_is_named(monkeypatch):
    nic = FakeNic()
    monkeypatch.setattr(nic, "local_key", lambda chunk, nic: 0xFFFFFFFF if chunk == 2 else 1)
    with pytest.raises(RuntimeError, match="not registered chunk 2 of lkeys"):
        described(nic)


@pytest.mark.parametrize("field", ["host", "state", "pair"])
def test_a_structure_of_another_version_is_refused(field):
    nic = FakeNic()
    getattr(nic, field)["version"] = 2 << 16
    with pytest.raises(RuntimeError, match=r"got version 0x20000; nbep knows 0x1[0-9a-f]{4} alone"):
        described(nic)


def test_another_version_of_the_library_is_refused():
    """In 3.3, which DeepEP v1.2.1 reads, queue pairs to one rank are side by side, in structures of the same size."""
    nic = FakeNic()
    nic.version = (3, 3)
    with pytest.raises(RuntimeError, match=r"got version 3\.3; nbep knows the queue pairs of 3\.8 alone"):
        described(nic)


def test_an_image_that_is_too_short_is_refused():
    nic = FakeNic()
    images = nic.images._replace(ibgda=nic.images.ibgda[:-1])
    with pytest.raises(RuntimeError, match="nvshmemi_ibgda_device_state_t: got 8383 bytes; the structure has 8384"):
        describe(images, nic.read, BUFFER, NUM_BYTES)


@pytest.mark.parametrize("buffer", [HEAP - 1, HEAP + HEAP_BYTES - NUM_BYTES + 1])
def test_a_buffer_outside_of_the_heap_is_refused(buffer):
    with pytest.raises(ValueError, match="buffer: got 262144 bytes from 0x"):
        described(FakeNic(), buffer)
