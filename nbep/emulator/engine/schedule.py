"""Who runs next: the loop of `schedule.scheduler`, compiled. A thread that gives way looks for the next one itself.

 thread --step, park--> advance --> next thread
                           |
                           +------> the hub, with `run.event`: what Python has to do before the run goes on

The generator of random numbers is Python's, so a seed makes the same choices: Python draws from it, too. Source:
Matsumoto, Nishimura, "Mersenne Twister", ACM TOMACS 1998, and CPython's random.Random
"""

from __future__ import annotations

from numba import types
from numba.extending import register_jitable

from . import state
from .state import AFTER, HOST, NUM_QUANTA, OPERATION, OVERFLOWED, PICK, RAISED, STOPPED, TICK, TICK_STEPS
from .switch import FAULT_ADDRESS, GUARD_BYTES, MOST_STACKS, STACK_PITCH
from .words import (
    I32,
    I64,
    address,
    call,
    call_kernel,
    compiled,
    declared,
    emitting,
    get_s32,
    get_s64,
    is_delayed,
    linked,
    low_u32,
    pointer,
    put_s32,
    rows,
    run,
    switch_stacks,
)

threads, launches = rows("threads"), rows("launches")
each_waiting = linked("threads")
runnable_at, slow_at, hosts_at = address("runnable"), address("slow"), address("hosts")
quanta_at, generator_at, operations_at = address("quanta"), address("generator"), address("operations")
threads_at = address("threads")  # whose first field is the stack pointer
copy, leave, come = declared("copy", None, int), declared("leave", None), declared("come", int, int)
HUB = 0


# --- random numbers ----------------------------------------------------------------------------------------------


@compiled
def refill(begin: int) -> None:
    """Make the next 624 words of the generator that begins there."""
    for i in range(624):
        upper, lower = get_s32(generator_at(begin + i)), get_s32(generator_at(begin + (i + 1) % 624))
        y = (upper & 0x80000000) | (lower & 0x7FFFFFFF)
        word = low_u32(get_s32(generator_at(begin + (i + 397) % 624))) ^ (y >> 1)
        put_s32(generator_at(begin + i), word ^ 0x9908B0DF if y & 1 else word)


@compiled
def random_word(early: int) -> int:
    """32 random bits. early: of `Run.early`, not of the scheduler's generator"""
    begin = early * state.GENERATOR_WORDS
    place = generator_at(begin + 624)
    at = get_s32(place)
    if at >= 624:
        refill(begin)
        at = 0
    put_s32(place, at + 1)
    y = low_u32(get_s32(generator_at(begin + at)))
    y ^= y >> 11
    y ^= (y << 7) & 0x9D2C5680
    y ^= (y << 15) & 0xEFC60000
    return y ^ (y >> 18)


@compiled
def uniform(early: int) -> float:
    """As random.random()."""
    a = random_word(early) >> 5
    return (a * 67108864.0 + (random_word(early) >> 6)) / 9007199254740992.0


@emitting(types.int64, types.float64)
def whole(builder, x):
    """Rounded towards 0."""
    return builder.fptosi(x, I64)


@register_jitable
def lanes_of(mask):
    for i in range(32):
        if (mask >> i) & 1:
            yield i


# --- the loop ----------------------------------------------------------------------------------------------------


@register_jitable
def make_runnable(thread):
    r = run(0)
    put_s32(runnable_at(r.num_runnable), thread)
    r.num_runnable += 1


@register_jitable
def is_reluctant(who):
    return get_s32(hosts_at(-who - 1)) != 0 if who < 0 else threads(who).is_slow != 0


