"""The last permitted value of each limit is taken, and gives what it should; the next one is refused in words."""

import ml_dtypes
import numpy as np
import pytest
from parts import both_parts

import nbep
from nbep.device.jit import MAX_CLUSTER, kernel
from nbep.device.kernels.parts.arrivals import MAX_TAGS
from nbep.device.layout.internode import MAX_CHANNELS
from nbep.device.layout.intranode import MAX_LOCAL_EXPERTS, MAX_NVL_PEERS, MAX_TOPK
from nbep.device.layout.low_latency import MAX_EXPERTS
from nbep.device.layout.low_latency import MAX_TOPK as MAX_LOW_LATENCY_TOPK
from nbep.emulator import World
from nbep.emulator.machine.stream import MAX_BLOCK
from nbep.host.intranode.checks import MAX_RING_THREADS
from nbep.host.normal_checks import MAX_SCALES
from nbep.host.ranks.timeouts import MAX_TIMEOUT_MS

pytestmark = pytest.mark.emulator_only("the limits are the host's")

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def on_ranks(num_ranks, main):
    return nbep.spawn(main, num_ranks, "emulator")


def layout(num_experts=4, num_topk=1):
    """Each rank's token chooses the last experts."""

    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 16)
        chosen = np.arange(num_experts - num_topk, num_experts)[None]
        of_ranks, _, of_experts, _, _ = buffer.get_dispatch_layout(chosen, num_experts)
        assert of_experts.tolist() == [0] * (num_experts - num_topk) + [1] * num_topk
        assert of_ranks[-1] == 1
        assert buffer.get_dispatch_layout(chosen, num_experts)[0].tolist() == of_ranks.tolist()  # cells are 0 again
        buffer.destroy()

    on_ranks(2, main)


def dispatch(num_scales=1, **config):
    """One token of each rank to all ranks, with its scales."""

    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 18)
        x, scales = np.ones((1, 16), FP8), np.full((1, num_scales), 1 + comm.rank, np.float32)
        to_all = {
            "num_tokens_per_rank": np.ones(2, np.int32),
            "is_token_in_rank": np.ones((1, 2), bool),
            "num_tokens_per_expert": np.ones(2, np.int32),
        }
        received, *_ = buffer.dispatch((x, scales), **to_all, config=nbep.Config(2, 1, 4, **config))
        assert received[1].tolist() == [[1.0] * num_scales, [2.0] * num_scales]
        buffer.destroy()

    on_ranks(2, main)


def between_nodes(num_sms):
    def main(comm):
        config = nbep.Config(num_sms, 1, 4, 1, 2)
        sizes = [
            hint(32, 2, num_nvl_peers=1) for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint)
        ]
        buffer = nbep.Buffer(comm, *sizes, num_nvl_peers=1)
        topk_idx, weights = np.array([[0, 1]]), np.ones((1, 2), np.float32)
        of_ranks, of_nodes, of_experts, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        x = np.full((1, 16), 1 + comm.rank, BF16)
        counts = of_ranks, of_nodes, is_in_rank, of_experts
        received, *_ = buffer.dispatch(x, None, *counts, topk_idx, weights, config=config)
        assert received[:, 0].tolist() == [1, 2]
        buffer.destroy()

    on_ranks(2, main)


def node_memory(num_ranks):
    def main(comm):
        memory = nbep.SharedMemory.create(comm, 128)
        assert memory.num_ranks == num_ranks
        memory.close()

    on_ranks(num_ranks, main)


