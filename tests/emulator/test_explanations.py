"""What explains an error never replaces it: the error keeps its seed, and a failed explanation is a note."""

import pytest

from nbep.emulator import DataRace, DeadlockError, Uninitialized, World, current_thread, world
from nbep.emulator.reports import deadlock, race

NEVER = 1 << 62


def run(kernel, seed=0, memory_model="sc", smem_bytes=0, **options):
    world = World(1, seed, memory_model=memory_model, **options)
    space, stream = world.ranks[0].space, world.ranks[0].create_stream("stream")
    data = space.allocate(256, "data")
    flag = space.allocate(4, "flag", zero=True)
    stream.launch(kernel, (data.address, flag.address), 2, 1, smem_bytes)
    stream.synchronize()


def copies_nothing(data, flag):
    """Starts to copy bytes that were never written, and loads others before the copy has come to them."""
    t = current_thread()
    t.mbarrier_init(0, 1)
    t.bulk_load(16, data, 16, 0)
    t.load(data + 128, "s32", "weak", "gpu")


@pytest.mark.parametrize("seed", [0, 1, 3])  # in which the load comes first
def test_an_error_of_a_copy_under_way_does_not_replace_the_one_that_is_explained(seed):
    with pytest.raises(Uninitialized, match="byte 128") as caught:
        run(copies_nothing, seed, smem_bytes=64)
    assert caught.value.__notes__ == [f"seed {seed} replays this run"]


def loads_nothing(data, flag):
    current_thread().load(data, "s32", "weak", "gpu")


def races(data, flag):
    t = current_thread()
    t.store(data, "s32", t.block_idx, "weak", "gpu")


def hangs(data, flag):
    t = current_thread()
    while t.load(flag, "s32", "acquire", "gpu") == 0:
        t.spin(NEVER)


@pytest.mark.parametrize(
    ("kernel", "kind", "module", "function"),
    [
        (loads_nothing, Uninitialized, world, "tell_who_writes"),
        (races, DataRace, race, "find_causes"),
        (hangs, DeadlockError, deadlock, "ask"),
        (hangs, DeadlockError, deadlock, "paragraph"),
    ],
)
def test_an_explanation_that_fails_is_a_note_of_the_error(kernel, kind, module, function, monkeypatch):
    def fail(*_):
        raise KeyError("planted")

    monkeypatch.setattr(module, function, fail)
    with pytest.raises(kind) as caught:
        run(kernel, 3, memory_model="checked")
    failed, seed = sorted(caught.value.__notes__)
    assert seed == "seed 3 replays this run"
    assert failed == "its explanation is missing, for that failed: KeyError: 'planted'"


def test_a_callback_that_fails_does_not_replace_the_error():
    def fail(error):
        raise KeyError("planted")

    with pytest.raises(Uninitialized) as caught:
        run(loads_nothing, 3, on_failure=fail)
    assert "KeyError: 'planted'" in " ".join(caught.value.__notes__)
