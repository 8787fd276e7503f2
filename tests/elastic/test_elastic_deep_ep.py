"""nbep.deep_ep has DeepEP's names for ElasticBuffer, with its signatures, and what programs expect of it besides."""

import inspect

import numpy as np
import pytest
from arrays import to_numpy, to_target
from cases import make_case
from elastic import ElasticOptions, check, dispatch_arguments, round_trip
from target import spawn

import nbep
from nbep import deep_ep
from nbep.deep_ep.buffers import elastic

# Source: DeepEP dd758ca, deep_ep/buffers/elastic.py
INIT = """group num_bytes=None num_cpu_bytes=0 num_max_tokens_per_rank=0 hidden=0 num_topk=0 use_fp8_dispatch=False
    deterministic=False allow_hybrid_mode=True allow_multiple_reduction=True prefer_overlap_with_compute=True sl_idx=3
    num_allocated_qps=0 num_cpu_timeout_secs=300 num_gpu_timeout_secs=100 explicitly_destroy=False"""
DISPATCH = """x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None num_experts=None
    num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 previous_event=None
    previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False handle=None
    do_handle_copy=True do_cpu_sync=None do_expand=False do_zero_padding=False use_tma_aligned_col_major_sf=False"""
COMBINE = """x handle topk_weights=None bias=None num_sms=0 num_qps=0 previous_event=None
    previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False"""
SIGNATURES = {
    "__init__": INIT,
    "dispatch": DISPATCH,
    "combine": COMBINE,
    "destroy": "",
    "barrier": "use_comm_stream=True with_cpu_sync=False sequential=True",
    "capture": "",
    "get_comm_stream": "",
    "get_physical_domain_size": "",
    "get_logical_domain_size": "",
    "get_theoretical_num_qps": "num_sms",
    "get_theoretical_num_sms": """num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 sm_read_gbs=200
        sm_write_gbs=50""",
    "get_buffer_size_hint": """group num_max_tokens_per_rank hidden num_topk=0 use_fp8_dispatch=False
        allow_hybrid_mode=True allow_multiple_reduction=True""",
}
HANDLE = """do_expand num_experts expert_alignment num_max_tokens_per_rank num_sms topk_idx num_recv_tokens
    num_expanded_tokens num_recv_tokens_per_expert_list psum_num_recv_tokens_per_scaleup_rank
    psum_num_recv_tokens_per_expert num_unaligned_recv_tokens_per_expert recv_src_metadata dst_buffer_slot_idx
    token_metadata_at_forward channel_linked_list"""
ATTRIBUTES = """group num_bytes num_max_tokens_per_rank num_ranks rank_idx num_scaleout_ranks num_scaleup_ranks
    scaleout_rank_idx scaleup_rank_idx num_rdma_ranks num_nvlink_ranks num_allocated_qps deterministic
    allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute explicitly_destroy runtime"""
EXPERIMENTAL = """get_engram_storage_size_hint engram_write engram_fetch get_pp_buffer_size_hint pp_set_config pp_send
    pp_recv get_agrs_num_max_session_bytes get_agrs_buffer_size_hint create_agrs_session destroy_agrs_session
    agrs_new_session agrs_set_config agrs_get_inplace_tensor all_gather"""


