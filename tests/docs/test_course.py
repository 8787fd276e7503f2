"""The course's page: its times add up, and what the answers of its self-tests say of the code is true of the code."""

import re
import sys
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import nbformat
import numpy as np
import pytest

import nbep
from nbep.device.jit import kernel
from nbep.device.kernels.parts import arrivals
from nbep.device.primitives import thread_idx
from nbep.device.protocols.fp8 import fp8_scales
from nbep.device.types import Out
from nbep.lab.check import Run, broken, perform
from nbep.lab.notebook import edit
from nbep.lab.puzzle import check, command
from nbep.reference import count_tokens_per_rdma_rank, get_dispatch_layout

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "examples"))
import ring  # noqa: E402

PAGE = (ROOT / "docs" / "course.md").read_text()
ROUTE = PAGE.partition("\n## The route")[2].partition("\n## ")[0]
PARTS = re.split(r"^### ", ROUTE, flags=re.MULTILINE)[1:]
STEP = re.compile(r"^\| (.+) \| (\d+) \|$", re.MULTILINE)
ROWS = np.arange(320).reshape(10, 32)


@contextmanager
def replaced(number, function, old, new):
    """A puzzle, with a solution in which something is replaced."""
    path = next(path for path in command.files() if path.name.startswith(f"{number:02}_"))
    puzzle, solution = command.load(path), command.solution_of(path)
    with puzzle.filled(solution), redirect_stdout(StringIO()), edit(solution[function], old, new):
        yield puzzle


def verdict(*mistake):
    """What the check says of it."""
    with replaced(*mistake) as puzzle:
        return check.check(puzzle)


def received(seed, **options):
    """What rank 1 received through the ring of docs/examples."""
    return np.array(nbep.spawn(ring.main, 2, "emulator", seed=seed, **options)[1])


def test_every_part_says_what_you_can_do_afterwards_and_has_three_questions_with_folded_answers():
    assert len(PARTS) == 10
    for number, part in enumerate(PARTS):
        assert part.startswith(f"Part {number}: ")
        assert "**After this part you can**" in part
        assert len(re.findall(r"^<details><summary>\d\. .+\?</summary>$", part, re.MULTILINE)) == 3
        assert part.count("</details>") == 3


def test_minutes_add_up():
    overview, *parts = re.split(r"^### ", ROUTE, flags=re.MULTILINE)
    said = [int(minutes) for _, minutes in STEP.findall(overview)]
    sums = [sum(int(minutes) for _, minutes in STEP.findall(part)) for part in parts]
    assert said == sums
    assert f"about {round(sum(sums) / 60)} hours" in overview


def test_minutes_are_those_that_the_notebooks_say():
    steps = {name: int(minutes) for text, minutes in STEP.findall(ROUTE) for name in re.findall(r"(\w+)\.ipynb", text)}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        first = nbformat.read(path, as_version=4).cells[0].source
        if said := re.search(r"(\d+) minutes", first):
            assert steps[path.stem] == int(said[1]), path.stem


def test_part_0_late_stores_hide_from_sc_and_not_from_checked():
    with replaced(1, "send", "st_release_sys_s32", "st_relaxed_sys_s32") as puzzle:
        assert all(check.attempt(puzzle, seed, "sc") is None for seed in range(100))
        assert check.attempt(puzzle, 0, "checked").kind == "race"
    assert verdict(1, "receive", "ld_acquire_sys_s32", "ld_relaxed_sys_s32").kind == "race"


def test_part_1_one_lane_a_chain_and_a_barrier_that_is_used_again():
    with replaced(2, "send", "syncwarp(FULL_MASK)", "pass") as puzzle:
        found = [check.attempt(puzzle, seed, "sc") for seed in range(20)]
    assert "wrong result" in {each.kind for each in found if each is not None}
    assert verdict(3, "pass_on", "ld_acquire_sys_s32", "ld_relaxed_sys_s32").kind == "race"
    assert not verdict(6, "barrier", "peers.num_ranks * (turn + 1)", "peers.num_ranks").solved


def test_part_2_ranks_of_a_token_the_last_block_and_the_barrier_of_notify():
    [row] = get_dispatch_layout(np.array([[3, 30, 40, 200]]), 256, 8).is_token_in_rank
    assert list(np.flatnonzero(row)) == [0, 1, 6]
    assert verdict(4, "add_and_arrive", "atom_add_acq_rel_gpu_s32", "atom_add_relaxed_gpu_s32").kind == "race"
    run = Run("intranode.notify", seed=0, memory_model="checked")
    with broken("intranode.notify_dispatch: meet_block"):
        finding = perform(run)
    assert "rank_counts" in finding.message  # never written
    assert "sum_counts" in finding.message


