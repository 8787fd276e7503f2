"""Each check of an access, for loads, stores, atomics and copies, in each memory model, at the last bytes allowed.

An access at the first and the last permitted place is made, and each one beside it is an error.
"""

import numpy as np
import pytest

from nbep.emulator import Misaligned, OutOfBounds, Unmapped, World, current_thread
from nbep.emulator.machine.kinds import KINDS

NUM_BYTES = 64
MBARRIER = NUM_BYTES  # behind the part of shared memory that is tried
MODELS = ["sc", "delayed", "checked"]
VALUES = {"v2": (1, 2), "v4": (1, 2, 3, 4), "f32": np.float32(1)}
SIZES = ["u8", "u16", "s32", "f32", "s64", "v2", "v4"]
WITH_ATOMICS = ["s32", "s64"]


def load(order):
    return lambda t, at, kind: t.load(at, kind, order, "gpu")


def store(order):
    return lambda t, at, kind: t.store(at, kind, VALUES.get(kind, 1), order, "gpu")


def load_in_bulk(t, at, _):
    t.mbarrier_init(MBARRIER, 1)
    t.bulk_load(0, at, 16, MBARRIER)
    wait_filled(t)


def store_in_bulk(t, at, _):
    t.store_shared(0, "v4", VALUES["v4"], "weak")
    t.fence_proxy_async()
    t.bulk_store(at, 0, 16)
    t.bulk_commit_group()
    t.bulk_wait_group(0)


def fill_in_bulk(t, at, _, source):
    t.mbarrier_init(MBARRIER, 1)
    t.bulk_load(at, source, 16, MBARRIER)
    wait_filled(t)


def empty_in_bulk(t, at, _, target):
    t.bulk_store(target, at, 16)
    t.bulk_commit_group()
    t.bulk_wait_group(0)


def wait_filled(t):
    t.mbarrier_arrive_expect_tx(MBARRIER, 16)
    while not t.mbarrier_try_wait(MBARRIER, 0):
        pass


GLOBAL = {
    **{f"load, {order}": load(order) for order in ("weak", "relaxed", "acquire", "volatile")},
    "load, nc": load("nc"),
    **{f"store, {order}": store(order) for order in ("weak", "relaxed", "release")},
    "atomic": lambda t, at, kind: t.atomic("add", at, kind, 1, "acq_rel", "sys"),
    "bulk load": load_in_bulk,
    "bulk store": store_in_bulk,
}
SHARED = {
    "load, weak": lambda t, at, kind: t.load_shared(at, kind, "weak"),
    "load, acquire": lambda t, at, kind: t.load_shared(at, kind, "acquire"),
    "store, weak": lambda t, at, kind: t.store_shared(at, kind, VALUES.get(kind, 1), "weak"),
    "store, release": lambda t, at, kind: t.store_shared(at, kind, VALUES.get(kind, 1), "release"),
    "atomic": lambda t, at, kind: t.atomic_shared("add", at, kind, 1, "acq_rel"),
}
IN_SHARED = {"bulk load": fill_in_bulk, "bulk store": empty_in_bulk}


def sizes_of(name: str) -> list[str]:
    if name.startswith("bulk"):
        return ["v4"]
    return WITH_ATOMICS if name == "atomic" or not name.endswith(("weak", "nc")) else SIZES


def attempt(memory_model: str, access, at: int, kind: str, is_shared: bool, with_other: bool = False):
    world = World(1, memory_model=memory_model)
    memory = world.ranks[0].space.allocate(NUM_BYTES, "memory", zero=True)
    other = world.ranks[0].space.allocate(NUM_BYTES, "other", zero=True)

    def kernel(address):
        t = current_thread()
        if is_shared:
            for i in range(0, NUM_BYTES, 16):
                t.store_shared(i, "v4", VALUES["v4"], "weak")
            t.fence_proxy_async()
        access(t, at if is_shared else address + at, kind, *([other.address] if with_other else []))

    def host():
        stream = world.ranks[0].create_stream("main")
        # Shared memory ends behind what is tried, but where the copies need their mbarrier.
        stream.launch(kernel, (memory.address,), 1, 1, smem_bytes=NUM_BYTES + (8 if with_other or not is_shared else 0))
        stream.synchronize()

    world.run([host])


CASES = [
    (where, name, kind)
    for where, names in (("global", GLOBAL), ("shared", SHARED))
    for name in names
    for kind in sizes_of(name)
]


@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize(("where", "name", "kind"), CASES)
def test_first_and_last_places_are_allowed_and_those_beside_them_are_errors(where, name, kind, memory_model):
    is_shared, size = where == "shared", KINDS[kind].size
    access = (SHARED if is_shared else GLOBAL)[name]
    for at in (0, NUM_BYTES - size):
        attempt(memory_model, access, at, kind, is_shared)
    for at in (-size, NUM_BYTES):
        with pytest.raises((OutOfBounds, Unmapped)):
            attempt(memory_model, access, at, kind, is_shared)
    for at in (size // 2, NUM_BYTES - size // 2) if size > 1 else ():
        with pytest.raises((Misaligned, OutOfBounds)):
            attempt(memory_model, access, at, kind, is_shared)


@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize("name", IN_SHARED)
def test_copies_end_with_shared_memory(name, memory_model):
    access, last = IN_SHARED[name], NUM_BYTES - 16
    for at in (0, last):
        attempt(memory_model, access, at, "v4", True, True)
    for at, error in ((-16, OutOfBounds), (NUM_BYTES, OutOfBounds), (8, Misaligned)):
        with pytest.raises(error):
            attempt(memory_model, access, at, "v4", True, True)


@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize("goes_out", [False, True])
def test_a_kernel_ends_with_its_last_copy_though_no_thread_waits_for_it(goes_out, memory_model, launch):
    x, y = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)

    def leave(x, y):
        t = current_thread()
        t.mbarrier_init(MBARRIER, 1)
        if goes_out:
            t.store_shared(0, "v4", (0, 1, 2, 3), "weak")
            t.fence_proxy_async()
            t.bulk_store(y, 0, 16)
            t.bulk_commit_group()
            t.bulk_wait_group_read(0)
        else:
            t.bulk_load(0, x, 16, MBARRIER)
            t.mbarrier_arrive_expect_tx(MBARRIER, 16)

    for seed in range(12):
        y[:] = 0
        launch(leave, x, y, smem_bytes=NUM_BYTES + 8, seed=seed, memory_model=memory_model)
        assert not goes_out or y.tolist() == [0, 1, 2, 3]
