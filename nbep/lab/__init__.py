"""What runs, checks and shows kernels without a GPU. It knows nothing of experts: see nbep.registry.

numba_cuda  plain `@cuda.jit` kernels on the emulator
check       many schedules; litmus: the axioms of PTX; puzzle: what checks the puzzles
trace       what a run did; debug: at a stop in a run; notebook: for notebooks
"""

import lazy_loader

from nbep.doors import HOMES

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, HOMES["lab"])
