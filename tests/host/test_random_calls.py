"""Calls with arguments that no program should pass: each gives a right result, or an error that names an argument."""

import inspect
import random
import re
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from parts import both_parts
from target import spawn

import nbep
from nbep import deep_ep

pytestmark = pytest.mark.emulator_only("it makes NumPy arrays, and what a GPU cannot look at would run")
CONFIG = nbep.Config(2, 2, 4, 2, 4)
NUM_CALLS = 500  # of each rank, for a seed
BF16 = ml_dtypes.bfloat16
# What a message may begin with besides an argument's name: what belongs to one.
ALSO = {
    "bias_0", "bias_1", "buffer", "comm", "config", "group", "handle", "hidden", "num_nvl_bytes", "num_ranks",
    "num_rdma_bytes",
}  # fmt: skip

# Values that no program should pass, and some that look odd but are fine.
ODD = (
    None, 0, 1, -1, 2, 3, 7, 128, 1 << 31, 1 << 63, 1 << 70, 1.5, float("nan"), float("inf"), "x", "",
    b"y", True, False,
    object(), [], (), {}, [1, 2], (1, 2), (1, 2, 3, 4, 5, 6), np.float32(2), np.int64(2), np.array(3), np.zeros(0),
    np.bool_(True), np.dtype(object), int, len, lambda: 0, range(3), 1j, slice(None), Ellipsis, NotImplemented,
)  # fmt: skip
DTYPES = (
    np.int32, np.int64, np.float32, np.float64, np.float16, np.uint8, bool, object, ">i8", ">f4", ">i4", "S3", "M8[s]",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.complex64,
)  # fmt: skip


def odd_array(rng, array):
    """An array that was changed, most often into a wrong one."""
    kind = rng.randrange(10)
    if kind == 0:
        try:
            return np.zeros(array.shape, rng.choice(DTYPES))
        except TypeError:
            return None
    if kind == 1:
        return array.byteswap().view(array.dtype.newbyteorder()) if array.dtype.kind in "iuf" else array.tolist()
    if kind == 2:
        return np.concatenate([array, array]) if rng.random() < 0.5 else array[:-1]
    if kind == 3:
        return array[..., None] if rng.random() < 0.5 else array.reshape(-1)
    if kind == 4:
        return np.repeat(array, 2, axis=-1)[..., ::2]  # strided
    if kind == 5:
        return array.T if rng.random() < 0.5 else array[::-1]
    if kind == 6:
        return array.tolist()
    if kind == 7:
        return np.array([array], object)
    if kind == 8:
        return np.ma.masked_array(array) if rng.random() < 0.5 else np.zeros((0, *array.shape[1:]), array.dtype)
    # The same numbers are drawn for an array of any size: ranks keep in step.
    changed, at, value = array.copy(), rng.random(), rng.choice([77, -5, 1 << 20 if array.dtype.kind == "i" else 3])
    if changed.size:
        changed.reshape(-1)[int(at * changed.size)] = value
    return changed


