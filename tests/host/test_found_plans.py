"""A call gives what it gives without plans, whatever calls came before; what is in its arrays is checked all the same.

On the emulator, which keeps plans as a GPU does.
"""

import ml_dtypes
import numpy as np
import pytest
from parts import both_parts

import nbep
from nbep.device.jit import spec_of
from nbep.host.target.base import current_runtime
from nbep.host.target.emulator import EmulatorRuntime

NUM_RANKS, NUM_TOKENS, HIDDEN, NUM_EXPERTS = 2, 3, 512, 8
CONFIG, MORE = nbep.Config(2, 2, 8), nbep.Config(4, 2, 8)
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def plans_of(buffer):
    """Those of all verbs."""
    parts = buffer._memory, buffer._memory.low_latency
    return [plans for part in parts if part for name, plans in vars(part).items() if name.endswith("_plans")]


def num_plans(buffer):
    return [*map(len, plans_of(buffer))]


def told(value):
    """What a call returned, for a comparison: arrays with their bytes, handles with theirs, no events."""
    if hasattr(value, "dtype"):
        return value.shape, str(value.dtype), value.strides, value.base is None, np.asarray(value).tobytes()
    if isinstance(value, (tuple, list)):
        return [told(each) for each in value]
    arrays = getattr(value, "arrays", None)
    if isinstance(arrays, (dict, tuple)):
        return told(list(arrays.values() if isinstance(arrays, dict) else arrays))
    return value if isinstance(value, int) else type(value).__name__


def outcome(call):
    """Told, or the error; and which kernels it has launched, with how many blocks, for which sizes."""
    launches = current_runtime().launches = []
    try:
        return told(call()), launches
    except ValueError as error:
        return str(error), launches


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Each rank's runtime notes them."""
    start = EmulatorRuntime.start

    def note(self, stream, kernel, grid, block, smem_bytes, leaves):
        params = spec_of(kernel).params
        alike = "sizes.", "shape.", "call.word"
        sizes = [leaf for param, leaf in zip(params, leaves, strict=True) if param.path.startswith(alike)]
        self.launches.append((spec_of(kernel).name, grid, sizes))
        start(self, stream, kernel, grid, block, smem_bytes, leaves)

    monkeypatch.setattr(EmulatorRuntime, "start", note)
    monkeypatch.setattr(EmulatorRuntime, "launches", [], raising=False)


