"""Calls without a handle and between nodes that were prepared: what the driver gets; and what all refuse. No GPU."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu
import no_gpu
from cuda.bindings import driver as cu

import nbep
from nbep.host.handles import InternodeHandle
from nbep.host.node import Received

pytestmark = pytest.mark.emulator_only("its GPU is none")
NUM_TOKENS, NUM_ROWS, NUM_PASSED, HIDDEN, NUM_TOPK, NUM_NODES, CHANNELS = 16, 24, 40, 512, 4, 2, 4
NUM_EXPERTS, NUM_RANKS = 32, fake_gpu.NUM_RANKS
RDMA_BYTES = nbep.Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, NUM_RANKS, NUM_EXPERTS)
ACTIVE = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


class Gpu(fake_gpu.Gpu):
    """A buffer inside a node, one between nodes, and the arrays of calls."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.buffer = fake_gpu.make_buffer(RDMA_BYTES)
        self.nodes = no_gpu.make_buffer(NUM_RANKS, 1 << 28, NUM_RANKS // NUM_NODES, low_latency_mode=False)
        of_nodes, of_ranks = (NUM_NODES, CHANNELS), (NUM_RANKS, CHANNELS)
        shapes = of_nodes, of_ranks, of_nodes, (NUM_NODES,), of_ranks, (NUM_RANKS,), (NUM_ROWS, 2)
        arrays = [self.tensor("int32", *shape) for shape in shapes]
        heads = self.tensor("int32", NUM_TOKENS, NUM_NODES), self.tensor("int32", NUM_PASSED, NUM_RANKS // NUM_NODES)
        in_rank = self.tensor("bool", NUM_TOKENS, NUM_RANKS)
        self.handle = InternodeHandle.made((in_rank, *arrays, *heads), self.nodes._memory.identity, 1)

    def topk(self):
        weights = self.tensor("float32", NUM_TOKENS, NUM_TOPK)
        return {"topk_idx": self.tensor("int64", NUM_TOKENS, NUM_TOPK), "topk_weights": weights}

    def counted(self, fp8=False, topk=True):
        return {
            "x": self.tokens(NUM_TOKENS, HIDDEN, fp8),
            "num_tokens_per_rank": self.tensor("int32", NUM_RANKS),
            "is_token_in_rank": self.tensor("bool", NUM_TOKENS, NUM_RANKS),
            "num_tokens_per_expert": self.tensor("int32", NUM_EXPERTS),
            **(self.topk() if topk else {}),
        }

    def verb(self, name):
        """A function, its arguments, and the sets of plans that it has."""
        memory, nodes, mode = self.buffer._memory, self.nodes._memory, self.buffer._memory.low_latency
        x, weights = self.tokens(NUM_TOKENS, HIDDEN), self.tensor("float32", NUM_ROWS, NUM_TOPK)
        rows, bias = self.tokens(NUM_ROWS, HIDDEN), self.tokens(NUM_TOKENS, HIDDEN)
        if name == "dispatch":
            return self.buffer.dispatch, self.counted() | {"num_worst_tokens": 64}, memory.counted_plans
        if name in ("cached", "combine"):
            handle = fake_gpu.handle_of(self.torch, self.buffer, NUM_TOKENS, CHANNELS)
            if name == "cached":
                return self.buffer.dispatch, {"x": x, "handle": handle}, memory.cached_plans
            rows, weights = self.tokens(3 * NUM_TOKENS, HIDDEN), self.tensor("float32", 3 * NUM_TOKENS, NUM_TOPK)
            given = {"x": rows, "handle": handle, "topk_weights": weights, "bias": bias}
            return self.buffer.combine, given, memory.combine_plans
        if name == "nodes cached":
            return self.nodes.dispatch, {"x": x, "handle": self.handle}, nodes.cached_plans
        if name == "nodes combine":
            given = {"x": rows, "handle": self.handle, "topk_weights": weights, "bias": bias}
            return self.nodes.combine, given, nodes.combine_plans
        given = {"x": x, "num_max_dispatch_tokens_per_rank": NUM_TOKENS, "num_experts": NUM_EXPERTS, **self.topk()}
        stats = {"cumulative_local_expert_recv_stats": self.tensor("int32", NUM_EXPERTS // NUM_RANKS)}
        waits = self.tensor("int64", NUM_RANKS)
        if name == "low_latency_dispatch":
            given |= {"deduplicate": True, **stats, "dispatch_wait_recv_cost_stats": waits}
            return self.buffer.low_latency_dispatch, given, mode.dispatch_plans
        del given["topk_weights"]
        handle = self.buffer.low_latency_dispatch(**given)[2]
        rows = self.tensor("bfloat16", NUM_EXPERTS // NUM_RANKS, NUM_RANKS * NUM_TOKENS, HIDDEN)
        given = {"x": rows, **self.topk(), "handle": handle, "out": x, "combine_wait_recv_cost_stats": waits}
        return self.buffer.low_latency_combine, given, mode.combine_plans


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.mark.parametrize("topk", [True, False])
@pytest.mark.parametrize("fp8", [False, True])
def test_each_dispatch_launches_with_its_own_arrays_and_as_many_rows_as_come(gpu, monkeypatch, fp8, topk):
    for num_rows in (5, 9, 5, 0):
        monkeypatch.setattr(type(gpu.buffer._memory.counters), "poll", lambda *_, n=num_rows: Received(n, [n, 0], 0))
        given = gpu.counted(fp8, topk)
        received, recv_idx, recv_weights, counts, handle, _ = gpu.buffer.dispatch(**given)
        x, scales = given["x"] if fp8 else (given["x"], None)
        recv_x, recv_scales = received if fp8 else (received, None)
        names = "num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"
        wanted = {f"inputs__{name}": given[name] for name in names}
        gpu.check("notify_dispatch", **wanted, out__rank_prefix_matrix=handle[0], out__channel_prefix_matrix=handle[1])
        inputs = {"x": x, "x_scales": scales, "topk_idx": given.get("topk_idx"), "is_token_in_rank": handle[4]}
        inputs |= {"topk_weights": given.get("topk_weights"), "rank_prefix_matrix": handle[0]}
        outputs = {"x": recv_x, "x_scales": recv_scales, "topk_idx": recv_idx, "topk_weights": recv_weights}
        outputs |= {"src_idx": handle[3], "channel_prefix_matrix": handle[2]}
        wanted = {f"inputs__{name}": array for name, array in inputs.items()}
        wanted |= {f"out__recv_{name}": array for name, array in outputs.items()}
        wanted |= {"inputs__channel_prefix_matrix": handle[1], "out__send_head": handle[5]}
        gpu.check("dispatch", **wanted, sizes__num_recv_tokens=num_rows)
        assert handle[4] is given["is_token_in_rank"]
        received = [array for array in (recv_x, recv_scales, recv_idx, handle[3]) if array is not None]
        assert {array.shape[0] for array in received} == {num_rows}
        assert (counts, gpu.launches) == ([num_rows, 0], [])
    assert len(gpu.buffer._memory.counted_plans) == 1


@pytest.mark.parametrize("fp8", [False, True])
def test_cached_dispatches_between_nodes_launch_with_their_own_arrays(gpu, fp8):
    for _ in range(3):
        given = gpu.tokens(NUM_TOKENS, HIDDEN, fp8)
        received = gpu.nodes.dispatch(given, handle=gpu.handle)[0]
        gpu.check("internode_cached_notify", heads__send_rdma_head=None, heads__send_nvl_head=None)
        names = "is_token_in_rank", "rdma_channel_prefix_matrix", "recv_gbl_rank_prefix_sum"
        wanted = {f"inputs__{name}": getattr(gpu.handle, name) for name in names}
        for of, name in ((given, "inputs__x"), (received, "out__recv_x")):
            wanted[name], wanted[f"{name}_scales"] = of if fp8 else (of, None)
        wanted |= {"out__recv_src_meta": None, "out__send_nvl_head": None, "inputs__topk_idx": None}
        sizes = {"sizes__num_recv_tokens": NUM_ROWS, "sizes__num_rdma_recv_tokens": NUM_PASSED}
        gpu.check("internode_dispatch", **wanted, **sizes)
    assert len(gpu.nodes._memory.cached_plans) == 1


@pytest.mark.parametrize("with_weights", [False, True])
def test_combines_between_nodes_launch_with_their_own_arrays(gpu, with_weights):
    for _ in range(3):
        x, bias = gpu.tokens(NUM_ROWS, HIDDEN), gpu.tokens(NUM_TOKENS, HIDDEN)
        weights = gpu.tensor("float32", NUM_ROWS, NUM_TOPK) if with_weights else None
        combined_x, combined_weights, _ = gpu.nodes.combine(x, gpu.handle, weights, (None, bias))
        heads = {name: getattr(gpu.handle, name) for name in ("send_rdma_head", "send_nvl_head")}
        gpu.check("internode_cached_notify", **{f"heads__{name}": array for name, array in heads.items()})
        wanted = {f"inputs__{name}": array for name, array in heads.items()}
        wanted |= {"inputs__x": x, "inputs__topk_weights": weights, "inputs__bias_0": None, "inputs__bias_1": bias}
        wanted |= {"out__combined_x": combined_x, "out__combined_topk_weights": combined_weights}
        gpu.check("internode_combine", **wanted)
        assert tuple(combined_x.shape) == (NUM_TOKENS, HIDDEN)
    assert len(gpu.nodes._memory.combine_plans) == 1


VERBS = "dispatch", "cached", "combine", "nodes cached", "nodes combine", "low_latency_dispatch", "low_latency_combine"


@pytest.mark.parametrize("name", VERBS)
def test_what_is_prepared_does_not_hide_what_is_wrong_with_the_next_call(gpu, name):
    """Each array with another dtype, more rows, strides, at an address that is not aligned, or that is no memory."""
    verb, right, plans = gpu.verb(name)
    for _ in range(2):
        verb(**right)
    gpu.launches.clear()
    known = len(plans)

    def refuse(message, **wrong):
        with pytest.raises(ValueError, match=message):
            verb(**right | wrong)

    def no_pointer():
        raise RuntimeError("Cannot access data pointer of Tensor")

    for argument, array in right.items():
        if isinstance(array, gpu.torch.Tensor):
            said = rf"^{argument}(_0)?: got "
            other, alike = ("int32" if array.dtype.name != "int32" else "int64"), array.dtype.name
            refuse(said + other, **{argument: gpu.tensor(other, *array.shape)})
            refuse(" got ", **{argument: gpu.tensor(alike, array.shape[0] + 1, *array.shape[1:])})
            refuse(said, **{argument: gpu.tensor(alike, *array.shape, strides=tuple(2 * n for n in array.stride()))})
            flawed = {flaw: gpu.tensor(alike, *array.shape) for flaw in ("aside", "freed", "sparse", "negative")}
            if argument in ("x", "out"):
                flawed["aside"].address += 8
                refuse(said + "an array that starts 8 bytes past", **{argument: flawed["aside"]})
            flawed["freed"].address, flawed["sparse"].data_ptr, flawed["negative"].is_neg = 0, no_pointer, lambda: True
            refuse(said + "Tensor without memory", **{argument: flawed["freed"]})
            refuse(said + 'Tensor of which torch says "?.Cannot access data pointer', **{argument: flawed["sparse"]})
            refuse(said + "Tensor with torch's negative or conjugate bit set", **{argument: flawed["negative"]})
    other = InternodeHandle.made((*gpu.handle,), no_gpu.make_buffer(2)._memory.identity, 1)
    if "nodes" in name:
        refuse("handle: got the handle of another buffer", handle=other)
    if "handle" in right:
        refuse("handle: got int", handle=3)
    if not name.startswith("low_latency"):
        refuse("config.num_sms: got [34]", config=nbep.Config(3 if name == "dispatch" else 4, 4, 16))
    if "combine" not in name:
        refuse(r"x(\[1\])?: got (a tuple|tuple|NoneType)", x=(right["x"], None))
    refuse("async_finish: got 0", async_finish=0)  # which equals False
    assert (gpu.launches, len(plans)) == ([], known)
    verb(**right)
    assert gpu.launches


@pytest.mark.parametrize("between_nodes", [False, True])
def test_a_capture_cannot_wait_for_counts_that_were_prepared_outside_of_one(gpu, monkeypatch, between_nodes):
    buffer, given = gpu.buffer, gpu.counted()
    if between_nodes:
        buffer, given["num_tokens_per_rdma_rank"] = gpu.nodes, gpu.tensor("int32", 2)
    monkeypatch.setattr(type(gpu.buffer._memory.counters), "poll", lambda *_: Received(3, [3, 0], 0))
    buffer.dispatch(**given, num_worst_tokens=64)
    if not between_nodes:
        buffer.dispatch(**given)
    monkeypatch.setattr(cu, "cuStreamIsCapturing", lambda stream: (fake_gpu.SUCCESS, ACTIVE))
    buffer.dispatch(**given, num_worst_tokens=64)
    with pytest.raises(ValueError, match="num_worst_tokens: got 0; must be positive in a CUDA graph"):
        buffer.dispatch(**given)
