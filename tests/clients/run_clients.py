"""Run the layers of DeepEP's clients on the emulator, as they are, with torch on the CPU. For who has their sources:

    torchrun --standalone --nproc-per-node 2 tests/clients/run_clients.py megatron PATH   # of a tree of Megatron-LM
    torchrun --standalone --nproc-per-node 2 tests/clients/run_clients.py vllm PATH       # the folder that has vllm/
    torchrun --standalone --nproc-per-node 2 tests/clients/run_clients.py sglang PATH     # the folder that has sglang/

and, of those that call ElasticBuffer, vllm_v2 and sglang_v2 with the same PATH, torchtitan and lightllm.

The experts multiply by powers of two, and all sums are exact: each result is compared bit by bit with that of plain
loops on one rank. Nothing of the clients but the files that call deep_ep is needed; see stand_ins.py.
"""

import argparse
import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from case import HIDDEN, MAX_TOKENS, NUM_EXPERTS, NUM_TOPK, Case, Numbers, same
from elastic_clients import ELASTIC_CLIENTS

from nbep.conformance.stand_ins import StandIns


def megatron(root: Path, group: Any, case: Case) -> list[str]:
    """megatron/core/transformer/moe/fused_a2a.py: dispatch and combine, forward and backward."""
    name = "megatron.core.transformer.moe.fused_a2a"
    StandIns(root, {name}, {"megatron.core.utils.internal_api": lambda function: function}).install()
    client = import_module(name)
    done = []
    for options in ((False, False), (True, False), (True, True)):  # async_finish, allocate_on_comm_stream
        x, weights = case.x.clone().requires_grad_(), case.topk_weights.clone().requires_grad_()
        recv_x, recv_idx, recv_weights, counts, handle = client.fused_dispatch(
            x, case.topk_idx, weights, NUM_EXPERTS, group, *options
        )
        assert counts.sum() == (recv_idx >= 0).sum()
        rows = case.experts(recv_x, case.of_local(recv_idx), recv_weights)
        combined, _ = client.fused_combine(rows, group, handle, *options)
        same("combined", combined, case.combined)
        combined.backward(case.grad)
        same("grad of x", x.grad, case.experts(case.grad, case.topk_idx, case.topk_weights))
        products = (case.x.float() * case.grad.float()).sum(1, keepdim=True)
        same("grad of weights", weights.grad, products * 2.0 ** (case.topk_idx % 3))
        done.append(f"fused_a2a, forward and backward, with async_finish, allocate_on_comm_stream = {options}")
    return done


def vllm(root: Path, group: Any, case: Case) -> list[str]:
    """deepep_ht.py and deepep_ll.py of vllm/model_executor/layers/fused_moe/prepare_finalize/."""
    import deep_ep

    layers = "vllm.model_executor.layers.fused_moe"
    names = [f"{layers}.prepare_finalize.deepep_{mode}" for mode in ("ht", "ll")]
    reduce = f"{layers}.topk_weight_and_reduce"
    given = {f"{layers}.utils.moe_kernel_quantize_input": lambda x, *_, **__: (x, None)}
    StandIns(root, {*names, reduce, "vllm.v1.worker.ubatching"}, given).install()
    high_throughput, low_latency = map(import_module, names)
    delegate = import_module(reduce).TopKWeightAndReduceDelegate()
    quant = SimpleNamespace(
        is_block_quantized=False, quant_dtype=None, a1_scale=None, a2_scale=None, block_shape=None,
        per_act_token_quant=False,
    )  # fmt: skip
    num_ranks, num_nvl_bytes = group.size(), 64 << 20
    common = {"group": group, "num_nvl_bytes": num_nvl_bytes, "explicitly_destroy": True}
    routing = case.topk_weights, case.topk_idx

    buffer = deep_ep.Buffer(num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1, **common)
    layer = high_throughput.DeepEPHTPrepareAndFinalize(buffer, num_ranks, num_ranks, case.first_expert)
    for finalize in (layer.finalize, layer.finalize_async):
        rows, _, _, idx, weights = layer.prepare(case.x, *routing, NUM_EXPERTS, None, False, quant, True)
        mine = (idx >= case.first_expert) & (idx < case.first_expert + case.num_local_experts)
        rows = case.experts(rows, torch.where(mine, idx, -1), weights)
        plain = SimpleNamespace(apply=lambda fused_expert_output, **_: fused_expert_output)
        output = torch.empty_like(case.x)
        receiver = finalize(output, rows, *routing, False, plain)
        if receiver is not None:
            receiver()
        same("high throughput", output, case.combined)
    buffer.destroy()

    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_ranks=num_ranks, num_experts=NUM_EXPERTS
    )
    buffer = deep_ep.Buffer(
        num_rdma_bytes=hint, low_latency_mode=True, num_qps_per_rank=case.num_local_experts,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, enable_shrink=False, **common,
    )  # fmt: skip
    layer = low_latency.DeepEPLLPrepareAndFinalize(buffer, MAX_TOKENS, num_ranks)
    for is_async in (False, True):
        rows, *_ = layer.prepare(case.x, *routing, NUM_EXPERTS, None, False, quant)
        output = torch.empty_like(case.x)
        arguments = output, case.packed_experts(rows), *routing, False, delegate
        if is_async:
            hook, receiver = layer.finalize_async(*arguments)
            hook()
            receiver()
        else:
            layer.finalize(*arguments)
        same("low latency", output, case.combined)
    buffer.destroy()
    return ["DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize"]


