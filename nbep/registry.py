"""What the upper half gives to the lower one.

The lower half of nbep knows nothing of experts, and imports nothing of the half that does; docs/architecture.md says
which folder is which. What it needs from there is registered by name, and imported when it is asked for:

 kernels    a `device.library.KernelLibrary`         what `nbep compile` and `nbep check` find, and a GPU loads at first
 scenarios  name -> `check.scenario.Scenario`        what `nbep check NAME` runs
 steps      name of a step -> its kind, its fault    what `nbep check --fault` can break
 views      a `trace.view.View`                      roles, cells, tokens and pictures of launches in a trace
 debug      name -> function                         further functions of `nbep.debug`

`nbep/__init__.py` registers what nbep itself has. A library of kernels of its own does the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_places: dict[str, list[str]] = {}


def register(what: str, place: str) -> None:
    """Add the object at "module:name" to what is registered under a name of the table above."""
    _places.setdefault(what, []).append(place)


def registered(what: str) -> list[Any]:
    """All objects under a name, in the order in which they came."""
    return [object_at(place) for place in _places.get(what, ())]


def object_at(place: str) -> Any:
    """The object at "module:name", imported now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
