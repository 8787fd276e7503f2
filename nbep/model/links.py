"""What carries the bytes of a call, as a file says it: data/h800_cx7.toml, or one like it for other machines."""

from __future__ import annotations

import tomllib
from collections.abc import Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nbep.model.traffic import LINKS

H800_FILE = Path(__file__).parent / "data" / "h800_cx7.toml"


@dataclass(frozen=True)
class Link:
    """gb_per_s in each direction at the same time; message_us what each message and each flag costs besides.

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
