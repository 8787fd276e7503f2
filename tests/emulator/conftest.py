"""A one-rank machine for kernels given as plain functions."""

import numpy as np
import pytest

from nbep.emulator import World


@pytest.fixture
def launch():
    """launch(kernel, *args, grid=1, block=1, smem_bytes=0, seed=0, ...) runs one kernel to its end; returns the world.

    Arrays become addresses; those that NumPy marks read-only are mapped as inputs.
    """

    def run(kernel, *args, grid=1, block=1, smem_bytes=0, seed=0, **options):
        world = World(1, seed, **options)
        space, stream = world.ranks[0].space, world.ranks[0].create_stream("main")
        addresses = [
            space.map_array(arg, f"arg{i}", arg.flags.writeable).address if isinstance(arg, np.ndarray) else arg
            for i, arg in enumerate(args)
        ]
        stream.launch(kernel, tuple(addresses), grid, block, smem_bytes)
        stream.synchronize()
        return world

    return run
