"""DeepEP's own limits on what dispatch and combine may change, and its pattern of tokens.

Source: DeepEP tests/test_low_latency.py
"""

import numpy as np
import pytest
from arrays import to_numpy, to_target
from low_latency import Options, skip_what_the_target_lacks
from parts import dear
from target import spawn

import nbep
from nbep import reference

pytestmark = pytest.mark.usefixtures("blocks")

NUM_RANKS = 2
NUM_TOKENS, HIDDEN, NUM_TOPK, EXPERTS_PER_RANK = 6, 512, 4, 3
MOST_BF16, MOST_FP8, MOST_ROUNDED = 1e-5, 9e-4, 0.007
RANK_OFFSET = 128

FP8 = Options(use_fp8=True)
ROUNDED = Options(use_fp8=True, round_scale=True)
UE8M0 = Options(use_fp8=True, round_scale=True, use_ue8m0=True)
DISPATCHES = [Options(), FP8, ROUNDED, UE8M0]
is_deduplicated = pytest.mark.parametrize("deduplicate", [False, True])


def pattern(rank):
    """The rank in all columns but the last 128, which hold the token's index."""
    x = np.full((NUM_TOKENS, HIDDEN), rank - RANK_OFFSET, np.float32)
    x[:, -128:] = np.arange(NUM_TOKENS)[:, None]
    return x.astype(reference.BF16)


def noise(rank):
    return (np.random.default_rng(rank).standard_normal((NUM_TOKENS, HIDDEN)) * 0.1).astype(reference.BF16)


def routing(rank, num_ranks):
    """DeepEP's: the best of random scores, a tenth of the choices unused, and positive weights."""
    rng = np.random.default_rng(100 + rank)
    topk_idx = np.argsort(-rng.random((NUM_TOKENS, num_ranks * EXPERTS_PER_RANK)), axis=1)[:, :NUM_TOPK]
    topk_idx[rng.random(topk_idx.shape) < 0.1] = -1
    return topk_idx.astype(np.int64), np.abs(rng.standard_normal(topk_idx.shape)).astype(np.float32)


def there_and_back(comm, make_x, options):
    """One rank's dispatch, the cast back, and combine: x, its weights, recv_x as bf16, the handle, combined_x."""
    rank, num_ranks = comm.rank, comm.size
    x, (topk_idx, topk_weights) = make_x(rank), routing(rank, num_ranks)
    num_experts = num_ranks * EXPERTS_PER_RANK
    num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, num_ranks, num_experts)
    buffer = nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True)
    idx, weights = to_target((topk_idx, topk_weights))
    recv_x, recv_count, handle, _, _ = buffer.low_latency_dispatch(
        to_target(x),
        idx,
        NUM_TOKENS,
        num_experts,
        use_fp8=options.use_fp8,
        round_scale=options.round_scale,
        use_ue8m0=options.use_ue8m0,
        deduplicate=options.deduplicate,
        topk_weights=weights if options.deduplicate else None,
    )
    recv_x, recv_count = to_numpy((recv_x, recv_count))
    if options.use_fp8:
        values, scales = recv_x
        scales = reference.unpack_ue8m0(scales) if options.use_ue8m0 else scales
        recv_x = np.zeros(values.shape, reference.BF16)
        for local_expert, count in enumerate(recv_count):
            used = slice(0, count)
            recv_x[local_expert, used] = reference.per_token_cast_back(
                values[local_expert, used], scales[local_expert, used]
            )
    combined_x, _, _ = buffer.low_latency_combine(
        to_target(recv_x), idx, weights, handle, use_logfmt=options.use_logfmt
    )
    src_info, layout_range = to_numpy((handle.src_info, handle.layout_range))
    combined_x = to_numpy(combined_x)
    buffer.destroy()
    dispatched = reference.LowLatencyDispatched(recv_x, None, recv_count, src_info, layout_range)
    return x, np.where(topk_idx < 0, 0, topk_weights), dispatched, combined_x


