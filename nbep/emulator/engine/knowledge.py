"""What threads and hosts know of each other, for `checked`: `models.knowledge` and parts of `models.signals`, compiled.

A vector has a number for each clock: of the latest signal that is known. Clocks are those of hosts, streams, warps and
the copy engines of warps. A warp's is given to another one when its launch is over; what was done before that is known
by the clock of its stream alone. Vectors and what consists of them are shared, and counted: 0 is nothing.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import register_jitable

from .schedule import run, stop
from .state import FULL_TABLE, MOST_CLOCKS
from .words import (
    I32,
    I64,
    address,
    compiled,
    copy_bytes,
    emitting,
    free_list,
    get_s32,
    linked,
    pointer,
    put_s32,
    rows,
    unused,
)

owners, epochs, minds = rows("owners"), rows("epochs"), rows("minds")
vectors, knowledge = rows("vectors"), rows("knowledge")
numbers_at, clocks_at, lanes_known_at = address("numbers"), address("clocks"), address("lanes_known")

parts_at = address("knowledge")  # whose first fields are its vectors
take_vector, give_vector = free_list("vectors")
take_knowledge, give_knowledge = free_list("knowledge")
unused_epoch = unused("epochs")
each_unfenced_shared, each_unfenced_global = linked("epochs", "then_shared"), linked("epochs", "then_global")

OF_COPY = 64  # beside the lane of an epoch
PART = 16  # numbers at once
# Where vectors are in a row of knowledge; those of stores come first.
ENGINE, LOADS, SHARED, READ, END = 4, 8, 12, 16, 20


# --- vectors -----------------------------------------------------------------------------------------------------


@emitting(types.int64, types.int64, types.int64)
def compare_part(builder, a, b):
    """Of two parts of vectors: 1 if some number of a is larger, and 2 if some of b is."""
    kind = ir.VectorType(I32, PART)
    va, vb = (builder.load(pointer(builder, x, kind), align=4) for x in (a, b))
    found = [builder.bitcast(builder.icmp_signed(">", *pair), ir.IntType(PART)) for pair in ((va, vb), (vb, va))]
    one, two = (builder.zext(builder.icmp_unsigned("!=", x, ir.IntType(PART)(0)), I64) for x in found)
    return builder.or_(one, builder.shl(two, I64(1)))


@emitting(types.none, types.int64, types.int64)
def join_part(builder, target, b):
    kind = ir.VectorType(I32, PART)
    va, vb = (builder.load(pointer(builder, x, kind), align=4) for x in (target, b))
    larger = builder.select(builder.icmp_signed(">", va, vb), va, vb)
    builder.store(larger, pointer(builder, target, kind), align=4)


@register_jitable
def vector_at(v):
    return numbers_at(v * MOST_CLOCKS)


@register_jitable
def width():
    """Bytes of a vector that may not be 0."""
    return (run(0).num_clocks * 4 + 63) & ~63


@register_jitable
def number_of(v, slot):
    return get_s32(vector_at(v) + 4 * slot)


@register_jitable
def keep_vector(v):
    if v != 0:
        vectors(v).uses += 1
    return v


@compiled
def drop_vector(v: int) -> None:
    if v != 0:
        vectors(v).uses -= 1
        if vectors(v).uses == 0:
            give_vector(v)


@compiled
def copy_vector(v: int) -> int:
    new = take_vector()
    vectors(new).uses = 1
    copy_bytes(vector_at(new), vector_at(v), width())
    return new


@compiled
def later(a: int, b: int) -> int:
    """The larger number of each clock; one of the two if the other adds nothing."""
    if a == b or b == 0:
        return keep_vector(a)
    if a == 0:
        return keep_vector(b)
    found, end = 0, width()
    for i in range(0, end, 4 * PART):
        found |= compare_part(vector_at(a) + i, vector_at(b) + i)
        if found == 3:
            new = copy_vector(a)
            for j in range(0, end, 4 * PART):
                join_part(vector_at(new) + j, vector_at(b) + j)
            return new
    return keep_vector(b if found == 2 else a)


@compiled
def with_number(v: int, slot: int, number: int) -> int:
    if number_of(v, slot) >= number:
        return keep_vector(v)
    new = copy_vector(v)
    put_s32(vector_at(new) + 4 * slot, number)
    return new


# --- what somebody knows -----------------------------------------------------------------------------------------


@compiled
def new_knowledge(stores: int, engine: int, loads: int, shared: int, read: int) -> int:
    """It takes over these uses of the vectors."""
    k = take_knowledge()
    here = knowledge(k)
    here.stores, here.engine, here.loads, here.shared, here.read, here.uses = stores, engine, loads, shared, read, 1
    return k


@register_jitable
def keep(k):
    if k != 0:
        knowledge(k).uses += 1
    return k


@compiled
def same(k: int) -> int:
    """What is known, to be changed: a row of its own."""
    new = take_knowledge()
    for part in range(0, END, 4):
        put_s32(parts_at(new) + part, keep_vector(get_s32(parts_at(k) + part)))
    knowledge(new).uses = 1
    return new


@register_jitable
def put_vector(place, v):
    """Put a vector in the place of another; takes over its use."""
    drop_vector(get_s32(place))
    put_s32(place, v)


@register_jitable
def put_knowledge(place, k):
    """The same of what is known."""
    drop(get_s32(place))
    put_s32(place, k)


@compiled
def drop(k: int) -> None:
    if k != 0:
        here = knowledge(k)
        here.uses -= 1
        if here.uses == 0:
            for part in range(parts_at(k), parts_at(k) + END, 4):
                drop_vector(get_s32(part))
            give_knowledge(k)


@compiled
def join(a: int, b: int) -> int:
    """What two know together; one of them if the other adds nothing."""
    if a == b or b == 0:
        return keep(a)
    if a == 0:
        return keep(b)
    new, is_a, is_b = take_knowledge(), True, True
    knowledge(new).uses = 1
    for part in range(0, END, 4):
        x, y = get_s32(parts_at(a) + part), get_s32(parts_at(b) + part)
        both = later(x, y)
        put_s32(parts_at(new) + part, both)
        is_a, is_b = is_a and both == x, is_b and both == y
    if is_a or is_b:
        drop(new)
        return keep(a if is_a else b)
    return new


@register_jitable
def joined(a, b):
    """The same; takes over a's use."""
    new = join(a, b)
    drop(a)
    return new


