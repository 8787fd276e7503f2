"""What an ElasticBuffer refuses: a ValueError that names the argument, before anything is launched."""

import inspect
import re

import numpy as np
import pytest
from arrays import to_numpy, to_target
from cases import make_case
from elastic import ElasticOptions, dispatch_arguments, make_elastic_buffer
from parts import both_parts, crossed
from target import spawn

import nbep
from nbep import reference
from nbep.host import handle_contents
from nbep.host.arguments import ROW_DTYPES
from nbep.host.elastic.handle import ARRAYS, FORM, EPHandle
from nbep.host.handles import Identity

pytestmark = pytest.mark.emulator_only("a GPU's host does not look into arrays")
CASE = make_case(3, num_tokens=(5, 3), num_topk=3)
OPTIONS = ElasticOptions(do_expand=True)
X = np.zeros((5, 16), reference.BF16)
BF16_ROW = np.zeros((5, 12), reference.BF16)

CONSTRUCTION = {
    "no size": ({}, "num_max_tokens_per_rank: got 0"),
    "num_bytes": ({"num_bytes": 1000}, "num_bytes: got 1000; must be a multiple of 2097152"),
    "num_cpu_bytes": ({"num_bytes": 2 << 20, "num_cpu_bytes": 2 << 20}, "num_cpu_bytes: got 2097152; must be 0"),
    "a flag": ({"num_bytes": 2 << 20, "deterministic": 2}, "deterministic: got 2"),
    "choices": (
        {"num_max_tokens_per_rank": 4, "hidden": 16, "num_topk": 33},
        "num_topk: got 33; must be at most 32",
    ),
    "time": ({"num_bytes": 2 << 20, "num_gpu_timeout_secs": 0}, "num_gpu_timeout_secs: got 0"),
}

DISPATCHES = {
    "x": ({"x": X.astype(np.float64)}, "x: got float64 [5, 16]"),
    "a row": ({"x": BF16_ROW}, "hidden size of x: got 12"),
    "too many tokens": ({"num_max_tokens_per_rank": 4}, "x: got 5 tokens; must be at most num_max_tokens_per_rank=4"),
    "no experts": ({"num_experts": None}, "num_experts: got None"),
    "experts": ({"num_experts": 5}, "num_experts: got 5; must be a multiple of 2"),
    "top-k": ({"topk_idx": CASE.topk_idx[0][:4]}, "topk_idx: got int64 [4, 3]"),
    "no top-k": ({"topk_idx": None}, "topk_idx: got NoneType"),
    "an expert": ({"topk_idx": np.full((5, 3), 4)}, "topk_idx[0, 0]: got 4; must be -1 (unused) or an expert below 4"),
    "weights": ({"topk_weights": np.zeros((5, 2), np.float32)}, "topk_weights: got float32 [5, 2]"),
    "alignment": ({"expert_alignment": 0}, "expert_alignment: got 0"),
    "padding": ({"do_expand": False, "do_zero_padding": True}, "do_zero_padding: got True"),
    "a switch": ({"do_expand": 1.0}, "do_expand: got 1.0"),
    "an event": ({"previous_event": 3}, "previous_event: got int"),
    "statistics": (
        {"cumulative_local_expert_recv_stats": np.zeros(3, np.int32)},
        "cumulative_local_expert_recv_stats: got int32 [3]",
    ),
    "room": ({"num_max_tokens_per_rank": 1 << 20}, "num_bytes: got"),
    "queue pairs": ({"num_qps": 1000}, "num_qps: got 1000; must be at most num_allocated_qps=129"),
    "SMs": ({"num_sms": -1}, "num_sms: got -1"),
}


def tried(call, arguments, table):
    """Each case is refused with its message."""
    for name, (change, message) in table.items():
        changed = {**arguments, **{key: to_target(value) for key, value in change.items()}}
        try:
            with pytest.raises(ValueError, match=f"^(ranks 0, 1: )?{re.escape(message)}"):
                call(**changed)
        except BaseException as error:
            error.add_note(f"in the case of {name!r}")
            raise


def test_what_a_buffer_is_made_with():
    spawn(lambda comm: tried(lambda **options: nbep.ElasticBuffer(comm, **options), {}, CONSTRUCTION), 2)


def test_sizes_that_differ_are_named():
    def main(comm):
        with pytest.raises(ValueError, match=r"num_bytes: got \[2097152, 4194304\] on ranks 0 to 1; must be the same"):
            nbep.ElasticBuffer(comm, num_bytes=(1 + comm.rank) * (2 << 20))
        with pytest.raises(ValueError, match="allow_multiple_reduction: got"):
            nbep.ElasticBuffer(comm, num_bytes=2 << 20, allow_multiple_reduction=comm.rank == 0)

    spawn(main, 2)


