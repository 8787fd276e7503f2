"""Random low-latency rounds on one buffer, and a check of them that is fast: in NumPy, without loops over tokens.

A round is one trip, or two whose steps are mixed. All ranks make the same plan from the same random numbers. What the
check computes is what `nbep.reference` says; tests/low_latency/test_rounds.py compares the two.
"""

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from cases import Case
from low_latency import ASYNC, BOTH, FACTORS, HOOK, LOW_LATENCY_ROUTINGS, Options, Outcome, Trip, make_low_latency_case

import nbep
from nbep import reference

MODES = (BOTH, HOOK, ASYNC)
LOGFMT_LIMIT = 1e-3  # calc_diff of sums, whose rows keep ten bits a value


class Sizes(NamedTuple):
    """From what the rounds are chosen."""

    hiddens: tuple[int, ...] = (128, 512, 1024, 2560, 7168)
    most_tokens: int = 128  # of a rank
    most_topk: int = 8
    experts_per_rank: tuple[int, ...] = (1, 3, 8, 24)


class Plan(NamedTuple):
    """One round: its trips, which alternate step by step."""

    number: int
    trips: list[tuple[Case, Options]]

    def __str__(self) -> str:
        shapes = [
            f"inputs {case.seed}: {case.num_tokens} tokens, hidden {case.hidden}, {case.num_experts} experts, {options}"
            for case, options in self.trips
        ]
        return f"round {self.number}: {'; '.join(shapes)}"


def num_rdma_bytes(num_ranks: int, sizes: Sizes) -> int:
    return nbep.Buffer.get_low_latency_rdma_size_hint(
        sizes.most_tokens, max(sizes.hiddens), num_ranks, num_ranks * max(sizes.experts_per_rank)
    )


def make_plan(rng: random.Random, number: int, num_ranks: int, sizes: Sizes) -> Plan:
    """The next round."""
    trips = [_make_trip(rng, num_ranks, sizes) for _ in range(rng.choice((1, 1, 2)))]
    if len(trips) == 2:
        trips = [(case, replace(options, dispatch_as=HOOK, combine_as=HOOK)) for case, options in trips]
    return Plan(number, trips)


def _make_trip(rng: random.Random, num_ranks: int, sizes: Sizes) -> tuple[Case, Options]:
    hidden = rng.choice(sizes.hiddens)
    use_fp8 = rng.random() < 0.6
    round_scale = use_fp8 and rng.random() < 0.4
    deduplicate = rng.random() < 0.5
    use_logfmt = not deduplicate and rng.random() < 0.1
    options = Options(
        use_fp8=use_fp8,
        round_scale=round_scale,
        use_ue8m0=round_scale and hidden % 512 == 0 and rng.random() < 0.5,
        deduplicate=deduplicate,
        dispatch_as=rng.choice(MODES),
        use_logfmt=use_logfmt,
        combine_as=rng.choice(MODES),
        with_out=rng.random() < 0.3,
        spare=rng.choice((0, 0, 1, 5)),
    )
    most = sizes.most_tokens - options.spare
    num_tokens = [0 if rng.random() < 0.1 else rng.randint(1, rng.choice((4, most))) for _ in range(num_ranks)]
    case = make_low_latency_case(
        rng.getrandbits(40),
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        hidden=hidden,
        num_topk=rng.randint(1, sizes.most_topk),
        experts_per_rank=rng.choice(sizes.experts_per_rank),
        routing=rng.choice(("uniform",) * 4 + LOW_LATENCY_ROUTINGS),
    )
    return case, options


def run_plan(buffer: nbep.Buffer, plan: Plan) -> list[str]:
    """Run a round on one rank; the names of what came out wrong."""
    trips = [Trip(buffer, case, options) for case, options in plan.trips]
    for send, receive in ((Trip.send_dispatch, Trip.receive_dispatch), (Trip.send_combine, Trip.receive_combine)):
        for trip in trips:
            send(trip)
        for trip in trips:
            receive(trip)
    return [
        f"{name} of trip {i}"
        for i, trip in enumerate(trips)
        for name in wrong_names(trip.case, trip.options, buffer.rank, trip.outcome)
    ]


def wrong_names(case: Case, options: Options, rank: int, outcome: Outcome) -> list[str]:
    """The names of what a rank got wrong in a trip."""
    casts = [cast(x, options) for x in case.x]
    return _wrong_in_dispatch(case, rank, outcome, casts) + _wrong_in_combine(case, options, rank, outcome, casts)


