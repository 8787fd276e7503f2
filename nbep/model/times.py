"""The time of a call: what each link needs for what crosses it, and which of them is the last.

 time     = start + latencies of the links that the call uses + the longest of the links' times
 a link's = bytes / rate + (messages + flags) * cost of one

Links work at the same time, and chunks flow through all of them, so only the slowest counts. All is of the average
rank: what one rank's tokens cause, wherever they cause it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nbep.model import counts
from nbep.model.features import mean
from nbep.model.links import Link, Links
from nbep.model.traffic import HOME, LINKS
from nbep.model.work import Work

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
