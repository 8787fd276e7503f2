"""Ranks that live in processes of their own and pass something else: each reports what both have passed.

Here they live in one process, which would compare them before; that is switched off.
"""

import re

import ml_dtypes
import numpy as np
import pytest
from parts import both_parts

import nbep
from nbep.device.kernels.parts.calls import NUM_WORDS
from nbep.device.layout.intranode import CALL_BYTES, CALL_ROWS
from nbep.device.protocols.peers import ONE
from nbep.host.calls import DIGESTS, NUM_EXPERTS, WORDS, CallLog, make_call

pytestmark = pytest.mark.emulator_only("a GPU's virtual ranks live in one process: what they launch is compared before")
BF16 = ml_dtypes.bfloat16
MODELS = ["sc", "delayed", "checked"]
ZERO_COPY_BYTES = 1 << 17


@pytest.fixture(autouse=True)
def like_processes(monkeypatch):
    monkeypatch.setattr(CallLog, "shared", classmethod(lambda cls, comm: None))
    # Six experts, of which no token chooses the last.
    monkeypatch.setattr(nbep.host.normal_checks, "check_routing", lambda *_: None)


def fp8(num_scales, dtype=np.float32):
    return np.zeros((3, 128), ml_dtypes.float8_e4m3fn), np.ones((3, num_scales), dtype)


# What all ranks pass; what the last one passes in its place; the name; what the others and the last one have passed.
DISPATCHES = {
    "zero_copy": ({}, {"zero_copy": True}, "zero_copy", "False", "True"),
    "dtype": ({}, {"x": np.zeros((3, 128), np.float16)}, "dtype of x", "bfloat16", "float16"),
    "hidden": ({}, {"x": np.zeros((3, 64), BF16)}, "hidden size of x", "128", "64"),
    "scales": ({"x": fp8(1)}, {"x": fp8(3)}, "scales", "1 float32 a token", "3 float32 a token"),
    "dtype of scales": ({"x": fp8(1)}, {"x": fp8(1, np.int32)}, "scales", "1 float32 a token", "1 int32 a token"),
    "top-k": ({}, {"topk_idx": None, "topk_weights": None}, "topk_idx", "2 choices a token", "None"),
    "experts": ({}, {"num_tokens_per_expert": np.array([2, 1, 2, 1, 0, 0], np.int32)}, NUM_EXPERTS, "4", "6"),
    "SMs": ({}, {"config": nbep.Config(4, 2, 4)}, "config.num_sms", "2", "4"),
    "slots": ({}, {"config": nbep.Config(2, 2, 5)}, "config.num_max_nvl_chunked_recv_tokens", "4", "5"),
    "chunk": (
        {"zero_copy": True},
        {"config": nbep.Config(2, 1, 4)},
        "config.num_max_nvl_chunked_send_tokens",
        "2",
        "1",
    ),
}


def refused(comm, name: str, own: str, theirs: str, verb: str):
    """The error of a rank, which names its own value and that of another rank."""
    is_last = comm.rank == comm.size - 1
    own, theirs = (theirs, own) if is_last else (own, theirs)
    other = rf"[0-{comm.size - 2}]" if is_last else str(comm.size - 1)
    got = rf"{re.escape(own)} on rank {comm.rank}, {re.escape(theirs)} on rank {other} in the same {verb}"
    return pytest.raises(ValueError, match=rf"^{name}: got {got}; must be the same on all ranks$")


def run(fn, num_ranks: int = 2, memory_model: str = "sc", seeds: range = range(1)) -> None:
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17, num_zero_copy_bytes=ZERO_COPY_BYTES)
        fn(comm, buffer, make_arguments(buffer))
        buffer.destroy()

    for seed in seeds:
        nbep.spawn(main, num_ranks, "emulator", seed=seed, memory_model=memory_model, on_deadlock="expire")


def make_arguments(buffer):
    topk_idx = np.array([[0, 2], [1, 3], [2, 0]])
    per_rank, _, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(topk_idx, max(4, buffer.group_size))
    return {
        "x": np.ones((3, 128), BF16),
        "topk_idx": topk_idx,
        "topk_weights": np.ones((3, 2), np.float32),
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": is_token_in_rank,
        "config": nbep.Config(2, 2, 4),
    }


