"""What goes wrong in compiled kernels is run again by Python, and said in its words."""

import ctypes
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from parts import both_parts

import nbep
from nbep.device import engine
from nbep.device import primitives as ptx
from nbep.device.compile import CompileError
from nbep.emulator.engine.switch import GUARD_BYTES, SAVED_BYTES, STACK_PITCH, Stacks, machine
from nbep.host import spawn as spawn_module
from nbep.lab.trace import Trace
from nbep.lang import FULL_MASK, I32, In, InOut, device_function, kernel

NEVER = 1 << 62
KINDS = (
    "nothing", "behind the end", "misaligned", "no memory", "read-only", "never written", "constant", "lanes apart",
    "left a warp", "left a barrier", "no such lane", "trap", "assert", "division", "deadlock", "no mbarrier",
    "no proxy fence", "copy behind the end", "left while copying", "polls nothing", "far behind the end",
    "remainder", "shift",
)  # fmt: skip
RAISED = "assert", "remainder", "shift"  # where Numba raises something, Python may not
ASKED = {kind: i for i, kind in enumerate(KINDS)}


@kernel(max_threads=64)
def go_wrong(memory: InOut, given: In, kind: I32):
    """Some threads of a block do one thing wrong."""
    thread = ptx.thread_idx()
    ptx.st_weak_s32(memory + 4 * thread, thread)
    ptx.syncthreads()
    if kind == 1 and thread == 40:
        ptx.st_weak_s32(memory + 4096, 1)
    elif kind == 2:
        ptx.ld_weak_s32(memory + 2 * thread)
    elif kind == 3 and thread == 3:
        ptx.ld_weak_s32(memory + (1 << 40))
    elif kind == 4:
        ptx.st_weak_s32(given, 1)
    elif kind == 5:
        ptx.ld_shared_s32(4 * thread)
    elif kind == 6:
        ptx.ld_nc_s32(memory)
        ptx.syncthreads()
        ptx.st_weak_s32(memory, 5)
    elif kind == 7:
        if thread % 32 == 7:
            ptx.syncwarp(FULL_MASK)
        else:
            ptx.syncwarp(FULL_MASK)
    elif kind == 8:
        if thread != 9:
            ptx.syncwarp(FULL_MASK)
    elif kind == 9:
        if thread < 32:
            ptx.bar_sync(2, 64)
    elif kind == 10:
        if thread < 8:
            ptx.shfl_idx_s32(0xFF, thread, 20)
    elif kind == 11 and thread == 33:
        ptx.trap()
    elif kind == 12:
        if ptx.ld_weak_s32(memory + 4 * thread) == 50:
            raise AssertionError("fifty")
    elif kind == 13:
        ptx.st_weak_s32(memory, ptx.u32_div(7, ptx.ld_weak_s32(memory)))
    elif kind == 14:
        while ptx.ld_acquire_gpu_s32(memory + 512) == 0:
            if ptx.wait_expired(NEVER):
                return
    elif kind == 15 and thread == 0:
        ptx.mbarrier_arrive_expect_tx(64, 16)
    elif kind == 16 and thread == 0:
        ptx.st_shared_s32(0, 1)
        ptx.st_shared_s32(4, 1)
        ptx.st_shared_s32(8, 1)
        ptx.st_shared_s32(12, 1)
        ptx.tma_store_1d(memory, 0, 16)
    elif kind == 17 and thread == 0:
        ptx.mbarrier_init(64, 1)
        ptx.tma_load_1d(128, memory + 4080, 32, 64)
    elif kind == 18 and thread < 2:
        ptx.tma_store_1d(memory, 256 * thread, 16)
        ptx.tma_store_commit()
    elif kind == 19 and thread == 40:
        while not ptx.wait_expired(NEVER):
            pass
    elif kind == 20:
        ptx.ld_nc_s32(memory + 512)
        ptx.st_weak_s32(memory + (1 << 30), 1)
    elif kind == 21:
        ptx.st_weak_s32(memory, 7 % (ptx.ld_weak_s32(memory + 4 * thread) - 40))
    elif kind == 22:
        ptx.st_weak_s32(memory, 7 >> (ptx.ld_weak_s32(memory + 4 * thread) - 9))


def error_of(kind, engine, seed=3, **options):
    """What a run raises, as text, with its notes."""

    def main(comm):
        stream = comm.runtime.create_stream("own")
        memory = np.zeros(1024, np.int32)
        comm.runtime.launch(stream, go_wrong, 1, 64, 1024, memory, np.zeros(4, np.int32), ASKED[kind])
        stream.synchronize()

    try:
        nbep.spawn(main, 1, "emulator", seed=seed, engine=engine, **options)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", [])
    return None


@pytest.mark.parametrize("memory_model", both_parts(["sc"], ["delayed"]))
@pytest.mark.parametrize("kind", KINDS[1:])
def test_it_is_found_and_said_as_by_python(kind, memory_model):
    interpreted = error_of(kind, "python", memory_model=memory_model)
    assert interpreted is not None
    assert error_of(kind, "compiled", memory_model=memory_model) == interpreted


def test_what_fails_nowhere_is_not_run_again():
    assert error_of("nothing", "compiled") is error_of("nothing", "python") is None


@device_function
def is_first(thread):
    if thread < 40:
        return thread == 0
    return None


@kernel(max_threads=64)
def count_the_first(memory: InOut):
    if is_first(ptx.thread_idx()):
        ptx.atom_add_relaxed_gpu_s32(memory, 1)


@device_function
def of_positive(number):
    if number > 0:
        found = number
    return found


@kernel(max_threads=64)
def find(memory: InOut):
    ptx.st_weak_s32(memory, of_positive(ptx.ld_weak_s32(memory)))