def cast(x: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What arrives of some tokens: their values, their scales as they are returned, and both put together in bf16."""
    num_tokens, hidden = x.shape
    if not options.use_fp8:
        return x, np.zeros((num_tokens, 0), np.float32), x
    blocks = x.astype(np.float32).reshape(num_tokens, hidden // 128, 128)
    largest = np.maximum(np.abs(blocks).max(axis=2), reference.AMAX_FLOOR)
    scales, inverse = reference.E4M3_MAX / largest, largest * (1 / reference.E4M3_MAX)
    if options.round_scale:
        mantissa, exponent = np.frexp(inverse)
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        scales, inverse = np.ldexp(np.float32(1), -exponent), np.ldexp(np.float32(1), exponent)
    clipped = np.clip(blocks * scales[:, :, None], -reference.E4M3_MAX, reference.E4M3_MAX)
    values = clipped.astype(reference.E4M3)
    back = (values.astype(np.float32) * inverse[:, :, None]).astype(reference.BF16)
    returned = reference.pack_ue8m0(inverse) if options.use_ue8m0 else inverse
    return values.reshape(x.shape), returned, back.reshape(x.shape)


def _wrong_in_dispatch(case: Case, rank: int, outcome: Outcome, casts: list) -> list[str]:
    got = outcome.dispatched
    num_local_experts, num_rows = got.src_info.shape
    most = outcome.num_max_tokens
    is_sent = np.zeros((case.num_ranks, most, num_local_experts), np.int64)
    for src, topk_idx in enumerate(case.topk_idx):
        local = topk_idx - rank * num_local_experts
        token, choice = ((local >= 0) & (local < num_local_experts)).nonzero()
        is_sent[src, token, local[token, choice]] = 1
    counts = is_sent.sum(axis=1)
    ends = counts.cumsum(axis=0)
    wrong = []
    if (got.recv_count != ends[-1]).any():
        wrong.append("recv_count")
    if (got.layout_range != ((ends - counts) << 32 | counts).T).any():
        wrong.append("layout_range")
    rows = np.arange(num_rows)
    expert, row = (rows < ends[-1][:, None]).nonzero()
    src = (rows >= ends[:, :, None]).sum(axis=0)[expert, row]
    token = got.src_info[expert, row]
    if ((token < 0) | (token >= most)).any():
        return [*wrong, "src_info"]
    is_here = np.zeros_like(is_sent)
    np.add.at(is_here, (src, token, expert), 1)
    if (is_here != is_sent).any():
        return [*wrong, "src_info"]
    starts = np.cumsum([0, *case.num_tokens])[:-1]
    for name, index in (("recv_x", 0), ("recv_x_scales", 1)):
        array = getattr(got, name)
        if array is not None:
            want = np.concatenate([of_rank[index] for of_rank in casts])[starts[src] + token]
            if np.ascontiguousarray(array[expert, row]).tobytes() != want.tobytes():
                wrong.append(name)
    return wrong


def _wrong_in_combine(case: Case, options: Options, rank: int, outcome: Outcome, casts: list) -> list[str]:
    want, got = combined(case, options, rank, casts[rank][2]), outcome.combined_x
    if options.use_logfmt:
        return [] if got.size == 0 or reference.calc_diff(got, want) < LOGFMT_LIMIT else ["combined_x"]
    return [] if got.tobytes() == want.tobytes() else ["combined_x"]


def combined(case: Case, options: Options, rank: int, x: np.ndarray) -> np.ndarray:
    """What a rank's tokens add up to when each of their experts has multiplied x by its factor. LogFMT is left out."""
    topk_idx, topk_weights = case.topk_idx[rank], case.topk_weights[rank]
    num_tokens, num_topk = topk_idx.shape
    owners = np.where(topk_idx >= 0, topk_idx // (case.num_experts // case.num_ranks), -1)
    sums = np.zeros((case.num_ranks if options.deduplicate else 1, num_tokens, x.shape[1]), np.float32)
    for k in range(num_topk):
        used = (topk_idx[:, k] >= 0).nonzero()[0]
        factors = FACTORS[topk_idx[used, k] % len(FACTORS)][:, None]
        rows = (x[used].astype(np.float32) * factors).astype(reference.BF16).astype(np.float32)
        sums[owners[used, k] if options.deduplicate else 0, used] += rows * topk_weights[used, k][:, None]
    if not options.deduplicate:
        return sums[0].astype(reference.BF16)
    sums = sums.astype(reference.BF16).astype(np.float32)
    total = np.zeros((num_tokens, x.shape[1]), np.float32)
    for k in range(num_topk):
        is_first = (owners[:, k] >= 0) & (owners[:, :k] != owners[:, k : k + 1]).all(axis=1)
        first = is_first.nonzero()[0]
        total[first] += sums[owners[first, k], first]
    return total.astype(reference.BF16)
