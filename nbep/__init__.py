"""Expert-parallel dispatch and combine from one kernel source: on GPUs through Numba, on CPUs through an emulator.

def main(comm):                                    # once per rank
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 20)
    ...

results = nbep.spawn(main, num_ranks=4)            # or main(MPI.COMM_WORLD) under mpiexec
"""

from nbep import doors, starting  # noqa: F401 - before all that takes long

# isort: split
import lazy_loader

from nbep.registry import register
from nbep.version import __version__ as __version__

# What the lower half finds of the upper one; imported when it is asked for.
register("kernels", "nbep.device.kernels.library:LIBRARY")
register("scenarios", "nbep.specimens.scenarios:SCENARIOS")
register("steps", "nbep.specimens.scenarios:STEPS")
register("views", "nbep.specimens.views:VIEW")
register("debug", "nbep.specimens.workloads.saved_call:TOOLS")

# A name is imported when somebody asks for it: __init__.pyi has them all.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
