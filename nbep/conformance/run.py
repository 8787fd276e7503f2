"""Run a layer of expert parallelism on the emulator, all ranks in one process, and say what is wrong with it.

What nbep forgives and DeepEP does not is taken back: a layer that rests on it works here, and not on cards.

nbep                                                       inside of `as_deep_ep()`
ElasticBuffer.dispatch waits for counts of no tokens       RuntimeError: DeepEP's times out
rows of a dispatch without CPU sync that did not come      a choice of expert 0 with weight 1: what was there before
  have choices of -1 and weights of 0
low-latency verbs after the normal mode                    RuntimeError: clean_low_latency_buffer must come between
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import count
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

import nbep
import nbep.deep_ep
from nbep.conformance.cases import KINDS, Broken, Case
from nbep.conformance.cpu_as_cuda import cpu_as_cuda
from nbep.conformance.stand_ins import Edit, StandIns
from nbep.deep_ep.buffer import Buffer
from nbep.deep_ep.elastic import ElasticBuffer
from nbep.emulator.machine.source import caller_site, describe_site
from nbep.host.ranks.comm import InProcessComm

Verb = Callable[..., Any]


@contextmanager
def as_deep_ep() -> Iterator[None]:
    """For all buffers of nbep.deep_ep."""
    changes: list[tuple[type, str, Callable[[Verb], Verb]]] = [(ElasticBuffer, "dispatch", _elastic_dispatch)]
    changes += [(Buffer, verb, _marking(True)) for verb in ("dispatch", "combine")]
    changes += [(Buffer, verb, _low_latency) for verb in ("low_latency_dispatch", "low_latency_combine")]
    changes += [(Buffer, "clean_low_latency_buffer", _marking(False))]
    before = [(cls, verb, getattr(cls, verb)) for cls, verb, _ in changes]
    for cls, verb, change in changes:
        setattr(cls, verb, change(getattr(cls, verb)))
    try:
        yield
    finally:
        for cls, verb, original in before:
            setattr(cls, verb, original)


def _elastic_dispatch(original: Verb) -> Verb:
    @wraps(original)
    def dispatch(buffer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = x[0] if isinstance(x, tuple) else x
        waits = kwargs.get("do_cpu_sync") is not False and kwargs.get("handle") is None
        if waits and len(tokens) == 0:
            raise RuntimeError("dispatch: x has no tokens, with CPU sync; DeepEP's waits for ever then: send one of -1")
        result = original(buffer, x, *args, **kwargs)
        _, topk_idx, weights, handle, event = result
        if kwargs.get("do_cpu_sync") is False and topk_idx is not None and event.event is None:
            num_rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            topk_idx[num_rows:] = 0
            if weights is not None:
                weights[num_rows:] = 1
        return result

    return dispatch


def _marking(is_dirty: bool) -> Callable[[Verb], Verb]:
    def change(original: Verb) -> Verb:
        @wraps(original)
        def verb(buffer: Any, *args: Any, **kwargs: Any) -> Any:
            buffer.is_dirty = is_dirty
            return original(buffer, *args, **kwargs)

        return verb

    return change


def _low_latency(original: Verb) -> Verb:
    @wraps(original)
    def verb(buffer: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(buffer, "is_dirty", False):
            raise RuntimeError(
                f"{original.__name__}: called after the normal mode; DeepEP needs clean_low_latency_buffer between"
            )
        return original(buffer, *args, **kwargs)

    return verb


Layer = Callable[["Rank"], Any]
TWO_ALIVE = "two alive"
STRATEGIES = "uniform", "late", "starved", "few_preemptions"
_copies = count()


class Failed(AssertionError):
    """A layer does not conform: each finding is a line."""


class Finding(NamedTuple):
    """kind: the class of an exception, or "wrong numbers"; text: what is wrong, and where; how: which run replays it"""

    kind: str
    text: str
    how: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.text} ({self.how})"


class Rank:
    """What a layer gets: one rank of a group, and what it is to do there.

    group: what DeepEP's buffers take, with `rank` and `size` of mpi4py and `rank()` and `size()` of torch
    case: tokens, choices and what must come out, see Case
    """

    def __init__(self, group: InProcessComm, case: Case, edits: Sequence[Edit], kept: dict[Any, Any]):
        self.group, self.case = group, case
        self.rank, self.size = int(group.rank), int(group.size)
        self.wrong: list[str] = []
        self._edits, self._kept = edits, kept

    def load(
        self, root: str | Path, real: set[str], given: Mapping[str, Any] | None = None, also: Sequence[str] = ()
    ) -> dict[str, ModuleType]:
        """Modules of a client, by name: a copy for this rank, as each process has one.

        Args:
            root: the folder of its packages
            real: full names of the modules that run; other imports of their packages get stand-ins
            given: values of names of other modules, by full name
            also: more packages to stand in for
        """
        copy = f"r{self.rank}_{next(_copies)}"
        stand_ins = StandIns(Path(root), real, given or {}, also, self._edits, copy)
        return self.once((str(root), *sorted(real)), stand_ins.load)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What make() has returned on this rank when the run's first call with such a key came: a buffer, say."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        """A copy whose gradient is asked for."""
        return x.clone().requires_grad_()

    def same(self, what: str, got: torch.Tensor | None, want: torch.Tensor) -> None:
        """Note what is wrong with a result, to the bit; go on in any case."""
        if got is None:
            self.wrong.append(f"{what}: None")
        elif got.dtype != want.dtype or got.shape != want.shape:
            shapes = f"{got.dtype} {tuple(got.shape)}; must be {want.dtype} {tuple(want.shape)}"
            self.wrong.append(f"{what}: got {shapes}")
        elif not torch.equal(got, want):
            where = (got != want).nonzero()
            first = tuple(where[0].tolist())
            self.wrong.append(
                f"{what}: wrong in {len(where)} of {want.numel()} elements, first in {list(first)}: got "
                f"{got[first].item()}; must be {want[first].item()}"
            )


def run(
    layer: Layer,
    ranks: int = 2,
    kind: str = "plain",
    *,
    memory_model: str = "sc",
    seed: int = 0,
    strategy: str = "uniform",
    edits: Sequence[Edit] = (),
    strict: bool = True,
    **sizes: Any,
) -> list[Finding]:
    """What one run has found: an exception, or results that are wrong. See `conforms`."""
    nbep.deep_ep.install()
    os.environ["NBEP_TARGET"] = "emulator"
    how = f"case {kind!r}, {memory_model}, seed {seed}, {strategy}"
    made: list[Rank] = []

    def main(comm: InProcessComm) -> None:
        kept: dict[Any, Any] = {}
        kinds = [("plain", 0), ("choices of -1", 1)] if kind == TWO_ALIVE else [(kind, 0)]
        of_this = [
            Rank(comm, Case(int(comm.rank), ranks, each, seed=number, **sizes), edits, kept) for each, number in kinds
        ]
        made.extend(of_this)
        for second_half in [layer(rank) for rank in of_this]:  # first in, first out
            if callable(second_half):
                second_half()

    found, num_threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            stack.enter_context(cpu_as_cuda())
            if strict:
                stack.enter_context(as_deep_ep())
            nbep.spawn(main, ranks, "emulator", seed=seed, memory_model=memory_model, strategy=strategy)
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        if ".py:" not in text:
            text += _place(error.__traceback__)
        kind_of_error = "contract" if isinstance(error, Broken) else type(error).__name__
        found.append(Finding(kind_of_error, text, how))
    finally:
        torch.set_num_threads(num_threads)
    return found + [Finding("wrong numbers", f"rank {rank.rank}: {text}", how) for rank in made for text in rank.wrong]


def runs(seeds: int, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each case under `sc`, then under `checked` with seeds and strategies in turn."""
    for kind in kinds:
        yield {"kind": kind}
    for seed in range(seeds):
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        yield {"kind": kinds[seed % len(kinds)], "memory_model": "checked", "seed": seed, "strategy": strategy}


