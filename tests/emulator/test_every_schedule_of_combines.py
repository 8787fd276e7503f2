"""What the tree of all schedules says of combine: one rank sends back what the other one adds up, in a kernel that
calls the real functions of both ends. Left out are the other direction, and what rank 1 has itself."""

import ml_dtypes
import numpy as np
import pytest
from every_schedule import all_of
from parts import both_parts

import nbep
import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.kernels.intranode import combine as ringed
from nbep.device.kernels.intranode import direct_combine, direct_dispatch
from nbep.device.kernels.intranode.offer_rows import Begins, Offered, offer_rows
from nbep.device.kernels.parts.fetched_sums import FetchedSums, FetchShape, OfferCells
from nbep.device.kernels.parts.staged_sums import sums_smem_bytes
from nbep.device.layout.direct import NEXT_TOKEN, OFFERS, DirectShape, num_direct_bytes_needed, place_half
from nbep.device.layout.intranode import RingShape, num_nvl_bytes_needed
from nbep.device.protocols.peers import Bounds, Peers
from nbep.device.protocols.teams import Context, Team
from nbep.emulator import DataRace
from nbep.host.calls import make_call
from nbep.lab.check.faults import broken

HIDDEN = 32
HIDDEN_BYTES = 2 * HIDDEN  # of four lanes


@kernel(max_threads=64)
def combine_one_way(
    out: ringed.CombineOutputs,
    inputs: ringed.CombineInputs,
    peers: Peers,
    bounds: Bounds,
    shape: RingShape,
    sizes: ringed.CombineSizes,
):
    """As `combine`, with one block: rank 0 sends its rows of x, which rank 1 adds up."""
    warp, lane = ptx.thread_idx() // 32, ptx.thread_idx() % 32
    if peers.rank == 0:
        ringed.send_tokens(Context(peers, bounds, shape, sizes, 0, ringed.join_senders(2)), inputs)
    else:
        ctx = Context(peers, bounds, shape, sizes, 0, Team(False, lane, 0, warp, 2, lane))
        board = ringed.locate_board(2)
        ringed.reset_board(board, warp, lane)
        ptx.syncthreads()
        if warp > 0:
            ringed.receive_tokens(ctx, out, inputs, board)
        elif lane == 0:
            ringed.coordinate(ctx, board)


def send_back(comm, num_tokens, num_slots):
    shape = RingShape(2, 1, num_slots, HIDDEN_BYTES, 0, 0, 0)
    memory = nbep.SharedMemory.create(comm, num_nvl_bytes_needed(shape))
    x = np.arange(HIDDEN * num_tokens).reshape(num_tokens, HIDDEN).astype(ml_dtypes.bfloat16)
    combined = np.zeros_like(x)
    rank_prefix = np.array([[0, 0], [num_tokens, 0]], np.int32)  # rank 1 had sent all its tokens to rank 0
    heads = np.array([[token, -1] for token in range(num_tokens)], np.int32)
    out = ringed.CombineOutputs(combined, None)
    inputs = ringed.CombineInputs(x, None, None, None, rank_prefix, np.zeros((2, 1), np.int32), heads)
    sizes = ringed.CombineSizes(num_tokens, 1)
    smem_bytes = ringed.combine_smem_bytes(64)
    args = out, inputs, memory.peers, memory.bounds, shape, sizes
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, combine_one_way, 1, 64, smem_bytes, *args)
    memory.wait()
    memory.close()
    if comm.rank == 1:
        assert (combined == x).all()


@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "schedules", "redundant"),
    both_parts([(1, 1, 1, 3), (2, 1, 1, 5)], thorough=[(2, 2, 6, 13)]),
)
def test_rows_come_back_through_a_ring(num_tokens, num_slots, schedules, redundant):
    *_, (tree, _) = all_of(send_back, 2, num_tokens, num_slots)
    assert tree.is_whole
    assert (tree.schedules, tree.redundant) == (schedules, redundant)


RING_FAULTS = [
    "combine.send_tokens: wait for head",
    "combine.send_tokens: syncwarp",
    "combine.send_tokens: bar_red_and",
    "combine.send_tokens: release of combine-tail",
    "combine.coordinate: acquire of combine-tail",
    "combine.coordinate: release of combine-shared-tail",
    "combine.coordinate: scope of head",
    "combine.wait_shared_tail_past: acquire of combine-shared-tail",
    "combine.receive_tokens: value of head",
    "combine.receive_tokens: syncwarp 2",
]


