"""The time of a call: what each link needs for what crosses it, and which of them is the last.

 time     = start + latencies of the links that the call uses + the longest of the links' times
 a link's = bytes / rate + (messages + flags) * cost of one

Links work at the same time, and chunks flow through all of them, so only the slowest counts. All is of the average
rank: what one rank's tokens cause, wherever they cause it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Set
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from research.model import counts
from research.model.features import mean
from research.model.traffic import HOME, LINKS
from research.model.work import Work

# --- What carries the bytes of a call, as a file says it: data/h800_cx7.toml, or one like it for other machines -------
H800_FILE = Path(__file__).parent / "data" / "h800_cx7.toml"


@dataclass(frozen=True)
class Link:
    """gb_per_s in each direction at the same time; message_us what each message and each flag costs in addition.

    limit_gb_per_s: what the hardware can do; a fit does not go beyond
    """

    gb_per_s: float
    latency_us: float = 0.0
    message_us: float = 0.0
    limit_gb_per_s: float = float("inf")


@dataclass(frozen=True)
class Links:
    """Of one kind of machine. start_us: of every call, whatever it sends."""

    name: str
    start_us: float
    home: Link
    nvlink: Link
    network: Link

    @classmethod
    def read(cls, path: Path = H800_FILE) -> Links:
        """From a file with `name` and the tables call, home, nvlink and network.

        Raises: ValueError if a name is missing or unknown, or a value is no number that fits; OSError
        """
        table = tomllib.loads(path.read_text())
        _check_names(str(path), table, {"name", "call", *LINKS})
        _check_names("[call]", table["call"], {"start_us"})
        links = {name: _link(name, table[name]) for name in LINKS}
        return cls(str(table["name"]), _number("call", "start_us", table["call"]["start_us"]), **links)


def _link(name: str, table: dict[str, Any]) -> Link:
    _check_names(f"[{name}]", table, {"gb_per_s"}, {field.name for field in fields(Link)})
    values = {key: _number(name, key, value) for key, value in table.items()}
    if values["gb_per_s"] == 0:
        raise ValueError(f"[{name}] gb_per_s: got 0; must be more")
    return Link(**values)


def _check_names(where: str, table: Any, needed: Set[str], allowed: Set[str] = frozenset()) -> None:
    if not isinstance(table, dict) or not needed <= table.keys() <= needed | allowed:
        found = ", ".join(sorted(table)) if isinstance(table, dict) else repr(table)
        others = f", and may be {', '.join(sorted(allowed - needed))}" if allowed - needed else ""
        raise ValueError(f"{where}: got {found or 'nothing'}; must be {', '.join(sorted(needed))}{others}")


def _number(table: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"[{table}] {name}: got {value!r}; must be a number that is not negative")
    return float(value)


FLAG_BYTES = 4
NUM_SAMPLES = {"low_latency": 16, "internode": 2, "intranode": 2}  # ranks whose tokens are drawn


class Load(NamedTuple):
    """What crosses one link for the average rank."""

    num_bytes: float
    num_messages: float  # with flags


class Time(NamedTuple):
    """In microseconds. links: of each that is used; bound: the slowest one."""

    us: float
    links: dict[str, float]
    bound: str


Loads = dict[str, Load]


@lru_cache(maxsize=1)
def forms() -> dict[str, counts.Forms]:
    return counts.load()


@lru_cache(maxsize=256)
def loads_of(work: Work, verb: str) -> Loads:
    """What a call puts on each link, by the counts."""
    features = mean(work, verb, NUM_SAMPLES[work.mode])
    numbers = counts.evaluate_all(forms()[counts.name_of(work)], verb, features)
    return {link: _load(link, numbers[link]) for link in LINKS}


def _load(link: str, numbers: dict[str, float]) -> Load:
    num_flags = sum(value for what, value in numbers.items() if what.startswith("flags."))
    num_bytes = numbers.get("payload", 0.0) + numbers.get("loads", 0.0) + FLAG_BYTES * num_flags
    return Load(num_bytes, 0.0 if link == HOME else numbers.get("messages", 0.0) + num_flags)


def time_of(loads: Loads, links: Links) -> Time:
    """How long a call with these loads takes on these links."""
    used = {name: load for name, load in loads.items() if load.num_bytes > 0}
    each = {name: link_us(load, getattr(links, name)) for name, load in used.items()}
    bound = max(each, key=lambda name: each[name], default=HOME)
    latency = sum(getattr(links, name).latency_us for name in used)
    return Time(links.start_us + latency + each.get(bound, 0.0), each, bound)


def link_us(load: Load, link: Link) -> float:
    return load.num_bytes / link.gb_per_s / 1e3 + load.num_messages * link.message_us
