"""Faults of one line that are planted into the layers of `client_layers.py`: the kinds that reports of frameworks show.

A row: kind, layer, where, old, new; what finds it, and in which case of `sc`, if not the first. `old` is the first such
text behind `where`, which is once in the layer's file. What finds it is an error of nbep's or of the client's own,
"contract", or "wrong numbers": the comparison with loops.
"""

from pathlib import Path

import client_layers as layers

FILES = {
    "megatron": "megatron/core/transformer/moe/fused_a2a.py",
    "deepspeed": "deepspeed/module_inject/auto_ep_comm.py",
    "torchtitan": "torchtitan/distributed/deepep/deepep.py",
    "vllm_ht": "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ht.py",
    "vllm_ll": "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ll.py",
    "sglang_v2": "sglang/srt/layers/moe/token_dispatcher/deepep_v2.py",
    "sglang": "sglang/srt/layers/moe/token_dispatcher/deepep.py",
}
EVENT, HOOK, PREVIOUS, WRITTEN, OTHER, EXPAND, SIZES, WEIGHTS, NUMBERS, ROWS, RANKS = (
    "event wait dropped", "hook not called, or twice", "previous_event dropped, or taken before its input is made",
    "input written before its event", "handle, buffer or choices of another call", "do_expand forgotten or added",
    "num_experts, num_max_tokens, alignment", "weights twice, never, or their gradient lost",
    "-1, masks, local and global numbers", "rows short or permuted; dtype, stride, zero_copy",
    "one rank skips, or is idle; no clean between modes",
)  # fmt: skip
WAIT = "after_event.current_stream_wait()"
BACK_D, BACK_C = '"""Backward pass of fused dispatch."""', '"""Backward pass of fused combine."""'
FORW_D, FORW_C = '"""Forward pass of fused dispatch."""', '"""Forward pass of fused combine."""'
HT_COMBINE = "combined_x, _, event = self.buffer.combine("
LL_COMBINE = "_, _, recv_hook = self.buffer.low_latency_combine("
SG_NORMAL, SG_LL = "class _DeepEPDispatcherImplNormal", "class _DeepEPDispatcherImplLowLatency"
SG_DISPATCH, SG_COMBINE = "recv_topk_weights,\n            num_recv", "combined_x, _, event = buffer.combine("
SG_LL_DISPATCH, SG_LL_COMBINE = "buffer.low_latency_dispatch(\n", "= buffer.low_latency_combine("
V2_DISPATCH = "handle, event = buffer.dispatch("
CAPTURE = "previous_event = Buffer.capture() if self.async_finish else None\n"

