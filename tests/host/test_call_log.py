"""Ranks of one process that call different verbs, or pass something else that must be alike, name both in errors."""

import re

import ml_dtypes
import numpy as np
import pytest
from arrays import to_target
from target import spawn

import nbep
from nbep.host.calls import CallLog

TWO_CHOICES = {"topk_idx": "2 choices a token"}
THREE_CHOICES = {"topk_idx": "3 choices a token"}


def routing(buffer, topk_idx, num_experts=4):
    """The arguments of a dispatch that say where tokens go."""
    num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
        topk_idx, num_experts
    )
    return {
        "topk_idx": topk_idx,
        "topk_weights": np.ones(topk_idx.shape, np.float32),
        "num_tokens_per_rank": num_tokens_per_rank,
        "is_token_in_rank": is_token_in_rank,
        "num_tokens_per_expert": num_tokens_per_expert,
    }


def tokens(dtype, hidden=128):
    return np.ones((3, hidden), dtype)


BF16 = ml_dtypes.bfloat16
WAITING = "a rank that fails leaves its peer's kernel waiting"
# What rank 1 passes instead of what rank 0 does; the name; what ranks 0 and 1 passed. The words are those of the
# kernels: see test_calls_alike for each of them.
DIFFER = {
    "dispatch": (lambda _: {"x": tokens(BF16, 256)}, "hidden size of x", "128", "256"),
    "cached": (
        lambda buffer: {"handle": None, **routing(buffer, np.zeros((3, 2), np.int64))},
        "handle", "that of dispatch 1", "None",
    ),
    "combine": (
        lambda _, num_rows: {"topk_weights": np.ones((num_rows, 2), np.float32)},
        "topk_weights", "None", "2 choices a token",
    ),
}  # fmt: skip


@pytest.mark.emulator_only(WAITING)
@pytest.mark.parametrize("verb", DIFFER)
def test_calls_that_differ_are_reported_whoever_finds_it(verb, inputs):
    change, name, of_rank_0, of_rank_1 = DIFFER[verb]

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
        arguments = inputs(buffer)
        differs = comm.rank == 1
        if verb == "dispatch":
            buffer.dispatch(**arguments | (change(buffer) if differs else {}))
        recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments)
        given = {"handle": handle, "config": arguments["config"]}
        if verb == "cached":
            buffer.dispatch(arguments["x"], **given | (change(buffer) if differs else {}))
        buffer.combine(recv_x, **given, **(change(buffer, len(recv_x)) if differs else {}))

    got = {"0, 1": (of_rank_0, of_rank_1), "1, 0": (of_rank_1, of_rank_0)}
    texts = [
        f"{name}: got {values[0]} on rank {ranks[0]}, {values[1]} on rank {ranks[-1]} in "
        for ranks, values in got.items()
    ]
    for seed in range(2):
        with pytest.raises(ValueError, match=f"^({'|'.join(map(re.escape, texts))})") as failure:
            spawn(main, 2, seed=seed)
        assert str(failure.value).endswith("; must be the same on all ranks")


@pytest.mark.emulator_only(WAITING)
@pytest.mark.parametrize("check_calls", [False, True])
@pytest.mark.parametrize("verb", ["combine", "dispatch"])
def test_ranks_that_use_handles_of_equal_shape_in_another_order_raise(verb, check_calls, inputs):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17, check_calls=check_calls)
        arguments = inputs(buffer)
        recv_x, _, _, _, first, _ = buffer.dispatch(**arguments)
        *_, second, _ = buffer.dispatch(**arguments)
        x = {"combine": recv_x, "dispatch": arguments["x"]}[verb]
        getattr(buffer, verb)(x, handle=second if comm.rank == 1 else first, config=arguments["config"])

    found = r"that of dispatch (1 on rank 0, that of dispatch 2 on rank 1|2 on rank 1, that of dispatch 1 on rank 0)"
    with pytest.raises(ValueError, match=f"^handle: got {found} in {verb}, the buffer's collective call 3; must be"):
        spawn(main, 2)


def test_what_only_concerns_a_rank_itself_may_differ(inputs, on_two_ranks):
    def main(buffer):
        first = buffer.rank == 0
        arguments = inputs(buffer, num_tokens=3 if first else 5)
        arguments["config"] = nbep.Config(2, 2 if first else 1, 4, num_threads=64 if first else 128, mix_roles=first)
        *_, handle, event = buffer.dispatch(
            **arguments,
            num_worst_tokens=8 if first else 0,
            expert_alignment=1 if first else 4,
            previous_event=buffer.capture() if first else None,
            async_finish=first,
            allocate_on_comm_stream=first,
        )
        event.current_stream_wait()
        recv_x = buffer.dispatch(arguments["x"], handle=handle, config=arguments["config"])[0]
        bias = to_target(np.ones(tuple(arguments["x"].shape), BF16)) if first else None
        buffer.combine(recv_x, handle, bias=bias, config=arguments["config"])

    on_two_ranks(main)