@compiled
def advance() -> int:
    """Choose who goes on, a thread; or the hub, and say why."""
    r = run(0)
    if r.event != 0:
        return HUB
    if r.stage == AFTER:
        r.calls += r.granted - r.left
        r.granted = 0
        r.steps += 1
        r.stage = PICK
        if r.num_operations > 0 and uniform(0) < r.operation_rate:
            operate()
            if r.event != 0:
                return HUB
    while r.tick_left > 0 and r.num_runnable + r.num_slow > 0:
        quantum = get_s64(quanta_at(r.tick_at))
        r.tick_at += 1
        r.tick_left -= 1
        draw = uniform(0) * (r.num_runnable + r.num_slow * r.willing)
        if draw < r.num_runnable:
            place = runnable_at(whole(draw))
            who = get_s32(place)
            r.num_runnable -= 1
            put_s32(place, get_s32(runnable_at(r.num_runnable)))
            if is_reluctant(who):
                put_s32(slow_at(r.num_slow), who)
                r.num_slow += 1
                continue
        else:
            place = slow_at(min(whole((draw - r.num_runnable) / r.willing), r.num_slow - 1))
            who = get_s32(place)
            r.num_slow -= 1
            put_s32(place, get_s32(slow_at(r.num_slow)))
        r.granted = r.left = quantum
        r.current = who
        r.stage = AFTER
        if who < 0:
            r.event = HOST
            return HUB
        return who
    r.event = TICK
    return HUB


@compiled
def park() -> None:
    """Let others run until somebody makes this thread runnable."""
    this = run(0).current
    new = advance()
    if new != this:
        switch_stacks(threads_at(this), get_s64(threads_at(new)))


@compiled
def pause() -> None:
    """Let another thread go first."""
    make_runnable(run(0).current)
    park()


@register_jitable
def step():
    """One primitive call: maybe others go first."""
    r = run(0)
    r.left -= 1
    if r.left < 0:
        pause()


@compiled
def turn() -> None:
    """A loop of a plain kernel begins another turn. Those that look at one address again and again may never end."""
    t = threads(run(0).current)
    t.spins = t.spins + 1 if t.looks else 0
    t.looks = 0
    run(0).turns += 1
    step()


@compiled
def proceed(begins: int) -> int:
    """The hub: run until Python has something to do, an event. begins: a batch of steps, whose quanta are drawn"""
    r = run(0)
    if begins:
        r.tick_left = TICK_STEPS
        r.tick_at = NUM_QUANTA
        while r.tick_at >= NUM_QUANTA - TICK_STEPS:  # as random.randrange
            r.tick_at = random_word(0) >> 20
    r.event = 0
    if is_delayed() and r.resumes:
        r.resumes = 0
        new = r.current
    else:
        new = advance()
    if new != HUB:
        switch_stacks(threads_at(HUB), get_s64(threads_at(new)))
    return r.event


@compiled
def operate() -> None:
    """Let one operation under way happen; Python lets its own happen. A store that has arrived before is none."""
    r = run(0)
    while r.num_operations > 0:
        last = r.num_operations - 1
        place = operations_at(whole(uniform(0) * r.num_operations))
        what = get_s32(place)
        put_s32(place, get_s32(operations_at(last)))
        r.num_operations = last
        if what < 0:
            r.event = OPERATION
            r.event_arg = what
            return
        if not is_delayed():
            copy(what)
            return
        if come(what) == 0:
            return


@compiled
def stop(reason: int, where: int, thread: int) -> None:
    """Let the hub stop the run: no thread goes on."""
    r = run(0)
    r.fault = reason
    r.fault_address = where
    r.fault_thread = thread
    r.event = STOPPED


@compiled
def fault(reason: int, where: int) -> None:
    """The running thread stops the run, here."""
    r = run(0)
    stop(reason, where, r.current)
    switch_stacks(threads_at(r.current), get_s64(threads_at(HUB)))


@compiled
def on_fault(number: int, info: int, context: int) -> None:
    """A signal: the overflow of a stack stops the run. Other faults go to `old_action`, when the access is repeated."""
    r = run(0)
    where = get_s64(info + FAULT_ADDRESS)
    thread = (where - r.stacks) // STACK_PITCH
    if r.stage == AFTER and 0 <= thread < MOST_STACKS and (where - r.stacks) % STACK_PITCH < GUARD_BYTES:
        stop(OVERFLOWED, where, thread)
        switch_stacks(threads_at(r.current), get_s64(threads_at(HUB)))
    take_back_signal(number, r.old_action)


@emitting(types.none, types.int64, types.int64)
def take_back_signal(builder, number, action):
    call(builder, "sigaction", I32, [builder.trunc(number, I32), pointer(builder, action), pointer(builder, I64(0))])


@compiled
def live() -> None:
    """A thread's life."""
    if call_kernel(launches(threads(run(0).current).launch).entry) != 0:
        fault(RAISED, 0)
    leave()
