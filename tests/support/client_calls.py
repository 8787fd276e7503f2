"""How programs that are written for DeepEP call it: facts about their sources, as data.

line    of the file, at the commit or in the release
callee  what is called, as deep_ep names it
given   arguments: names of DeepEP's parameters; those before / by position, those behind it by name
read    what the program takes of the result: for a tuple each of its parts, nested as it unpacks them; .name is an
        attribute that it asks for, .a.b are two, () that it calls it. A result that is not unpacked has its attributes
        alone
forks   arguments that it passes in some modes of its own, and that only forks of DeepEP have
"""

from typing import NamedTuple


class Call(NamedTuple):
    line: int
    callee: str
    given: str
    read: str = ""
    forks: str = ""


class Source(NamedTuple):
    client: str
    version: str
    file: str
    calls: tuple[Call, ...]


LAYOUT = "num_tokens_per_rank num_tokens_per_rdma_rank num_tokens_per_expert is_token_in_rank event"
RECEIVED = "recv_x recv_topk_idx recv_topk_weights num_recv_tokens_per_expert handle"
OF_LAYOUT = "num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert"
ASYNC = "previous_event async_finish allocate_on_comm_stream"
HINT = "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts"
TOPK = "topk_idx topk_weights"
WAIT = "event.current_stream_wait()"

MEGATRON = Source(
    "NVIDIA/Megatron-LM",
    "d98e8a64dd",
    "megatron/core/transformer/moe/fused_a2a.py",
    (
        Call(49, "Buffer.get_dispatch_config", "num_ranks /"),
        Call(50, "Buffer.get_combine_config", "num_ranks /"),
        Call(54, "Config.get_nvl_buffer_size_hint", "hidden_bytes num_ranks /"),
        Call(57, "Config.get_rdma_buffer_size_hint", "hidden_bytes num_ranks /"),
        Call(68, "Buffer", "group num_nvl_bytes num_rdma_bytes /", ".group .num_nvl_bytes .num_rdma_bytes"),
        Call(89, "EventHandle", "/"),
        Call(89, "EventOverlap", "event /"),
        Call(98, "Buffer.get_dispatch_layout", f"topk_idx num_experts / {ASYNC}", LAYOUT),
        Call(116, "Buffer.dispatch", f"x / {TOPK} {OF_LAYOUT} {ASYNC}", f"{RECEIVED} {WAIT}"),
        Call(152, "Buffer.combine", f"x handle / topk_weights {ASYNC}", f"grad_x grad_weights {WAIT}"),
        Call(176, "Buffer.combine", f"x / handle {ASYNC}", f"combined_x weights {WAIT}"),
        Call(200, "Buffer.dispatch", f"x / handle {ASYNC}", f"{RECEIVED} {WAIT}"),
        Call(263, "Buffer.set_num_sms", "new_num_sms /"),
    ),
)

