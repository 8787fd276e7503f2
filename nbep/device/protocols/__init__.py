"""What kernels agree on: barriers, bounded waits, rings, notes, copies, reductions. Built from primitives only."""
