"""Whatever a verb returns and whenever it is read: the right value, an error, or rows that `unwritten` names.

And two calls that are under way together, in any order on each rank: right, or refused.
"""

import gc
import itertools
from contextlib import nullcontext

import numpy as np
import pytest
from cases import make_case
from internode import Options as NodeOptions
from internode import make_node_case
from intranode import Options, dispatch_arguments, make_buffer
from low_latency import Options as LowLatencyOptions
from low_latency import make_buffer as make_low_latency_buffer
from low_latency import make_low_latency_case
from parts import both_parts
from target import spawn

import nbep
from nbep.host.calls import CallLog
from nbep.host.handles import Unpacks
from nbep.reference import BF16

pytestmark = pytest.mark.emulator_only("the host waits for no stream of a GPU when it reads")
MODES = {
    "rings": (Options(), make_case(1, num_tokens=(5, 3), num_topk=2)),
    "worst tokens": (Options(num_worst_tokens=20), make_case(1, num_tokens=(5, 3), num_topk=2)),
    "zero copy": (Options(zero_copy=True), make_case(1, num_tokens=(5, 3), num_topk=2)),
    "between nodes": (NodeOptions(), make_node_case(1, num_tokens=4)),
}
LOW_LATENCY = {
    "low latency": LowLatencyOptions(),
    "low latency, FP8": LowLatencyOptions(use_fp8=True),
    "low latency, deduplicated": LowLatencyOptions(deduplicate=True),
}
for name, of_calls in LOW_LATENCY.items():
    MODES[name] = of_calls, make_low_latency_case(1, num_tokens=3)
ALWAYS = ["zero copy", "low latency, FP8"]
modes = pytest.mark.parametrize("mode", both_parts(ALWAYS, thorough=[mode for mode in MODES if mode not in ALWAYS]))


def make(comm, mode):
    """A buffer for calls of a mode, the calls, and their names; what the later ones need comes from a call before."""
    options, case = MODES[mode]
    if mode in LOW_LATENCY:
        buffer = make_low_latency_buffer(comm, [(case, options)])
        return buffer, low_latency_verbs(buffer, case, options, comm.rank)
    buffer = make_buffer(comm, case, options)
    return buffer, verbs(buffer, case, options, comm.rank)


def low_latency_verbs(buffer, case, options, rank):
    """Each verb, and what makes its results complete: its hook."""
    given = case.x[rank], case.topk_idx[rank], 3, case.num_experts
    weights = case.topk_weights[rank]
    more = {"use_fp8": options.use_fp8, "deduplicate": options.deduplicate, "return_recv_hook": True}
    more["topk_weights"] = weights if options.deduplicate else None

    def dispatch():
        *results, _, hook = buffer.low_latency_dispatch(*given, **more)
        return *results, hook

    recv_x, _, handle, hook = dispatch()
    hook()
    rows = np.ones((recv_x[0] if options.use_fp8 else recv_x).shape, BF16)

    def combine():
        combined_x, _, hook = buffer.low_latency_combine(rows, given[1], weights, handle, return_recv_hook=True)
        return combined_x, hook

    return {"dispatch": dispatch, "combine": combine}


def complete(event_or_hook):
    if isinstance(event_or_hook, nbep.EventOverlap):
        event_or_hook.current_stream_wait()
    else:
        event_or_hook()


def arrays_of(value, name="") -> dict:
    """The arrays among what a verb returns, and in its handle."""
    if isinstance(value, np.ndarray):
        return {name: value}
    if isinstance(value, (tuple, list, Unpacks)):
        parts = (arrays_of(part, f"{name}[{i}]") for i, part in enumerate(value))
        return {name: array for part in parts for name, array in part.items()}
    return {}


def read(array):
    """What a caller sees in an array, None if that is an error, and which rows are unwritten."""
    try:
        return np.array(array[...]), nbep.debug.unwritten(array)
    except nbep.EmulatorError:
        return None, None


def check_read(name, array, right, unwritten_too=False):
    seen, unwritten = read(array)
    if seen is None:
        return
    wrong = np.array(seen).view(np.uint8) != right.view(np.uint8)
    rows = wrong.reshape(*right.shape, -1).any(axis=-1)
    rows = rows if right.ndim == 1 else rows.any(axis=-1)
    allowed = unwritten if unwritten_too else np.zeros_like(rows)
    assert not (rows & ~allowed).any(), f"{name} is {seen.tolist()} and not {right.tolist()}"


def verbs(buffer, case, options, rank):
    """Each verb as a call that is under way when it returns; what the later ones need comes from a call before."""
    _, arguments = dispatch_arguments(buffer, case, options, rank)
    recv_x, _, weights, _, handle, _ = buffer.dispatch(**arguments)
    other = buffer.dispatch(**arguments)[4]  # of equal shape
    rows, weights = np.array(recv_x[...]), np.array(weights[...])
    more = {"async_finish": True}
    normal = {"config": options.config, "zero_copy": options.zero_copy, **more}
    twice = arguments["x"] * np.array(2, arguments["x"].dtype)
    return {
        "layout": lambda: buffer.get_dispatch_layout(case.topk_idx[rank], case.num_experts, **more),
        "dispatch": lambda: buffer.dispatch(**arguments | more),
        "cached dispatch": lambda: buffer.dispatch(twice, handle, **normal),
        "combine": lambda: buffer.combine(rows, handle, weights, **normal),
        "other combine": lambda: buffer.combine(rows, other, weights, **normal),
    }