LMDEPLOY = Source(
    "InternLM/lmdeploy",
    "1263d5cd8",
    "lmdeploy/pytorch/backends/cuda/token_dispatcher.py",
    (
        Call(11, "Buffer.set_num_sms", "new_num_sms /"),
        Call(129, "Buffer.destroy", "/"),
        Call(171, "Buffer.clean_low_latency_buffer", "num_max_dispatch_tokens_per_rank hidden num_experts /"),
        Call(199, "Buffer.get_low_latency_rdma_size_hint", f"{HINT} /"),
        Call(
            204,
            "Buffer",
            "group / num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank allow_mnnvl explicitly_destroy",
            ".group_size .set_num_sms()",
        ),
        Call(223, "Config.get_nvl_buffer_size_hint", "hidden_bytes num_ranks /"),
        Call(224, "Config.get_rdma_buffer_size_hint", "hidden_bytes num_ranks /"),
        Call(
            229,
            "Buffer",
            "group num_nvl_bytes num_rdma_bytes / explicitly_destroy",
            ".group .num_nvl_bytes .num_rdma_bytes",
        ),
        Call(
            251,
            "Buffer",
            "group / num_rdma_bytes low_latency_mode num_qps_per_rank explicitly_destroy",
            ".group .low_latency_mode .num_rdma_bytes .num_sms",
        ),
        Call(368, "Buffer.get_dispatch_layout", f"topk_idx num_experts / {ASYNC}", LAYOUT),
        Call(383, "Buffer.dispatch", f"x / {TOPK} {OF_LAYOUT} {ASYNC}", f"{RECEIVED} event"),
        Call(418, "Buffer.get_dispatch_layout", f"topk_idx / num_experts {ASYNC}", LAYOUT),
        Call(433, "Buffer.dispatch", f"x / {TOPK} {OF_LAYOUT} {ASYNC}", f"{RECEIVED} event"),
        Call(463, "Buffer.combine", f"x handle / {ASYNC}", "combined_x weights event"),
        Call(473, "Buffer.combine", f"x handle / {ASYNC}", "combined_x weights event"),
        Call(601, "Buffer.get_dispatch_layout", f"topk_idx num_experts / {ASYNC}", LAYOUT),
        Call(609, "Buffer.dispatch", f"x / {TOPK} {OF_LAYOUT} {ASYNC} expert_alignment", f"{RECEIVED} event"),
        Call(633, "Buffer.get_dispatch_layout", f"topk_idx / num_experts {ASYNC}", LAYOUT),
        Call(641, "Buffer.dispatch", f"x / {TOPK} {OF_LAYOUT} {ASYNC} expert_alignment", f"{RECEIVED} event"),
        Call(663, "Buffer.combine", f"x handle / {ASYNC}", "combined_x weights event"),
        Call(673, "Buffer.combine", f"x handle / {ASYNC}", "combined_x weights event"),
        Call(
            732,
            "Buffer.low_latency_dispatch",
            "x topk_idx num_max_dispatch_tokens_per_rank num_experts / use_fp8 async_finish return_recv_hook",
            f"(recv_x scales) recv_count handle {WAIT} hook()",
        ),
        Call(
            760,
            "Buffer.low_latency_dispatch",
            "x topk_idx num_max_dispatch_tokens_per_rank / num_experts use_fp8 async_finish return_recv_hook",
            "(recv_x scales) recv_count handle event hook",
        ),
        Call(
            778,
            "Buffer.low_latency_combine",
            "x topk_idx topk_weights handle / async_finish return_recv_hook",
            f"combined_x {WAIT} hook()",
        ),
        Call(
            799,
            "Buffer.low_latency_combine",
            "x topk_idx topk_weights handle / async_finish return_recv_hook",
            "combined_x event hook",
        ),
    ),
)

RTP_LLM = (
    Source(
        "alibaba/rtp-llm",
        "4b8d39cd5",
        "rtp_llm/models_py/distributed/deepep_wrapper.py",
        (
            Call(
                556,
                "Buffer",
                "/ group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
                "allow_nvlink_for_low_latency_mode allow_mnnvl use_fabric",
            ),
            Call(561, "Buffer.get_low_latency_rdma_size_hint", f"{HINT} /"),
            Call(
                597,
                "Buffer",
                "/ group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
                "allow_nvlink_for_low_latency_mode allow_mnnvl",
            ),
        ),
    ),
    Source(
        "alibaba/rtp-llm",
        "4b8d39cd5",
        "rtp_llm/models_py/modules/factory/fused_moe/impl/cuda/routers/deepep_low_latency_router.py",
        (
            Call(
                152,
                "Buffer.low_latency_dispatch",
                "/ x topk_idx num_max_dispatch_tokens_per_rank num_experts use_fp8 async_finish return_recv_hook "
                "round_scale use_ue8m0",
                "(recv_x scales) recv_count handle event hook",
                "pertoken_quant",
            ),
            Call(
                245,
                "Buffer.low_latency_combine",
                f"/ x {TOPK} handle zero_copy async_finish return_recv_hook",
                "combined_x event hook",
                "opt_level",
            ),
        ),
    ),
    Source(
        "alibaba/rtp-llm",
        "4b8d39cd5",
        "rtp_llm/models_py/modules/factory/fused_moe/impl/cuda/routers/deepep_normal_router.py",
        (
            Call(133, "Buffer.get_dispatch_layout", "topk_idx num_experts /", LAYOUT),
            Call(145, "Buffer.dispatch", f"x handle {OF_LAYOUT} {TOPK} / expert_alignment", f"{RECEIVED} event"),
            Call(204, "Buffer.combine", "x handle /", "combined_x weights event"),
        ),
    ),
)

