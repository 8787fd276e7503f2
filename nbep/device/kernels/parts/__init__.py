"""Steps that kernels of several modes share: headers, sums, arrivals, the comparison of calls."""
