"""`nbep.conformance`: a layer that is right passes, and what breaks it is found, with the run that replays it."""

import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from processes import run_python  # noqa: E402

from nbep.conformance import Failed, conforms, cpu_as_cuda, run  # noqa: E402
from nbep.conformance.run import TWO_ALIVE  # noqa: E402

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
CLIENT = """
import torch
from deep_ep import Buffer, Config
from small_client.settings import num_sms, Unused

lib = torch.library.Library("small_client", "DEF")
lib.define("doubled(Tensor x) -> Tensor")

@torch.library.impl(lib, "doubled", "CUDA")
def doubled(x):
    return x * 2

class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, idx, buffer, case):
        assert torch.ops.small_client.doubled(x.detach()).shape == x.shape
        config = Config(num_sms, 4, 8)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, case.num_experts)
        layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
        rows, local, local_weights, counts, handle, event = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, config=config, async_finish=True, **layout
        )
        event.current_stream_wait()
        ctx.saved, ctx.back = (rows, local, local_weights), (buffer, handle, config, case)
        made = case.experts(rows, case.of_local(local), local_weights)
        return buffer.combine(made, handle, config=config)[0]

    @staticmethod
    def backward(ctx, grad):
        (rows, local, local_weights), (buffer, handle, config, case) = ctx.saved, ctx.back
        grads = buffer.dispatch(grad.contiguous(), handle=handle, config=config)[0]
        of_experts = torch.where(local < 0, 0.0, 2.0 ** (case.of_local(local) % 3))
        grad_weights = (rows.float() * grads.float()).sum(1, keepdim=True) * of_experts
        made = case.experts(grads, case.of_local(local), local_weights)
        grad_x, grad_weights, _ = buffer.combine(made, handle, topk_weights=grad_weights, config=config)
        return grad_x, grad_weights, None, None, None
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("client")
    (root / "small_client").mkdir()
    (root / "small_client" / "moe.py").write_text(CLIENT)
    return root


@pytest.fixture(scope="module")
def layer(root):
    def small_layer(rank):
        client = rank.load(root, {"small_client.moe"}, {"small_client.settings.num_sms": 2})["small_client.moe"]
        buffer = rank.once("buffer", lambda: client.Buffer(rank.group, 1 << 20))
        x, weights = rank.leaf(rank.case.x), rank.leaf(rank.case.topk_weights)
        y = client.Layer.apply(x, weights, rank.case.topk_idx, buffer, rank.case)

        def backward():
            rank.same("combined", y, rank.case.combined)
            y.backward(rank.case.grad)
            rank.same("grad of x", x.grad, rank.case.grad_x)
            rank.same("grad of weights", weights.grad, rank.case.grad_weights)

        return backward

    return small_layer


def test_a_layer_that_is_right_conforms_with_two_and_four_ranks(layer):
    conforms(layer, seeds=4)
    assert run(layer, 4, num_experts=8) == []


@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        ("event.current_stream_wait()", "pass", "Uninitialized", r"moe\.py r\d_\d+:\d+ \(forward\)|test_conforms"),
        ("weights)\n        return buffer", "weights * 2)\n        return buffer", "wrong numbers", "combined: wrong"),
        ("return grad_x, grad_weights", "return grad_x, None", "wrong numbers", "grad of weights: None"),
        ("idx, case.num_experts", "idx, 2 * case.num_experts", "contract", "are no experts of rank"),
    ],
)  # fmt: skip
def test_a_fault_is_found_by_name_and_case(layer, old, new, kind, words):
    with pytest.raises(Failed) as caught:
        conforms(layer, seeds=0, edits=[("moe.py", old, new)])
    text = str(caught.value)
    assert text.startswith("small_layer does not conform:\n[")
    assert "case 'plain', sc, seed 0" in text
    assert kind in text
    assert re.search(words, text)


def test_a_layer_that_takes_the_handle_of_its_latest_call_fails_with_two_alive(layer):
    edits = [
        ("moe.py", "made = case.experts(rows", "Layer.back = ctx.back; made = case.experts(rows"),
        ("moe.py", "= ctx.saved, ctx.back", "= ctx.saved, Layer.back"),
    ]
    with pytest.raises(Failed, match=f"case '{TWO_ALIVE}', sc, seed 0"):
        conforms(layer, seeds=0, edits=edits)


def test_an_edit_that_is_not_there_and_a_case_that_is_none_are_refused(layer):
    with pytest.raises(Failed, match=r"'absent' is 0 times in moe\.py"):
        conforms(layer, edits=[("moe.py", "absent", "")])
    with pytest.raises(ValueError, match=r"without: got \['idel'\]; must be of plain"):
        conforms(layer, without=["idel"])


def elastic(do_cpu_sync):
    def layer(rank):
        import deep_ep

        buffer = deep_ep.ElasticBuffer(rank.group, num_max_tokens_per_rank=8, hidden=128, num_topk=2)
        case = rank.case
        rows, idx, weights, *_ = buffer.dispatch(
            case.x, topk_idx=case.topk_idx, topk_weights=case.topk_weights, num_experts=4, do_cpu_sync=do_cpu_sync
        )
        made = case.experts(rows, torch.where(idx < 0, idx, idx + case.first_expert), weights)
        rank.same("sum", made.float().abs().sum() > 0, torch.tensor(len(rows) > 0))
        if not do_cpu_sync:  # whoever rests on -1 in rows that did not come counts too many
            sent = rank.group.allreduce(int((case.topk_idx // case.num_local_experts == 1 - rank.rank).sum()))
            own = int((case.topk_idx // case.num_local_experts == rank.rank).sum())
            of_other = sent - int((case.topk_idx // case.num_local_experts == 1 - rank.rank).sum())
            rank.same("choices", (idx >= 0).sum(), torch.tensor(own + of_other))
        buffer.destroy()

    return layer


def test_what_nbep_forgives_is_refused_as_deep_ep_would():
    assert {each.kind for each in run(elastic(True), kind="a rank has no tokens", strict=False)} <= {"wrong numbers"}
    assert run(elastic(False), strict=False) == []
    (found,) = run(elastic(True), kind="a rank has no tokens")
    assert "x has no tokens, with CPU sync" in found.text
    assert {found.kind for found in run(elastic(False))} == {"wrong numbers"}


def test_low_latency_after_the_normal_mode_needs_a_clean_buffer():
    def layer(rank, cleans=False):
        import deep_ep

        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 128, rank.size, 4)
        buffer = deep_ep.Buffer(rank.group, 1 << 20, size, low_latency_mode=True, num_qps_per_rank=2)
        x, idx = rank.case.x, rank.case.topk_idx
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        buffer.dispatch(x, config=deep_ep.Config(2, 4, 8), **layout)
        if cleans:
            buffer.clean_low_latency_buffer(8, 128, 4)
        buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)
        buffer.destroy()

    (found,) = run(layer)
    assert "low_latency_dispatch: called after the normal mode" in found.text
    assert run(lambda rank: layer(rank, cleans=True)) == []
    assert run(layer, strict=False) == []


MARKED = """
import pytest, torch

