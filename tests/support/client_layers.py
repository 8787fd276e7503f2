"""Ten layers of frameworks as `nbep.conformance` takes them. Their sources: the folder of NBEP_TEST_CLIENTS, which

    pip install --no-deps --target FOLDER megatron-core torchtitan deepspeed vllm sglang

fills; .ci/nightly says which versions the table of faults is of. Only the files that call deep_ep are run.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import torch

from nbep.conformance.cases import HIDDEN, MAX_TOKENS, NUM_EXPERTS, NUM_TOPK

SOURCES = os.environ.get("NBEP_TEST_CLIENTS", "")


class Numbers:
    """Environment variables of SGLang: `name.get()` is a number, 0 where none is given; of a list its only value."""

    def __init__(self, **values):
        self._values = values

    def __getattr__(self, name):
        value = self._values.get(name, 0)
        return SimpleNamespace(get=lambda: value[0] if isinstance(value, list) else value)


def compare(rank, y, x, weights):
    """Forward and backward."""
    case = rank.case
    rank.same("combined", y, case.combined)
    y.backward(case.grad)
    rank.same("grad of x", x.grad, case.grad_x)
    rank.same("grad of weights", weights.grad, case.grad_weights)


def megatron(rank, name="megatron.core.transformer.moe.fused_a2a"):
    given = {"megatron.core.utils.internal_api": lambda function: function}
    client, case = rank.load(SOURCES, {name}, given)[name], rank.case
    client.set_deepep_num_sms(2)
    x, weights = rank.leaf(case.x), rank.leaf(case.topk_weights)
    rows, idx, recv_weights, counts, handle = client.fused_dispatch(
        x, case.topk_idx, weights, NUM_EXPERTS, rank.group, True, True
    )
    rank.same("counts", counts.sum(), (idx >= 0).sum())
    y, _ = client.fused_combine(case.experts(rows, case.of_local(idx), recv_weights), rank.group, handle, True, True)
    return lambda: compare(rank, y, x, weights)


def deepspeed(rank, name="deepspeed.module_inject.auto_ep_comm"):
    client, case = rank.load(SOURCES, {name})[name], rank.case
    exchange = rank.once(
        "exchange",
        lambda: client.shared_exchange(0, rank.group, NUM_EXPERTS, NUM_TOPK, HIDDEN, MAX_TOKENS, num_sms=2),
    )
    x, weights = rank.leaf(case.x), rank.leaf(case.topk_weights)
    rows, recv_weights, _ = client.deepep_dispatch(exchange, x, case.topk_idx, weights)
    handle = exchange.last_handle
    ends = handle.psum_num_recv_tokens_per_expert
    made = case.grouped_experts(rows, torch.diff(ends, prepend=ends.new_zeros(1)), recv_weights)
    y = client.deepep_combine(exchange, made, handle)
    return lambda: compare(rank, y, x, weights)


def torchtitan(rank, expands=False, name="torchtitan.distributed.deepep.deepep"):
    client, case = rank.load(SOURCES, {name})[name], rank.case
    client.get_buffer(rank.group, hidden=HIDDEN, num_max_tokens_per_rank=MAX_TOKENS, num_topk=NUM_TOPK)
    with torch.set_grad_enabled(not expands):
        x, weights = rank.leaf(case.x), rank.leaf(case.topk_weights)
        rows, counts, state = client.dispatch_tokens(
            x, case.topk_idx, weights, case.num_local_experts, NUM_EXPERTS,
            num_tokens_per_rank=MAX_TOKENS, cudagraphable=expands,
        )  # fmt: skip
        y = client.combine_tokens(case.grouped_experts(rows, counts), state)
        client.sync_combine()
    if expands:
        return lambda: rank.same("combined", y, case.combined)
    return lambda: compare(rank, y, x, weights)


def torchtitan_expanded(rank):
    return torchtitan(rank, expands=True)


VLLM = "vllm.model_executor.layers.fused_moe"
PLAIN = SimpleNamespace(apply=lambda fused_expert_output, **_: fused_expert_output)


def vllm(rank, mode):
    names = [f"{VLLM}.prepare_finalize.deepep_{mode}", f"{VLLM}.topk_weight_and_reduce"]
    given = {f"{VLLM}.utils.moe_kernel_quantize_input": lambda x, *_, **__: (x, None)}
    loaded = rank.load(SOURCES, {*names, "vllm.v1.worker.ubatching"}, given)
    quant = SimpleNamespace(
        is_block_quantized=False, quant_dtype=None, a1_scale=None, a2_scale=None, block_shape=None,
        per_act_token_quant=False, is_scale_swizzled=False,
    )  # fmt: skip
    return *(loaded[name] for name in names), quant


def vllm_ht(rank):
    import deep_ep

    client, _, quant = vllm(rank, "ht")
    case, routing = rank.case, (rank.case.topk_weights, rank.case.topk_idx)
    buffer = deep_ep.Buffer(group=rank.group, num_nvl_bytes=64 << 20, num_rdma_bytes=0)
    layer = client.DeepEPHTPrepareAndFinalize(buffer, rank.size, rank.size, case.first_expert)
    for finalize in (layer.finalize, layer.finalize_async):
        rows, _, _, idx, weights = layer.prepare(case.x, *routing, NUM_EXPERTS, None, False, quant, True)
        mine = (idx >= case.first_expert) & (idx < case.first_expert + case.num_local_experts)
        output = torch.empty_like(case.x)
        receiver = finalize(output, case.experts(rows, torch.where(mine, idx, -1), weights), *routing, False, PLAIN)
        if receiver is not None:
            receiver()
        rank.same("combined", output, case.combined)
    buffer.destroy()


def vllm_ll(rank):
    import deep_ep

    client, reduce, quant = vllm(rank, "ll")
    case, routing = rank.case, (rank.case.topk_weights, rank.case.topk_idx)
    client.DeepEPLLPrepareAndFinalize.SUPPORTED_HIDDEN_SIZES = [HIDDEN]
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, rank.size, NUM_EXPERTS)
    buffer = deep_ep.Buffer(
        rank.group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=case.num_local_experts
    )
    layer = client.DeepEPLLPrepareAndFinalize(buffer, MAX_TOKENS, rank.size)
    for is_async in (False, True):
        rows, *_ = layer.prepare(case.x, *routing, NUM_EXPERTS, None, False, quant)
        output = torch.empty_like(case.x)
        arguments = output, case.packed_experts(rows), *routing, False, reduce.TopKWeightAndReduceDelegate()
        if is_async:
            hook, receiver = layer.finalize_async(*arguments)
            hook()
            receiver()
        else:
            layer.finalize(*arguments)
        rank.same("combined", output, case.combined)
    buffer.destroy()


def sglang(rank, is_prefill, overlap):
    layers = "sglang.srt.layers"
    rank.once("modes", dict)["is_prefill"] = is_prefill
    name = f"{layers}.moe.token_dispatcher.deepep"
    gemm = SimpleNamespace(ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_BLACKWELL=False)
    resources = SimpleNamespace(buffers={})
    given = {
        f"{layers}.deep_gemm_wrapper": gemm,
        f"{layers}.dp_attention.get_is_extend_in_batch": lambda: rank.once("modes", dict).get("is_prefill"),
        "sglang.srt.runtime_context.get_resources": lambda: resources,
        "sglang.srt.environ.envs": Numbers(SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=MAX_TOKENS),
    }
    real = {name, f"{layers}.moe.utils", f"{layers}.moe.token_dispatcher.base"}
    client, case = rank.load(SOURCES, real, given)[name], rank.case
    client.get_deepep_output_dtype = lambda _: client.DispatcherOutputDtype.BF16
    client.get_deepep_config = lambda: ""
    layer = client.DeepEPDispatcher(
        rank.group, NUM_TOPK, num_experts=NUM_EXPERTS, num_local_experts=case.num_local_experts, hidden_size=HIDDEN,
        params_dtype=torch.bfloat16, async_finish=overlap, return_recv_hook=overlap,
    )  # fmt: skip
    out = layer.dispatch(case.x, SimpleNamespace(topk_weights=case.topk_weights, topk_ids=case.topk_idx.int()))
    if is_prefill:
        counts = out.num_recv_tokens_per_expert
        if any(count % 128 for count in counts):
            rank.wrong.append(f"counts {counts} are no multiples of 128, which DeepGEMM rests on")
        rows = case.experts(out.hidden_states, case.of_local(out.topk_ids), out.topk_weights)
        made = client.DeepEPNormalCombineInput(rows, out.topk_ids, out.topk_weights)
    else:
        made = case.packed_experts(out.hidden_states)
        made = client.DeepEPLLCombineInput(made, out.topk_ids, out.topk_weights)
    rank.same("combined", layer.combine(made), case.combined)
    return layer, client


def sglang_prefill(rank):
    sglang(rank, True, True)


def sglang_decode(rank):
    for overlap in (True, False):
        sglang(rank, False, overlap)


def sglang_both(rank):
    sglang(rank, True, False)
    sglang(rank, False, False)


def sglang_v2(rank, expands=False, is_prefill=True):
    layers = "sglang.srt.layers"
    dispatchers = f"{layers}.moe.token_dispatcher"
    name = f"{dispatchers}.deepep_v2"
    resources, moe = SimpleNamespace(buffers={}), SimpleNamespace(deepep_v2_mode="direct")
    given = {
        f"{layers}.deep_gemm_wrapper": SimpleNamespace(
            DEEPGEMM_NEED_TMA_ALIGNED_SCALES=True, DEEPGEMM_SCALE_UE8M0=False
        ),
        f"{layers}.dp_attention.get_is_extend_in_batch": lambda: is_prefill,
        "sglang.srt.environ.envs": Numbers(
            SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=MAX_TOKENS, SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=expands
        ),
        "sglang.srt.runtime_context.get_exec": lambda: SimpleNamespace(moe=moe),
        "sglang.srt.runtime_context.get_parallel": lambda: SimpleNamespace(attn_dp_size=rank.size),
        "sglang.srt.runtime_context.get_resources": lambda: resources,
    }
    client = rank.load(SOURCES, {name, f"{layers}.moe.utils", f"{dispatchers}.base"}, given)[name]
    case = rank.case
    layer = client.DeepEPv2Dispatcher(
        rank.group, NUM_TOPK, NUM_EXPERTS, case.num_local_experts, HIDDEN, torch.bfloat16, False
    )
    out = layer.dispatch(case.x, SimpleNamespace(topk_weights=case.topk_weights, topk_ids=case.topk_idx.int()))
    if out.is_expanded:
        ends, alignment = out.psum_num_recv_tokens_per_expert.tolist(), out.expert_alignment
        begins = [0, *(-(-end // alignment) * alignment for end in ends[:-1])]
        made = torch.full_like(out.hidden_states, torch.nan)  # rows that pad an expert are not read
        for expert, (begin, end) in enumerate(zip(begins, ends, strict=True), case.first_expert):
            factors = out.topk_weights[begin:end] * 2.0 ** (expert % 3)
            made[begin:end] = (out.hidden_states[begin:end].float() * factors[:, None]).bfloat16()
    else:
        made = case.experts(out.hidden_states, case.of_local(out.topk_ids), out.topk_weights)
    rank.same("combined", layer.combine(client.DeepEPv2CombineInput(made, out.topk_weights)), case.combined)


def sglang_v2_expanded(rank):
    sglang_v2(rank, expands=True)


def sglang_v2_decode(rank):
    sglang_v2(rank, expands=True, is_prefill=False)


LAYERS = {
    layer.__name__: layer
    for layer in (
        megatron, deepspeed, torchtitan, torchtitan_expanded, vllm_ht, vllm_ll, sglang_prefill, sglang_decode,
        sglang_both, sglang_v2, sglang_v2_expanded, sglang_v2_decode,
    )
}  # fmt: skip


IDLE = "a rank has no tokens", "idle"
WITHOUT = {
    "deepspeed": IDLE,  # its caller and torchtitan's send at least one token
    "torchtitan": IDLE,
    "vllm_ll": ["an expert twice"],  # low latency takes different experts
    "sglang_decode": ["an expert twice"],
    "sglang_both": ["an expert twice"],
}


def has_sources(name):
    return bool(SOURCES) and (Path(SOURCES) / name.partition("_")[0]).is_dir()