@pytest.mark.parametrize(
    "fault", both_parts(RING_FAULTS[::4], thorough=[f for f in RING_FAULTS if f not in RING_FAULTS[::4]])
)
def test_a_broken_ring_is_a_race_in_the_first_schedule(fault):
    with broken(f"intranode.{fault}"), pytest.raises(DataRace):
        next(all_of(send_back, 2, 2, 1))


# --- without rings --------------------------------------------------------------------------------------------------


def go_and_come_back(comm, num_tokens, num_warps):
    """Direct dispatch of all tokens to the other rank, which offers them, and their combine: the kernels themselves."""
    rank, other = comm.rank, 1 - comm.rank
    shape, cells = DirectShape(1, HIDDEN_BYTES, 0, 0, 0), OfferCells(NEXT_TOKEN, OFFERS, rank, 2)
    num_bytes = num_direct_bytes_needed(num_tokens, 2, shape)
    memory = nbep.SharedMemory.create(comm, num_bytes)
    places = place_half(num_bytes, 0, 2, shape)
    x = (np.arange(HIDDEN * num_tokens).reshape(num_tokens, HIDDEN) + 100 * rank).astype(ml_dtypes.bfloat16)
    recv_x = memory.symmetric.array(ml_dtypes.bfloat16, places.x, HIDDEN * num_tokens).reshape(num_tokens, HIDDEN)
    combined = np.zeros_like(x)
    rank_prefix = np.array([[0, num_tokens], [num_tokens, num_tokens]], np.int32)
    channel_prefix = np.array([[num_tokens if peer == other else 0] for peer in range(2)], np.int32)
    heads = np.array([[token if peer == other else -1 for peer in range(2)] for token in range(num_tokens)], np.int32)
    comm.barrier()

    def launch(kernel, smem_bytes, *args):
        memory.runtime.launch(memory.comm_stream, kernel, 1, 32 * num_warps, smem_bytes, *args)

    launch(
        direct_dispatch.direct_dispatch,
        direct_dispatch.direct_dispatch_smem_bytes(32 * num_warps, True),
        direct_dispatch.DirectOutputs(np.zeros((2, 1), np.int32)),
        direct_dispatch.DirectInputs(x, None, None, None, heads, rank_prefix, channel_prefix),
        memory.peers,
        memory.bounds,
        places,
        shape,
        direct_dispatch.DirectSizes(num_tokens, num_tokens, 0, 1, 0, 0),
    )
    begins = Begins(places.x // 16, 0, num_tokens)
    launch(offer_rows, 0, Offered(rank_prefix), begins, memory.peers, memory.bounds, cells, make_call("barrier"))
    launch(
        direct_combine.direct_combine,
        sums_smem_bytes(32 * num_warps, True),
        FetchedSums(combined, None),
        direct_combine.DirectCombineInputs(recv_x, None, None, None, channel_prefix, heads),
        memory.peers,
        memory.bounds,
        cells,
        FetchShape(HIDDEN_BYTES, 0, num_tokens),
        direct_combine.DirectCombineSizes(1),
    )
    memory.wait()
    memory.close()
    assert (combined == x).all()


@pytest.mark.parametrize(
    ("num_tokens", "num_warps", "schedules", "redundant"),
    both_parts([(2, 1, 1, 2)], thorough=[(1, 2, 4, 2), (2, 2, 16, 2)]),
)
def test_tokens_go_and_come_back_without_rings(num_tokens, num_warps, schedules, redundant):
    *_, (tree, _) = all_of(go_and_come_back, 2, num_tokens, num_warps)
    assert tree.is_whole
    assert (tree.schedules, tree.redundant) == (schedules, redundant)


DIRECT_FAULTS = [
    "direct_dispatch.send_token: mbarrier_try_wait_parity",
    "direct_dispatch.receive: wait_blocks_arrived",
    "direct_dispatch.wait_blocks_arrived: acquire of direct-arrived",
]


@pytest.mark.parametrize("fault", DIRECT_FAULTS)
def test_a_broken_step_without_rings_is_a_race_in_the_first_schedule(fault):
    with broken(f"intranode.{fault}"), pytest.raises(DataRace):
        next(all_of(go_and_come_back, 2, 2, 1))