def sglang(root: Path, group: Any, case: Case) -> list[str]:
    """DeepEPDispatcher of sglang/srt/layers/moe/token_dispatcher/deepep.py: both modes, over one buffer."""
    layers = "sglang.srt.layers"
    name, utils = f"{layers}.moe.token_dispatcher.deepep", f"{layers}.moe.utils"
    is_extend = [True]
    resources = SimpleNamespace(buffers={})
    given = {
        f"{layers}.deep_gemm_wrapper": SimpleNamespace(ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_BLACKWELL=False),
        f"{layers}.dp_attention.get_is_extend_in_batch": lambda: is_extend[0],
        "sglang.srt.runtime_context.get_resources": lambda: resources,
        "sglang.srt.environ.envs": Numbers(SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=MAX_TOKENS),
    }
    StandIns(root, {name, utils, f"{layers}.moe.token_dispatcher.base"}, given).install()
    client = import_module(name)
    client.get_deepep_output_dtype = lambda _: client.DispatcherOutputDtype.BF16
    client.get_deepep_config = lambda: ""
    routed = SimpleNamespace(topk_weights=case.topk_weights, topk_ids=case.topk_idx.int())
    done = []
    for overlap in (False, True):
        layer = client.DeepEPDispatcher(
            group, NUM_TOPK, num_experts=NUM_EXPERTS, num_local_experts=case.num_local_experts, hidden_size=HIDDEN,
            params_dtype=torch.bfloat16, async_finish=overlap, return_recv_hook=overlap,
        )  # fmt: skip
        for is_extend[0] in (True, False):
            out = layer.dispatch(case.x, routed)
            if is_extend[0]:
                rows = case.experts(out.hidden_states, case.of_local(out.topk_ids), out.topk_weights)
                made = client.DeepEPNormalCombineInput(rows, out.topk_ids, out.topk_weights)
            else:
                rows = case.packed_experts(out.hidden_states)
                made = client.DeepEPLLCombineInput(rows, out.topk_ids, out.topk_weights)
            same(type(made).__name__, layer.combine(made), case.combined)
        done.append(f"DeepEPDispatcher in both modes with async_finish={overlap}, return_recv_hook={overlap}")
    return done


CLIENTS = {client.__name__: client for client in (megatron, vllm, sglang, *ELASTIC_CLIENTS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("path", type=Path, help="where the sources are")
    options = parser.parse_args()
    os.environ["NBEP_TARGET"] = "emulator"

    import nbep.deep_ep
    from nbep.conformance.cpu_as_cuda import cpu_as_cuda

    nbep.deep_ep.install()
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    case = Case(torch.distributed.get_rank(), torch.distributed.get_world_size())
    with cpu_as_cuda():
        for line in CLIENTS[options.client](options.path, group, case):
            print(f"rank {torch.distributed.get_rank()}: {line}: right", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