def conforms(
    layer: Layer,
    ranks: int = 2,
    seeds: int = 8,
    *,
    without: Sequence[str] = (),
    edits: Sequence[Edit] = (),
    strict: bool = True,
    **sizes: Any,
) -> None:
    """Run a layer with all cases, and then with `seeds` schedules in which races are errors.

    Args:
        layer: called once for each rank, with a Rank: it makes the client's calls and compares with `rank.same`. If it
            returns a function, its backward half, say, that is called then; in one more case two first halves come
            before the second ones
        ranks: 2, 4 or 8
        without: of KINDS, those that the layer need not serve
        edits: (file name, old text, new text) of the client's files: does the test find a fault?
        strict: what nbep forgives and DeepEP does not is an error; see as_deep_ep
        sizes: hidden, num_topk, num_experts; see Case

    Raises:
        Failed: with all that the first bad run has found. What found it, and how to replay it, is in each line
        ValueError: for a case that is none of KINDS
    """
    unknown = sorted(set(without) - {*KINDS, TWO_ALIVE})
    if unknown:
        raise ValueError(f"without: got {unknown}; must be of {', '.join(KINDS)}")
    kinds = [kind for kind in (*KINDS, TWO_ALIVE) if kind not in without]
    for options in runs(seeds, kinds):
        found = run(layer, ranks, **options, edits=edits, strict=strict, **sizes)
        if found:
            name = getattr(layer, "__name__", "the layer")
            raise Failed(f"{name} does not conform:\n" + "\n".join(map(str, found)))


def _place(trace: TracebackType | None) -> str:
    """Where the client's code was when an error was raised."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    for frame, instruction in reversed(frames):
        if caller_site(frame) == (frame.f_code, frame.f_lasti):
            return f", at {describe_site((frame.f_code, instruction))}"
    return ""
