"""What RDMA does not promise, and what a NIC does not hear: each such fault is planted once, and caught.

Faults of order are caught by `checked` on any schedule, or by wrong bytes and errors of the NIC on some schedules.
"""

import ast

import mlx5_layouts as mlx5
import pytest
from own_network import FLAGS, SEEN, SOURCE, TARGET, fill_source, run, see, sent_by, wait_flag
from parts import both_parts, dear
from primitives_of import replace_primitives

import nbep
from nbep.device import primitives as ptx
from nbep.device.jit import kernel
from nbep.device.network.ibgda import queue_pair, transport
from nbep.device.network.ibgda.transport import IbgdaNetwork, post_add, post_value, post_write, wait_written
from nbep.device.network.seam import Place, own_ptr
from nbep.device.types import I32
from nbep.lab.check import edited

pytestmark = pytest.mark.emulator_only("the device code is broken in Python")

BLOCK_BYTES = 512
FIRST_QPN = 0x40  # of the software NIC's queue pairs
SAME_PAIR, OTHER_PAIR = 0, 1


@kernel()
def data_then_flag(network: IbgdaNetwork, flag_queue: I32, is_waited: I32, is_written: I32):
    """One warp: a block on queue 0, and if it is said its completion; then a flag, which is added to or written."""
    lane = ptx.thread_idx()
    peer = 1 - network.rank
    fill_source(network, SOURCE, BLOCK_BYTES, lane)
    last = post_write(network, Place(TARGET, SOURCE, peer, 0), BLOCK_BYTES, True, lane)
    if lane == 0:
        if is_waited != 0:
            wait_written(network, peer, 0, last)
        if is_written != 0:
            post_value(network, FLAGS, 1, 4, peer, flag_queue)
        else:
            post_add(network, FLAGS, 1, False, peer, flag_queue)
    wait_flag(network, 0, 1, lane)
    see(network, 0, BLOCK_BYTES, lane)


@kernel()
def flag_then_data(network: IbgdaNetwork):
    """The same, with the flag first."""
    lane = ptx.thread_idx()
    peer = 1 - network.rank
    fill_source(network, SOURCE, BLOCK_BYTES, lane)
    if lane == 0:
        post_add(network, FLAGS, 1, False, peer, 0)
    post_write(network, Place(TARGET, SOURCE, peer, 0), BLOCK_BYTES, True, lane)
    wait_flag(network, 0, 1, lane)
    see(network, 0, BLOCK_BYTES, lane)


@kernel()
def poll_the_data(network: IbgdaNetwork):
    """The reader takes the last word of a block for its flag."""
    lane = ptx.thread_idx()
    fill_source(network, SOURCE, BLOCK_BYTES, lane)
    post_write(network, Place(TARGET, SOURCE, 1 - network.rank, 0), BLOCK_BYTES, True, lane)
    while ptx.ld_acquire_sys_s32(own_ptr(network, TARGET + BLOCK_BYTES - 4)) == 0:
        ptx.wait_expired(1 << 62)
    see(network, 0, BLOCK_BYTES, lane)


@kernel()
def many_blocks(network: IbgdaNetwork, num_blocks: I32):
    """One warp: blocks of 32 bytes on one queue, then a flag. The queue wraps where there are many."""
    lane = ptx.thread_idx()
    peer = 1 - network.rank
    fill_source(network, SOURCE, 32 * num_blocks, lane)
    for i in range(num_blocks):
        post_write(network, Place(TARGET + 32 * i, SOURCE + 32 * i, peer, 0), 32, True, lane)
    if lane == 0:
        post_add(network, FLAGS, 1, False, peer, 0)
    wait_flag(network, 0, 1, lane)
    see(network, 0, 32 * num_blocks, lane)


def outcome(kernel, *args, num_bytes: int = BLOCK_BYTES, **options) -> Exception | None:
    """How a run fails: in an error, or in wrong bytes; None if it does not."""
    try:
        memories = run(kernel, 1, 32, *args, num_qps=2, **options)
        for rank, memory in enumerate(memories):
            assert memory[SEEN : SEEN + num_bytes].tolist() == sent_by(1 - rank, SOURCE, num_bytes)
    except (AssertionError, nbep.EmulatorError, nbep.NetworkError) as error:
        return error
    return None


