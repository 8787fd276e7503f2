"""What kernels agree on: barriers, bounded waits, rings, headers, copies, reductions. Built from primitives only."""