def written(function) -> str:
    """Its parameters as above."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return " ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("cls", [nbep.ElasticBuffer, deep_ep.ElasticBuffer])
def test_signatures_are_deepeps(cls, name):
    assert written(getattr(cls, name)) == " ".join(SIGNATURES[name].split())


def test_names_are_where_programs_import_them_from():
    assert elastic.ElasticBuffer is deep_ep.ElasticBuffer
    assert elastic.EPHandle is deep_ep.EPHandle is nbep.EPHandle
    assert written(nbep.EPHandle.__init__).replace("=None", "") == " ".join(HANDLE.split())
    assert deep_ep.get_physical_domain_size is deep_ep.utils.envs.get_physical_domain_size


def test_the_buffer_and_the_handle_have_deepeps_attributes():
    def main(comm):
        buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=8, hidden=16, num_topk=2)
        found = {name: getattr(buffer, name) for name in ATTRIBUTES.split()}
        assert found["runtime"] is not None
        case = make_case(1)
        arguments = dispatch_arguments(case, ElasticOptions(), comm.rank)
        *_, handle, event = buffer.dispatch(**arguments)
        assert event.event is None
        [getattr(handle, name) for name in HANDLE.split()]
        assert deep_ep.get_logical_domain_size(comm) == buffer.get_logical_domain_size() == (1, 2)
        assert deep_ep.get_physical_domain_size(comm) == buffer.get_physical_domain_size() == (1, 2)
        buffer.destroy()
        assert buffer.runtime is None
        return {name: found[name] for name in ("num_ranks", "rank_idx", "num_scaleup_ranks", "num_nvlink_ranks")}

    wanted = {"num_ranks": 2, "num_scaleup_ranks": 2, "num_nvlink_ranks": 2}
    assert spawn(main, 2) == [{**wanted, "rank_idx": rank} for rank in range(2)]


def test_topk_idx_may_be_int32_and_an_asynchronous_call_has_an_event(monkeypatch):
    case, options = make_case(2, num_topk=3), ElasticOptions()
    blocking = spawn(round_trip, 2, (case, options))

    def main(comm):
        buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=8, hidden=16, num_topk=3)
        arguments = dispatch_arguments(case, options, comm.rank)
        arguments["topk_idx"] = to_target(case.topk_idx[comm.rank].astype(np.int32))
        *received, handle, event = buffer.dispatch(**arguments, async_with_compute_stream=True)
        assert event.event is not None
        event.current_stream_wait()
        rows = to_target(to_numpy(received[0]).copy())
        assert buffer.combine(rows, handle)[-1].event is None
        buffer.destroy()
        return to_numpy(received[0]).tobytes()

    assert spawn(main, 2) == [outcome.recv_x.tobytes() for outcome in blocking]
    check(case, options, blocking, "blocking")


def test_a_compact_dispatch_with_an_expanded_handle_warns_at_the_line_of_the_call():
    case, options = make_case(2, num_topk=3), ElasticOptions(do_expand=True)

    def main(comm):
        buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=8, hidden=16, num_topk=3)
        arguments = dispatch_arguments(case, options, comm.rank)
        *_, handle, _ = buffer.dispatch(**arguments)
        with pytest.warns(RuntimeWarning, match="do_expand=False: there comes one row for each token") as found:
            compact = buffer.dispatch(arguments["x"], handle=handle)[0]
        buffer.dispatch(arguments["x"], handle=handle, do_expand=True)
        buffer.destroy()
        assert [each.filename for each in found] == [__file__]
        return len(compact) == len(to_numpy(handle.recv_src_metadata))

    assert spawn(main, 2) == [True, True]


@pytest.mark.parametrize("name", EXPERIMENTAL.split())
def test_what_no_framework_calls_is_refused_by_name_with_what_to_use(name):
    verb = getattr(deep_ep.ElasticBuffer, name)
    arguments = () if isinstance(inspect.getattr_static(deep_ep.ElasticBuffer, name), staticmethod) else (None,)
    with pytest.raises(NotImplementedError, match=rf"ElasticBuffer\.{name}: .* is not in nbep; use \S+"):
        verb(*arguments)


def test_one_and_zero_are_switches_and_no_other_number_is():
    def main(comm):
        shape = {"num_max_tokens_per_rank": 8, "hidden": 16, "num_topk": 3}
        with pytest.raises(ValueError, match="allow_hybrid_mode: got 2; must be True or False"):
            deep_ep.ElasticBuffer(comm, **shape, allow_hybrid_mode=2)
        buffer = deep_ep.ElasticBuffer(comm, **shape, deterministic=0, allow_hybrid_mode=1)
        arguments = dispatch_arguments(make_case(2, num_topk=3), ElasticOptions(), comm.rank)
        *_, handle, event = buffer.dispatch(**{**arguments, "do_expand": 1, "do_cpu_sync": 0})
        assert handle.num_recv_tokens_per_expert_list == []
        assert event.event is None
        with pytest.raises(ValueError, match=r"do_expand: got 1\.0; must be True or False"):
            buffer.dispatch(**{**arguments, "do_expand": 1.0})
        buffer.destroy()

    spawn(main, 2)