def failures(kernel, *args, seeds=range(4), max_delay_ns: int = 300, **options) -> list[Exception]:
    found = [
        outcome(kernel, *args, seed=seed, nic={"seed": seed + 1, "max_delay_ns": max_delay_ns}, **options)
        for seed in seeds
    ]
    return [error for error in found if error is not None]


@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc", "delayed"]))
@pytest.mark.parametrize(
    ("flag_queue", "is_waited"), [(SAME_PAIR, False), (OTHER_PAIR, True)], ids=["same-pair", "after-the-completion"]
)
def test_a_flag_behind_its_data_is_right(flag_queue, is_waited, memory_model):
    assert failures(data_then_flag, flag_queue, int(is_waited), 0, memory_model=memory_model) == []


def test_a_flag_on_another_queue_pair_is_caught_and_the_entry_named_that_wrote_the_bytes():
    found = failures(data_then_flag, OTHER_PAIR, 0, 0, memory_model="checked")
    assert len(found) >= 3  # of four seeds
    for error in found:
        assert isinstance(error, nbep.DataRace)
        text = str(error)
        writer, reader = (0, 1) if "by rank 1, kernel" in text else (1, 0)
        assert f"by the NIC of rank {writer}, kernel `software_nic`" in text
        number = FIRST_QPN + 2 * reader  # of queue 0: each peer has two queue pairs
        assert f"for entry 0 of queue pair {number}\n" in text or f"for entry 1 of queue pair {number}\n" in text


def test_a_flag_that_overtakes_its_data_shows_in_wrong_bytes():
    found = failures(data_then_flag, OTHER_PAIR, 0, 0, memory_model="sc")
    assert any(isinstance(error, AssertionError) for error in found)


def test_a_flag_before_its_data_is_caught():
    assert len(failures(flag_then_data, memory_model="checked")) == 4


def test_a_flag_that_is_written_and_not_added_is_caught():
    """A write says nothing of the bytes before it."""
    assert len(failures(data_then_flag, SAME_PAIR, 0, 1, memory_model="checked")) == 4


@pytest.mark.parametrize(("memory_model", "least"), [("sc", 1), ("checked", 4)])
def test_the_last_word_of_a_write_says_nothing_of_the_others(memory_model, least):
    assert len(failures(poll_the_data, memory_model=memory_model)) >= least


# Doorbells and slots


def test_a_doorbell_that_publishes_nothing_is_caught(monkeypatch):
    replace_primitives(monkeypatch, queue_pair, st_release_sys_s64=ptx.st_relaxed_sys_s64)
    for memory_model in ("delayed", "checked"):
        found = failures(data_then_flag, SAME_PAIR, 0, 0, memory_model=memory_model)
        assert found, memory_model
    assert len(found) >= 3  # of four seeds
    for error in found:
        assert str(error).startswith("the store to `queue pairs` of rank ")
        assert "doorbell of queue pair" in str(error).splitlines()[0]
        assert "is too weak" in str(error).splitlines()[0]


@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc", "delayed"]))
def test_a_doorbell_before_its_entry_is_caught(memory_model, monkeypatch):
    write_piece, submit = transport.write_piece, transport.submit
    late = {}

    def write_late(network, qp, index, *rest):
        late[network.rank, index] = (network, qp, index, *rest)

    def submit_first(network, qp, peer, queue, entries, leaves_now):
        submit(network, qp, peer, queue, entries, leaves_now)
        index, num_entries = entries
        for i in range(index, index + num_entries):
            if (network.rank, i) in late:
                write_piece(*late.pop((network.rank, i)))

    monkeypatch.setattr(transport, "write_piece", write_late)
    monkeypatch.setattr(transport, "submit", submit_first)
    assert failures(data_then_flag, SAME_PAIR, 0, 0, memory_model=memory_model, seeds=range(12), max_delay_ns=0)


