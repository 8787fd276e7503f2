"""A kernel that never ends is stopped, and one that only takes long is not: who loops where, on what, who is left."""

import sys

import nbep.numba_cuda
import numpy as np
import pytest
from parts import both_parts, crossed, dear

from nbep.emulator.machine.errors import DeadlockError
from nbep.lab.numba_cuda import command
from nbep.lab.numba_cuda.code import exec_with_source

# The body of a kernel that takes `a`; the line where it loops; what the report says of what it looks at.
HANGS = {
    "plain load": ("while a[0] == 0: pass", "a[0] holds 0; wanted: anything but 0; no thread has changed it"),
    "comparison": ("while a[1] < 7: pass", "a[1] holds 0; wanted: 7 or more;"),
    "break": ("while True:\n        if a[2] > 3: break", "a[2] holds 0; wanted: 4 or more;"),
    "of two dimensions": ("b = a.reshape(2, 4)\n    while b[1, 2] == 0: pass", "a[6] holds 0; wanted: anything but 0;"),
    "in a function": ("while not ready(a): pass", "a[0] holds 0;"),
    "no way out": ("while True: pass", "nothing ends this loop"),
    "counts": ("n = 0\n    while True: n += 1", "nothing ends this loop"),
    "polls and counts": ("n = 0\n    while a[0] == 0: n += 1", "a[0] holds 0; wanted: anything but 0;"),
    "sums up": ("x = 0.5\n    while x < 1: x += 1e-30", "nothing ends this loop"),
    "stores": ("while a[0] == 0: a[1 + i] = 5", "a[0] holds 0; wanted: anything but 0;"),
    "stores what it counts": ("n = 0\n    while True:\n        n += 1\n        a[i] = n", "nothing ends this loop"),
    "adds up": ("while a[0] == 0: a[1 + i] += 1", "a[0] holds 0; wanted: anything but 0;"),
    "counts for all": ("while a[0] == 0: cuda.atomic.add(a, 7, 1)", "a[0] holds 0; wanted: anything but 0;"),
    "atomic load": ("while cuda.atomic.add(a, 0, 0) == 0: pass", "a[0] holds 0; wanted: anything but 0; no thread has"),
    "atomic maximum": ("while cuda.atomic.max(a, 0, 0) < 4: cuda.nanosleep(9)", "a[0] holds 0; wanted: 4 or more;"),
    "lock": ("while cuda.atomic.cas(a, 0, 0, 1) != 0: pass", "a[0] holds 1; wanted: 0; changed last by threadIdx"),
    "exchange": ("while cuda.atomic.exch(a, 0, 1) != 0: pass", "a[0] holds 1; wanted: 0; changed last by threadIdx"),
    "loop in a loop": ("while a[0] == 0:\n        for k in range(3): a[1 + 3 * i + k] = k", "a[0] holds 0; wanted:"),
    "they meet": ("while cuda.syncthreads_or(a[0]) == 0: pass", "a[0] holds 0;"),
    "for each other": ("while cuda.atomic.add(a, 1 - i, 0) == 0: pass\n    a[i] = 1", "holds 0; wanted: anything"),
}  # fmt: skip


def kernel_of(cuda, body):
    @cuda.jit(device=True)
    def ready(a):
        return a[0] != 0

    names = {"cuda": cuda, "np": np, "ready": ready}
    exec_with_source(f"@cuda.jit\ndef kernel(a):\n    i = cuda.threadIdx.x\n    {body}\n", names)
    return names["kernel"]


