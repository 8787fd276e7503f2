"""Clients of ElasticBuffer; see run_clients.py.

Kernels of theirs that are written in Triton run in its interpreter: `pip install triton`.
"""

import os
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from case import HIDDEN, MAX_TOKENS, NUM_EXPERTS, NUM_TOPK, Case, Numbers, same

from nbep.conformance.stand_ins import StandIns

BLOCK = 128  # values that have one scale
PLAIN = SimpleNamespace(apply=lambda fused_expert_output, **_: fused_expert_output)


def interpreted_triton() -> Any:
    os.environ["TRITON_INTERPRET"] = "1"
    return import_module("triton")


def quantized(x: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 and [num_tokens, num_scales] scales, each of `block` values, without any error.

    x is small integers, and the scales are powers of two that differ from block to block.
    """
    scales = 2.0 ** ((torch.arange(x.shape[0])[:, None] + torch.arange(x.shape[1] // block)) % 3 - 1)
    return (x.float() / scales.repeat_interleave(block, 1)).to(torch.float8_e4m3fn), scales


def as_exponents(scales: torch.Tensor) -> torch.Tensor:
    """UE8M0: a byte for each scale."""
    return (scales.log2() + 127).to(torch.uint8)


def restored(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype != torch.float32:
        scales = 2.0 ** (scales.contiguous().view(torch.uint8).float() - 127)
    return (values.float() * scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)).bfloat16()


def expanded_experts(
    case: Case, rows: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor, alignment: int
) -> torch.Tensor:
    """What this rank's experts make of rows in groups; rows of no token are not numbers."""
    made = torch.full_like(rows, torch.nan)
    begin = 0
    for expert, end in enumerate(ends.tolist(), case.first_expert):
        factors = weights[begin:end] * 2.0 ** (expert % 3)
        made[begin:end] = (rows[begin:end].float() * factors[:, None]).bfloat16()
        begin = -(-end // alignment) * alignment
    return made


def vllm_v2(root: Path, group: Any, case: Case) -> list[str]:
    """DeepEPV2All2AllManager, and DeepEPV2PrepareAndFinalize for prefill and for decode."""
    triton = interpreted_triton()
    layers, devices = "vllm.model_executor.layers.fused_moe", "vllm.distributed.device_communicators"
    name, reduce = f"{layers}.prepare_finalize.deepep_v2", f"{layers}.topk_weight_and_reduce"
    batch = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([5 + rank for rank in range(group.size())]))
    real = {name, reduce, f"{layers}.modular_kernel", "vllm.v1.worker.ubatching", "vllm.utils.math_utils"}
    real |= {f"{devices}.all2all", f"{devices}.base_device_communicator"}
    given = {
        "vllm._custom_ops.moe_sum": lambda rows, output: output.copy_(rows.sum(1)),
        "vllm.distributed.parallel_state.in_the_same_node_as": lambda *_, **__: [True],
        "vllm.forward_context.get_forward_context": lambda: SimpleNamespace(dp_metadata=batch),
        "vllm.triton_utils.triton": triton,
        "vllm.triton_utils.tl": triton.language,
        "vllm.utils.import_utils.has_deep_ep_v2": lambda: True,
        "vllm.utils.torch_utils.PIN_MEMORY": False,
        "vllm.utils.nccl.query_nccl_gin_type": lambda *_, **__: 1,
    }

    def quantize(x: torch.Tensor, _: Any, quant_dtype: Any = None, **__: Any) -> Any:
        if quant_dtype is None:
            return x, None
        values, scales = quantized(x, 32 if quant_dtype == "mxfp8" else BLOCK)
        return values, as_exponents(scales) if quant_dtype == "mxfp8" else scales

    given[f"{layers}.utils.moe_kernel_quantize_input"] = quantize
    for option in ("ALLOW_HYBRID_MODE", "PREFER_OVERLAP", "ALLOW_MULTIPLE_REDUCTION"):
        given[f"vllm.envs.VLLM_DEEPEP_V2_{option}"] = True
    StandIns(root, real, given).install()
    client = import_module(name)
    manager = import_module(f"{devices}.all2all").DeepEPV2All2AllManager(group)
    buffer = manager.get_handle(
        {
            "num_max_tokens_per_rank": MAX_TOKENS,
            "hidden": HIDDEN,
            "num_topk": NUM_TOPK,
            "use_fp8_dispatch": False,
            "num_experts": NUM_EXPERTS,
        }
    )
    assert manager.max_sms_used() == buffer.get_theoretical_num_sms(NUM_EXPERTS, NUM_TOPK)
    delegate = import_module(reduce).TopKWeightAndReduceDelegate()
    routing = case.topk_weights, case.topk_idx
    done = []
    for is_decode, kind in product((False, True), (None, "fp8", "mxfp8")):
        quant = SimpleNamespace(
            is_block_quantized=kind == "fp8", quant_dtype=kind, a1_scale=None, a1_gscale=None, block_shape=None,
            per_act_token_quant=False, is_scale_swizzled=False, mx_alignment=0,
        )  # fmt: skip
        layer = client.DeepEPV2PrepareAndFinalize(
            buffer, group.size(), group.size(), case.first_expert, NUM_EXPERTS, NUM_TOPK, use_cudagraph=is_decode
        )
        for finalize in (layer.finalize, layer.finalize_async):
            x, scales, meta, idx, weights = layer.prepare(case.x, *routing, NUM_EXPERTS, None, False, quant)
            rows = x if scales is None else restored(x, scales)
            assert idx.dtype == torch.int64
            assert (scales is None) == (kind is None)
            mine = (idx >= case.first_expert) & (idx < case.first_expert + case.num_local_experts)
            assert torch.equal(mine, idx >= 0), "experts of other ranks"
            if is_decode:
                made, reduced = case.experts(rows, idx, weights), PLAIN
                assert len(rows) == MAX_TOKENS * group.size()
            else:
                made, reduced = case.experts(rows, idx, torch.ones_like(weights)), delegate
                assert meta.expert_num_tokens.sum() == len(rows)
            output = torch.empty_like(case.x)
            receiver = finalize(output, made, weights, idx, False, reduced)
            if receiver is not None:
                receiver()
            same(f"{is_decode=} {kind=}", output, case.combined)
        form = "decode" if is_decode else "prefill"
        done.append(f"DeepEPV2PrepareAndFinalize, {form} in {kind or 'bf16'}, finalize and finalize_async")
    manager.destroy()
    return done


def sglang_v2(root: Path, group: Any, case: Case) -> list[str]:
    """DeepEPv2Dispatcher of sglang/srt/layers/moe/token_dispatcher/deepep_v2.py, in bf16 and in FP8."""
    layers = "sglang.srt.layers"
    dispatchers = f"{layers}.moe.token_dispatcher"
    name, real = f"{dispatchers}.deepep_v2", {f"{layers}.moe.utils", f"{dispatchers}.base"}
    is_extend, prefill_expands = [True], [False]
    resources, moe = SimpleNamespace(buffers={}), SimpleNamespace(deepep_v2_mode="direct")

    def quantize(x: torch.Tensor, block: int, column_major_scales: bool, scale_ue8m0: bool, **_: Any) -> Any:
        values, scales = quantized(x, block)
        if scale_ue8m0:
            scales = as_exponents(scales).view(torch.int32)
        return values, scales.T.contiguous().T if column_major_scales else scales

    gemm = SimpleNamespace(DEEPGEMM_NEED_TMA_ALIGNED_SCALES=True, DEEPGEMM_SCALE_UE8M0=False)
    given = {
        f"{layers}.deep_gemm_wrapper": gemm,
        f"{layers}.dp_attention.get_is_extend_in_batch": lambda: is_extend[0],
        "sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_group_quant_fp8": quantize,
        "sglang.srt.environ.envs": Numbers(
            SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=MAX_TOKENS,
            SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=prefill_expands,
        ),
        "sglang.srt.runtime_context.get_exec": lambda: SimpleNamespace(moe=moe),
        "sglang.srt.runtime_context.get_parallel": lambda: SimpleNamespace(attn_dp_size=group.size()),
        "sglang.srt.runtime_context.get_resources": lambda: resources,
    }
    StandIns(root, {name, *real}, given).install()
    client = import_module(name)
    done = []
    # bf16, FP8, and FP8 with scales that are exponents of two; in each prefill compact and expanded, and decode
    for use_fp8, gemm.DEEPGEMM_SCALE_UE8M0 in ((False, False), (True, False), (True, True)):
        for is_extend[0], expands in ((True, False), (True, True), (False, True)):
            prefill_expands[:] = [expands]
            layer = client.DeepEPv2Dispatcher(
                group, NUM_TOPK, NUM_EXPERTS, case.num_local_experts, HIDDEN, torch.bfloat16, use_fp8
            )
            for num_tokens in (len(case.x), 0 if case.first_expert else len(case.x)):  # once without any on some ranks
                weights, idx = case.topk_weights[:num_tokens], case.topk_idx[:num_tokens].int()
                out = layer.dispatch(case.x[:num_tokens], SimpleNamespace(topk_weights=weights, topk_ids=idx))
                assert out.is_expanded == expands
                assert (out.hidden_states_scale is None) != use_fp8
                rows = out.hidden_states
                if use_fp8:
                    rows = restored(rows, out.hidden_states_scale)
                if expands:
                    ends = out.psum_num_recv_tokens_per_expert
                    made = expanded_experts(case, rows, ends, out.topk_weights, out.expert_alignment)
                else:
                    made = case.experts(rows, case.of_local(out.topk_ids), out.topk_weights)
                combined = layer.combine(client.DeepEPv2CombineInput(made, out.topk_weights))
                same(f"{use_fp8=} {expands=} {is_extend=}", combined, case.combined[:num_tokens])
        form = "bf16" if not use_fp8 else "FP8 with UE8M0" if gemm.DEEPGEMM_SCALE_UE8M0 else "FP8"
        done.append(f"DeepEPv2Dispatcher in {form}, prefill and decode")
    return done


def torchtitan(root: Path, group: Any, case: Case) -> list[str]:
    """torchtitan/distributed/deepep/deepep.py: forward and backward, and the form of inference."""
    name = "torchtitan.distributed.deepep.deepep"
    StandIns(root, {name}, {}).install()
    client = import_module(name)
    shape = {"hidden": HIDDEN, "num_max_tokens_per_rank": MAX_TOKENS, "num_topk": NUM_TOPK}
    assert client.get_buffer(group, **shape) is client.get_buffer(group, **shape)
    case.grad[:, 16:] = 0  # the gradient of a score is a sum over a row that bf16 holds exactly
    sizes = case.num_local_experts, NUM_EXPERTS
    numbers = torch.arange(case.first_expert, case.first_expert + case.num_local_experts)
    done = []
    for expands in (False, True):
        with torch.set_grad_enabled(not expands):
            x, weights = (each.clone().requires_grad_() for each in (case.x, case.topk_weights))
            rows, counts, state = client.dispatch_tokens(
                x, case.topk_idx, weights, *sizes, num_tokens_per_rank=MAX_TOKENS, cudagraphable=expands
            )
            assert state.cudagraphable == expands
            assert counts.dtype == torch.int32
            factors = (2.0 ** (numbers % 3)).bfloat16().repeat_interleave(counts)
            made = rows[: len(factors)] * factors[:, None]
            if expands:
                made = torch.cat([made, torch.zeros_like(rows[len(factors) :])])
            assert len(made) == len(rows)
            combined = client.combine_tokens(made, state)
            client.sync_combine()
        same(f"{expands=}", combined, case.combined)
        if not expands:
            combined.backward(case.grad)
            same("grad of x", x.grad, case.experts(case.grad, case.topk_idx, case.topk_weights))
            products = (case.x.float() * case.grad.float()).sum(1, keepdim=True)
            same("grad of weights", weights.grad, products * 2.0 ** (case.topk_idx % 3))
        done.append(f"dispatch_tokens and combine_tokens, {'expanded' if expands else 'forward and backward'}")
    assert not client._handle_cache
    client._buffer.destroy()
    return done


def grouped_gemm(x: Any, weights: Any, out: torch.Tensor, experts: torch.Tensor) -> None:
    """DeepGEMM's for rows in groups: row i times the transposed matrix of expert experts[i]."""
    rows, (matrices, scales) = restored(*x).float(), weights
    for expert, (matrix, blocks) in enumerate(zip(matrices.float(), scales, strict=True)):
        is_here = experts == expert
        matrix = matrix * blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        out[is_here] = (rows[is_here] @ matrix.T).to(out.dtype)


def lightllm(root: Path, group: Any, case: Case) -> list[str]:
    """Prefill: fused_experts as one call, and the steps of FuseMoeDeepGEMM that overlap two halves of a batch.

    The experts are matrices: the identity, then a power of two. In the place of SwiGLU is the second half of a row.
    """
    interpreted_triton()
    kernels = "lightllm.common.basemodel.triton_kernel.fused_moe"
    moe = "lightllm.common.basemodel.layer_weights.meta_weights.fused_moe.impl.deepgemm_impl"
    operations = "lightllm.distributed.communication_op"
    real = {f"{kernels}.grouped_fused_moe_ep", f"{kernels}.deepep_expanded_layout_kernels", operations, moe}
    real.add("lightllm.utils.tensor_buffer_manager")
    variables, size = "lightllm.utils.envs_utils", group.size()
    given = {
        f"{kernels}.moe_silu_and_mul.silu_and_mul_fwd": lambda x, out: out.copy_(x[:, x.shape[1] // 2 :]),
        "lightllm.common.basemodel.triton_kernel.quantization.fp8act_quant_kernel.per_token_group_quant_fp8": (
            lambda x, block, **_: quantized(x, block)
        ),
        f"{variables}.get_env_start_args": lambda: SimpleNamespace(enable_ep_moe=True),
        f"{variables}.get_redundancy_expert_num": lambda: 0,
        f"{variables}.get_deepep_num_max_dispatch_tokens_per_rank_prefill": lambda: MAX_TOKENS,
        f"{variables}.get_deepep_num_max_dispatch_tokens_per_rank_decode": lambda: 128,  # its memory is a workspace
        "lightllm.utils.dist_utils.get_global_world_size": lambda: size,
        "lightllm.utils.device_utils.get_device_sm_count": lambda: 132,
    }
    gemm: Any = ModuleType("deep_gemm")
    gemm.m_grouped_fp8_gemm_nt_contiguous, gemm.set_num_sms = grouped_gemm, lambda _: None
    sys.modules["deep_gemm"] = gemm
    StandIns(root, real, given).install()
    manager = import_module(operations).dist_group_manager
    import_module("lightllm.distributed").dist_group_manager = manager
    manager.groups = [None]
    hidden, method = 256, "fp8w8a8-b128-deepgemm"
    manager.new_deepep_group(NUM_EXPERTS, hidden, {method}, NUM_TOPK)

    factors = 2.0 ** (torch.arange(case.first_expert, case.first_expert + case.num_local_experts) % 3)
    identity = torch.eye(hidden).to(torch.float8_e4m3fn).repeat(case.num_local_experts, 1, 1)
    ones = torch.ones(case.num_local_experts, hidden // BLOCK, hidden // BLOCK)
    w13 = SimpleNamespace(weight=identity.repeat(1, 2, 1), weight_scale=ones.repeat(1, 2, 1))
    w2 = SimpleNamespace(weight=identity, weight_scale=ones * factors[:, None, None])
    quant = SimpleNamespace(method_name=method, block_size=BLOCK)
    x, wanted = case.x[:, :hidden].contiguous(), case.combined[:, :hidden]
    client = import_module(f"{kernels}.grouped_fused_moe_ep")
    routing = {"topk_weights": case.topk_weights, "topk_idx": case.topk_idx, "num_experts": NUM_EXPERTS}
    for _ in range(2):
        combined = client.fused_experts(x, w13, w2, **routing, quant_method=quant, is_prefill=True)
        same("fused_experts", combined, wanted)

    layer = import_module(moe).FuseMoeDeepGEMM()
    layer.quant_method, layer.total_expert_num_contain_redundancy = quant, NUM_EXPERTS
    capture = import_module("deep_ep").ElasticBuffer.capture
    rows = client.quantize_fused_experts_input(x, w13, quant)
    recv_x, recv_idx, recv_weights, counts, handle, hook = layer.dispatch(
        rows, case.topk_idx, case.topk_weights, overlap_event=capture()
    )
    hook()
    of_handle = handle.num_unaligned_recv_tokens_per_expert, handle.recv_src_metadata
    made = layer.prefilled_group_gemm(counts, *of_handle, recv_x, recv_idx, recv_weights, w13, w2)
    combined, hook = layer.combine(made, handle, overlap_event=capture())
    hook()
    same("FuseMoeDeepGEMM", combined, wanted)
    manager.clear_deepep_buffer()
    return ["fused_experts in prefill", "FuseMoeDeepGEMM: dispatch, prefilled_group_gemm and combine, with events"]


ELASTIC_CLIENTS = (vllm_v2, sglang_v2, torchtitan, lightllm)