def dispatches_that_differ(which: str, num_worst_tokens: int = 0):
    all_pass, last_passes, name, own, theirs = DISPATCHES[which]

    def main(comm, buffer, arguments):
        arguments |= all_pass
        if arguments.get("topk_idx") is not None:
            arguments["num_worst_tokens"] = num_worst_tokens
        if comm.rank == comm.size - 1:
            arguments |= last_passes
        for _ in range(2):  # it stays so
            with refused(comm, name, own, theirs, "dispatch"):
                buffer.dispatch(**arguments)

    return main


@pytest.mark.parametrize("which", DISPATCHES)
def test_dispatches_that_differ_are_refused_on_every_rank(which):
    run(dispatches_that_differ(which))


@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize("which", both_parts(["hidden"], thorough=[name for name in DISPATCHES if name != "hidden"]))
def test_they_are_refused_in_every_memory_model(which, memory_model):
    run(dispatches_that_differ(which), memory_model=memory_model, seeds=range(2))


@pytest.mark.parametrize("num_ranks", both_parts([4], thorough=[8]))
def test_one_rank_of_many_that_differs_is_named_on_all(num_ranks):
    def main(comm, buffer, arguments):
        if comm.rank == comm.size - 1:
            arguments["config"] = nbep.Config(2, 2, 5)
        with refused(comm, "config.num_max_nvl_chunked_recv_tokens", "4", "5", "dispatch"):
            buffer.dispatch(**arguments)

    run(main, num_ranks, "checked")


@pytest.mark.parametrize("zero_copy", both_parts([False], thorough=[True]))
def test_cached_dispatches_are_compared_too(zero_copy):
    def main(comm, buffer, arguments):
        recv_x, *_, handle, _ = buffer.dispatch(**arguments, zero_copy=zero_copy)
        rows, options = recv_x.copy(), {"config": arguments["config"], "zero_copy": zero_copy}
        for _ in range(2):
            buffer.dispatch(arguments["x"], handle, **options)
            buffer.combine(rows, handle, **options)
        x = arguments["x"] if comm.rank == 0 else np.ones((3, 256), BF16)
        with refused(comm, "hidden size of x", "128", "256", "dispatch"):
            buffer.dispatch(x, handle, **options)

    run(main, memory_model="checked")


@pytest.mark.parametrize("zero_copy", [False, True])
def test_combines_are_compared_too(zero_copy):
    def main(comm, buffer, arguments):
        recv_x, _, weights, _, handle, _ = buffer.dispatch(**arguments, zero_copy=zero_copy)
        with refused(comm, "topk_weights", "2 choices a token", "None", "combine"):
            weights = weights if comm.rank == 0 else None
            buffer.combine(recv_x, handle, weights, config=arguments["config"], zero_copy=zero_copy)

    run(main, memory_model="checked")


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("verb", ["combine", "dispatch"])
def test_handles_of_equal_shape_that_one_rank_uses_in_another_order_are_refused(verb, zero_copy):
    def main(comm, buffer, arguments):
        recv_x, *_, first, _ = buffer.dispatch(**arguments)
        *_, second, _ = buffer.dispatch(**arguments)
        options = {"config": arguments["config"], "zero_copy": zero_copy}
        handle = second if comm.rank == comm.size - 1 else first
        with refused(comm, "handle", "that of dispatch 1", "that of dispatch 2", verb):
            if verb == "combine":
                buffer.combine(recv_x, handle, **options)
            else:
                buffer.dispatch(arguments["x"], handle, **options)

    run(main, memory_model="checked")


def test_a_handle_and_a_tuple_of_arrays_whose_origin_is_unknown_are_refused_together():
    def main(comm, buffer, arguments):
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        buffer.combine(recv_x, tuple(handle), config=arguments["config"])
        handle = tuple(handle) if comm.rank == comm.size - 1 else handle
        with refused(comm, "handle", "that of dispatch 1", "a handle of unknown origin", "combine"):
            buffer.combine(recv_x, handle, config=arguments["config"])

    run(main)


