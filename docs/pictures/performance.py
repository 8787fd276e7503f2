"""Draw the plots of docs/performance.md from the tables of records/measured.md.

    python docs/pictures/performance.py

A picture keeps the figures that it was drawn from: tests/docs/test_pictures.py compares them with the tables of today.
"""

import json
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
MEASURED = HERE.parents[1] / "records" / "measured.md"
WORKS = ("dispatch BF16", "dispatch FP8", "combine BF16")


def table_below(heading: str, first: str) -> list[list[str]]:
    """The cells of the first table below a heading whose first column is called `first`; without its own heading."""
    _, found, section = MEASURED.read_text().partition(f"\n{heading}\n")
    if not found:
        raise LookupError(f"{MEASURED.name} has no heading {heading!r}")
    table = re.search(rf"^\| *{re.escape(first)} *\|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", section, re.MULTILINE)
    if table is None:
        raise LookupError(f"no table below {heading!r} begins with {first!r}")
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in table[1].splitlines()]


def number(cell: str) -> float:
    """`28.0 (20.6)` is 28.0: what stands in parentheses is drawn by `in_parentheses`."""
    return float(cell.split()[0])


def in_parentheses(cell: str) -> float:
    return float(re.search(r"\(([\d.]+)\)", cell)[1])


def inside_a_node() -> dict:
    """GB/s by SMs for each work: through rings at the best chunk, without rings, and DeepEP."""
    found: dict = {work: {"rings": {}, "no rings": {}, "DeepEP": {}} for work in WORKS}
    work = ""
    for row in table_below("### Four GPUs, present kernels", "work"):
        work = row[0] or work
        found[work]["rings"][int(row[1])] = max(map(float, row[2:]))
    for row in table_below("### Without rings", "work"):
        if row[0] in WORKS:
            for sms, cell in zip((6, 8, 12, 16, 24), row[2:], strict=True):
                lines = found[row[0]]["no rings"]
                lines[sms] = max(float(cell), lines.get(sms, 0))
    for row in table_below("### Four GPUs, beside DeepEP", "work"):
        found[row[0]]["DeepEP"][24] = number(row[1])
    pushed = [number(row[1]) for row in table_below("### Four GPUs, present kernels", "SMs")]
    return {"works": found, "wire": 4 / 3 * max(pushed)}


def low_latency() -> dict:
    """Microseconds by tokens: a dispatch and a combine, with `deduplicate`, what `push` takes, and DeepEP."""
    rows = table_below("### Times of calls", "tokens")
    works = {}
    for work, deep_ep, _ in table_below("### Low latency, beside DeepEP", "work"):
        place = [row[0] for row in rows].index(work)
        name, *pushed = rows[place + 1]
        assert name == "push of its bytes", name
        works[work] = {
            "nbep": [number(cell) for cell in rows[place][1:]],
            "nbep, deduplicate": [in_parentheses(cell) for cell in rows[place][1:]],
            "push": [number(cell) for cell in pushed],
            "DeepEP": number(deep_ep),
        }
    return {"tokens": [1, 8, 32, 64, 128], "works": works}


def between_nodes() -> dict:
    """Microseconds of each work with 16 and with 24 SMs at the best chunk, and what `push` allows."""
    best: dict = {}
    for row in table_below("## The normal mode between nodes", "work"):
        times = [float(cell.split(" us")[0]) for cell in row[2:]]
        parts = [float(cell.rpartition(", ")[2]) for cell in row[2:]]
        time = min(times)
        best.setdefault(row[0], {})[row[1]] = {"us": time, "push": round(time * parts[times.index(time)])}
    return best


def draw_inside_a_node(figures: dict) -> Figure:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, (work, lines) in zip(figure.subplots(1, 3, sharey=True), figures["works"].items(), strict=True):
        axes.plot(*zip(*lines["rings"].items(), strict=True), "o-", label="nbep, through rings")
        axes.plot(*zip(*lines["no rings"].items(), strict=True), "s-", label="nbep, without rings")
        axes.plot(*zip(*lines["DeepEP"].items(), strict=True), "kD", label="DeepEP v1.2.1")
        axes.axhline(figures["wire"], color="grey", linestyle=":", label="the wire, by `push`")
        axes.set(title=work, xlabel="SMs", xlim=(4, 34), ylim=(0, 490))
    figure.axes[0].set_ylabel("GB/s, four GPUs")
    figure.axes[0].legend(fontsize="small", loc="lower right")
    return figure


def draw_low_latency(figures: dict) -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (work, lines) in zip(figure.subplots(1, 2, sharey=True), figures["works"].items(), strict=True):
        for name, style in (("nbep", "o-"), ("nbep, deduplicate", "s-"), ("push", ":")):
            colour = {"color": "grey"} if name == "push" else {}
            label = "the same bytes by `push`" if name == "push" else name
            axes.plot(figures["tokens"], lines[name], style, label=label, **colour)
        axes.plot([128], [lines["DeepEP"]], "kD", label="DeepEP v1.2.1")
        axes.set(title=work, xlabel="tokens of each rank", ylim=(0, 60))
    figure.axes[0].set_ylabel("us, four GPUs")
    figure.axes[0].legend(fontsize="small")
    return figure


def draw_between_nodes(figures: dict) -> Figure:
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for axes, (work, by_sms) in zip(figure.subplots(1, 3, sharey=True), figures.items(), strict=True):
        sms = [f"{number} SMs" for number in by_sms]
        axes.bar(sms, [each["us"] for each in by_sms.values()], width=0.6, label="nbep")
        pushed = [each["push"] for each in by_sms.values()]
        axes.bar(sms, pushed, width=0.6, fill=False, hatch="//", label="`push`")
        axes.set(title=work)
    figure.axes[0].set_ylabel("us, 2 nodes of 2")
    figure.axes[0].legend(fontsize="small")
    return figure


PICTURES = {
    "inside_a_node": (inside_a_node, draw_inside_a_node),
    "low_latency": (low_latency, draw_low_latency),
    "between_nodes": (between_nodes, draw_between_nodes),
}


def main() -> None:
    matplotlib.use("Agg")
    for name, (read, draw) in PICTURES.items():
        figures = read()
        draw(figures).savefig(HERE / f"{name}.png", dpi=110, metadata={"Description": json.dumps(figures)})


if __name__ == "__main__":
    main()
