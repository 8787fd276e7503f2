"""`python tools/deep_ep_tests.py`, with small programs in the place of DeepEP's tests."""

import pytest
from processes import run_python

torch = pytest.importorskip("torch")
import deep_ep_tests  # noqa: E402

from nbep.conformance.cpu_as_cuda import _replaced, cpu_as_cuda  # noqa: E402

BESIDE = """
import torch
import torch.distributed as dist

def init_dist(local_rank, num_local_ranks):
    dist.init_process_group(
        backend="nccl", init_method="tcp://127.0.0.1:%s" % __import__("os").environ["MASTER_PORT"],
        world_size=num_local_ranks, rank=local_rank, device_id=torch.device(f"cuda:{local_rank}"),
    )
    torch.set_default_device("cuda")
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), dist.new_group(list(range(num_local_ranks)))

def bench(function):
    raise AssertionError("on the emulator nothing is measured")

def bench_kineto(function, kernel_names):
    raise AssertionError("on the emulator nothing is measured")
"""
OLD = """
import argparse
import torch
import torch.distributed as dist
import deep_ep
from utils import init_dist, bench

def test_loop(local_rank, num_local_ranks, args):
    rank, group = init_dist(local_rank, num_local_ranks)
    buffer = deep_ep.Buffer(group, 1 << 20)
    x = torch.full((3, 64), rank + 1.0, dtype=torch.bfloat16, device="cuda")
    topk_idx = torch.tensor([[0], [1], [2]], device="cuda").cuda()
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 4)
    layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)
    recv_x = buffer.dispatch(x, config=deep_ep.Config(2, 2, 4), **layout)[0]
    assert len(recv_x) == (4, 2)[rank], len(recv_x)
    assert bench(lambda: None)[0] == 1e-3
    assert rank != args.wrong, "wrong, as asked for"
    print("rank", rank, "is done", flush=True)
    dist.barrier(device_ids=[rank])  # one that has failed does not come
    dist.destroy_process_group()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-processes", type=int, default=8)
    parser.add_argument("--wrong", type=int, default=-1)
    args = parser.parse_args()
    torch.multiprocessing.spawn(test_loop, args=(args.num_processes, args), nprocs=args.num_processes)
"""
NEW = """
import torch
import torch.distributed as dist
import deep_ep
from deep_ep.utils.envs import init_dist
from deep_ep.utils.math import twice
from deep_ep.utils.testing import bench_kineto

@torch.inference_mode()
def test_loop(local_rank, num_local_ranks):
    rank, group = init_dist(local_rank, num_local_ranks)
    buffer = deep_ep.ElasticBuffer(
        group, num_max_tokens_per_rank=4, hidden=128, allow_hybrid_mode=1, explicitly_destroy=True
    )
    x = torch.full((2, 128), rank + 1.0, device="cuda").to(torch.float8_e4m3fn)
    sf = torch.full((2, 1), rank + 1.0, device="cuda")
    topk_idx = torch.tensor([[0, 3], [1, -1]], device="cuda")
    (recv_x, recv_sf), _, _, handle, event = buffer.dispatch(
        (x, sf), topk_idx=topk_idx, num_experts=4, do_cpu_sync=1, async_with_compute_stream=1
    )
    event.current_stream_wait()
    sent = torch.empty((2, *x.shape), dtype=x.dtype, device="cuda")
    dist.all_gather_into_tensor(sent, x, group)
    rows = [sent[r][t] for r in range(2) for t in ((0, 1), (0,))[rank]]
    assert torch.equal(recv_x.float(), torch.stack(rows).float())
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x, [1, 1], [1, 1])
    assert exchanged[:, 0].tolist() == [1, 2]
    times = bench_kineto(lambda: buffer.barrier(), ("one", "two"), barrier=buffer.barrier)
    assert twice(times[0] + times[1]) == 4e-3
    assert bench_kineto(lambda: None, "one", num_kernels_per_period=2) == [1e-3, 1e-3]
    print("rank", rank, "is done", flush=True)
    buffer.destroy()
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(test_loop, args=(2,), nprocs=2)
"""


def run(*arguments, must_fail=False):
    return run_python(deep_ep_tests.__file__, *map(str, arguments), must_fail=must_fail)


def test_a_program_of_v1_runs_as_it_is_and_a_rank_that_fails_is_named(tmp_path):
    (tmp_path / "utils.py").write_text(BESIDE)
    test = tmp_path / "test_old.py"
    test.write_text(OLD)
    assert "rank 1 is done" in run(test, "--num-processes", 2)
    output = run(test, "--num-processes", 2, "--wrong", 1, must_fail=True)
    assert "AssertionError: wrong, as asked for" in output
    assert output.splitlines()[-1] == "failed: process 1 (exit status 1) of 2"


def test_a_program_of_v2_gets_deepeps_helpers_from_its_tree(tmp_path):
    utils, tests = tmp_path / "deep_ep" / "utils", tmp_path / "tests" / "elastic"
    utils.mkdir(parents=True)
    tests.mkdir(parents=True)
    (utils / "envs.py").write_text("import deep_ep._C as _C\nfrom .testing import init_dist\nassert _C.EventHandle\n")
    (utils / "math.py").write_text("import torch\n@torch.compile(dynamic=True)\ndef twice(x):\n    return 2 * x\n")
    (utils / "testing.py").write_text(BESIDE)
    (tests / "test_new.py").write_text(NEW)
    assert run(tests / "test_new.py").count("is done") == 2


def test_a_test_that_is_not_there_is_named(tmp_path):
    assert "test_none.py: no such file" in run(tmp_path / "test_none.py", must_fail=True)


def test_torch_is_as_before_behind_it():
    before = [getattr(owner, name) for owner, name, _ in _replaced()]
    with cpu_as_cuda():
        assert torch.ones(2, device="cuda:1").to("cuda").cuda().device.type == "cpu"
        assert torch.cuda.get_device_properties("cuda").multi_processor_count == 132
    assert [getattr(owner, name) for owner, name, _ in _replaced()] == before