def test_part_3_six_rows_and_a_lane_that_reads_the_row_four_later():
    # Row i needs a head of i + 1 - NUM_SLOTS.
    assert [i for i in range(10) if i + 1 - ring.NUM_SLOTS <= 2] == list(range(6))
    with redirect_stdout(StringIO()), edit(ring.receive_row, "syncwarp(FULL_MASK)", "pass"):
        results = [received(seed, memory_model="sc") for seed in range(20)]
        with pytest.raises(nbep.EmulatorError):
            received(0, memory_model="checked")
    wrong = [results[i] for i in range(20) if (results[i] != ROWS).any()]
    assert wrong  # some seeds show it, and most do not
    assert len(wrong) < 10
    for rows in wrong:
        assert set((rows - ROWS)[rows != ROWS]) == {ring.NUM_SLOTS * ring.LANES}


def test_part_4_rows_by_rank_and_a_token_with_two_experts_on_one_rank():
    def rows(comm):
        x, topk_idx = np.full((1, 16), 1 + comm.rank, np.float32), np.array([[2, 3]])
        buffer = nbep.ElasticBuffer(comm, num_max_tokens_per_rank=1, hidden=16, num_topk=2)
        both = [buffer.dispatch(x, topk_idx, num_experts=4, do_expand=each)[0] for each in (False, True)]
        return [list(recv_x[:, 0]) for recv_x in both]

    assert nbep.spawn(rows, 2, "emulator") == [[[], []], [[1, 2], [1, 2, 1, 2]]]


def test_part_5_scales_and_bytes():
    plain, power = fp8_scales(np.float32(0.5), 0), fp8_scales(np.float32(0.5), 1)
    assert plain[0] == 896
    assert round(float(plain[1]), 6) == 0.001116
    assert power == (512, 2**-9)
    assert fp8_scales(np.float32(0), 0)[0] == np.float32(448) / np.float32(1e-4)
    assert (2 * 7168, 7168 + 4 * 7168 // 128, 7168 + 7168 // 128) == (14336, 7392, 7224)


def test_part_6_counts_that_are_complete_and_a_credit_that_is_not_awaited():
    tag, rest = arrivals.TAG, arrivals.completion(2)
    assert tag == 16384
    assert 2 * tag + rest == -3
    assert tag + rest == -16387
    assert [arrivals.is_complete(value) for value in (0, 2 * tag, tag + rest, 2 * tag + rest)] == [False] * 3 + [True]
    assert arrivals.completion(0) == -1
    assert not verdict(15, "send_call", "wait_at_least(credit, n - 1, bounds)", "pass").solved


def test_part_7_once_over_the_network_and_a_turn_that_is_not_awaited():
    layout = get_dispatch_layout(np.array([[4, 5, 7]]), num_experts=8, num_ranks=8)
    assert list(count_tokens_per_rdma_rank(layout, num_nvl_peers=4)) == [0, 1]
    assert not verdict(18, "post", "ld_acquire_gpu_s32(ready) != ticket", "False").solved


def test_part_8_arrays_are_addresses_and_a_peer_that_does_not_come():
    def alone(comm):
        if comm.rank == 0:
            return ring.main(comm)
        memory = nbep.SharedMemory.create(comm, ring.NUM_BYTES)
        comm.barrier()
        return memory.wait()

    with pytest.raises(nbep.DeadlockError):
        nbep.spawn(alone, 2, "emulator")
    with pytest.raises(nbep.PeerTimeout):
        nbep.spawn(alone, 2, "emulator", on_deadlock="expire")

    with redirect_stdout(StringIO()), edit(ring.receive_row, "st_release_sys_s32", "st_relaxed_sys_s32"):
        assert all((received(seed, memory_model="checked") == ROWS).all() for seed in range(16))

    @kernel(max_threads=32)
    def like_an_array(out: Out):
        out[thread_idx()] = 3

    def launch(comm):
        stream = comm.runtime.create_stream("stream")
        comm.runtime.launch(stream, like_an_array, 1, 32, 0, np.zeros(32, np.int32))
        stream.synchronize()

    with pytest.raises(TypeError, match="'int' object does not support item assignment"):
        nbep.spawn(launch, 1, "emulator")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start.md", "docs/course.md"])
def test_all_pages_that_greet_a_reader_begin_with_the_flag_that_overtook(page):
    """It is the first notebook that each names, and the page says so before its second screen."""
    text = (ROOT / page).read_text()
    first = re.search(r"\]\((?:\.\./)?notebooks/(\w+)\.ipynb\)", text)
    assert first is not None
    assert first[1] == "00_the_flag_that_overtook"
    assert len(text[: first.start()].splitlines()) < 45


def test_the_first_screen_of_start_is_for_those_without_a_gpu():
    screen = "\n".join((ROOT / "docs" / "start.md").read_text().splitlines()[:60])
    assert not re.search(r"CUDA_DEVICE_MAX_CONNECTIONS|MPIR_CVAR|FI_PROVIDER", screen)