class Calls:
    """The calls of one rank. Ranks with the same seed make the same calls, with other tokens."""

    def __init__(self, comm, seed: int):
        self.comm = comm
        self.rng = random.Random(seed)
        self.buffer = nbep.Buffer(comm, 1 << 16, 1 << 16, low_latency_mode=True, num_zero_copy_bytes=1 << 16)
        self.made: dict[str, nbep.Buffer] = {}
        self.topk_idx = np.array([[0, 2], [1, -1], [3, 0]])
        self.weights = np.full((3, 2), 0.5, np.float32)
        self.x = np.full((3, 128), comm.rank + 1, BF16)
        *self.layout, _ = self.buffer.get_dispatch_layout(self.topk_idx, 4)
        self.outcomes: Counter[str] = Counter()

    def other(self, where: str) -> nbep.Buffer:
        """Another buffer, made when it is first used, by all ranks alike."""
        if where not in self.made:
            made = {
                "nodes": lambda: nbep.Buffer(self.comm, 1 << 16, 1 << 18, num_nvl_peers=1),
                "deep_ep": lambda: deep_ep.Buffer(self.comm, 1 << 16),
            }
            self.made[where] = made[where]()
        return self.made[where]

    def dispatch_arguments(self, layout=None, **more) -> dict:
        per_rank, per_node, per_expert, is_token_in_rank = layout or self.layout
        return {
            "x": self.x,
            "handle": None,
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_node,
            "is_token_in_rank": is_token_in_rank,
            "num_tokens_per_expert": per_expert,
            "topk_idx": self.topk_idx,
            "topk_weights": self.weights,
            "expert_alignment": 1,
            "num_worst_tokens": 0,
            "config": CONFIG,
            "previous_event": None,
            "async_finish": False,
            "allocate_on_comm_stream": False,
            **more,
        }

    def low_latency_arguments(self) -> dict:
        arguments = {"x": self.x, "topk_idx": self.topk_idx, "num_max_dispatch_tokens_per_rank": 4, "num_experts": 4}
        options = dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0", "return_recv_hook", "deduplicate"), False)
        return {**arguments, **options, "topk_weights": None}

    def valid(self, name: str) -> tuple:
        """(function, arguments that are right, check of the result)"""
        buffer, x = self.buffer, self.x
        where, _, verb = name.rpartition(" ")
        if verb in ("dispatch", "cached", "combine"):
            return self.valid_normal(where, verb)
        if name == "low_latency_dispatch":
            return buffer.low_latency_dispatch, self.low_latency_arguments(), None
        if name in ("low_latency_combine", "get_next_low_latency_combine_buffer"):
            received, _, handle, _, _ = buffer.low_latency_dispatch(**self.low_latency_arguments())
            if name == "get_next_low_latency_combine_buffer":
                return buffer.get_next_low_latency_combine_buffer, {"handle": handle}, None
            arguments = {"x": received, "topk_idx": self.topk_idx, "topk_weights": self.weights, "handle": handle}
            options = {"use_logfmt": False, "zero_copy": False, "async_finish": False, "return_recv_hook": False}
            return buffer.low_latency_combine, {**arguments, **options, "out": None}, None
        arguments = {
            "get_dispatch_layout": {"topk_idx": self.topk_idx, "num_experts": 4, "previous_event": None},
            "get_local_buffer_tensor": {"dtype": np.int32, "size": (3, 2), "offset": 1, "use_rdma_buffer": False},
            "set_num_sms": {"new_num_sms": 20},
            "get_dispatch_config": {"num_ranks": 2},
            "get_combine_config": {"num_ranks": 16},
            "get_low_latency_rdma_size_hint": {
                "num_max_dispatch_tokens_per_rank": 4,
                "hidden": 128,
                "num_ranks": 2,
                "num_experts": 4,
            },
            "get_zero_copy_size_hint": {"num_max_tokens_per_rank": 4, "hidden": 128, "num_ranks": 2, "num_topk": 2},
            "clean_low_latency_buffer": {"num_max_dispatch_tokens_per_rank": 4, "hidden": 128, "num_experts": 4},
            "low_latency_query_mask_buffer": {"mask_status": np.zeros(2, np.int32)},
            "low_latency_update_mask_buffer": {"rank_to_mask": 0, "mask": True},
        }
        if name in arguments:
            return getattr(buffer, name), arguments[name], None
        others = {
            "Config": (nbep.Config, {"num_sms": 20, "num_max_nvl_chunked_send_tokens": 6, "num_threads": None}),
            "size hint": (CONFIG.get_nvl_buffer_size_hint, {"hidden_bytes": 256, "num_ranks": 2}),
            "to fp8": (nbep.per_token_cast_to_fp8, {"x": x, "round_scale": False, "column_major_scales": False}),
            "back": (
                nbep.per_token_cast_back,
                {"x_fp8": np.zeros((2, 128), ml_dtypes.float8_e4m3fn), "scales": np.ones((2, 1), np.float32)},
            ),
            "SharedMemory": (self.node_memory, {"num_bytes": 256, "timeout_ms": 1000.0, "cells": None, "num_qps": 1}),
            "Buffer": (self.other_buffer, {"num_nvl_bytes": 256, "handle_type": "ipc", "num_nvl_peers": None}),
        }
        return (*others[name], None)

    def valid_normal(self, where: str, verb: str) -> tuple:
        """A call of the normal mode: inside a node, with or without rings, between nodes, or by DeepEP's names."""
        buffer = self.other(where) if where in ("nodes", "deep_ep") else self.buffer
        layout = buffer.get_dispatch_layout(self.topk_idx, 4)[:-1] if where == "nodes" else self.layout
        way = {"zero_copy": where == "direct"} if buffer is self.buffer else {}
        first = self.dispatch_arguments(layout, **way)
        if verb == "dispatch":
            return buffer.dispatch, first, self.check_dispatch if buffer is self.buffer else None
        recv_x, *_, handle, _ = buffer.dispatch(**first)
        if verb == "cached":
            return (
                buffer.dispatch,
                {"x": self.x, "handle": handle, "config": CONFIG, "num_worst_tokens": 0, **way},
                None,
            )
        arguments = {"topk_weights": None, "bias": None, "config": CONFIG, "async_finish": False, **way}
        return buffer.combine, {"x": recv_x, "handle": handle, **arguments}, None

    def node_memory(self, num_bytes, timeout_ms, cells, num_qps):
        options = {"timeout_ms": timeout_ms, "cells": cells, "transport": "ibgda", "num_qps": num_qps}
        nbep.SharedMemory.create(self.comm, num_bytes, num_nvl_peers=1, **options).close()

    def other_buffer(self, num_nvl_bytes, handle_type, num_nvl_peers):
        nbep.Buffer(self.comm, num_nvl_bytes, handle_type=handle_type, num_nvl_peers=num_nvl_peers).destroy()

    def check_dispatch(self, arguments: dict, result: tuple) -> None:
        """Every row is the token that it says it is."""
        recv_x, _, _, counts, handle, event = result
        event.current_stream_wait()
        if not isinstance(arguments["x"], np.ndarray) or arguments["x"] is not self.x:
            return
        num_rows = handle.rank_prefix_matrix[:, self.comm.rank]
        source = np.searchsorted(num_rows, np.arange(num_rows[-1]), side="right")
        assert (recv_x[: num_rows[-1], 0].astype(int) == source + 1).all()
        assert counts == [] or len(counts) == 2

    def call(self, name: str) -> None:
        function, arguments, check = self.valid(name)
        changed = dict(arguments)
        keys = sorted(arguments)
        for key in self.rng.sample(keys, min(len(keys), self.rng.choice([0, 1, 1, 1, 2, 3]))):
            value = arguments[key]
            is_array = isinstance(value, np.ndarray) and self.rng.random() < 0.6
            changed[key] = odd_array(self.rng, value) if is_array else self.rng.choice(ODD)
        if isinstance(changed.get("num_worst_tokens"), (int, np.integer)) and 0 < changed["num_worst_tokens"] < 6:
            changed["num_worst_tokens"] = 6  # what is too small is found out by kernels, and ends the buffer
        result, error = None, None
        try:
            result = function(**changed)
        except Exception as caught:
            error = caught
        if error is not None:
            assert isinstance(error, ValueError), f"{name}({changed}) ended in {error!r}"
            head = re.split(r": got|; must be|$", str(error), maxsplit=1)[0]
            names = ALSO | set(changed) | set(inspect.signature(function).parameters)
            assert any(re.search(rf"\b{known}\b", head) for known in names), f"{name}({changed}) says: {error}"
            self.outcomes["refused"] += 1
            return
        self.outcomes["done"] += 1
        if check is not None:
            check(changed, result)
        if name in ("low_latency_dispatch", "low_latency_combine"):
            *_, hook = result
            if hook is not None:
                hook()