def run_on(engine, function):
    def main(comm):
        memory = np.zeros(1, np.int32)
        stream = comm.runtime.create_stream("own")
        comm.runtime.launch(stream, function, 1, 64, 0, memory)
        stream.synchronize()
        return memory.tolist()

    return nbep.spawn(main, 1, "emulator", engine=engine)


def test_no_value_is_false_as_in_python():
    """Numba raises an error for it."""
    assert run_on("compiled", count_the_first) == run_on("python", count_the_first) == [[1]]


def test_a_variable_that_may_have_no_value_is_not_compiled():
    """Not in a second try either."""
    for _ in range(2):
        with pytest.raises(CompileError, match="variable found may have no value"):
            run_on("compiled", find)
    with pytest.raises(UnboundLocalError):
        run_on("auto", find)


@pytest.mark.parametrize("memory_model", both_parts(["sc"], ["delayed"]))
def test_the_engine_finds_each_of_them_itself(monkeypatch, memory_model):
    """What Python would not find is said all the same, with the thread."""
    harmless = SimpleNamespace(num_ranks=1, run=lambda mains: [None])
    monkeypatch.setattr("nbep.host.spawn.World", lambda *_, **options: harmless)
    for kind in set(KINDS[1:]).difference(RAISED):
        name, text, _ = error_of(kind, "compiled", memory_model=memory_model)
        assert name == "EngineError", kind
        assert "run by Python, the same seed fails nowhere" in text
        assert kind == "deadlock" or "kernel `go_wrong`" in text


def test_a_listener_sees_threads_that_python_runs():
    seen = []
    error_of("trap", "compiled", on_failure=lambda error: seen.append((str(error), nbep.emulator.World.latest())))
    ((text, world),) = seen
    assert "trap" in text
    assert type(world).__name__ == "World"


def test_an_overflow_of_a_stack_names_the_thread(monkeypatch):
    """One thread has hardly any of its stack left when it begins."""
    whole = Stacks.prepare

    def prepare(self, first, count, entry):
        pointers = whole(self, first, count, entry)
        thread = (first + 26) // 32 * 32 + 5
        size, low = SAVED_BYTES[machine()][0], self.begin + thread * STACK_PITCH + GUARD_BYTES + 16
        ctypes.memmove(low, int(pointers[thread - first]), size)
        pointers[thread - first] = low
        return pointers

    monkeypatch.setattr(Stacks, "prepare", prepare)
    name, text, _ = error_of("nothing", "compiled")
    assert name == "EngineError"
    assert "warp 0, lane 5 (thread 5): a stack that overflows" in text


@kernel(max_threads=64)
def endless(memory: InOut):
    """Two warps store in turn, for ever."""
    turn = 0
    while True:
        turn += 1
        ptx.st_release_gpu_s32(memory + 4 * (ptx.thread_idx() % 2), turn)


def test_an_interrupt_ends_it_within_a_second():
    def main(comm):
        stream = comm.runtime.create_stream("own")
        comm.runtime.launch(stream, endless, 1, 64, 0, np.zeros(64, np.int32))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        stream.synchronize()

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            nbep.spawn(main, 1, "emulator", engine="compiled")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_wait_of_the_host_that_times_out_is_waited_for_by_python():
    """Also where its code would catch anything."""
    worlds = []

    def main(comm):
        worlds.append(type(comm.runtime.world).__name__)
        try:
            return comm.runtime.wait_until(lambda: False, lambda: "what never comes", 1000)
        except BaseException:
            return "caught"

    assert nbep.spawn(main, 1, "emulator", engine="compiled", on_deadlock="expire") == [False]
    assert worlds == ["CompiledWorld", "World"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "few_preemptions"}, "strategy 'few_preemptions' is interpreted"),
        ({"tracer": Trace()}, "a tracer sees threads that Python runs"),
    ],
)
def test_what_is_not_compiled_is_refused_with_a_sentence(options, said):
    with pytest.raises(ValueError, match=said):
        nbep.spawn(lambda comm: 0, 1, "emulator", engine="compiled", **options)
    assert nbep.spawn(lambda comm: 0, 1, "emulator", engine="auto", **options) == [0]


def test_the_environment_chooses_where_no_argument_does(monkeypatch):
    def kind(comm):
        return type(comm.runtime.world).__name__

    monkeypatch.setenv("NBEP_ENGINE", "compiled")
    assert nbep.spawn(kind, 1, "emulator") == ["CompiledWorld"]
    assert nbep.spawn(kind, 1, "emulator", engine="python") == ["World"]
    monkeypatch.setenv("NBEP_ENGINE", "fast")
    with pytest.raises(ValueError, match="NBEP_ENGINE: got 'fast'; must be python, compiled, auto"):
        nbep.spawn(kind, 1, "emulator")


@pytest.mark.parametrize("num_calls", [0, spawn_module.LONG])
def test_auto_compiles_once_python_has_run_long(monkeypatch, tmp_path, num_calls):
    """With an empty cache it takes Python before that, and afterwards where Numba refuses a kernel."""
    asked = []

    def refuse(*_):
        asked.append(1)
        raise CompileError("refused")

    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(engine, "_loaded", {})
    monkeypatch.setattr(engine, "machine", engine.machine.__wrapped__)
    monkeypatch.setattr(engine, "_compile_machine", refuse)
    monkeypatch.setattr(spawn_module, "_run_by_python", num_calls)
    assert error_of("nothing", "auto") is None
    assert spawn_module._run_by_python > num_calls
    assert (len(asked), list(tmp_path.iterdir())) == (num_calls > 0, [])