def ring_first(function: ast.FunctionDef) -> None:
    """Exchange the record and the doorbell."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and "ring(" in ast.unparse(node.body[-1]):
            assert "write_record(" in ast.unparse(node.body[0])
            node.body.reverse()


@dear
@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc", "delayed"]))
def test_a_record_after_its_doorbell_is_caught(memory_model):
    with edited(queue_pair.submit, ring_first):
        assert any(outcome(many_blocks, 20, num_bytes=640, memory_model=memory_model, seed=seed) for seed in range(12))


# What the NIC hears


@kernel()
def ring_for_some(network: IbgdaNetwork, num_values: I32):
    """One thread of rank 0: numbers on one queue, and a wait for the last one."""
    for _ in range(num_values):
        last = post_value(network, TARGET, 1, 4, 1, 0)
    wait_written(network, 1, 0, last)


RECORD_ONLY = {"from_record": True}
RINGS_ONLY = {"from_record": False}


def relaxed_record(record, num_entries):
    ptx.st_relaxed_sys_s32(record, ptx.s32(ptx.byteswap_u32(num_entries & 0xFFFF)))


def outcomes_of(nic, memory_model, seeds=range(4)) -> list[Exception | None]:
    return [outcome(data_then_flag, SAME_PAIR, 0, 0, memory_model=memory_model, seed=seed, nic=nic) for seed in seeds]


@pytest.mark.parametrize(("memory_model", "least"), [("delayed", 1), ("checked", 4)])
def test_a_record_that_publishes_nothing_is_caught_by_a_nic_that_serves_from_it(memory_model, least, monkeypatch):
    assert not any(outcomes_of(RECORD_ONLY, memory_model))
    monkeypatch.setattr(queue_pair, "write_record", relaxed_record)
    assert sum(error is not None for error in outcomes_of(RECORD_ONLY, memory_model)) >= least


@pytest.mark.parametrize(
    ("step", "nic"), [("write_record", RECORD_ONLY), ("write_record", RINGS_ONLY), ("ring", RINGS_ONLY)]
)
def test_a_record_or_a_doorbell_that_is_not_written_is_caught(step, nic, monkeypatch):
    monkeypatch.setattr(queue_pair, step, lambda *_: None)
    assert all(outcomes_of(nic, "sc", [0]))


def test_a_doorbell_that_counts_new_entries_alone_is_caught(monkeypatch):
    """Rings are merged: each says how many entries there are in all."""
    ring = queue_pair.ring
    monkeypatch.setattr(queue_pair, "ring", lambda bell, num_entries, qpn: ring(bell, 1, qpn))
    assert all(outcomes_of(RINGS_ONLY, "sc", [0]))


@pytest.mark.parametrize(
    "wrong_qpn", [lambda qpn: 0, lambda qpn: qpn + 1, ptx.byteswap_u32], ids=["0", "next", "swapped"]
)
def test_a_doorbell_that_names_another_queue_pair_is_refused(wrong_qpn, monkeypatch):
    ring = queue_pair.ring
    monkeypatch.setattr(queue_pair, "ring", lambda bell, num, qpn: ring(bell, num, wrong_qpn(qpn)))
    with pytest.raises(nbep.NetworkError) as caught:
        run(ring_for_some, 1, 1, 1, ranks=[0], nic=RINGS_ONLY)
    assert (caught.value.entry, caught.value.syndrome) == (0, mlx5.SYNDROMES["LOCAL_QP_OP_ERR"])


def test_a_record_of_more_than_16_bits_is_refused(monkeypatch):
    monkeypatch.setattr(
        queue_pair, "write_record", lambda at, num: ptx.st_release_sys_s32(at, ptx.s32(ptx.byteswap_u32(num | 1 << 16)))
    )
    with pytest.raises(nbep.NetworkError) as caught:
        run(ring_for_some, 1, 1, 1, ranks=[0], nic=RECORD_ONLY)
    assert (caught.value.entry, caught.value.syndrome) == (0, mlx5.SYNDROMES["LOCAL_QP_OP_ERR"])


@pytest.mark.parametrize("nic", [RECORD_ONLY, RINGS_ONLY], ids=["record", "rings"])
def test_more_entries_than_the_queue_has_slots_are_refused(nic, monkeypatch):
    submit = transport.submit
    monkeypatch.setattr(transport, "wait_room", lambda *_: True)
    monkeypatch.setattr(transport, "submit", lambda *args: submit(*args[:-1], args[4][0] == 64))
    with pytest.raises(nbep.NetworkError) as caught:
        run(ring_for_some, 1, 1, 65, ranks=[0], nic=nic)
    assert (caught.value.entry, caught.value.syndrome) == (0, mlx5.SYNDROMES["LOCAL_QP_OP_ERR"])
