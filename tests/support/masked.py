"""What ranks get that go on without others: the reference, for calls in which some ranks take no part."""

from collections.abc import Sequence

from cases import Case
from intranode import Report
from low_latency import Options, Outcome, check_combined, check_dispatched, expected_combine, expected_dispatch

from nbep.specimens.workloads.cases import without


def check_survivor(
    case: Case, options: Options, rank: int, outcome: Outcome, senders: Sequence[int], owners: Sequence[int]
) -> None:
    """Compare what a rank got in a trip whose dispatch `senders`, and whose combine `owners` have taken no part in."""
    report = Report(f"inputs {case.seed}, {options}, rank {rank}, without {senders} and {owners}")
    dispatched = expected_dispatch(without(case, senders, []), options)
    check_dispatched(report, case, options, rank, dispatched[rank], outcome)
    combine_case = without(case, senders, owners)
    combined = expected_combine(combine_case, options, dispatched)
    check_combined(report, combine_case, options, rank, combined[rank], outcome)