@pytest.mark.parametrize(
    ("model", "name"), crossed([("checked", name) for name in [*HANGS][1::2]], ("sc", "checked", "delayed"), HANGS)
)
def test_a_loop_that_never_ends_says_where_and_on_what(cuda, model, name):
    body, words = HANGS[name]
    if model == "delayed" and any(word in name for word in ("stores", "adds", "counts for", "loop in")):
        pytest.skip("a store is always under way")
    with nbep.numba_cuda.options(memory_model=model), pytest.raises(DeadlockError, match="endless loop") as caught:
        kernel_of(cuda, body)[1, 2](np.zeros(8, np.int32))
    report = str(caught.value)
    if model != "checked":
        words = words.removesuffix(" no thread has changed it").removesuffix(" no thread has").partition(" changed")[0]
    assert words in report, report
    loop = next(line.strip() for line in body.splitlines() if "while" in line)
    assert sum(loop in line for line in report.splitlines() if "<- " in line and "loop" in line) == 1, report
    assert report.splitlines()[-1] == "  no other thread is left that could change what they look at"
    is_plain = "while cuda.atomic." not in loop and "nothing ends" not in words
    assert ("a compiler may load a[" in report) is is_plain, report


@pytest.mark.parametrize("strategy", ["few_preemptions", "starved", "late"])
def test_each_strategy_finds_a_loop_that_never_ends(cuda, strategy):
    with (
        nbep.numba_cuda.options(memory_model="checked", strategy=strategy, seed=1),
        pytest.raises(DeadlockError, match=r"a\[0\] holds 1; wanted: 0; changed last by threadIdx"),
    ):
        kernel_of(cuda, HANGS["lock"][0])[2, 2](np.zeros(8, np.int32))


def test_a_run_of_all_schedules_says_what_a_loop_looks_at(cuda):
    from every_schedule import run_all

    def program(strategy):
        with nbep.numba_cuda.options(memory_model="checked", strategy=strategy):
            kernel_of(cuda, HANGS["atomic load"][0])[1, 2](np.zeros(8, np.int32))

    with pytest.raises(DeadlockError, match=r"2 of 2 threads .*loop\n    a\[0\] holds 0; no thread has changed it"):
        run_all(program)


# Kernels with loops that take long, or wait for each other, and end.
ENDS = {
    "counts up": "n = 0\n    while n < 20000: n += 1\n    a[i] = n",
    "counts down in a function": "n = 9000\n    while n != 0: n = n - 1",
    "two loops, one state": "for k in range(9000):\n        n = 0\n        while n < 1: n += 1",
    "counts in memory": "while a[i] < 9000: a[i] += 1",
    "counts with an atomic": "while cuda.atomic.add(a, 0, 1) < 20000: pass",
    "counts in a local array": "b = cuda.local.array(1, np.int32)\n    b[0] = 0\n    while b[0] < 20000: b[0] += 1",
    "gives up": "n = 0\n    while cuda.atomic.add(a, 0, 0) == 0:\n        n += 1\n        if n > 20000: break",
    "stores at last": "n = 0\n    while cuda.atomic.add(a, 0, 0) == 0:\n        n += 1\n"
    "        if n > 20000: cuda.atomic.add(a, 0, 1)",
    "stores its own way out": "n = 0\n    while a[i] == 0:\n        n += 1\n        a[i] = n // 20000",
    "waits for who works": "if i == 0:\n        for k in range(20000): a[7] = k\n        cuda.atomic.add(a, 0, 1)\n"
    "    while cuda.atomic.add(a, 0, 0) == 0: pass",
    "lock": "while cuda.atomic.cas(a, 0, 0, 1) != 0: pass\n    cuda.threadfence()\n    for k in range(999): a[1] += 1\n"
    "    cuda.threadfence()\n    cuda.atomic.exch(a, 0, 0)",
    "they meet": "n = 0\n    while cuda.syncthreads_or(n < 9000 + i): n += 1",
    "one counts, all meet": "n = 0\n    while cuda.syncthreads_or(i == 0 and n < 9000):\n        if i == 0: n += 1",
    "in turn": "n = 0\n    while n < 20:\n        while cuda.atomic.add(a, 0, 0) % 2 != i: pass\n"
    "        cuda.atomic.add(a, 0, 1)\n        n += 1",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("model", "seed"), both_parts([("sc", 0)], thorough=[("checked", 1)]))