def test_arguments_of_dispatch_and_combine():
    def main(comm):
        buffer = make_elastic_buffer(comm, [(CASE, OPTIONS)])
        arguments = dispatch_arguments(CASE, OPTIONS, comm.rank)
        topk_idx = arguments["topk_idx"]
        array = type(topk_idx).__name__
        if comm.rank == 0:
            tried(buffer.dispatch, arguments, DISPATCHES)
        recv_x, _, weights, handle, _ = buffer.dispatch(**arguments)
        other = buffer.dispatch(**{**arguments, "do_expand": False})
        if comm.rank == 0:
            with_handle = {
                "top-k": ({"topk_idx": topk_idx}, f"topk_idx: got {array}; must be None together with a"),
                "sync": ({"do_cpu_sync": True}, "do_cpu_sync: got True; must be False or None with a handle"),
                "experts": ({"num_experts": 8}, "num_experts: got 8; must be None or 4"),
                "a tuple": ({"handle": (1, 2)}, "handle: got tuple; must be the EPHandle"),
                "tokens": ({"x": X[:4]}, "topk_idx: got int64 [5, 3]"),
                "a compact one": ({"handle": other[3], "do_expand": True}, "do_expand: got True"),
            }
            tried(buffer.dispatch, {"x": arguments["x"], "handle": handle}, with_handle)
            rows = {
                "x": ({"x": recv_x[:-1]}, f"x: got {len(recv_x) - 1} rows; must be at least {len(recv_x)}, those that"),
                "compact": ({"handle": other[3]}, f"x: got {len(recv_x)} rows; must be at most {len(other[0])}"),
                "dtype": ({"x": recv_x.astype(np.float32)}, "x: got float32"),
                "weights": ({"topk_weights": weights[:-1]}, "topk_weights: got float32"),
                "a bias": ({"bias": X[:2]}, "bias_0: got bfloat16 [2, 16]"),
                "three biases": ({"bias": (X, X, X)}, "bias: got a tuple of 3"),
                "no handle": ({"handle": None}, "handle: got NoneType; must be the EPHandle"),
            }
            tried(buffer.combine, {"x": recv_x, "handle": handle}, rows)
        stranger = make_elastic_buffer(comm, [(CASE, OPTIONS)])
        for call in (
            lambda: stranger.combine(recv_x, handle),
            lambda: stranger.dispatch(arguments["x"], handle=handle),
        ):
            with pytest.raises(ValueError, match="handle: got the handle of another buffer"):
                call()
        combined = buffer.combine(recv_x, handle)[0]  # what was refused has started nothing
        stranger.destroy()
        buffer.destroy()
        return combined.shape

    assert spawn(main, 2) == [(5, 16), (3, 16)]


def rewrite(handle, way):
    """Name one row for each token, at its last choice."""
    metadata = to_numpy(handle.recv_src_metadata)
    if way == "another array":
        metadata = metadata.copy()
    one_row = np.where(np.arange(3) == (metadata[:, 1] % 3)[:, None], np.arange(len(metadata))[:, None], -1)
    metadata[:, 2:] = one_row
    if way == "another array":
        handle.recv_src_metadata = to_target(metadata)


@pytest.mark.parametrize(
    ("way", "do_cpu_sync", "num_nodes"),
    crossed([("in place", False, 1), ("another array", True, 2)], ("another array", "in place"), (True, False), (1, 2)),
)
def test_a_rewritten_handle_serves_only_sums_without_weights(way, do_cpu_sync, num_nodes):
    name = r"handle.recv_src_metadata(: got a rewritten one|\[.*\]: got .*); must be .*as dispatch made it"

    def main(comm, reduces):
        options = ElasticOptions(
            do_expand=True, do_cpu_sync=do_cpu_sync, allow_multiple_reduction=reduces, num_nodes=num_nodes
        )
        buffer = make_elastic_buffer(comm, [(CASE, options)])
        arguments = dispatch_arguments(CASE, options, comm.rank)
        recv_x, _, _, handle, _ = buffer.dispatch(**arguments)
        weights = to_target(np.ones(len(recv_x), np.float32))
        buffer.combine(recv_x, handle, weights)  # the plan of this call is known then
        comm.barrier()
        rewrite(handle, way)
        with pytest.raises(ValueError, match=name):
            buffer.combine(recv_x, handle, weights)
        if not reduces:
            with pytest.raises(ValueError, match=name):
                buffer.combine(recv_x, handle)
        with pytest.raises(ValueError, match=name):
            buffer.dispatch(arguments["x"], handle=handle, do_expand=True)
        buffer.dispatch(arguments["x"], handle=handle)
        if reduces:
            buffer.combine(recv_x, handle)
        buffer.destroy()

    for reduces in (True, False):
        spawn(main, 2, (reduces,))


