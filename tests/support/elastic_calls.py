"""How programs call DeepEP's second interface; see client_calls.py for what a line says."""

from client_calls import Call, Source

RECEIVED = "recv_x recv_topk_idx recv_topk_weights"
COMBINED = "combined_x combined_topk_weights"
ROUTED = "topk_idx topk_weights num_experts"
SHAPE = "num_max_tokens_per_rank hidden num_topk use_fp8_dispatch"

OF_VLLM = (
    Source(
        "vllm-project/vllm",
        "0.33.0",
        "vllm/distributed/device_communicators/all2all.py",
        (
            Call(
                1112,
                "ElasticBuffer",
                f"/ group {SHAPE} allow_hybrid_mode prefer_overlap_with_compute allow_multiple_reduction "
                "explicitly_destroy",
                ".destroy()",
            ),
            Call(1115, "ElasticBuffer.get_theoretical_num_sms", "/ num_experts num_topk"),
        ),
    ),
    Source(
        "vllm-project/vllm",
        "0.33.0",
        "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_v2.py",
        (
            Call(
                220,
                "ElasticBuffer.dispatch",
                f"/ x {ROUTED} num_max_tokens_per_rank do_expand do_cpu_sync async_with_compute_stream",
                f"{RECEIVED} handle.num_recv_tokens_per_expert_list.psum_num_recv_tokens_per_scaleup_rank event.event",
            ),
            Call(
                488,
                "ElasticBuffer.combine",
                "/ x handle topk_weights async_with_compute_stream allocate_on_comm_stream",
                f"{COMBINED} event.event",
            ),
        ),
    ),
)

OF_SGLANG = Source(
    "sgl-project/sglang",
    "0.5.23",
    "python/sglang/srt/layers/moe/token_dispatcher/deepep_v2.py",
    (
        Call(
            192,
            "ElasticBuffer",
            f"group / {SHAPE} allow_hybrid_mode sl_idx prefer_overlap_with_compute",
            ".num_bytes",
        ),
        Call(
            385,
            "ElasticBuffer.dispatch",
            f"x / {ROUTED} num_max_tokens_per_rank expert_alignment num_sms use_tma_aligned_col_major_sf do_cpu_sync "
            "do_expand",
            f"{RECEIVED} handle.psum_num_recv_tokens_per_scaleup_rank.psum_num_recv_tokens_per_expert event.event",
        ),
        Call(475, "ElasticBuffer.combine", "x / handle topk_weights", f"{COMBINED} event.event"),
    ),
)

TORCHTITAN = Source(
    "pytorch/torchtitan",
    "b5bcd76c6",
    "torchtitan/distributed/deepep/deepep.py",
    (
        Call(123, "ElasticBuffer.get_theoretical_num_sms", "num_experts num_topk /"),
        Call(
            160,
            "ElasticBuffer.dispatch",
            f"x / {ROUTED} num_max_tokens_per_rank num_sms do_expand do_cpu_sync",
            f"{RECEIVED} handle.psum_num_recv_tokens_per_expert.num_recv_tokens_per_expert_list event",
        ),
        Call(229, "ElasticBuffer.combine", "x / handle topk_weights", "grad_x grad_scores event"),
        Call(
            266,
            "ElasticBuffer.combine",
            "x / handle topk_weights async_with_compute_stream",
            f"{COMBINED} event.current_stream_wait()",
        ),
        Call(298, "ElasticBuffer.dispatch", "x / handle num_sms do_cpu_sync", f"{RECEIVED} handle.num_sms event"),
        Call(
            358,
            "ElasticBuffer.get_buffer_size_hint",
            "group num_max_tokens_per_rank hidden / num_topk use_fp8_dispatch",
        ),
        Call(
            371,
            "ElasticBuffer",
            f"group / num_bytes {SHAPE} deterministic explicitly_destroy",
            ".group.num_bytes.num_max_tokens_per_rank",
        ),
    ),
)

LIGHTLLM = (
    Source(
        "ModelTC/LightLLM",
        "87881ae7c",
        "lightllm/distributed/communication_op.py",
        (
            Call(196, "ElasticBuffer", f"group / {SHAPE} allow_multiple_reduction"),
            Call(
                234,
                "Buffer.get_low_latency_rdma_size_hint",
                "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts /",
            ),
            Call(237, "Buffer", "group / num_rdma_bytes low_latency_mode num_qps_per_rank"),
            Call(266, "ElasticBuffer.get_theoretical_num_sms", "num_experts num_topk /"),
            Call(280, "Buffer.set_num_sms", "new_num_sms /"),
            Call(309, "Buffer.get_local_buffer_tensor", "dtype / use_rdma_buffer"),
            Call(321, "Buffer.clean_low_latency_buffer", "num_max_dispatch_tokens_per_rank hidden num_experts /"),
        ),
    ),
    Source(
        "ModelTC/LightLLM",
        "87881ae7c",
        "lightllm/common/basemodel/triton_kernel/fused_moe/grouped_fused_moe_ep.py",
        (
            Call(
                279,
                "ElasticBuffer.dispatch",
                f"x / {ROUTED} num_max_tokens_per_rank expert_alignment previous_event allocate_on_comm_stream "
                "do_cpu_sync do_handle_copy do_expand use_tma_aligned_col_major_sf",
                f"{RECEIVED} handle.num_recv_tokens_per_expert_list.num_unaligned_recv_tokens_per_expert"
                ".recv_src_metadata event",
            ),
            Call(
                332,
                "ElasticBuffer.combine",
                "x handle / topk_weights previous_event allocate_on_comm_stream",
                f"{COMBINED} event",
            ),
        ),
    ),
    Source(
        "ModelTC/LightLLM",
        "87881ae7c",
        "lightllm/common/basemodel/layer_weights/meta_weights/fused_moe/impl/deepgemm_impl.py",
        (
            Call(
                167,
                "ElasticBuffer.dispatch",
                f"x / {ROUTED} num_max_tokens_per_rank expert_alignment num_sms previous_event "
                "async_with_compute_stream allocate_on_comm_stream do_cpu_sync do_handle_copy do_expand "
                "use_tma_aligned_col_major_sf",
                f"{RECEIVED} handle.num_recv_tokens_per_expert_list event.current_stream_wait()",
            ),
            Call(
                281,
                "ElasticBuffer.combine",
                "x handle / topk_weights num_sms previous_event async_with_compute_stream allocate_on_comm_stream",
                f"{COMBINED} event.current_stream_wait()",
            ),
        ),
    ),
    Source(
        "ModelTC/LightLLM",
        "87881ae7c",
        "lightllm/models/deepseek2/layer_infer/transformer_layer_infer.py",
        (Call(457, "ElasticBuffer.capture", "/"),),
    ),
)

ELASTIC_SOURCES = (*OF_VLLM, OF_SGLANG, TORCHTITAN, *LIGHTLLM)
