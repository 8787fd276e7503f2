"""Steps that kernels of several modes share: notes, sums, arrivals, the comparison of calls."""
