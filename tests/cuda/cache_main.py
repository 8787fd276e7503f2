"""Load all kernels for the first GPU, and say whether Numba had to be imported for it."""

import sys

from nbep.device.jit import KERNELS
from nbep.host.target.cuda.runtime import SharedDevice

if __name__ == "__main__":
    shared = SharedDevice(0)
    assert {loaded.spec.name for loaded in shared.kernels.values()} == set(KERNELS) != set()
    print("compiled" if "numba" in sys.modules else "read from the cache")