@compiled
def with_signal(k: int, slot: int, number: int) -> int:
    """The same, and a signal of a clock, which the copy engine does not know."""
    x = knowledge(k)
    stores, loads = with_number(x.stores, slot, number), with_number(x.loads, slot, number)
    return new_knowledge(stores, keep_vector(x.engine), loads, keep_vector(x.shared), keep_vector(x.read))


@register_jitable
def said_by_others(k):
    """The same for a thread of another block: a proxy fence there says nothing to its copy engine."""
    x = knowledge(k)
    return new_knowledge(keep_vector(x.stores), 0, keep_vector(x.loads), 0, 0)


@register_jitable
def know(who, k):
    """From now on somebody knows this; takes over its use."""
    m = minds(who)
    drop(m.known)
    m.known = k


# --- epochs ------------------------------------------------------------------------------------------------------


@compiled
def new_epoch(owner: int, lane: int) -> int:
    e = unused_epoch()
    epochs(e).owner, epochs(e).lane = owner, lane
    return e


@register_jitable
def chained(who):
    m = minds(who)
    e = new_epoch(m.owner, m.lane)
    epochs(e).then_shared, epochs(e).then_global = m.unfenced_shared, m.unfenced_global
    m.unfenced_shared = m.unfenced_global = e
    return e


@compiled
def loading(who: int) -> int:
    """Of its loads that no signal tells of yet."""
    m = minds(who)
    if m.loading == 0:
        m.loading = chained(who)
    return m.loading


@compiled
def storing(who: int) -> int:
    """Of its stores that no release tells of yet."""
    m = minds(who)
    if m.storing == 0:
        m.storing = chained(who)
    return m.storing


