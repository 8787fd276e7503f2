"""Ranks of nbep.spawn that use torch: each has its modes and backward pass for itself, and its tensors are watched."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from processes import run_python  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import nbep  # noqa: E402
import nbep.deep_ep as deep_ep  # noqa: E402
from nbep.emulator import DataRace, DeadlockError, Uninitialized, UseAfterFree  # noqa: E402

CONFIG = deep_ep.Config(2, 2, 4)
IDX = torch.tensor([[0], [1], [2]])
MODELS = "sc", "delayed", "checked"


def layout_of(buffer):
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDX, 4)
    return {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}


def dispatch(buffer, x, layout=None, **options):
    received, *_, handle, event = buffer.dispatch(x, config=CONFIG, **(layout or layout_of(buffer)), **options)
    return received, handle, event


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer, kept):
        received, ctx.handle, event = dispatch(buffer, x, async_finish=True)
        event.current_stream_wait()
        ctx.buffer, ctx.kept = buffer, kept
        kept.append(ctx.handle)
        return received

    @staticmethod
    def backward(ctx, grad):
        ctx.kept.append("backward")
        return ctx.buffer.combine(grad.contiguous(), ctx.handle, config=CONFIG)[0], None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(x, handle, config=CONFIG)[0]

    @staticmethod
    def backward(ctx, grad):
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle, config=CONFIG)[0], None, None


BUFFERS = []  # of the ranks, for operations, which take no objects


@torch.library.custom_op("nbep_test::sent", mutates_args=())
def sent(x: torch.Tensor, rank: int) -> torch.Tensor:
    received, handle, event = dispatch(BUFFERS[rank][0], x, async_finish=True)
    BUFFERS[rank].append(handle)
    if x[0, 0] != 7:  # then nobody waits
        event.current_stream_wait()
    return received.float().mul(2).to(x.dtype) / 2


def of_sent(ctx, inputs, output):
    ctx.rank, ctx.handle = inputs[1], BUFFERS[inputs[1]][-1]


def back(ctx, grad):
    return BUFFERS[ctx.rank][0].combine(grad.contiguous(), ctx.handle, config=CONFIG)[0], None


sent.register_autograd(back, setup_context=of_sent)


def train(comm, how):
    buffer = deep_ep.Buffer(comm, 1 << 20)
    x = torch.full((3, 64), comm.rank + 1.0, dtype=torch.bfloat16, requires_grad=True)
    factor = comm.rank + 2.0
    if how == "an operation":
        BUFFERS.extend([] for _ in range(2 - len(BUFFERS)))
        BUFFERS[comm.rank][:] = [buffer]
        y = Combine.apply(sent(x, comm.rank) * factor, buffer, BUFFERS[comm.rank][-1])
    else:

        def layer(x):
            kept = []
            received = Dispatch.apply(x, buffer, kept)
            return Combine.apply(torch.sin(received) * factor, buffer, kept[0])

        y = checkpoint(layer, x, use_reentrant=how == "reentrant") if how != "functions" else layer(x)
    y.backward(torch.ones_like(y))
    if how == "an operation":
        BUFFERS[comm.rank].clear()
    buffer.destroy()
    return y.detach().float(), x.grad.float()


@pytest.mark.parametrize("how", ["functions", "an operation", "not reentrant", "reentrant"])
@pytest.mark.parametrize("model", MODELS)
def test_a_backward_pass_runs_in_spawn(model, how):
    for seed in range(3):
        for rank, (y, grad) in enumerate(nbep.spawn(train, 2, "emulator", args=(how,), seed=seed, memory_model=model)):
            x = torch.full((3, 64), rank + 1.0, dtype=torch.bfloat16)
            factors = torch.tensor([2.0, 2.0, 3.0]).bfloat16()[:, None]
            is_operation = how == "an operation"
            made = x if is_operation else torch.sin(x)
            assert torch.equal(y, (made * factors).float())
            assert torch.equal(grad, (factors * (1 if is_operation else torch.cos(x))).float().expand(3, 64))


def test_a_rank_that_does_not_come_to_the_backward_pass_is_named_with_the_line_of_those_that_do():
    def main(comm):
        buffer, kept = deep_ep.Buffer(comm, 1 << 20), []
        x = torch.ones(3, 64, dtype=torch.bfloat16, requires_grad=True)
        received = Dispatch.apply(x, buffer, kept)
        if comm.rank == 0:
            received.backward(torch.ones_like(received))
        else:
            comm.barrier()

    with pytest.raises((DeadlockError, RuntimeError), match=r"barrier[^$]*test_torch_ranks\.py:\d+ \(main\)"):
        nbep.spawn(main, 2, "emulator")


def test_gradients_are_on_or_off_for_each_rank_alone():
    def main(comm):
        seen = [torch.is_grad_enabled()]
        with torch.set_grad_enabled(comm.rank == 1):
            comm.barrier()
            seen.append(torch.is_grad_enabled())
        return [*seen, torch.is_grad_enabled()]

    for seed in range(4):
        assert nbep.spawn(main, 2, "emulator", seed=seed) == [[True, False, True], [True, True, True]]
    with torch.no_grad():
        assert nbep.spawn(main, 2, "emulator") == [[False, False, False], [False, True, False]]


def lost(comm, fault):
    buffer = deep_ep.Buffer(comm, 1 << 20)
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    layout, options = layout_of(buffer), {}
    if fault in ("late", "in time"):
        options["previous_event"] = deep_ep.Buffer.capture()
    if fault == "late":
        x = x + 0
    received, handle, event = dispatch(buffer, x, layout, async_finish=True, **options)
    if fault == "written":
        x.add_(1)
    if fault == "grown":
        received.mul_(2)
    views, like = received[1:].view(-1, 64), torch.empty_like(received)
    if fault != "unwaited":
        event.current_stream_wait()
        x += 1
    like.copy_(received)
    y, _, second = buffer.combine(like, handle, config=CONFIG, async_finish=True)
    if fault == "second":
        (y == 1).all()
    second.current_stream_wait()
    result = len(views), y[:, 0].tolist()
    buffer.destroy()
    return result


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("unwaited", Uninitialized, "copy_.* of recv_x, which kernel dispatch writes, before the event"),
        ("second", Uninitialized, "eq.* of .*, which kernel combine writes, before the event"),
        ("grown", Uninitialized, "mul_.* of recv_x"),
        ("written", DataRace, "add_.* writes x, which kernel dispatch reads, before the event"),
        ("late", DataRace, "x: .* behind the previous_event"),
    ],
)
def test_what_comes_before_its_event_is_found_at_its_line_with_every_seed(model, fault, error, words):
    for seed in range(3):
        with pytest.raises(error, match=words) as caught:
            nbep.spawn(lost, 2, "emulator", args=(fault,), seed=seed, memory_model=model)
        assert fault == "late" or re.search(r"test_torch_ranks\.py:\d+ \(lost\)", str(caught.value))


@pytest.mark.parametrize("fault", ["none", "in time"])
def test_who_waits_in_time_is_not_reported(fault):
    for model in MODELS:
        results = nbep.spawn(lost, 2, "emulator", args=(fault,), memory_model=model)
        assert results == [(3, [1.0] * 3), (1, [1.0] * 3)]


def test_what_an_operation_of_the_program_does_inside_is_looked_at():
    def main(comm):
        buffer = deep_ep.Buffer(comm, 1 << 20)
        BUFFERS.extend([] for _ in range(2 - len(BUFFERS)))
        BUFFERS[comm.rank][:] = [buffer]
        sent(torch.full((3, 64), 7.0, dtype=torch.bfloat16), comm.rank)

    with pytest.raises(Uninitialized, match=r"recv_x.* before the event") as caught:
        nbep.spawn(main, 2, "emulator")
    assert "(sent)" in str(caught.value)


def decode(comm, is_called):
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 128, 2, 4)
    buffer = deep_ep.Buffer(comm, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=2)
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    rows, _, handle, _, hook = buffer.low_latency_dispatch(x, IDX, 4, 4, use_fp8=False, return_recv_hook=True)
    x.zero_()
    if is_called:
        hook()
    made = rows * 2
    weights = torch.ones(3, 1)
    y, _, hook = buffer.low_latency_combine(made, IDX, weights, handle, return_recv_hook=True)
    made.zero_()
    hook()
    result = y[:, 0].tolist()
    buffer.destroy()
    return result


def test_what_a_hook_brings_is_not_there_before_it():
    for model in MODELS:
        assert nbep.spawn(decode, 2, "emulator", args=(True,), memory_model=model) == [[2.0] * 3] * 2
        with pytest.raises(Uninitialized, match=r"mul.*\(decode\) of .*, before the event or the hook"):
            nbep.spawn(decode, 2, "emulator", args=(False,), memory_model=model)


def test_the_modes_of_the_caller_are_those_of_the_ranks():
    class Counts(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.calls += function is torch.sin
            return function(*args, **(kwargs or {}))

    with Counts() as mode:
        nbep.spawn(lambda comm: torch.sin(torch.ones(1)), 2, "emulator")
    assert mode.calls == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("none", r"sum 256\.0"),
        ("unwaited", r"Uninitialized: .* at \S*torch_watch_main\.py:\d+ \(main\) of recv_x.* before the event"),
        ("written", r"DataRace: .* at \S*torch_watch_main\.py:\d+ \(main\) writes x.* before the event"),
    ],
)
def test_tensors_are_watched_under_torchrun(fault, words):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    program = Path(__file__).parent / "torch_watch_main.py"
    output = run_python(*launcher, program, fault, must_fail=fault != "none", NBEP_TARGET="emulator")
    assert re.search(words, output), output


def test_rows_that_zero_copy_has_taken_are_not_the_callers():
    def main(comm, use):
        buffer = deep_ep.Buffer(comm, 1 << 20, num_zero_copy_bytes=1 << 16)
        x, layout, received = torch.ones(3, 64, dtype=torch.bfloat16), layout_of(buffer), []
        for _ in range(3):
            received.append(dispatch(buffer, x, layout, zero_copy=True)[0])
        result = float(received[use].float().sum())
        buffer.destroy()
        return result

    for model in MODELS:
        assert nbep.spawn(main, 2, "emulator", args=(1,), memory_model=model) == [256.0, 128.0]
        with pytest.raises(
            UseAfterFree, match=r"\(main\) of what zero-copy dispatch 0 received after zero-copy dispatch 2"
        ):
            nbep.spawn(main, 2, "emulator", args=(0,), memory_model=model)


LATE = """
import nbep
def main(comm):
    import torch
    class Barrier(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2
        @staticmethod
        def backward(ctx, grad):
            comm.barrier()
            return grad
    Barrier.apply(torch.ones(1, requires_grad=True)).backward()
nbep.spawn(main, 2, "emulator")
"""


def test_torch_that_ranks_import_themselves_has_no_backward_pass_for_each():
    assert "import torch first: each rank has a thread of its own then" in run_python("-c", LATE, must_fail=True)