def run(make_x, options):
    skip_what_the_target_lacks(options)
    return spawn(there_and_back, NUM_RANKS, (make_x, options))


def received_blocks(ranks):
    """(source, what came from it for one expert as float32, its tokens), of all sources and experts of all ranks."""
    for _, _, dispatched, _ in ranks:
        for local_expert in range(EXPERTS_PER_RANK):
            for src in range(NUM_RANKS):
                rows = dispatched.rows_of(local_expert, src)
                got = dispatched.recv_x[local_expert, rows.start : rows.stop].astype(np.float32)
                yield src, got, dispatched.src_info[local_expert, rows.start : rows.stop]


@is_deduplicated
@pytest.mark.parametrize("options", [Options(), FP8], ids=["bf16", "fp8"])
def test_constant_blocks_come_through_exactly(options, deduplicate):
    options = Options(**{**vars(options), "deduplicate": deduplicate})
    for src, got, tokens in received_blocks(run(pattern, options)):
        assert (got[:, :-128] == src - RANK_OFFSET).all()
        assert (got[:, -128:] == tokens[:, None]).all()


@dear
@pytest.mark.parametrize("options", [ROUNDED, UE8M0], ids=["round_scale", "ue8m0"])
def test_constant_blocks_stay_constant_if_scales_are_rounded(options):
    for src, got, tokens in received_blocks(run(pattern, options)):
        assert (got == np.repeat(got[:, ::128], 128, axis=1)).all()
        assert reference.calc_diff(got[:, :-128], np.full_like(got[:, :-128], src - RANK_OFFSET)) < MOST_ROUNDED
        assert reference.calc_diff(got[:, -1], tokens) < MOST_ROUNDED


@dear
@pytest.mark.parametrize(
    ("options", "make_x", "deduplicate"),
    [
        pytest.param(options, make_x, deduplicate, id=f"{name}-{make_x.__name__}-{deduplicate}", marks=marks)
        for i, (name, options) in enumerate(zip(["bf16", "fp8", "round_scale", "ue8m0"], DISPATCHES, strict=True))
        for deduplicate in (False, True)
        for make_x, marks in zip(
            (pattern, noise) if (i + deduplicate) % 2 else (noise, pattern), ((), pytest.mark.thorough), strict=True
        )
    ],
)
def test_what_returns_is_the_token_times_its_weights(options, make_x, deduplicate):
    options = Options(**{**vars(options), "deduplicate": deduplicate})
    most = MOST_FP8 if options.use_fp8 else MOST_BF16
    for x, topk_weights, _, combined_x in run(make_x, options):
        want = x.astype(np.float32) * topk_weights.sum(axis=1, keepdims=True)
        assert reference.calc_diff(want, combined_x) < most


@dear
@pytest.mark.parametrize("options", [Options(), FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("make_x", [pytest.param(pattern, marks=pytest.mark.thorough), noise])
def test_logfmt_keeps_deepeps_limits(make_x, options):
    options = Options(**{**vars(options), "use_logfmt": True})
    for x, topk_weights, _, combined_x in run(make_x, options):
        want = x.astype(np.float32) * topk_weights.sum(axis=1, keepdims=True)
        assert reference.calc_diff(want, combined_x) < (MOST_FP8 if options.use_fp8 else MOST_BF16)


def test_logfmt_is_off_by_less_than_two_percent_in_each_value():
    """Its steps are (log2(max) - log2(min)) / 510: of noise about 2**0.03."""
    for x, topk_weights, _, combined_x in run(noise, Options(use_logfmt=True)):
        want = x.astype(np.float32) * topk_weights.sum(axis=1, keepdims=True)
        assert np.abs(combined_x.astype(np.float32) - want)[want != 0].max() > 0  # it did travel in LogFMT
        # What is smaller than 2**-20 of its neighbours is as good as nothing.
        large = np.abs(want) > np.abs(want).max() * 2**-20
        assert (np.abs(combined_x.astype(np.float32) - want)[large] < 0.02 * np.abs(want)[large]).all()
