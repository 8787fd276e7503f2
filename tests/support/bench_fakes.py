"""What stands in for a GPU where benchmarks are tested: times of kernels, and arrays."""

import numpy as np

from nbep.bench.harness.clocks import KernelTime


def kernels(*names: str, stream: int = 0) -> list[KernelTime]:
    return [KernelTime(name, stream, 10.0 * i, i + 1.0) for i, name in enumerate(names)]


class NumpyArrays:
    """In place of nbep.bench.harness.normal_calls.GpuArrays."""

    @staticmethod
    def put(array):
        return array

    @staticmethod
    def get_bytes(array):
        return np.ascontiguousarray(array).view(np.uint8)

    @staticmethod
    def wait():
        """Nothing to do."""