def test_without_check_calls_kernels_do_not_compare_handles():
    """Ranks that replay a CUDA graph have made fewer dispatches than others, and other handles."""

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17, check_calls=False)
        arguments = make_arguments(buffer)
        handles = []
        for _ in range(2):
            recv_x, *_, handle, _ = buffer.dispatch(**arguments)
            handles.append(handle)
        combined_x, *_ = buffer.combine(recv_x, handles[comm.rank], config=arguments["config"])
        buffer.destroy()
        return combined_x.tolist()

    assert nbep.spawn(main, 2, "emulator") == [np.full((3, 128), 2).tolist()] * 2


@pytest.mark.parametrize("num_worst_tokens", [0, 9])
@pytest.mark.parametrize("zero_copy", [False, True])
def test_ranks_that_call_different_verbs_report_both(num_worst_tokens, zero_copy):
    def main(comm, buffer, arguments):
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        with refused(comm, "buffer", "dispatch", "combine", "call"):
            if comm.rank == 0:
                buffer.dispatch(**arguments, num_worst_tokens=num_worst_tokens, zero_copy=zero_copy)
            else:
                buffer.combine(recv_x, handle, config=arguments["config"])

    run(main, memory_model="checked")


@pytest.mark.parametrize("seeds", both_parts([range(1)], thorough=[range(1, 4)]), ids=str)
def test_what_a_rank_has_queued_behind_a_call_that_differs_ends_too(seeds):
    def main(comm, buffer, arguments):
        arguments |= {"num_worst_tokens": 9, "async_finish": True}
        recv_x, *_, handle, _ = buffer.dispatch(**arguments)
        arguments |= {"x": np.ones((3, 64), BF16)} if comm.rank == 1 else {}
        with refused(comm, "hidden size of x", "128", "64", "dispatch"):
            buffer.dispatch(**arguments)
            _, _, event = buffer.combine(recv_x, handle, config=arguments["config"], async_finish=True)
            event.current_stream_wait()

    run(main, memory_model="checked", seeds=seeds)


def test_a_peer_that_does_not_tell_its_words_is_named(monkeypatch):
    def main(comm, buffer, arguments):
        if comm.rank == 1:
            arguments["x"] = np.ones((3, 64), BF16)
        with pytest.raises(nbep.PeerTimeout, match=f"for rank {1 - comm.rank}: the peer to say what it has called"):
            buffer.dispatch(**arguments)

    monkeypatch.setattr("nbep.device.kernels.parts.calls.send_call", lambda *_: None)
    run(main)


def test_a_digest_fits_below_the_count_and_every_word_changes_it():
    words = (1, 0, 0, 7168, 112, 8, 256, 24, 0, 256, 0, 0)
    assert len(words) == NUM_WORDS - 1 == max(map(len, WORDS.values()))
    for index, word in enumerate(words):
        for other in (word + 1, word ^ 1, word + 2, 4 * word + 3, DIGESTS - 1):
            changed = make_call("dispatch", *words[:index], other, *words[index + 1 :]).signal
            assert ONE <= changed < 2 * ONE
            assert changed != make_call("dispatch", *words).signal


@pytest.mark.parametrize("kind", ["buffer", "elastic"])
def test_no_rank_has_sent_words_to_a_new_buffer(kind):
    """Or a time-out would show what lay in that memory as the call of a peer."""

    def main(comm):
        made = (
            nbep.Buffer(comm, num_nvl_bytes=1 << 16)
            if kind == "buffer"
            else nbep.ElasticBuffer(comm, num_max_tokens_per_rank=4, hidden=16, num_topk=2)
        )
        memory = made._memory
        words = memory.symmetric.read(memory.num_nvl_bytes + CALL_ROWS, 2 * CALL_BYTES // 4, np.int32)
        made.destroy()
        return words.any()

    assert nbep.spawn(main, 2, "emulator") == [False, False]
