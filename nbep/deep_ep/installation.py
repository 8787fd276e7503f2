"""DeepEP's module names for nbep's modules.

sys.modules   deep_ep, deep_ep.buffer, ... are nbep's modules themselves: no class exists twice
the path      a folder whose deep_ep.py and deep_ep_cpp.py do the same in processes that start later: those that
              multiprocessing spawns get sys.path, other programs PYTHONPATH
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

MODULES = {
    "deep_ep": "nbep.deep_ep",
    "deep_ep._C": "nbep.deep_ep.cpp",
    "deep_ep.buffer": "nbep.deep_ep.buffer",
    "deep_ep.buffers": "nbep.deep_ep.buffers",
    "deep_ep.buffers.elastic": "nbep.deep_ep.elastic",
    "deep_ep.buffers.legacy": "nbep.deep_ep.buffer",
    "deep_ep.utils": "nbep.deep_ep.utils",
    "deep_ep.utils.envs": "nbep.deep_ep.utils",
    "deep_ep.utils.event": "nbep.deep_ep.utils",
    "deep_ep.utils.math": "nbep.deep_ep.utils",
    "deep_ep_cpp": "nbep.deep_ep.cpp",
}
NAMES = str(Path(__file__).with_name("names"))
SHIMS = ("nbep", "deep_ep", "names")


def install() -> None:
    """`import deep_ep` and `import deep_ep_cpp` give nbep's modules, here and in processes that start after this.

    Raises: RuntimeError if another deep_ep was imported before
    """
    ours = {name: import_module(module) for name, module in MODULES.items()}
    for name in ("deep_ep", "deep_ep_cpp"):
        found = sys.modules.get(name)
        path = getattr(found, "__file__", None)
        is_shim = path is not None and Path(path).parent.parts[-3:] == SHIMS  # of this nbep, or of another copy of it
        if found not in (None, ours[name]) and not is_shim:
            raise RuntimeError(f"{name}: got {path or found!r}, imported before; call nbep.deep_ep.install() first")
    sys.modules.update(ours)
    if NAMES not in sys.path:
        sys.path.insert(0, NAMES)
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if NAMES not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([NAMES, *inherited])
