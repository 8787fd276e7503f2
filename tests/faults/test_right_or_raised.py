"""Whatever goes wrong once, each call of each verb gives the right result or raises. And on a GPU, where the caller's
stream goes on before the host can raise, what a failed call leaves behind is right or NaN.
"""

import random

import pytest
from in_trouble import MODES, NIC_LOSES, run
from parts import both_parts
from troubles import DEAD, EXPIRED, LOST, Trouble

pytestmark = pytest.mark.emulator_only("what goes wrong is planted in the emulator")


def can_be(name: str, kind: str) -> bool:
    """Only a NIC loses entries; and where all goes through one, nothing else is lost."""
    if kind == NIC_LOSES:
        return "ibgda" in name
    return kind != LOST or name != "low latency over ibgda"


CASES = [(name, kind) for name in MODES for kind in (LOST, EXPIRED, DEAD, NIC_LOSES) if can_be(name, kind)]


@pytest.mark.parametrize(
    ("name", "kind", "num_troubles"),
    both_parts(
        [(*case, 1) for case in CASES[::4]],
        thorough=[(*case, 2) for case in CASES],
        long=[(*case, 100) for case in CASES],
    ),
)
def test_each_call_gives_the_right_result_or_raises(name, kind, num_troubles):
    mode, rng = MODES[name], random.Random(f"{name} {kind} {num_troubles}")
    for i in range(num_troubles):
        if i % 2 == 0:  # a schedule, whose occasions are counted, serves two troubles
            rank, seed = rng.randrange(mode.num_ranks), rng.getrandbits(16)
            num_occasions = {DEAD: 3, NIC_LOSES: 64}.get(kind) or len(run(mode, Trouble(kind, rank, -1), seed)[1])
        if num_occasions == 0:  # this rank waits for no other under this schedule
            continue
        trouble = Trouble(kind, rank, rng.randrange(num_occasions))
        wrong, _ = run(mode, trouble, seed)
        assert not wrong, f"{name}, {trouble}, seed {seed}: {wrong}"