def changed(array):
    """An array in place, one element at a time."""
    array = to_numpy(array)
    for at in np.ndindex(array.shape):
        before = array[at]
        for value in {-1, 0, int(before) - 1, int(before) + 1} - {int(before)}:
            array[at] = value
            yield f"{at}: {before} -> {value}"
        array[at] = before


@pytest.mark.parametrize("num_nodes", both_parts([2], thorough=[1]))
def test_no_element_of_a_handle_changes_in_silence(num_nodes):
    def main(comm):
        options = ElasticOptions(num_nodes=num_nodes, do_handle_copy=False, expert_alignment=2)
        buffer = make_elastic_buffer(comm, [(CASE, options)])
        for do_expand in (False, True):
            arguments = {**dispatch_arguments(CASE, options, comm.rank), "do_expand": do_expand}
            recv_x, _, weights, handle, _ = buffer.dispatch(**arguments)
            calls = (
                lambda x=recv_x, of=handle, w=weights: buffer.combine(x, of, w),
                lambda x=arguments["x"], of=handle, way=do_expand: buffer.dispatch(x, handle=of, do_expand=way),
            )
            for name in ARRAYS:
                for change in changed(getattr(handle, name)):
                    for call in calls:
                        try:
                            call()
                            told = ""
                        except ValueError as error:
                            told = str(error)
                        assert told.startswith(("handle.", "topk_idx[")), (name, change, handle)
            for name in FORM:
                made = getattr(handle, name)
                setattr(handle, name, not made if name == "do_expand" else 2 * made)
                # That an expanded handle is compact now may be said; the arrays of these calls are not of such a one.
                names = "do_expand|x|topk_weights" if name == "do_expand" and made else name
                for call in calls:
                    with pytest.raises(ValueError, match=rf"^(handle\.)?({names}): got"):
                        call()
                setattr(handle, name, made)
            comm.barrier()
            for call in calls:
                call()
        buffer.destroy()

    spawn(main, 2)


LAST_CHOICE = "handle.recv_src_metadata: got a rewritten one on rank"
NO_TOKEN = "handle.recv_src_metadata: got a row 0 on rank"


@pytest.mark.parametrize(
    ("do_expand", "verb", "reduces", "message"),
    [
        (True, "combine", True, LAST_CHOICE),
        (True, "combine", False, LAST_CHOICE),
        (False, "combine", True, NO_TOKEN),
        (False, "dispatch", True, NO_TOKEN),
        (True, "dispatch", True, NO_TOKEN),
    ],
)
def test_kernels_report_what_no_token_can_be(monkeypatch, do_expand, verb, reduces, message):
    """Where the host reads nothing, as with GPUs."""
    monkeypatch.setattr(handle_contents, "elastic", lambda *_: 0)
    options = ElasticOptions(do_expand=do_expand, allow_multiple_reduction=reduces)

    def main(comm):
        buffer = make_elastic_buffer(comm, [(CASE, options)])
        arguments = dispatch_arguments(CASE, options, comm.rank)
        recv_x, _, _, handle, _ = buffer.dispatch(**arguments)
        comm.barrier()
        metadata = to_numpy(handle.recv_src_metadata)
        if message == NO_TOKEN:
            metadata[0, 0] = -1
        else:
            metadata[:, 2:] = -1
            metadata[:, 2] = np.arange(len(metadata))
        if verb == "dispatch":
            buffer.dispatch(arguments["x"], handle=handle, do_expand=do_expand)
        else:
            has_weights = do_expand and reduces
            buffer.combine(recv_x, handle, to_target(np.ones(len(recv_x), np.float32)) if has_weights else None)
        buffer.destroy()

    with pytest.raises(ValueError, match=rf"{re.escape(message)} \d"):
        spawn(main, 2, on_deadlock="expire")


@pytest.mark.parametrize(
    ("do_expand", "host_reads"), crossed([(False, False), (True, True)], (False, True), (False, True))
)
def test_x_may_end_behind_the_last_row_of_a_token(monkeypatch, do_expand, host_reads):
    if not host_reads:
        monkeypatch.setattr(handle_contents, "elastic", lambda *_: 0)
    options = ElasticOptions(do_expand=do_expand, do_cpu_sync=False, expert_alignment=4)

    def main(comm, less):
        buffer = make_elastic_buffer(comm, [(CASE, options)])
        recv_x, *_, handle, _ = buffer.dispatch(**dispatch_arguments(CASE, options, comm.rank))
        comm.barrier()
        ends = handle.psum_num_recv_tokens_per_expert if do_expand else handle.psum_of_ranks
        used = int(to_numpy(ends)[-1])
        x = to_target(np.array(to_numpy(recv_x)[: used - less]))
        combined = [to_numpy(buffer.combine(rows, handle)[0]).tobytes() for rows in (x, recv_x)]
        buffer.destroy()
        return combined

    for cut, whole in spawn(main, 2, (0,)):
        assert cut == whole
    with pytest.raises(ValueError, match=r"x: got \d+ rows( on rank \d)?; must be at least \d+"):
        spawn(main, 2, (1,), on_deadlock="expire")


