"""Inputs of dispatch and combine: those of `nbep check`."""

from nbep.specimens.workloads.cases import NODE_ROUTINGS, ROUTINGS, Case, make_case, routes_of

__all__ = ["NODE_ROUTINGS", "ROUTINGS", "Case", "make_case", "routes_of"]