def test_a_loop_that_ends_is_no_hang(cuda, model, name, seed):
    with nbep.numba_cuda.options(seed=seed, memory_model=model):
        kernel_of(cuda, ENDS[name])[1, 2](np.zeros(8, np.int32))


@dear
def test_a_loop_that_syncs_the_grid_waits_for_what_other_blocks_count(cuda):
    @cuda.jit
    def kernel(a, turns):
        grid = cuda.cg.this_grid()
        n, goes_on = 0, True
        while goes_on:
            if cuda.blockIdx.x == 1:
                n += 1
                if n == turns:
                    cuda.atomic.add(a, 0, 1)
            grid.sync()
            goes_on = cuda.atomic.add(a, 0, 0) == 0
            grid.sync()

    for seed in range(4):
        with nbep.numba_cuda.options(seed=seed):
            kernel[2, 2](np.zeros(1, np.int32), 2000)


@pytest.mark.usefixtures("checked")
def test_a_hang_names_each_place_once_and_says_who_has_left_and_who_waits_for_an_sm(cuda):
    @cuda.jit
    def kernel(a):
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(a, 0, 1)
            while cuda.blockIdx.x > 0 and cuda.atomic.add(a, 0, 0) < cuda.gridDim.x:
                pass
        if cuda.blockIdx.x > 0:
            cuda.syncthreads()

    with nbep.numba_cuda.options(num_sms=4, memory_model="checked"):
        kernel[5, 4](np.zeros(1, np.int32))  # as soon as block 0 has left there are SMs for the other four
        with pytest.raises(DeadlockError) as caught:
            kernel[9, 4](np.zeros(1, np.int32))
    head, loop, cell, meet, *rest = str(caught.value).splitlines()
    assert head.startswith("endless loop: ")
    assert "< cuda.gridDim.x:    <- 1 of 4 threads (threadIdx 0) of blockIdx 1-4 loop" in loop
    assert "a[0] holds 5; wanted: 9 or more; changed last by threadIdx 0, blockIdx " in cell
    assert cell.endswith("cuda.atomic.add(a, 0, 1)")
    assert "cuda.syncthreads()    <- 3 of 4 threads (threadIdx 1-3) of blockIdx 1-4 wait for the others at" in meet
    assert rest == [
        "  blockIdx 0 has left",
        "  4 of 9 blocks wait for an SM: blockIdx 5-8; 4 blocks of this size run at once",
        "  all other threads wait, or have not started: none of them can change what these look at",
    ]


def test_deadlock_says_where_the_threads_are(cuda):
    @cuda.jit
    def kernel(out):
        if cuda.threadIdx.x == 0:
            cuda.syncthreads()
        else:
            cuda.syncwarp()

    with pytest.raises(DeadlockError, match="deadlock") as caught:
        kernel[2, 32](np.zeros(1))
    _, *lines = str(caught.value).splitlines()
    assert "cuda.syncthreads()    <- 1 of 32 threads (threadIdx 0) of blockIdx 0-1 wait for the others" in lines[0]
    assert "cuda.syncwarp()    <- 31 of 32 threads (threadIdx 1-31) of blockIdx 0-1 wait at cuda.syncwarp()" in lines[1]
    assert len(lines) == 2


def test_what_takes_long_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nbep.lab.numba_cuda.script.FIRST_S", 0.01)
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\nfrom numba import cuda\n\n@cuda.jit\ndef kernel(a):\n    for k in range(300):\n"
        "        a[cuda.grid(1)] += k\n\nkernel[400, 1](np.zeros(400))\n"
    )
    assert command.main(["--num-sms", "2", "--engine", "python", str(script)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "kernel `kernel`: " in line]
    assert any("of 400 blocks have left" in line and "wait for an SM" in line for line in lines)
    assert any(f"{script}:7: a[cuda.grid(1)] += k" in line for line in lines)
    nbep.numba_cuda.uninstall()
    assert getattr(sys.modules.get("numba.cuda"), "implementation", "") != "nbep"
