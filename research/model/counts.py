"""The counts of each mode as forms: found from emulator runs, kept in data/counts.json, and read from there.

    python -m research.model.counts                 count all modes again and write the file
    python -m research.model.counts intranode       count this one again

No number in the file is typed by hand. The forms are found from all runs of a mode but the last ones, and these have to
come out of them exactly. The tests make other runs, and compare.

How often a flag moves may depend on which thread is first: then it has no form, but a bound, which every run keeps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nbep.host.transport.base import TransportName
from research.model.features import Features, total
from research.model.runs import Counts, count
from research.model.traffic import HOME, LINKS, NETWORK
from research.model.work import INTERNODE, INTRANODE, LOW_LATENCY, VERBS, Work

# --- Counts as exact linear forms of features, found from runs and proved by them -------------------------------------
# A form is found from some runs and must give the count of every run exactly, also of those that it was not found from.
# Its coefficients are whole numbers or fractions with small denominators; what cannot be written so is refused.


LARGEST_DENOMINATOR = 64

Form = dict[str, Fraction]  # feature -> how much of it


class Sample(NamedTuple):
    """One run: what it was made of, and one of its counts."""

    features: Features
    number: int


class NotLinear(ValueError):
    """A count is no linear form of these features, or the runs do not tell which."""


def find_form(names: Sequence[str], samples: Sequence[Sample]) -> Form:
    """The form of these features that gives the counts of all samples. Of features that are always equal it takes
    the first, and none that are always 0.

    Raises: NotLinear if there is none, or more than one
    """
    matrix = np.array([[sample.features[name] for name in names] for sample in samples], float)
    scale = np.abs(matrix).max(axis=0, initial=0)
    columns = [tuple(column) for column in matrix.T]
    used = [i for i, column in enumerate(columns) if scale[i] > 0 and column not in columns[:i]]
    names, matrix = [names[i] for i in used], matrix[:, used] / scale[used]
    if np.linalg.matrix_rank(matrix) < len(names):
        raise NotLinear(f"{len(samples)} runs do not tell {', '.join(names)} apart")
    solution = np.linalg.lstsq(matrix, np.array([sample.number for sample in samples], float), rcond=None)[0]
    form = {
        name: Fraction(float(value)).limit_denominator(LARGEST_DENOMINATOR)
        for name, value in zip(names, solution / scale[used], strict=True)
    }
    form = {name: value for name, value in form.items() if value}
    for sample in samples:
        if evaluate_exactly(form, sample.features) != sample.number:
            raise NotLinear(
                f"{show(form)} is {evaluate_exactly(form, sample.features)}, but a run has counted {sample.number}"
            )
    return form


def find_bound(names: Sequence[str], samples: Sequence[Sample]) -> Form:
    """The least whole multiple that no count exceeds, of the first of these features that can bound them.

    Raises: NotLinear if with each feature there is a count where it is 0
    """
    for name in names:
        pairs = [(int(sample.features[name]), sample.number) for sample in samples if sample.number]
        if all(feature > 0 for feature, _ in pairs):
            return {name: Fraction(max(-(-number // feature) for feature, number in pairs))}
    raise NotLinear(f"no bound among {', '.join(names)}")


def evaluate_exactly(form: Form, features: Features) -> Fraction:
    """Of whole features."""
    return sum((value * int(features[name]) for name, value in form.items()), Fraction(0))


def evaluate(form: Form, features: Features) -> float:
    """Of features that are means."""
    return sum(float(value) * features[name] for name, value in form.items())


def show(form: Form) -> str:
    """`rows.network + 4 chunks.network`; `0` where nothing is counted."""
    terms = [name if value == 1 else f"{value} {name}" for name, value in form.items()]
    return " + ".join(terms).replace("+ -", "- ") or "0"


FILE = Path(__file__).parent / "data" / "counts.json"
NUM_PROOFS = 2  # runs of each mode that the forms are not found from
AT_MOST = " at most"  # ends the name of a count that also depends on who is first

Forms = dict[str, dict[str, dict[str, Form]]]  # verb -> link -> what -> form

# What a rank does in its own memory depends on all links; what goes over a link, on that link alone.
AT_HOME = (
    *("values", "values.home", "values.nvlink", "rows", "rows.home", "rows.nvlink", "rows.node", "rows.network"),
    *("outputs", "hidden"),
)


def _low_latency(transport: TransportName) -> list[Work]:
    """(ranks, ranks of a node, tokens, hidden, top-k, experts, FP8)"""
    sizes = [
        (4, 2, 2, 512, 2, 8, True),
        (4, 2, 3, 128, 1, 4, True),
        (4, 2, 1, 256, 3, 12, False),
        (4, 2, 4, 128, 2, 16, True),
        (4, 2, 0, 128, 1, 8, True),
        (4, 2, 2, 384, 4, 8, False),
        (6, 3, 2, 128, 2, 6, True),
        (6, 2, 3, 256, 3, 12, True),
        (2, 2, 3, 128, 2, 4, True),
        (2, 1, 2, 256, 2, 4, True),
        (4, 1, 2, 256, 2, 8, False),
        (4, 4, 3, 128, 2, 8, False),
        (6, 2, 2, 640, 4, 18, True),
        (2, 1, 1, 7168, 2, 4, True),
        (2, 1, 2, 5120, 1, 2, False),
        (8, 4, 3, 512, 3, 16, True),
    ]
    return [Work(LOW_LATENCY, *size, transport=transport, seed=seed) for seed, size in enumerate(sizes)]


def _intranode() -> list[Work]:
    """(ranks, tokens, hidden, top-k, experts, FP8, channels, chunks of dispatch and combine)"""
    sizes = [
        (2, 5, 128, 2, 4, True, 1, (2, 1)),
        (2, 9, 256, 1, 4, False, 2, (1, 2)),
        (4, 3, 512, 2, 8, True, 1, (2, 3)),
        (4, 6, 128, 3, 8, True, 2, (3, 1)),
        (2, 0, 128, 1, 4, True, 1, (1, 1)),
        (4, 2, 1152, 1, 4, False, 3, (1, 2)),
        (2, 7, 5120, 2, 2, True, 2, (4, 4)),
        (2, 11, 128, 2, 8, False, 3, (2, 5)),
        (4, 8, 128, 4, 4, True, 1, (5, 2)),
        (8, 6, 256, 3, 8, True, 2, (2, 2)),
    ]
    return [
        Work(INTRANODE, size[0], size[0], *size[1:6], num_channels=size[6], nvl_chunks=size[7], seed=seed)
        for seed, size in enumerate(sizes)
    ]


def _internode(transport: TransportName) -> list[Work]:
    """(ranks, ranks of a node, tokens, hidden, top-k, experts, FP8, channels), chunks of dispatch and combine"""
    sizes = [
        ((4, 2, 5, 128, 2, 8, True, 1), (2, 1), (2, 3)),
        ((4, 2, 4, 512, 3, 8, True, 2), (1, 2), (3, 1)),
        ((4, 2, 6, 256, 1, 4, False, 1), (3, 2), (1, 2)),
        ((4, 2, 0, 128, 1, 4, True, 1), (1, 1), (1, 1)),
        ((6, 2, 3, 128, 3, 12, True, 1), (1, 1), (2, 1)),
        ((6, 3, 4, 256, 2, 6, False, 2), (2, 3), (1, 1)),
        ((4, 2, 3, 1152, 2, 8, True, 1), (1, 1), (1, 2)),
        ((4, 2, 2, 5120, 2, 4, False, 1), (2, 2), (2, 2)),
        ((8, 2, 4, 128, 4, 16, False, 1), (2, 1), (2, 2)),
        ((4, 2, 1, 7168, 3, 8, True, 1), (1, 1), (1, 1)),
        ((8, 4, 2, 384, 3, 8, True, 2), (1, 2), (1, 1)),
        ((4, 2, 8, 128, 3, 8, True, 3), (2, 2), (2, 3)),
        ((6, 2, 5, 640, 2, 12, True, 1), (3, 2), (3, 2)),
    ]
    return [
        Work(INTERNODE, *size[:7], size[7], nvl, rdma, transport=transport, seed=seed)
        for seed, (size, nvl, rdma) in enumerate(sizes)
    ]


RUNS: dict[str, list[Work]] = {
    "intranode": _intranode(),
    "internode, ibgda": _internode("ibgda"),
    "internode, direct": _internode("direct"),
    "low_latency, ibgda": _low_latency("ibgda"),
    "low_latency, direct": _low_latency("direct"),
}


def name_of(work: Work) -> str:
    """Under which name the forms of a work stand."""
    return work.mode if work.mode == INTRANODE else f"{work.mode}, {work.transport}"


def find_forms(works: Sequence[Work], num_proofs: int = NUM_PROOFS) -> Forms:
    """Run all works, find the forms from all but the last `num_proofs` runs, and prove them with those.

    Raises: NotLinear if a count has no form, or a proof comes out wrong
    """
    runs = [count(work, work.seed) for work in works]
    forms: Forms = {}
    for verb in VERBS:
        sums = [total(work, verb) for work in works]
        forms[verb] = {}
        for link in LINKS:
            forms[verb][link] = {}
            for what in sorted({what for run in runs for what in run[verb][link]}):
                samples = [Sample(sums[i], runs[i][verb][link].get(what, 0)) for i in range(len(works))]
                names = AT_HOME if link == HOME else [name for name in sums[0] if name.endswith(f".{link}")]
                names = [name for name in names if name in sums[0]]
                found, proofs = samples[: len(works) - num_proofs], samples[len(works) - num_proofs :]
                try:
                    name, form = what, find_form(names, found)
                except NotLinear as error:
                    if not what.startswith("flags."):
                        raise NotLinear(f"{verb}, {link}, {what}: {error}") from None
                    name, form = what + AT_MOST, find_bound([*_bounds(link, names), *names], found)
                for sample in proofs:
                    if not is_proved(name, form, sample):
                        raise NotLinear(f"{verb}, {link}, {name}: {show(form)} is not {sample.number}")
                forms[verb][link][name] = form
    return forms


def _bounds(link: str, names: Sequence[str]) -> list[str]:
    """What bounds how often a flag moves: inside a node it may move for each token, on the network for a chunk only."""
    name = f"chunks.{link}" if link == NETWORK else f"pairs.{link}"
    return [name] if name in names else []


def is_proved(name: str, form: Form, sample: Sample) -> bool:
    """Whether a run has counted what the form says."""
    value = evaluate_exactly(form, sample.features)
    return sample.number <= value if name.endswith(AT_MOST) else sample.number == value


def contradictions(forms: Forms, work: Work, counts: dict[str, Counts]) -> list[str]:
    """What a run of a work has counted otherwise than the forms say, a line each."""
    lines = []
    for verb in VERBS:
        sums = total(work, verb)
        for link in LINKS:
            known = forms[verb][link]
            counted = counts[verb][link]
            unknown = [what for what in counted if what not in known and what + AT_MOST not in known]
            lines += [f"{verb}, {link}, {what}: {counted[what]}, and there is no form" for what in unknown]
            for name, form in known.items():
                number = counted.get(name.removesuffix(AT_MOST), 0)
                if not is_proved(name, form, Sample(sums, number)):
                    lines.append(f"{verb}, {link}, {name}: {number}, and {show(form)} is {evaluate(form, sums):g}")
    return lines


def evaluate_all(forms: Forms, verb: str, features: Features) -> dict[str, dict[str, float]]:
    """Every count of one call, of features that may be means."""
    return {link: {what: evaluate(form, features) for what, form in forms[verb][link].items()} for link in LINKS}


def load() -> dict[str, Forms]:
    """The forms of every mode, as the file has them."""
    return {
        name: {
            verb: {
                link: {
                    what: {feature: Fraction(value) for feature, value in form.items()} for what, form in whats.items()
                }
                for link, whats in links.items()
            }
            for verb, links in verbs.items()
        }
        for name, verbs in json.loads(FILE.read_text()).items()
    }


def dump(forms: dict[str, Forms]) -> str:
    """The file's text."""
    return json.dumps(forms, indent=1, default=str) + "\n"


def main(names: Sequence[str]) -> int:
    found = load() if names else {}
    for name in names or RUNS:
        print(f"{name}: {len(RUNS[name])} runs", file=sys.stderr)
        found[name] = find_forms(RUNS[name])
    FILE.write_text(dump({name: found[name] for name in RUNS}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