VERBS = "layout", "dispatch", "cached dispatch", "combine"


@pytest.mark.parametrize("ends", both_parts(["dropped"], thorough=["destroyed"]))
@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc", "delayed"]))
@modes
def test_what_a_verb_returns_is_right_or_an_error_at_every_moment(mode, memory_model, ends):
    num_ranks = MODES[mode][1].num_ranks

    def main(comm):
        kept = []
        buffer, calls = make(comm, mode)
        for verb in calls:
            *results, event = calls[verb]()
            arrays = arrays_of(results, verb)
            # What a kernel has begun to write NumPy cannot tell: those of a handle are not looked at here.
            before = {name: read(array) for name, array in arrays.items() if "[4]" not in name}
            complete(event)
            right = {name: np.array(array) for name, array in arrays.items()}
            for name, (seen, unwritten) in before.items():
                if seen is not None:
                    same = (seen.view(np.uint8) == right[name].view(np.uint8)).reshape(*seen.shape, -1).all(axis=-1)
                    assert ((same if seen.ndim == 1 else same.all(axis=-1)) | unwritten).all(), f"{name} under way"
            heads = {name for name in arrays if verb == "dispatch" and name.startswith("dispatch[4][5]")}
            kept += [(name, array, right[name]) for name, array in arrays.items() if name not in heads]
        for verb in calls:
            *_, event = calls[verb]()
            for name, array, value in kept:
                check_read(f"{name} while {verb} is under way", array, value)
            complete(event)
        del calls, results, arrays
        if ends == "destroyed":
            buffer.destroy()
        del buffer
        gc.collect()
        for _ in range(2):
            other, _ = make(comm, mode)
            other.get_local_buffer_tensor(np.uint8, use_rdma_buffer=mode in LOW_LATENCY)[:] = 0x55
            for name, array, value in kept:
                check_read(f"{name} when its buffer is {ends}", array, value)
            other.destroy()

    spawn(main, num_ranks, memory_model=memory_model)


# Two calls under way


def in_order(array):
    """Without what low latency leaves open: the order of rows, and of what goes with them."""
    if array.ndim == 3:
        return np.array(sorted(row.tobytes() for row in array.reshape(-1, array.shape[-1])))
    return np.sort(array, axis=-1) if array.dtype == np.int32 else array


def pair_of_calls(comm, mode, first, second, swaps):
    """What the two calls return if they are made one after the other, and together, by one rank in another order."""
    alone, together = {}, {}
    for results in (alone, together):
        buffer, calls = make(comm, mode)
        order = [second, first] if swaps and results is together and comm.rank == comm.size - 1 else [first, second]
        events = []
        for i, verb in enumerate(order):
            *returned, event = calls[verb]()
            results[verb, i if first == second else 0] = arrays_of(returned)
            events.append(event)
            if results is alone:
                complete(event)
        for event in events if results is together else ():
            complete(event)
        for arrays in results.values():
            arrays.update(
                {name: np.array(array + 0 if array.dtype != bool else array) for name, array in arrays.items()}
            )
        buffer.destroy()
    for verb, arrays in alone.items():
        for name, array in arrays.items():
            got = together[verb][name]
            if mode in LOW_LATENCY:  # rows of a source come in any order
                got, array = in_order(got), in_order(array)
            assert got.tobytes() == array.tobytes() or name == "[4][5]", f"{verb}: {name} of {first} and {second}"


PAIRS = list(itertools.product(VERBS, VERBS))
CALLS = [(mode, *pair) for mode in ("rings", "zero copy") for pair in PAIRS[1::3]]
CALLS += [(mode, "combine", "other combine") for mode in ("rings", "zero copy")]
CALLS += [("low latency", *pair) for pair in itertools.product(("dispatch", "combine"), repeat=2)]


@pytest.mark.parametrize(
    ("swaps", "like_processes", "every"),
    both_parts([(True, True, 6)], thorough=list(itertools.product([False, True], [False, True], [1]))),
)
def test_two_calls_under_way_are_right_or_refused(swaps, like_processes, every, monkeypatch):
    if like_processes:
        monkeypatch.setattr(CallLog, "shared", classmethod(lambda cls, comm: None))
    for mode, first, second in CALLS[::every]:

        def main(comm, mode=mode, first=first, second=second):
            pair_of_calls(comm, mode, first, second, swaps)

        fit = not swaps or first == second or "layout" in (first, second)  # layout is no collective call
        refused = nullcontext() if fit else pytest.raises(ValueError, match="must be the same on all ranks")
        with refused:
            spawn(main, MODES[mode][1].num_ranks, on_deadlock="expire")
