"""The memory orders and scopes that accesses and fences name."""

WEAK = frozenset(("weak", "nc", "bulk"))  # may not meet another access to the same bytes unordered
POLLED = frozenset(("volatile", "relaxed", "acquire"))  # of loads that a thread may wait with
RELEASES = frozenset(("release", "acq_rel"))
ACQUIRES = frozenset(("acquire", "acq_rel"))
SCOPES = {"cta": 1, "gpu": 2, "sys": 3}  # how far an order reaches: the block, the rank, everybody