@pytest.mark.parametrize(
    ("dtype", "has_scales"), crossed([(ROW_DTYPES[0], False), (ROW_DTYPES[-1], True)], ROW_DTYPES, (False, True))
)
def test_rows_of_each_type_travel_with_scales_and_without(dtype, has_scales):
    def rows(rank):
        x = np.arange(16 * CASE.num_tokens[rank]).reshape(-1, 16) % 64 + rank
        return x.astype(np.dtype(dtype)), np.arange(len(x), dtype=np.int32)[:, None]

    def main(comm):
        options = ElasticOptions()
        buffer = make_elastic_buffer(comm, [(CASE, options)])
        pair = rows(comm.rank)
        given = {**dispatch_arguments(CASE, options, comm.rank), "x": pair if has_scales else pair[0]}
        received = buffer.dispatch(**given)[0]
        buffer.destroy()
        return received if has_scales else (received,)

    for rank, received in enumerate(spawn(main, 2)):
        comes = [(topk_idx // 2 == rank).any(axis=1) for topk_idx in CASE.topk_idx]
        sent = [[part[here] for part in rows(src)] for src, here in enumerate(comes)]
        for got, wanted in zip(received, zip(*sent, strict=True), strict=False):
            assert got.tobytes() == np.concatenate(wanted).tobytes()


def test_what_torch_writes_to_a_handle_is_known_without_reading_it():
    torch = pytest.importorskip("torch")

    def handle_of(metadata):
        sizes = dict.fromkeys(inspect.signature(EPHandle).parameters)
        return EPHandle(**{**sizes, "recv_src_metadata": metadata}).owned_by(Identity(), 1)

    metadata = torch.zeros((4, 5), dtype=torch.int32)
    handle = handle_of(metadata)
    metadata[0].sum()
    assert not handle.is_rewritten
    metadata[:, 2:].fill_(-1)
    assert handle.is_rewritten
    assert not handle_of(metadata).is_rewritten
    with torch.inference_mode():
        assert not handle_of(torch.zeros((4, 5), dtype=torch.int32)).is_rewritten


def test_hints_are_what_the_calls_need():
    def main(comm):
        hint = nbep.ElasticBuffer.get_buffer_size_hint(comm, 64, 4096, 8)
        buffer = nbep.ElasticBuffer(comm, num_max_tokens_per_rank=64, hidden=4096, num_topk=8)
        assert buffer.num_bytes == hint
        assert hint % (2 << 20) == 0
        # Combine decides: a row of each token for each of both ranks, and its weights. Rows start at 128 bytes.
        assert 64 * 2 * (2 * 4096 + 32) <= hint < 64 * 2 * (2 * 4096 + 32) + (2 << 20)
        once = nbep.ElasticBuffer.get_buffer_size_hint(comm, 64, 4096, 8, allow_multiple_reduction=False)
        assert 64 * 8 * (2 * 4096 + 32) <= once < 64 * 8 * (2 * 4096 + 32) + (2 << 20)
        sms = buffer.get_theoretical_num_sms(256, 8)
        assert sms % 2 == 0
        assert 4 <= sms <= 132
        assert buffer.get_theoretical_num_qps(1) == 17
        assert buffer.get_theoretical_num_qps(100) == buffer.num_allocated_qps == 129
        buffer.destroy()

    spawn(main, 2)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_more_overlap_takes_fewer_sms(num_ranks):
    """DeepEP's arithmetic, by hand: a wire of 405 GB/s in one direction, an SM writes 50 GB/s; a fourth more."""

    def main(comm):
        kind = {"num_bytes": 2 << 20}
        overlaps = nbep.ElasticBuffer(comm, **kind)
        alone = nbep.ElasticBuffer(comm, **kind, prefer_overlap_with_compute=False)
        found = overlaps.get_theoretical_num_sms(256, 8), alone.get_theoretical_num_sms(256, 8)
        alone.destroy()
        overlaps.destroy()
        return found

    wanted = -(-405 * num_ranks / (num_ranks - 1) / 50 * 1.25 // 1)
    assert spawn(main, num_ranks) == [(wanted + wanted % 2, 64)] * num_ranks