def test_a_rank_that_has_raised_can_call_again(inputs, on_two_ranks):
    def main(buffer):
        arguments = inputs(buffer) | {"num_worst_tokens": 6, "async_finish": True}
        if buffer.rank == 1:
            buffer.group.barrier()  # rank 0 has called
            with pytest.raises(ValueError, match=r"^config\.num_sms: got 4 on rank 1, 2 on rank 0 in dispatch, "):
                buffer.dispatch(**arguments | {"config": nbep.Config(4, 2, 4)})
        *_, event = buffer.dispatch(**arguments)
        if buffer.rank == 0:
            buffer.group.barrier()
        event.current_stream_wait()

    on_two_ranks(main)


def test_a_rank_may_be_calls_ahead():
    log = CallLog(3)
    for _ in range(5):
        log.add(0, "dispatch", TWO_CHOICES)
        log.add(0, "combine", TWO_CHOICES)
    for rank in (2, 1):
        for _ in range(5):
            log.add(rank, "dispatch", TWO_CHOICES)
            log.add(rank, "combine", TWO_CHOICES)
    assert log._calls == {}


def test_a_call_that_is_refused_does_not_count():
    log = CallLog(2)
    log.add(1, "dispatch", TWO_CHOICES)
    log.add(1, "combine", {})
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^topk_idx: got 3 .* on rank 0, 2 .* on rank 1 in dispatch, .* call 1;"):
            log.add(0, "dispatch", THREE_CHOICES)
        with pytest.raises(ValueError, match=r"^buffer: got combine on rank 0, dispatch on rank 1 as .* call 1;"):
            log.add(0, "combine", {})
    log.add(0, "dispatch", TWO_CHOICES)
    log.add(0, "combine", {})
    assert log._calls == {}


@pytest.mark.emulator_only("the failure is arranged")
def test_a_call_that_fails_before_its_first_launch_does_not_count(inputs, on_two_ranks, monkeypatch):
    def out_of_memory(*args):
        raise MemoryError

    def main(buffer):
        arguments = inputs(buffer)
        recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments)
        calls = (
            lambda: buffer.dispatch(**arguments),
            lambda: buffer.dispatch(arguments["x"], handle=handle, config=arguments.get("config")),
            lambda: buffer.combine(recv_x, handle),
        )
        for call in calls:
            if buffer.rank == 0:
                with monkeypatch.context() as patch:
                    patch.setattr(buffer._memory.runtime, "empty", out_of_memory)
                    with pytest.raises(MemoryError):
                        call()
            call()
        buffer.group.barrier()
        return len(buffer._memory._call_log._calls)

    assert on_two_ranks(main) == [0, 0]


@pytest.mark.emulator_only("what is captured is arranged")
def test_a_captured_call_ends_the_comparison(on_two_ranks, monkeypatch):
    """A graph may replay it at any time, while another rank makes the same call without a graph."""

    def main(buffer):
        memory = buffer._memory
        if buffer.rank == 0:
            memory.compare_call("dispatch", lambda: TWO_CHOICES)
            with monkeypatch.context() as patch:
                patch.setattr(type(memory.runtime), "is_capturing", True)
                memory.compare_call("dispatch", lambda: TWO_CHOICES)
        buffer.group.barrier()
        memory.compare_call("combine", dict)
        return len(memory._call_log._calls)

    assert on_two_ranks(main) == [0, 0]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("num_max_dispatch_tokens_per_rank", {"num_max_dispatch_tokens_per_rank": 3}),
        ("return_recv_hook", {"return_recv_hook": True}),
        ("hidden size of x", {"x": tokens(BF16, 256)}),
        ("use_fp8", {"use_fp8": True}),
    ],
)
def test_arguments_of_low_latency_calls_have_the_names_of_the_caller(name, other):
    def main(comm):
        num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(4, 256, 2, 4)
        buffer = nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True)
        usual = {"x": tokens(BF16), "topk_idx": np.zeros((3, 1), np.int64), "num_max_dispatch_tokens_per_rank": 4}
        usual |= {"num_experts": 4, "use_fp8": False, **(other if comm.rank == 0 else {})}
        buffer.low_latency_dispatch(**{key: to_target(value) for key, value in usual.items()})

    with pytest.raises(ValueError, match=rf"^{name}: got .* on rank \d, .* on rank \d in low_latency_dispatch"):
        spawn(main, 2)
