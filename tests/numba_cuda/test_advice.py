"""Who does what a report says has a program that runs clean: for each advice, one that gets it, and the repaired."""

import re

import nbep.numba_cuda
import numpy as np
import pytest

from nbep.emulator.machine.errors import EmulatorError
from nbep.lab.numba_cuda.code import exec_with_source
from nbep.lab.numba_cuda.reports import ADVICE

# A lock of the blocks' or the threads' own, that each takes once; {0} is what is done under it.
LOCKED = (
    "while cuda.atomic.cas(lock, 0, 0, 1) != 0: pass\ncuda.threadfence()\n{0}\ncuda.threadfence()\n"
    "cuda.atomic.exch(lock, 0, 0)"
)
ON_TWO_STREAMS = (
    "host: kernel[1, 64, s](m, out, lock, 1)", "host: kernel[1, 64, t](a, out, lock, 1)", "host: t.synchronize()"
)  # fmt: skip

# Name of the advice -> programs that get it. Each: blocks and threads, the lines of a kernel of `a`, `out`, `lock` and
# `n`, and those lines as they are repaired, a way for each that the advice names. `host: ` begins a line of the host,
# in place of the launch.
TABLE = {
    "block": [
        (
            (1, 64),
            ["out[i] = i", "a[i] = out[63 - i]"],
            [["out[i] = i", "cuda.syncthreads()", "a[i] = out[63 - i]"]],
        ),
        (  # a value that was loaded from another element is no update
            (1, 64),
            ["x = out[i]", "y = out[(i + 1) % 64]", "out[i] = x + y"],
            [["x = out[i]", "y = out[(i + 1) % 64]", "cuda.syncthreads()", "out[i] = x + y"]],
        ),
        (  # a scan whose steps lack a barrier
            (1, 32),
            ["off = 1", "while off < 32:", "    if i % (2 * off) == 0:", "        a[i] += a[i + off]", "    off *= 2"],
            [["off = 1", "while off < 32:", "    if i % (2 * off) == 0:", "        a[i] += a[i + off]", "    off *= 2",
              "    cuda.syncthreads()"]],
        ),
    ],
    "changed": [
        (
            (1, 8),
            ["b = i % 4", "old = a[b]", "a[b] = old + 1"],
            [
                ["b = i % 4", "cuda.atomic.add(a, b, 1)"],
                ["b = i % 4", LOCKED.format("old = a[b]\na[b] = old + 1")],
                ["b = i % 4", "for k in range(8):", "    if k == i:", "        old = a[b]", "        a[b] = old + 1",
                 "    cuda.syncthreads()"],
            ],
        ),
        ((1, 8), ["a[i % 4] += 2"], [["cuda.atomic.add(a, i % 4, 2)"], [LOCKED.format("a[i % 4] += 2")]]),
        ((1, 8), ["a[0] = a[0] | (1 << i)"], [["cuda.atomic.or_(a, 0, 1 << i)"]]),
        ((1, 8), ["x = a[0]", "y = x - i", "a[0] = y"], [["cuda.atomic.sub(a, 0, i)"]]),
        ((1, 8), ["if i > a[0]:", "    a[0] = i"], [["cuda.atomic.max(a, 0, i)"]]),
        ((1, 8), ["a[0] = max(a[0], i)"], [["cuda.atomic.max(a, 0, i)"]]),
    ],
    "changed by two blocks": [
        ((8, 1), ["old = a[0]", "a[0] = old + 1"], [["cuda.atomic.add(a, 0, 1)"], [LOCKED.format("a[0] += 1")]]),
        ((8, 1), ["a[0] += 1"], [["cuda.atomic.add(a, 0, 1)"]]),
        (  # a lock without fences
            (8, 1),
            [LOCKED.replace("cuda.threadfence()\n", "").format("if i > a[0]: a[0] = i")],
            [["cuda.atomic.max(a, 0, i)"], [LOCKED.format("if i > a[0]: a[0] = i")]],
        ),
    ],
    "several stores": [
        (
            (1, 64),
            ["a[0] = i"],
            [
                ["if i == 5: a[0] = i"],
                ["for k in range(64):", "    if k == i: a[0] = i", "    cuda.syncthreads()"],
            ],
        ),
    ],
    "several stores of two blocks": [((64, 1), ["a[0] = i"], [["if i == 5: a[0] = i"]])],
    "atomic and plain": [
        (
            (1, 64),
            ["cuda.atomic.add(a, 0, 1)", "out[i] = a[0]"],
            [
                ["cuda.atomic.add(a, 0, 1)", "cuda.syncthreads()", "out[i] = a[0]"],
                ["cuda.atomic.add(a, 0, 1)", "out[i] = cuda.atomic.add(a, 0, 0)"],
            ],
        ),
    ],
    "atomic and plain of two blocks": [
        (
            (64, 1),
            ["cuda.atomic.add(a, 0, 1)", "out[i] = a[0]"],
            [["cuda.atomic.add(a, 0, 1)", "out[i] = cuda.atomic.add(a, 0, 0)"]],
        ),
    ],
    "blocks": [
        (
            (8, 1),
            ["if i == 0: a[0] = 7", "else: out[i] = a[0]"],
            [
                [
                    "if i == 0:", "    a[0] = 7", "    cuda.threadfence()", "    cuda.atomic.exch(lock, 0, 1)", "else:",
                    "    while cuda.atomic.add(lock, 0, 0) == 0: pass", "    cuda.threadfence()", "    out[i] = a[0]",
                ],
                [LOCKED.format("if i == 0: a[0] = 7\nelse: out[i] = a[0]")],
                ["if i == 0: cuda.atomic.exch(a, 0, 7)", "else: out[i] = cuda.atomic.add(a, 0, 0)"],
                ["if n == 1:", "    if i == 0: a[0] = 7", "elif i: out[i] = a[0]",
                 "host: kernel[8, 1](a, out, lock, 1)", "host: kernel[8, 1](a, out, lock, 2)"],
                ["if i == 0: a[0] = 7", "cuda.cg.this_grid().sync()", "if i: out[i] = a[0]"],
            ],
        ),
    ],
    "grid": [
        (
            (4, 16),
            ["g = cuda.cg.this_grid()", "out[i] = i", "g.sync()", "a[i] = out[63 - i]", "out[i] = 1"],
            [["g = cuda.cg.this_grid()", "out[i] = i", "g.sync()", "a[i] = out[63 - i]", "g.sync()", "out[i] = 1"]],
        ),
    ],
    "streams": [
        (
            None,
            ["a[i] = n", "host: kernel[1, 64, s](a, out, lock, 1)", "host: kernel[1, 64, t](a, out, lock, 2)"],
            [
                ["a[i] = n", "host: kernel[1, 64, s](a, out, lock, 1)", "host: e.record(s)", "host: e.wait(t)",
                 "host: kernel[1, 64, t](a, out, lock, 2)"],
                ["a[i] = n", "host: kernel[1, 64, s](a, out, lock, 1)", "host: s.synchronize()",
                 "host: kernel[1, 64, t](a, out, lock, 2)"],
            ],
        ),
    ],
    "host later": [
        (
            None,
            ["a[i] = n", *ON_TWO_STREAMS, "host: m[3] + 1"],
            [
                ["a[i] = n", *ON_TWO_STREAMS, "host: cuda.synchronize()", "host: m[3] + 1"],
                ["a[i] = n", *ON_TWO_STREAMS, "host: s.synchronize()", "host: m[3] + 1"],
            ],
        ),
    ],
    "host first": [
        (
            None,
            ["a[i] = n", "host: kernel[1, 64, s](m, out, lock, 1)", "host: m[3] = 2"],
            [["a[i] = n", "host: kernel[1, 64, s](m, out, lock, 1)", "host: cuda.synchronize()", "host: m[3] = 2"]],
        ),
    ],
    "early": [
        (
            (1, 64),
            ["t = cuda.shared.array(64, np.int32)", "t[i] = i", "a[i] = t[63 - i]"],
            [["t = cuda.shared.array(64, np.int32)", "t[i] = i", "cuda.syncthreads()", "a[i] = t[63 - i]"]],
        ),
    ],
    "early in another block": [
        (
            None,
            ["if n % 2: out[i] = i", "if n // 2: a[i] = out[63 - i]", "host: kernel[64, 1](a, fresh, lock, 3)"],
            [["if n % 2: out[i] = i", "if n // 2: a[i] = out[63 - i]", "host: kernel[64, 1](a, fresh, lock, 1)",
              "host: kernel[64, 1](a, fresh, lock, 2)"]],
        ),
    ],
    "collective": [
        (
            (1, 32),
            ["if i < 16: a[i] = cuda.shfl_sync(0xFFFFFFFF, i, 3)", "else: cuda.syncwarp()"],
            [["x = cuda.shfl_sync(0xFFFFFFFF, i, 3)", "if i < 16: a[i] = x", "cuda.syncwarp()"]],
        ),
    ],
    "barrier": [
        (
            (1, 32),
            ["if i < 16: cuda.syncthreads()", "else:", "    a[0] = 1", "    cuda.syncthreads()"],
            [["if i == 16: a[0] = 1", "cuda.syncthreads()"]],
        ),
    ],
}  # fmt: skip