def low_latency(num_experts=4, num_topk=1, num_max_tokens=2):
    """Each rank's token goes to the last experts."""

    def main(comm):
        hint = nbep.Buffer.get_low_latency_rdma_size_hint(
            min(num_max_tokens, MAX_TAGS), 128, 2, min(num_experts, MAX_EXPERTS)
        )
        buffer = nbep.Buffer(comm, num_rdma_bytes=hint, low_latency_mode=True)
        topk_idx = np.arange(num_experts - num_topk, num_experts)[None]
        x = np.full((1, 128), 1 + comm.rank, BF16)
        recv_x, counts, handle, *_ = buffer.low_latency_dispatch(
            x, topk_idx, num_max_tokens, num_experts, use_fp8=False
        )
        on_rank = [2 * int(expert in topk_idx) for expert in range(num_experts)][comm.rank * num_experts // 2 :]
        assert counts.tolist() == on_rank[: num_experts // 2]
        y = np.zeros(recv_x.shape, BF16)
        for expert, count in enumerate(counts):
            y[expert, :count] = recv_x[expert, :count]
        weights = np.full((1, num_topk), 1, np.float32)
        combined, *_ = buffer.low_latency_combine(y, topk_idx, weights, handle)
        assert (combined == num_topk * x).all()
        buffer.destroy()

    on_ranks(2, main)


def local_buffer(offset=0, size=None):
    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 16)
        found = buffer.get_local_buffer_tensor(np.int32, size, offset)
        assert found.size == ((1 << 14) - offset if size is None else size[0])
        buffer.destroy()

    on_ranks(2, main)


def block(num_threads):
    World(1).ranks[0].create_stream("main").launch(lambda: None, (), 1, num_threads)


def blocks_together(num_blocks):
    stream = World(1, num_sms=4).ranks[0].create_stream("main")
    stream.launch(lambda: None, (), num_blocks, 1, starts_together=True)
    stream.synchronize()


def timeout(milliseconds):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBEP_TIMEOUT_MS", repr(milliseconds))
        assert on_ranks(2, lambda comm: nbep.Buffer(comm, 1 << 16).timeout_ms) == [milliseconds] * 2


# What is tried, its last permitted value, the next one, and the words of its refusal.
LIMITS = {
    "experts of a rank": (lambda n: layout(n), 2 * MAX_LOCAL_EXPERTS, 2 * MAX_LOCAL_EXPERTS + 2, "num_experts: got"),
    "choices": (lambda n: layout(64, n), MAX_TOPK, MAX_TOPK + 1, "choices a token"),
    "scales": (lambda n: dispatch(n), MAX_SCALES, MAX_SCALES + 1, "scales a token"),
    "threads": (lambda n: dispatch(num_threads=n), MAX_RING_THREADS, MAX_RING_THREADS + 64, "config.num_threads"),
    "ranks of a node's memory": (node_memory, MAX_NVL_PEERS, MAX_NVL_PEERS + 1, "comm: got 9 ranks"),
    "low-latency experts": (lambda n: low_latency(n), MAX_EXPERTS, MAX_EXPERTS + 2, "num_experts: got 2050"),
    "low-latency choices": (
        lambda n: low_latency(64, n), MAX_LOW_LATENCY_TOPK, MAX_LOW_LATENCY_TOPK + 1, "choices a token"
    ),
    "low-latency tokens": (
        lambda n: low_latency(num_max_tokens=n), MAX_TAGS, MAX_TAGS + 1, "num_max_dispatch_tokens_per_rank: got"
    ),
    "offset": (local_buffer, 1 << 14, (1 << 14) + 1, "offset: got"),
    "size": (lambda n: local_buffer(1, (n,)), (1 << 14) - 1, 1 << 14, "size: got"),
    "chunk": (lambda n: nbep.Config(2, n, 7), 6, 7, "num_max_nvl_chunked_send_tokens: got 7"),
    "chunk between nodes": (lambda n: nbep.Config(2, 1, 7, n, 8), 7, 8, "num_max_rdma_chunked_send_tokens: got 8"),
    "blocks of a cluster": (lambda n: kernel(clusters=(2, n)), MAX_CLUSTER, MAX_CLUSTER + 1, "clusters: got"),
    "threads of a block": (block, MAX_BLOCK, MAX_BLOCK + 1, "block: 1025"),
    "blocks together": (blocks_together, 4, 5, "at most 4 blocks"),
    "time-out": (timeout, MAX_TIMEOUT_MS, 2 * MAX_TIMEOUT_MS, "NBEP_TIMEOUT_MS: got"),
    "delay of a NIC": (lambda n: nbep.NicOptions(max_delay_ns=n), (1 << 31) - 1, 1 << 31, "nic: max_delay_ns: got"),
    "first entry of a NIC": (lambda n: nbep.NicOptions(first_entry=n), 1 << 48, (1 << 48) + 1, "nic: first_entry: got"),
    "SMs between nodes": (between_nodes, 2 * MAX_CHANNELS, 2 * MAX_CHANNELS + 2, "config.num_sms: got 162"),
}  # fmt: skip
DEAR = ("SMs between nodes", "low-latency tokens", "low-latency experts")


@pytest.mark.parametrize("limit", both_parts([name for name in LIMITS if name not in DEAR], thorough=DEAR))
def test_the_last_permitted_value_is_taken_and_the_next_one_refused(limit):
    attempt, last, beyond, words = LIMITS[limit]
    attempt(last)
    with pytest.raises(ValueError, match=words):
        attempt(beyond)