NAMES = (
    "dispatch", "dispatch", "dispatch", "cached", "combine", "low_latency_dispatch", "get_dispatch_layout", "Config",
    "get_local_buffer_tensor", "set_num_sms", "get_dispatch_config", "get_combine_config", "clean_low_latency_buffer",
    "get_low_latency_rdma_size_hint", "low_latency_query_mask_buffer", "low_latency_update_mask_buffer", "size hint",
    "to fp8", "back", "SharedMemory", "Buffer",
)  # fmt: skip
ALL_NAMES = (
    *NAMES, "direct dispatch", "direct cached", "direct combine", "nodes dispatch",
    "nodes cached", "nodes combine", "deep_ep dispatch", "deep_ep combine", "low_latency_combine",
    "get_next_low_latency_combine_buffer", "get_zero_copy_size_hint",
)  # fmt: skip


# All parts together have 2,000 calls of all entry points: 500 of each of two ranks, with two seeds.
@pytest.mark.parametrize(
    ("names", "num_calls", "seed"),
    both_parts(
        [("all", 60, 2)],
        thorough=[("some", NUM_CALLS, 0), ("all", NUM_CALLS, 4)],
        long=[("some", NUM_CALLS, 1), ("some", NUM_CALLS, 3), ("all", NUM_CALLS, 5)],
    ),
)
def test_odd_arguments_are_refused_by_name_or_give_what_they_should(names, num_calls, seed):
    def main(comm):
        calls = Calls(comm, seed)
        for number in range(num_calls):
            name = calls.rng.choice(NAMES if names == "some" else ALL_NAMES)
            try:
                calls.call(name)
            except BaseException as error:
                error.add_note(f"seed {seed}, call {number}, {name}")
                raise
        for buffer in (calls.buffer, *calls.made.values()):
            buffer.destroy()
        return calls.outcomes

    before = nbep.Buffer.num_sms
    try:
        outcomes = sum(spawn(main, 2), Counter())
    finally:
        nbep.Buffer.num_sms = before
    assert sum(outcomes.values()) == 2 * num_calls
    assert min(outcomes["refused"], outcomes["done"]) > num_calls / 4