@compiled
def signal(who: int, releases: int) -> int:
    """Number the loads since the last signal, and the stores since the last release; the number."""
    r = run(0)
    m = minds(who)
    r.signals += 1
    if r.signals >= 1 << 30:
        stop(FULL_TABLE, 0, r.current)
    if m.loading != 0:
        epochs(m.loading).number = r.signals
        m.loading = 0
    if releases and m.storing != 0:
        epochs(m.storing).number = r.signals
        m.storing = 0
    return r.signals


@register_jitable
def resolve(epoch):
    e = epoch
    while epochs(e).same != 0:
        e = epochs(e).same
    return e


@register_jitable
def slot_of(who):
    return owners(minds(who).owner).slot


@register_jitable
def is_told(v, owner, number):
    """Whether a vector says so much of an owner's signals."""
    o = owners(owner)
    if get_s32(clocks_at(o.slot)) == owner and number <= number_of(v, o.slot):
        return True
    return number <= number_of(v, o.stream)


@register_jitable
def has_met(who, owner, lane, number):
    """Whether a thread knows of a signal because it has met a thread of its own warp."""
    m = minds(who)
    if owner != m.owner:
        return False
    return number <= m.warp_known or (m.has_lanes != 0 and number <= get_s32(lanes_known_at(who * 32 + (lane & 31))))


@compiled
def knows(who: int, epoch: int, is_load: int) -> int:
    """Whether somebody can know of what was done in an epoch."""
    here = epochs(resolve(epoch))
    m = minds(who)
    if here.owner == m.owner and here.lane == m.lane:
        return 1
    if here.number == 0:
        return 0
    if has_met(who, here.owner, here.lane, here.number):
        return 1
    k = knowledge(m.known)
    return is_told(k.loads if is_load else k.stores, here.owner, here.number)


@register_jitable
def distance(who, epoch):
    """The reach that an order needs between somebody and whose epoch it is."""
    a, b = owners(minds(who).owner), owners(epochs(epoch).owner)
    return 1 if a.block == b.block else 2 if a.rank == b.rank else 3


# --- what the copy engine knows ----------------------------------------------------------------------------------


@register_jitable
def known_stores(who):
    """What a thread knows, with what it knows of its warp."""
    m = minds(who)
    known = m.warp_known
    if m.has_lanes:
        for i in range(32):
            known = max(known, get_s32(lanes_known_at(who * 32 + i)))
    return with_number(knowledge(m.known).stores, slot_of(who), known)


@compiled
def fence_proxies(who: int, is_shared: int) -> None:
    """A proxy fence: what the thread has done is fenced, and so is what it knows of."""
    number = signal(who, 1)
    m = minds(who)
    k = same(m.known)
    if is_shared:
        for e in each_unfenced_shared(m.unfenced_shared):
            epochs(e).fenced_shared = number
        m.unfenced_shared = 0
        put_vector(parts_at(k) + READ, with_number(knowledge(k).loads, slot_of(who), m.warp_known))
    else:
        for e in each_unfenced_global(m.unfenced_global):
            epochs(e).fenced_global = number
        m.unfenced_global = 0
    put_vector(parts_at(k) + (SHARED if is_shared else ENGINE), known_stores(who))
    know(who, k)


@compiled
def is_fenced(who: int, epoch: int, is_load: int, is_shared: int) -> int:
    """Whether a proxy fence is between what somebody did in an epoch, which `who` knows of, and who's copy engine."""
    m = minds(who)
    here = epochs(resolve(epoch))
    if owners(here.owner).block == owners(m.owner).block:
        if epochs(epoch).lane & OF_COPY:
            return 1
        number = here.fenced_shared if is_shared else here.fenced_global
        if number != 0 and (
            (here.owner == m.owner and here.lane == m.lane)
            or has_met(who, here.owner, here.lane, number)
            or is_told(knowledge(m.known).stores, here.owner, number)
        ):
            return 1
    if here.number == 0:
        return 0
    k = knowledge(m.known)
    return is_told(k.read if is_load else k.shared if is_shared else k.engine, here.owner, here.number)