FAULTS = [
    (EVENT, "megatron", FORW_D, "after_event_overlap.current_stream_wait()", "pass", "Uninitialized"),
    (EVENT, "megatron", BACK_D, WAIT, "pass", "Uninitialized"),
    (EVENT, "megatron", FORW_C, WAIT, "pass", "Uninitialized"),
    (EVENT, "megatron", BACK_C, WAIT, "pass", "Uninitialized"),
    (EVENT, "torchtitan", "def sync_combine", "_pending_combine_event.current_stream_wait()", "pass", "Uninitialized"),
    (EVENT, "torchtitan_expanded", "def sync_combine", "_pending_combine_event.current_stream_wait()", "pass", "Uninitialized"),
    (EVENT, "deepspeed", "combined, _, _ =", "num_sms=", "async_with_compute_stream=True, num_sms=", "Uninitialized"),
    (EVENT, "deepspeed", "def dispatch_with_handle", "num_sms=", "async_with_compute_stream=True, num_sms=", "Uninitialized"),
    (EVENT, "vllm_ht", "def _receiver(\n        self", "event.current_stream_wait()", "pass", "Uninitialized"),
    (EVENT, "vllm_ht", "def _receiver():", "event.current_stream_wait()", "pass", "Uninitialized"),
    (EVENT, "sglang_prefill", "def dispatch_b(self, hidden", "event.current_stream_wait()", "None", "Uninitialized"),
    (EVENT, "sglang_prefill", "def combine_b(self, output", "event.current_stream_wait()", "None", "Uninitialized"),
    (EVENT, "sglang_decode", "def combine_b(self, hidden", "event.current_stream_wait()", "None", "Uninitialized"),
    (HOOK, "vllm_ll", "quant_config,\n        )\n        hook()", "hook()", "pass", "Uninitialized"),
    (HOOK, "vllm_ll", "quant_config,\n        )\n        hook()", "hook()", "hook(), hook()", "ValueError"),
    (HOOK, "sglang_decode", SG_LL, "hook() if", "None if", "Uninitialized"),
    (HOOK, "sglang_decode", "def combine_b(self, hidden", "hook() if", "None if", "Uninitialized"),
    (HOOK, "sglang_decode", "def combine_b(self, hidden", "hook() if", "(hook(), hook()) if", "ValueError"),
    (PREVIOUS, "megatron", BACK_D, "grad_output.contiguous()", "grad_output.clone()", "DataRace"),
    (PREVIOUS, "megatron", BACK_D, "grad_token_probs.float()", "grad_token_probs.double().float()", "DataRace"),
    (PREVIOUS, "megatron", BACK_C, "grad_output.contiguous()", "grad_output.clone()", "DataRace"),
    (PREVIOUS, "megatron", FORW_D, "previous_event=event,", "previous_event=None,", "ValueError"),
    (PREVIOUS, "sglang_prefill", SG_NORMAL, CAPTURE, CAPTURE + "        topk_ids = topk_ids.clone()\n", "DataRace"),
    (PREVIOUS, "sglang_prefill", "output = hidden_states", CAPTURE, CAPTURE + "        output = output + 0\n", "DataRace"),
    (WRITTEN, "megatron", FORW_D, "# Make sure", "x.detach().zero_()  # Make sure", "DataRace"),
    (WRITTEN, "vllm_ht", HT_COMBINE, "dbo_switch_to_compute()", "fused_expert_output.zero_()", "DataRace"),
    (OTHER, "megatron", FORW_D, "topk_idx=token_indices", "topk_idx=token_indices.flip(0)", "DataRace"),
    (OTHER, "megatron", FORW_D, "is_token_in_rank=is_token_in_rank", "is_token_in_rank=~is_token_in_rank", "Uninitialized"),
    (OTHER, "megatron", "global _buffer", "_buffer is None", "True", "ValueError"),
    (OTHER, "megatron", BACK_D, "handle = ctx.handle", "handle = FusedDispatch.__dict__.get('last', ctx.handle); FusedDispatch.last = ctx.handle", "ValueError", "two alive"),
    (OTHER, "deepspeed", "grad_rows =", "ctx.handle", "ctx.exchange.last_handle", "wrong numbers", "two alive"),
    (OTHER, "deepspeed", "grad_received.contiguous(),", "ctx.handle", "ctx.exchange.last_handle", "wrong numbers", "two alive"),
    (OTHER, "deepspeed", "def dispatch(self, tokens", "topk_idx.to(self.deep_ep.topk_idx_t)", "topk_idx.flip(0).to(self.deep_ep.topk_idx_t)", "wrong numbers"),
    (OTHER, "torchtitan", "-> tuple[torch.Tensor, torch.Tensor, DispatchState]", "selected_experts_indices.contiguous()", "selected_experts_indices.flip(0)", "wrong numbers"),
    (OTHER, "vllm_ht", "handle = self.handles[a2a_idx]", "a2a_idx", "1 - a2a_idx", "AssertionError"),
    (OTHER, "vllm_ht", "self.buffer.get_dispatch_layout(", "topk_idx=rank_topk_ids", "topk_idx=rank_topk_ids.flip(0)", "ValueError"),
    (OTHER, "vllm_ll", "handle = self.handles[a2a_idx]", "a2a_idx", "1 - a2a_idx", "AssertionError"),
    (OTHER, "vllm_ll", LL_COMBINE, "combine_topk_ids", "combine_topk_ids.flip(0)", "ValueError"),
    (OTHER, "sglang_decode", SG_LL_COMBINE, "topk_idx=topk_ids", "topk_idx=topk_ids.flip(0)", "ValueError"),
    (OTHER, "sglang_v2", V2_DISPATCH, "topk_idx=topk_ids", "topk_idx=topk_ids.flip(0)", "wrong numbers"),
    (EXPAND, "deepspeed", "def dispatch_with_handle", "do_expand=handle.do_expand,", "", "wrong numbers"),
    (EXPAND, "deepspeed", "def dispatch(self, tokens", "do_expand=True", "do_expand=False", "contract"),
    (EXPAND, "torchtitan", "def _dispatch_op_impl", "do_expand=cudagraphable", "do_expand=True", "TypeError"),
    (EXPAND, "torchtitan_expanded", "def _dispatch_op_impl", "do_expand=cudagraphable", "do_expand=False", "wrong numbers"),
    (EXPAND, "sglang_v2", V2_DISPATCH, "do_expand=use_expand_layout", "do_expand=True", "TypeError"),
    (EXPAND, "sglang_v2_expanded", V2_DISPATCH, "do_expand=use_expand_layout", "do_expand=False", "ValueError"),
    (SIZES, "megatron", "buffer.get_dispatch_layout(", "num_experts", "num_experts * 2", "contract"),
    (SIZES, "megatron", FORW_D, "torch.tensor(num_recv_tokens_per_expert_list)", "torch.tensor(num_recv_tokens_per_expert_list) + 1", "wrong numbers"),
    (SIZES, "deepspeed", "def dispatch(self, tokens", "num_experts=self.num_experts", "num_experts=self.num_experts * 2", "contract"),
    (SIZES, "torchtitan", "def _dispatch_op_impl", "num_experts=num_experts", "num_experts=num_experts * 2", "contract"),
    (SIZES, "torchtitan", "def _dispatch_op_impl", "num_max_tokens_per_rank=num_tokens_per_rank", "num_max_tokens_per_rank=max(1, len(x))", "ValueError"),
    (SIZES, "vllm_ht", "self.buffer.get_dispatch_layout(", "num_experts=num_experts", "num_experts=num_experts * 2", "wrong numbers"),
    (SIZES, "vllm_ll", ") = self.buffer.low_latency_dispatch(", "num_experts", "num_experts * 2", "ValueError"),
    (SIZES, "vllm_ll", ") = self.buffer.low_latency_dispatch(", "self.max_tokens_per_rank", "a1.size(0)", "ValueError"),
    (SIZES, "sglang_prefill", SG_NORMAL, "expert_alignment=128", "expert_alignment=64", "wrong numbers"),
    (SIZES, "sglang_prefill", ") = buffer.get_dispatch_layout(", "self.num_experts", "self.num_experts * 2", "contract"),
    (SIZES, "sglang_decode", SG_LL_DISPATCH, "self.num_experts", "self.num_experts * 2", "ValueError"),
    (SIZES, "sglang_decode", SG_LL_DISPATCH, "self.num_max_dispatch_tokens_per_rank", "len(hidden_states)", "ValueError"),
    (SIZES, "sglang_v2", V2_DISPATCH, "num_experts=self.num_experts", "num_experts=self.num_experts * 2", "contract"),
    (SIZES, "sglang_v2", "# This collective argument", "self.num_max_dispatch_tokens_per_rank", "hidden_states.shape[0]", "ValueError"),
    (SIZES, "sglang_v2_expanded", V2_DISPATCH, "expert_alignment=_EXPERT_ALIGNMENT", "expert_alignment=8", "wrong numbers"),
    (SIZES, "sglang_v2_decode", V2_DISPATCH, "expert_alignment=_EXPERT_ALIGNMENT", "expert_alignment=8", "wrong numbers"),
    (WEIGHTS, "megatron", BACK_D, "topk_weights=grad_token_probs.float()", "topk_weights=None", "wrong numbers"),
    (WEIGHTS, "megatron", BACK_D, "return grad_x, None, grad_token_probs", "return grad_x, None, None", "wrong numbers"),
    (WEIGHTS, "deepspeed", "def combine_with_weight_grad", "topk_weights=weight_grads", "topk_weights=None", "wrong numbers"),
    (WEIGHTS, "deepspeed", "def dispatch(self, tokens", "topk_weights.float()", "torch.ones_like(topk_weights.float())", "wrong numbers"),
    (WEIGHTS, "torchtitan", "if state.permuted_scores is not None", "state.permuted_scores is not None", "False", "wrong numbers"),
    (WEIGHTS, "torchtitan", "if state.permuted_scores is not None", "hidden_states * state", "hidden_states * state.permuted_scores.reshape(-1, 1).bfloat16() * state", "wrong numbers"),
    (WEIGHTS, "torchtitan_expanded", "if state.recv_scores is not None", "state.recv_scores is not None", "False", "wrong numbers"),
    (WEIGHTS, "vllm_ll", "combine_topk_weights = topk_weights", "= topk_weights", "= torch.ones_like(topk_weights)", "wrong numbers"),
    (WEIGHTS, "sglang_decode", SG_LL_COMBINE, "topk_weights=topk_weights", "topk_weights=topk_weights ** 2", "wrong numbers"),
    (NUMBERS, "vllm_ht", "expert_topk_ids == -1,", "expert_topk_ids + self.rank_expert_offset", "expert_topk_ids", "wrong numbers"),
    (NUMBERS, "vllm_ht", "expert_topk_ids == -1,", "expert_topk_ids == -1", "expert_topk_ids == 0", "wrong numbers"),
    (NUMBERS, "torchtitan", "mask = dispatched_indices != -1", "!= -1", "> 0", "contract"),
    (NUMBERS, "torchtitan", "# Mask out zero-score", "top_scores == 0", "top_scores < 1", "wrong numbers"),
    (NUMBERS, "torchtitan", "sort_order =", "stable=True", "descending=True", "wrong numbers"),
    (NUMBERS, "torchtitan_expanded", "psum = handle", "torch.diff(psum, prepend=psum.new_zeros(1))", "psum", "contract", "a rank receives nothing"),
    (NUMBERS, "sglang_prefill", SG_NORMAL, "topk_ids.to(torch.int64)", "topk_ids.to(torch.int64).clamp(min=0)", "wrong numbers", "all to one expert"),
    (NUMBERS, "sglang_decode", SG_LL, "topk_ids.to(torch.int64)", "topk_ids.to(torch.int64).clamp(min=0)", "wrong numbers", "all to one expert"),
    (ROWS, "megatron", FORW_C, "            x,", "            x[:-1],", "ValueError"),
    (ROWS, "megatron", FORW_C, "            x,", "            x.float(),", "ValueError"),
    (ROWS, "megatron", FORW_C, "            x,", "            x.flip(0),", "DataRace"),
    (ROWS, "megatron", FORW_D, "            x,", "            x.t().contiguous().t(),", "ValueError"),
    (ROWS, "deepspeed", "combined, _, _ =", "combine(rows", "combine(rows.flip(0)", "wrong numbers"),
    (ROWS, "deepspeed", "combined, _, _ =", "combine(rows", "combine(rows[:-1]", "ValueError"),
    (ROWS, "torchtitan", "output_hidden_states.scatter_add_(", "permuted_indices.unsqueeze(1)", "permuted_indices.flip(0).unsqueeze(1)", "wrong numbers"),
    (ROWS, "vllm_ht", HT_COMBINE, "x=fused_expert_output", "x=fused_expert_output[:-1]", "ValueError"),
    (ROWS, "vllm_ht", "def _receiver():", "output.copy_(combined_x", "output.copy_(combined_x.flip(0)", "wrong numbers"),
    (ROWS, "vllm_ll", LL_COMBINE, "fused_expert_output", "fused_expert_output.float()", "ValueError"),
    (ROWS, "vllm_ll", LL_COMBINE, "zero_copy=False", "zero_copy=True", "ValueError"),
    (ROWS, "vllm_ll", LL_COMBINE, "out=output", "out=torch.empty_like(output)", "wrong numbers"),
    (ROWS, "sglang_decode", SG_LL_COMBINE, "x=hidden_states", "x=hidden_states.flip(1)", "wrong numbers"),
    (RANKS, "megatron", FORW_C, "buffer = get", "if group.rank(): return x[:0], None\n        buffer = get", "RuntimeError"),
    (RANKS, "megatron", BACK_C, "previous_event = None", "previous_event = None\n        if not grad_output.numel(): return (None,) * 5", "ValueError", "a rank has no tokens"),
    (RANKS, "vllm_ht", "assert handle is not None", "\n", "\n        if not fused_expert_output.numel(): return lambda: None\n", "ValueError", "a rank receives nothing"),
    (RANKS, "torchtitan", "def _dispatch_backward", "if grad_recv_x is None", "if not grad_recv_x.numel()", "DeadlockError", "a rank receives nothing"),
    (RANKS, "sglang_both", "def set_dispatch_mode_as_low_latency", "cls.clean_buffer()", "pass", "RuntimeError"),
    (RANKS, "sglang_v2", "# CPU-synced dispatch needs", "hidden_states.shape[0] == 0", "False", "RuntimeError", "a rank has no tokens"),
]  # fmt: skip


def edit(layer: str, where: str, old: str, new: str) -> tuple[str, str, str]:
    """As `conforms` takes it."""
    file = FILES[next(name for name in FILES if layer.startswith(name))]
    text = (Path(layers.SOURCES) / file).read_text()
    assert text.count(where) == 1, f"{file}: {where!r} is there {text.count(where)} times"
    begin = text.index(where)
    at = text.index(old, begin)
    end = max(at + len(old), begin + len(where))
    return Path(file).name, text[begin:end], text[begin:at] + new + text[at + len(old) : end]