OF_VLLM = "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank explicitly_destroy"
VLLM = (
    Source(
        "vllm-project/vllm",
        "0.33.0",
        "vllm/distributed/device_communicators/all2all.py",
        (
            Call(298, "Buffer", f"/ {OF_VLLM}", ".destroy()"),
            Call(311, "Buffer.set_num_sms", "new_num_sms /"),
            Call(347, "Buffer.get_low_latency_rdma_size_hint", f"/ {HINT}"),
            Call(
                378,
                "Buffer",
                f"/ {OF_VLLM} allow_nvlink_for_low_latency_mode allow_mnnvl enable_shrink",
                ".destroy()",
            ),
            Call(395, "Buffer.low_latency_query_mask_buffer", "mask_status /"),
            Call(409, "Buffer.get_local_buffer_tensor", "/ dtype use_rdma_buffer"),
            Call(411, "Buffer.low_latency_clean_mask_buffer", "/"),
        ),
    ),
    Source(
        "vllm-project/vllm",
        "0.33.0",
        "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ht.py",
        (
            Call(115, "Buffer.get_dispatch_config", "num_ranks /"),
            Call(120, "Buffer.get_combine_config", "num_ranks /"),
            Call(139, "Buffer.capture", "/"),
            Call(155, "Buffer.get_dispatch_layout", f"/ topk_idx num_experts {ASYNC}", LAYOUT),
            Call(
                174,
                "Buffer.dispatch",
                f"/ x handle {OF_LAYOUT} {TOPK} expert_alignment config {ASYNC}",
                f"{RECEIVED} event.event",
            ),
            Call(227, "EventOverlap.current_stream_wait", "/"),
            Call(
                402,
                "Buffer.combine",
                f"/ x handle topk_weights config {ASYNC}",
                "combined_x weights event.event",
            ),
        ),
    ),
    Source(
        "vllm-project/vllm",
        "0.33.0",
        "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ll.py",
        (
            Call(
                294,
                "Buffer.low_latency_dispatch",
                "x topk_idx num_max_dispatch_tokens_per_rank num_experts / use_fp8 round_scale use_ue8m0 async_finish "
                "return_recv_hook",
                "(recv_x scales) recv_count handle event hook()",
                "use_nvfp4 x_global_scale",
            ),
            Call(
                395,
                "Buffer.low_latency_combine",
                "x topk_idx topk_weights handle / async_finish zero_copy return_recv_hook out",
                "combined_x event hook()",
            ),
        ),
    ),
)

SGLANG = Source(
    "sgl-project/sglang",
    "0.5.23",
    "python/sglang/srt/layers/moe/token_dispatcher/deepep.py",
    (
        Call(226, "Buffer.get_dispatch_config", "num_ranks /"),
        Call(228, "Buffer.get_combine_config", "num_ranks /"),
        Call(231, "Config.get_nvl_buffer_size_hint", "hidden_bytes num_ranks /"),
        Call(235, "Config.get_rdma_buffer_size_hint", "hidden_bytes num_ranks /"),
        Call(244, "Buffer.get_low_latency_rdma_size_hint", f"{HINT} /"),
        Call(
            304,
            "Buffer",
            "group num_nvl_bytes num_rdma_bytes / low_latency_mode num_qps_per_rank allow_mnnvl use_fabric",
            ".group_size .low_latency_mode .num_sms",
        ),
        Call(312, "Buffer.clean_low_latency_buffer", "num_max_dispatch_tokens_per_rank hidden num_experts /"),
        Call(574, "Buffer.capture", "/"),
        Call(648, "Buffer.get_dispatch_layout", f"topk_idx num_experts / {ASYNC}", LAYOUT),
        Call(
            668,
            "Buffer.dispatch",
            f"x / {TOPK} {OF_LAYOUT} {ASYNC} expert_alignment config",
            f"{RECEIVED} {WAIT}",
        ),
        Call(723, "Buffer.combine", f"x handle / {ASYNC} config", f"combined_x weights {WAIT}"),
        Call(
            843,
            "Buffer.low_latency_dispatch",
            "x topk_idx num_max_dispatch_tokens_per_rank num_experts / use_fp8 async_finish return_recv_hook "
            "round_scale use_ue8m0",
            f"(recv_x scales) recv_count handle {WAIT} hook()",
            "use_nvfp4 x_global_scale",
        ),
        Call(
            950,
            "Buffer.low_latency_combine",
            f"/ x {TOPK} handle async_finish return_recv_hook",
            f"combined_x {WAIT} hook()",
            "overlap src_signals src_signal_expect_value packed_recv_count comp_signal block_m threshold num_sms",
        ),
    ),
)

SOURCES = (MEGATRON, LMDEPLOY, *RTP_LLM, *VLLM, SGLANG)