@pytest.fixture
def hidden():
    return 128

@pytest.mark.conforms(without=["idle"])
def test_right(rank, hidden):
    rank.same("rows", torch.zeros(hidden), torch.zeros(128))
    assert rank.case.kind != "idle"

@pytest.mark.conforms(ranks=4)
def test_wrong(rank):
    rank.same("ranks", torch.tensor(rank.size), torch.tensor(5))

def test_plain(rank):
    assert rank is None
"""


def test_a_marked_test_is_a_layer(pytester):
    pytester.makeconftest('pytest_plugins = ["nbep.conformance.plugin"]')
    pytester.makepyfile(MARKED)
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nconforms_seeds = '1'")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*test_wrong does not conform*", "*ranks: wrong in 1 of 1 elements*got 4; must be 5*"])


@pytest.mark.parametrize("module", ["torch.distributed.tensor", "torch._dynamo"])
def test_torch_can_be_imported_inside_of_cpu_as_cuda(tmp_path, module):
    script = tmp_path / "script.py"
    imports = "import torch.distributed.tensor, torch.distributed.fsdp\n" * (module == "torch._dynamo")
    body = f"from nbep.conformance import cpu_as_cuda\nwith cpu_as_cuda():\n    import {module}\nprint('is there')\n"
    script.write_text(imports + body)
    assert "is there" in run_python(str(script))


def test_an_operation_of_cuda_is_one_of_the_cpu():
    with cpu_as_cuda():
        for name, types in (("one", "cuda"), ("two", ["cuda"])):
            torch.library.define(f"nbep_cuda::{name}", "(Tensor x) -> Tensor")
            torch.library.impl(f"nbep_cuda::{name}", types, lambda x: x + 1)
    assert torch.ops.nbep_cuda.one(torch.ones(1)) == torch.ops.nbep_cuda.two(torch.ones(1)) == 2


def test_the_page_shows_what_its_test_says(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples" / "train_moe"), *sys.path])
    monkeypatch.delitem(sys.modules, "test_conforms", raising=False)
    from test_conforms import expert_parallel

    conforms(expert_parallel, seeds=1)
    with pytest.raises(Failed) as caught:
        conforms(expert_parallel, edits=[("expert_parallel.py", ", topk_weights=grad_recv_topk_weights", "")])
    assert f"```text\n{caught.value}\n```" in (ROOT / "docs" / "conformance.md").read_text()
