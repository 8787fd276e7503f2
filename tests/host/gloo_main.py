"""What test_torch_group.py runs, once per rank: the emulator in processes of a gloo group, with torch's tensors.

NBEP_TARGET=emulator NBEP_TEST_ARRAYS=torch torchrun --standalone --nproc-per-node 2 tests/host/gloo_main.py
"""

import torch.distributed
from cases import make_case
from intranode import Expected, Options, cached_round_trip, round_trip
from low_latency import HOOK, Trip, check, make_buffer, make_low_latency_case
from low_latency import Options as LowLatencyOptions

from nbep.host.ranks.comm import TorchComm, is_torch_group
from nbep.host.ranks.roll_call import RollCall


def main() -> None:
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    assert is_torch_group(group)
    comm = TorchComm(group)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert (comm.rank, comm.size) == (rank, size)
    assert comm.allgather({"rank": rank}) == [{"rank": peer} for peer in range(size)]
    comm.barrier()
    roll_call = RollCall(comm)
    if rank > 0:
        assert roll_call.reports(f"from {rank}") == []
    comm.barrier()
    assert rank > 0 or roll_call.reports("from 0") == [f"from {peer}" for peer in range(size)]
    for seed, fn, options in ((1, round_trip, Options(num_biases=2)), (2, cached_round_trip, Options(zero_copy=True))):
        case = make_case(seed, num_ranks=size, num_tokens=[5, 3, 0, 7][:size])
        Expected(case, options).check(rank, fn(group, case, options), f"rank {rank}")
    case = make_low_latency_case(3, num_ranks=size, num_tokens=[3] * size, hidden=128)
    options = LowLatencyOptions(use_fp8=True, dispatch_as=HOOK)
    for network in ({}, {"transport": "ibgda", "num_nvl_peers": 1}):
        buffer = make_buffer(group, [(case, options)], **network)
        outcomes = comm.allgather(Trip(buffer, case, options).whole())
        buffer.destroy()
        check(case, options, outcomes, f"low latency, {network}")
    print(f"rank {rank} is done", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
