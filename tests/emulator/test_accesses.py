"""What loads, stores and atomics mean, over all kinds, and how NumPy arrays are mapped."""

import ml_dtypes
import numpy as np
import pytest

from nbep.emulator import World, current_thread


def on_device(kernel, nbytes=64):
    """Run `kernel(thread, address)` on zeroed memory; returns the memory as bytes and what the kernel returned."""
    world = World(1)
    memory = world.ranks[0].space.allocate(nbytes, "memory", zero=True)
    results = []
    stream = world.ranks[0].create_stream("main")
    stream.launch(lambda a: results.append(kernel(current_thread(), a)), (memory.address,), 1, 1)
    stream.synchronize()
    return memory.array(np.uint8), results[0]


@pytest.mark.parametrize(
    ("kind", "value", "loaded"),
    [
        ("u8", 0x1FF, 0xFF),
        ("s8", 200, -56),
        ("u16", -1, 0xFFFF),
        ("s32", 2**31, -(2**31)),
        ("s32", -(2**31) - 1, 2**31 - 1),
        ("u32", -2, 2**32 - 2),
        ("s64", 2**63 + 5, -(2**63) + 5),
        ("u64", -1, 2**64 - 1),
        ("v2", (2**32 + 1, -1), (1, 2**32 - 1)),
        ("v4", (-1, 2**32, 7, 2**33 + 9), (2**32 - 1, 0, 7, 9)),
    ],
)
@pytest.mark.parametrize("memory_model", ["sc", "delayed"])
def test_integers_wrap_on_store(kind, value, loaded, memory_model):
    world = World(1, memory_model=memory_model)
    memory = world.ranks[0].space.allocate(64, "memory", zero=True)
    seen = []

    def kernel(a):
        t = current_thread()
        t.store(a + 16, kind, value, "weak", "gpu")
        seen.append(t.load(a + 16, kind, "weak", "gpu"))
        if kind not in ("v2", "v4"):
            t.atomic("exch", a + 32, kind, value, "relaxed", "gpu")
            seen.append(t.load(a + 32, kind, "weak", "gpu"))
        t.store_shared(16, kind, value, "weak")
        seen.append(t.load_shared(16, kind, "weak"))

    stream = world.ranks[0].create_stream("main")
    stream.launch(kernel, (memory.address,), 1, 1, smem_bytes=64)
    stream.synchronize()
    assert set(seen) == {loaded}


def test_128_bit_access_moves_four_words_in_order():
    def kernel(t, a):
        t.store(a + 16, "v4", (0x03020100, 0x07060504, 0x0B0A0908, 0x0F0E0D0C), "weak", "gpu")
        return t.load(a + 16, "v4", "nc", "gpu"), t.load(a + 24, "v2", "nc", "gpu"), t.load(a + 28, "u16", "nc", "gpu")

    memory, (v4, v2, u16) = on_device(kernel)
    np.testing.assert_array_equal(memory[16:32], np.arange(16))
    assert v4 == (0x03020100, 0x07060504, 0x0B0A0908, 0x0F0E0D0C)
    assert v2 == v4[2:]
    assert u16 == 0x0D0C


def test_f32_is_numpys():
    def kernel(t, a):
        t.store(a, "f32", np.float32(0.1), "weak", "gpu")
        t.store(a + 4, "f32", 1e300, "weak", "gpu")
        return t.load(a, "f32", "weak", "gpu"), t.load(a + 4, "f32", "weak", "gpu"), t.load(a, "u32", "weak", "gpu")

    _, (value, huge, bits) = on_device(kernel)
    assert isinstance(value, np.float32)
    assert value == np.float32(0.1)
    assert np.isinf(huge)
    assert bits == int(np.float32(0.1).view(np.uint32))


@pytest.mark.parametrize(
    ("op", "old", "operand", "new"),
    [
        ("add", 5, 3, 8),
        ("add", 2**31 - 1, 1, -(2**31)),
        ("exch", 5, 9, 9),
        ("max", -5, 3, 3),
        ("min", -5, 3, -5),
        ("or", 0b101, 0b011, 0b111),
        ("and", 0b101, 0b011, 0b001),
    ],
)
def test_atomics_return_the_old_value(op, old, operand, new):
    def kernel(t, a):
        t.store(a, "s32", old, "weak", "gpu")
        t.store_shared(0, "s32", old, "weak")
        returned = t.atomic(op, a, "s32", operand, "relaxed", "sys"), t.atomic_shared(op, 0, "s32", operand, "relaxed")
        return returned, (t.load(a, "s32", "weak", "gpu"), t.load_shared(0, "s32", "weak"))

    world = World(1)
    memory = world.ranks[0].space.allocate(64, "memory", zero=True)
    results = []
    stream = world.ranks[0].create_stream("main")
    stream.launch(lambda a: results.append(kernel(current_thread(), a)), (memory.address,), 1, 1, smem_bytes=16)
    stream.synchronize()
    assert results == [((old, old), (new, new))]


def copy_2d(src, dst, rows, cols, src_strides, dst_strides):
    """Byte by byte, with the strides of both sides."""
    t = current_thread()
    for r in range(rows):
        for c in range(cols):
            value = t.load(src + r * src_strides[0] + c * src_strides[1], "u8", "nc", "gpu")
            t.store(dst + r * dst_strides[0] + c * dst_strides[1], "u8", value, "weak", "gpu")


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a[2:7, 3:9],
        lambda a: a[::-1],
        lambda a: a[:, ::-2],
        lambda a: a.T,
        lambda a: a[3:3],
        lambda a: np.broadcast_to(a[0], (4, 12)),
    ],
)
def test_views_are_mapped_at_their_element_zero(view):
    source = view(np.arange(120, dtype=np.uint8).reshape(10, 12))
    target = np.zeros(source.shape, np.uint8)
    world = World(1)
    space, stream = world.ranks[0].space, world.ranks[0].create_stream("main")
    addresses = space.map_array(source, "source", False).address, space.map_array(target, "target", True).address
    stream.launch(copy_2d, (*addresses, *source.shape, source.strides, target.strides), 1, 1)
    stream.synchronize()
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.bool_, np.float64, np.int64])
def test_any_dtype_maps_as_bytes(launch, dtype):
    x = np.array([0, 1, 1, 0, 1, 0, 0, 1]).astype(dtype)
    y = np.zeros_like(x)
    launch(copy_2d, x, y, 1, x.nbytes, (0, 1), (0, 1))
    np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def test_empty_arrays_have_addresses():
    space = World(1).ranks[0].space
    for shape in [(0,), (0, 7), (7, 0)]:
        assert space.map_array(np.empty(shape, np.float32), "empty", True).address > 0


def test_mapping_the_same_array_twice_is_one_mapping_until_both_are_undone():
    space = World(1).ranks[0].space
    x = np.zeros(4, np.int32)
    first, second = space.map_array(x, "x", True), space.map_array(x, "x", True)
    assert first.address == second.address
    space.unmap(first)
    assert second.number in space.segments
    space.unmap(second)
    assert second.number not in space.segments


def test_array_over_an_allocation_has_the_allocations_address():
    space = World(1).ranks[0].space
    buffer = space.allocate(256, "buffer", zero=True)
    view = buffer.array(np.float32, 64, 8)[2:]
    assert space.map_array(view, "view", True).address == buffer.address + 72