HEAD = "@cuda.jit\ndef kernel(a, out, lock, n):\n    i = cuda.grid(1)\n"
SURE = {"block": 3, "early": 1, "changed": 5, "changed by two blocks": 2}  # programs whose report says what to write


def run(cuda, size, lines):
    code = [text for one in lines if not one.startswith("host: ") for text in one.splitlines()]
    host = [one.removeprefix("host: ") for one in lines if one.startswith("host: ")]
    names = {
        "cuda": cuda, "np": np, "s": cuda.stream(), "t": cuda.stream(), "e": cuda.event(),
        "m": cuda.managed_array(64, np.int32), "fresh": cuda.device_array(64, np.int32),
        **{name: cuda.to_device(np.zeros(64, np.int32)) for name in ("a", "out", "lock")},
    }  # fmt: skip
    names["m"][:] = 0
    body = "".join(f"    {text}\n" for text in code)
    exec_with_source(f"{HEAD}{body}", names)
    exec_with_source("\n".join(host or [f"kernel[{size[0]}, {size[1]}](a, out, lock, 1)"]), names)
    cuda.synchronize()


@pytest.mark.parametrize("advice", ADVICE)
@pytest.mark.usefixtures("checked")
def test_a_program_that_does_what_its_report_says_runs_clean(cuda, advice):
    words = re.escape(ADVICE[advice]).replace(r"\{\}", r"(\w+)")
    for size, broken, repaired in TABLE[advice]:
        with pytest.raises(EmulatorError, match=words) as caught:
            run(cuda, size, broken)
        named = re.search(words, str(caught.value))
        if named.groups():
            assert f"cuda.atomic.{named[1]}(" in repaired[0][-1], caught.value
        for lines in repaired:
            for seed in range(3):
                with nbep.numba_cuda.options(memory_model="checked", seed=seed):
                    run(cuda, size, lines)


@pytest.mark.parametrize("advice", SURE)
@pytest.mark.usefixtures("checked")
def test_the_line_that_a_report_says_makes_the_program_clean_where_it_says(cuda, advice):
    """To the letter: the barrier goes behind the line, as far in as that, or out of the `if`."""
    told = 0
    for size, broken, _ in TABLE[advice]:
        lines = [text for one in broken for text in one.splitlines()]
        for _ in range(4):
            try:
                run(cuda, size, lines)
                break
            except EmulatorError as error:
                sure = re.search(r"  write (.*\)) (after|in place of) lines? ([\d, and]+)(.*)", str(error))
                if sure is None:
                    break
                call, how, numbers, more = sure.groups()
                places = [int(one) - len(HEAD.splitlines()) - 1 for one in re.findall(r"\d+", numbers)]
                told += lines == [text for one in broken for text in one.splitlines()]
                own = lines[places[-1]]
                call = " " * (len(own) - len(own.lstrip()) - 4 * ("outside" in more)) + call
                lines.insert(places[-1] + 1, call)
                lines = [text for i, text in enumerate(lines) if how == "after" or i not in places]
        else:
            pytest.fail(f"it is never clean: {lines}")
    assert told == SURE[advice], "so many reports say what to write"