class Calls:
    """The arrays of a rank, and the verbs. Each rank sends one token to each expert: so each row has one place."""

    def __init__(self, comm, check_calls):
        size = nbep.Buffer.get_low_latency_rdma_size_hint(2 * NUM_TOKENS, HIDDEN, NUM_RANKS, 2 * NUM_EXPERTS)
        modes = {"num_rdma_bytes": size, "low_latency_mode": True, "num_zero_copy_bytes": 1 << 20}
        self.buffer = type("OfThisRank", (nbep.Buffer,), {})(comm, 1 << 18, check_calls=check_calls, **modes)
        self.elastic = nbep.ElasticBuffer(comm, num_max_tokens_per_rank=2 * NUM_TOKENS, hidden=HIDDEN, num_topk=2)
        rng = np.random.default_rng(comm.rank)
        self.x = (rng.random((NUM_TOKENS, HIDDEN)) + 1).astype(BF16)
        self.fp8 = self.x.astype(E4M3), rng.random((NUM_TOKENS, 4), np.float32)
        self.topk_idx = (np.arange(NUM_TOKENS)[:, None] + np.array([0, NUM_EXPERTS // 2]))[:]  # a view, unlike a copy
        self.weights = rng.random((NUM_TOKENS, 2), np.float32)
        self.counts = {}
        for num_experts in (NUM_EXPERTS, 2 * NUM_EXPERTS):
            per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.topk_idx, num_experts)
            self.counts[num_experts] = {
                "num_tokens_per_rank": per_rank,
                "is_token_in_rank": in_rank,
                "num_tokens_per_expert": per_expert,
            }

    def layout(self):
        given = {"topk_idx": self.topk_idx, "num_experts": NUM_EXPERTS}
        return self.buffer.get_dispatch_layout, given, [{"num_experts": 2 * NUM_EXPERTS}, {"num_experts": 8.0}]

    def counted(self):
        top_k = {"topk_idx": self.topk_idx, "topk_weights": self.weights}
        changes = [{"expert_alignment": 4}, {"num_worst_tokens": 20}, {"config": MORE}, {"zero_copy": True}]
        changes += [{"topk_idx": None, "topk_weights": None}, {"x": self.fp8}, {"x": self.fp8[0]}]
        changes += [{"config": None}, {"x": self.x.view(np.float16)}, self.counts[2 * NUM_EXPERTS]]
        changes += [{"x": (self.x, None)}, {"config": None, "num_sms": 4}]

        def call(num_sms=2, **options):
            type(self.buffer).num_sms = num_sms
            return self.buffer.dispatch(**options)

        return call, {"x": self.x, **self.counts[NUM_EXPERTS], **top_k, "config": CONFIG}, changes

    def handle(self, **change):
        call, given, _ = self.counted()
        return call(**{**given, **change})[4]

    def cached(self):
        handles = [self.handle(**change) for change in ({}, {"config": MORE}, {})]
        changes = [{"handle": handle} for handle in handles[1:]] + [{"handle": tuple(handles[0])}]
        changes += [{"x": (self.x, None)}]
        changes += [{"x": self.fp8}, {"x": self.fp8[0]}, {"zero_copy": True}, {"config": MORE}]
        return self.buffer.dispatch, {"x": self.x, "handle": handles[0]}, changes

    def combine(self):
        handle, x = self.handle(), np.ones((2 * NUM_TOKENS, HIDDEN), BF16)
        weights = np.ones((2 * NUM_TOKENS, 1), np.float32)
        changes = [{"handle": each} for each in (self.handle(config=MORE), self.handle(), tuple(handle))]
        changes += [{"bias": self.x}, {"config": MORE}]
        changes += [{"bias": (None, self.x)}, {"bias": (self.x, self.x)}, {"zero_copy": True}, {"topk_weights": None}]
        changes += [
            {"topk_weights": np.ones((2 * NUM_TOKENS, 2), np.float32)},
            {"x": x[:-1]},
            {"topk_weights": weights[:-1]},
        ]
        return self.buffer.combine, {"x": x, "handle": handle, "topk_weights": weights}, changes

    def received(self, call, options):
        """What a low-latency call returned, once all of it is here."""
        *received, event, hook = call(**options)
        if hook is not None:
            hook()
        if event.event is not None:
            event.current_stream_wait()
        return received

    def low_latency_dispatch(self):
        given = {"x": self.x, "topk_idx": self.topk_idx, "num_max_dispatch_tokens_per_rank": NUM_TOKENS}
        scales, stats = {"round_scale": True, "use_ue8m0": True}, np.zeros(NUM_EXPERTS // NUM_RANKS, np.int32)
        changes = [{"num_max_dispatch_tokens_per_rank": 2 * NUM_TOKENS}, {"num_experts": 2 * NUM_EXPERTS}]
        changes += [{"use_fp8": False}, {"round_scale": True}, scales, {"return_recv_hook": True}, {"use_fp8": 1}]
        changes += [{"async_finish": True}, {"deduplicate": True}, {"deduplicate": True, "topk_weights": self.weights}]
        changes += [{"async_finish": True, "return_recv_hook": True}]
        changes += [{"topk_weights": self.weights}, {"cumulative_local_expert_recv_stats": stats.astype(np.int64)}]
        call = self.buffer.low_latency_dispatch
        return lambda **options: self.received(call, options), {**given, "num_experts": NUM_EXPERTS}, changes

    def low_latency_combine(self):
        dispatch, given, _ = self.low_latency_dispatch()
        handle, wider, shared = (
            dispatch(**{**given, **change})[2]
            for change in ({}, {"num_experts": 2 * NUM_EXPERTS}, {"deduplicate": True, "topk_weights": self.weights})
        )
        x = np.random.default_rng(0).random((NUM_EXPERTS // NUM_RANKS, NUM_RANKS * NUM_TOKENS, HIDDEN)).astype(BF16)
        out = np.zeros((NUM_TOKENS, HIDDEN), BF16)
        changes = [{"use_logfmt": True}, {"zero_copy": True}, {"return_recv_hook": True}, {"async_finish": True}]
        changes += [{"async_finish": True, "return_recv_hook": True}, {"zero_copy": 1}, {"use_logfmt": 1}, {"out": out}]
        changes += [{"handle": each} for each in (wider, shared, tuple(handle), dispatch(**given)[2])]

        def call(zero_copy=False, **options):
            if zero_copy:
                self.buffer.get_next_low_latency_combine_buffer(handle)[:] = 2
            return self.received(self.buffer.low_latency_combine, {"zero_copy": zero_copy, **options})

        return call, {"x": x, "topk_idx": self.topk_idx, "topk_weights": self.weights, "handle": handle}, changes

    def elastic_dispatch(self):
        changes = [{"do_expand": True}, {"do_expand": True, "expert_alignment": 4}, {"do_cpu_sync": False}]
        changes += [{"num_experts": 2 * NUM_EXPERTS}, {"num_max_tokens_per_rank": NUM_TOKENS}, {"expert_alignment": 4}]
        changes += [{"do_expand": True, "expert_alignment": 4, "do_zero_padding": True}, {"do_handle_copy": False}]
        changes += [{"topk_weights": None}, {"x": self.fp8}, {"x": self.fp8, "use_tma_aligned_col_major_sf": True}]
        changes += [{"x": self.fp8[0]}, {"num_sms": 4}, {"async_with_compute_stream": 2}]
        changes += [{"x": (self.x, None)}, {"x": self.in_rows(self.x)}, {"allocate_on_comm_stream": 2}]
        top_k = {"topk_idx": self.topk_idx, "topk_weights": self.weights}
        return self.elastic.dispatch, {"x": self.x, **top_k, "num_experts": NUM_EXPERTS, "num_sms": 2}, changes

    def in_rows(self, x):
        """The same, in rows that the ranks share."""
        rows = self.elastic._memory.elastic.rows or self.elastic.make_rows(4 * NUM_TOKENS, HIDDEN)
        shared = rows.like(x)
        shared[:] = x
        return shared

    def elastic_handle(self, **change):
        call, given, _ = self.elastic_dispatch()
        return call(**{**given, **change})[3]

    def elastic_cached(self):
        compact, expanded = self.elastic_handle(), self.elastic_handle(do_expand=True)
        changes = [{"do_expand": True}, {"handle": expanded}, {"handle": expanded, "do_expand": True}]
        changes += [{"handle": self.elastic_handle()}]
        changes += [{"topk_weights": self.weights}, {"x": self.fp8}, {"handle": expanded, "do_cpu_sync": True}]
        changes += [{"handle": expanded, "do_expand": True, "handle.do_expand": False}]
        return self.of_handle(self.elastic.dispatch), {"x": self.x, "handle": compact}, changes

    def elastic_combine(self):
        expanded, again = (self.elastic_handle(do_expand=True, expert_alignment=4) for _ in range(2))
        compact = self.elastic_handle()
        x = (np.arange(expanded.num_expanded_tokens)[:, None] + np.zeros((1, HIDDEN))).astype(BF16)
        dense, weights = x[: expanded.num_recv_tokens], np.ones(len(x), np.float32)
        changes = [{"handle.do_expand": False}, {"handle": compact}, {"handle.num_expanded_tokens": 99}]
        changes += [{"x": dense, "handle.do_expand": False}, {"x": dense, "handle": compact}, {"num_sms": 4}]
        changes += [{"x": self.in_rows(dense), "handle": compact}, {"handle": again}, {"async_with_compute_stream": 2}]
        changes += [{"allocate_on_comm_stream": 2}]
        changes += [{"topk_weights": weights}, {"bias": self.x}, {"bias": (None, self.x)}]
        return self.of_handle(self.elastic.combine), {"x": x, "handle": expanded, "num_sms": 2}, changes

    def elastic_expanded(self):
        handle = self.elastic_handle(do_expand=True)
        return self.of_handle(self.elastic.dispatch), {"x": self.x, "handle": handle, "do_expand": True}, []

    def moved(self, given, name, where):
        """An array like one that is given, in another place."""
        like = given[name]
        if where == "over handle.send_head":
            return given["handle"].send_head.reshape(-1).view(like.dtype).reshape(like.shape)
        return self.buffer.get_local_buffer_tensor(like.dtype, like.shape, use_rdma_buffer="RDMA" in where)

    @staticmethod
    def of_handle(verb):
        """The verb. Options that begin with `handle.` are values that the caller has given the handle, for a while."""

        def call(handle, **options):
            values = {name[7:]: options.pop(name) for name in [*options] if name.startswith("handle.")}
            before = {name: getattr(handle, name) for name in values}
            vars(handle).update(values)
            try:
                return verb(handle=handle, **options)
            finally:
                vars(handle).update(before)

        return call


VERBS = "layout", "counted", "cached", "combine", "low_latency_dispatch", "low_latency_combine"
VERBS += "elastic_dispatch", "elastic_cached", "elastic_combine"
OF_HANDLES = "cached", "combine", "low_latency_combine"  # plans of a buffer whose kernels tell handles apart


@pytest.mark.parametrize(
    ("verb", "check_calls"),
    both_parts(
        [(verb, False) for verb in (*VERBS[:4], "elastic_cached")],
        [*((verb, False) for verb in VERBS[4:] if verb != "elastic_cached"), *((verb, True) for verb in OF_HANDLES)],
    ),
)
def test_a_call_gives_what_it_gives_without_plans(verb, check_calls):
    """Each changes one option of the first, with the same arrays, or one array with the same options."""

    def main(comm):
        calls = Calls(comm, check_calls)
        call, given, changes = getattr(calls, verb)()
        buffer = calls.elastic if verb.startswith("elastic") else calls.buffer
        requests = [given, *({**given, **change} for change in changes)]
        wanted = []
        for request in requests:
            for plans in plans_of(buffer):
                plans._kept.clear()
            wanted.append(outcome(lambda request=request: call(**request)))
        outcome(lambda: call(**given))
        known = num_plans(buffer)
        outcome(lambda: call(**given))
        assert num_plans(buffer) == known
        for change, request, expected in zip([{}, *changes], requests, wanted, strict=True):
            assert outcome(lambda request=request: call(**request)) == expected, change

    nbep.spawn(main, NUM_RANKS, target="emulator")


# A verb, the array of its call or handle of which the first element is spoilt, by what, and the error
SPOILT = [
    ("layout", "topk_idx", 99, r"topk_idx\[0, 0\]: got 99"),
    ("counted", "topk_idx", 99, r"topk_idx\[0, 0\]: got 99"),
    ("counted", "num_tokens_per_rank", 4, r"num_tokens_per_rank: got \[4, 3\]; must be \[3, 3\], as is_token_in_rank"),
    ("counted", "is_token_in_rank", False, "num_tokens_per_rank: got"),
    ("counted", "num_tokens_per_expert", 4, r"num_tokens_per_expert\[0\]: got 4"),
    ("cached", "handle.channel_prefix_matrix", 9, "handle.channel_prefix_matrix"),
    ("combine", "handle.send_head", 9, "handle.send_head"),
    ("low_latency_dispatch", "topk_idx", 99, r"topk_idx\[0, 0\]: got 99"),
    ("low_latency_dispatch", "topk_idx", 4, r"topk_idx\[0\]: got \[4, 4\]; must be without expert 4 twice"),
    ("low_latency_combine", "topk_idx", 7, r"topk_idx\[0, 0\]: got 7; must be one of \[0, 4\], to which"),
    ("low_latency_combine", "handle.layout_range", 99, r"handle\.layout_range\[0, 0\]: got 99 rows from 0 on"),
    ("low_latency_combine", "handle.src_info", 99, r"handle\.src_info\[0\]: got \[99\]"),
    ("elastic_dispatch", "topk_idx", 99, r"topk_idx\[0, 0\]: got 99"),
    ("elastic_cached", "handle.topk_idx", 99, r"handle\.topk_idx\[0, 0\]: got 99"),
    ("elastic_expanded", "handle.recv_src_metadata", 99, r"handle\.recv_src_metadata\[0, 0\]: got 99"),
    ("elastic_combine", "handle.dst_buffer_slot_idx", 99, r"handle\.dst_buffer_slot_idx\[0, 0\]: got 99"),
]
# A verb, the array that is given in another place, and where that is
MOVED = [
    ("counted", "x", "in the rings", "x: got memory of the buffer through which the call sends"),
    ("cached", "x", "in the rings", "x: got memory of the buffer through which the call sends"),
    ("combine", "topk_weights", "over handle.send_head", "handle.send_head: got memory that topk_weights lies in too"),
    ("low_latency_combine", "x", "in the RDMA buffer", "x: got memory of the buffer through which the call sends"),
]


@pytest.mark.parametrize(
    ("verb", "name", "value", "message"), both_parts([*SPOILT[::2], *MOVED[::2]], [*SPOILT[1::2], *MOVED[1::2]])
)
def test_what_is_in_arrays_and_where_they_lie_is_checked_behind_a_found_plan(verb, name, value, message):
    def main(comm):
        calls = Calls(comm, True)
        call, given, _ = getattr(calls, verb)()
        buffer = calls.elastic if verb.startswith("elastic") else calls.buffer
        call(**given)
        known = num_plans(buffer)
        spoilt = dict(given)
        if isinstance(value, str):
            spoilt[name] = calls.moved(given, name, value)
        else:
            of_handle = name.removeprefix("handle.")
            array = given[name] if of_handle == name else getattr(given["handle"], of_handle)
            array.reshape(-1)[0] = value
        with pytest.raises(ValueError, match="^" + message):
            call(**spoilt)
        assert num_plans(buffer) == known

    nbep.spawn(main, NUM_RANKS, target="emulator")
