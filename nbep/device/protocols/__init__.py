"""What kernels agree on: barriers, bounded waits, rings, copies, reductions. Built from primitives only."""
