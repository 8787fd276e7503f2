"""Bounded waits. A wait that times out reports who waited for whom and lets its kernel run to its end.

 cell      written by                     with                    read by     with
 claim     first fault of a rank: site    atom_cas_acq_rel_sys    any wait    ld_relaxed_gpu (has_timed_out)
 report    the one that got the claim     st_relaxed_sys,         the host    plain, after status is not 0
                                          status st_release_sys

A failed wait does not trap: a trap takes the CUDA context with it, and with the context the chance to destroy the
buffer. Instead the caller goes on as if the condition held, every later wait of the rank ends at once (`start_wait`
sees the claim), the kernel spoils its outputs at its end (see spoil.py), and the host raises from the report. So the
caller of a wait has to keep its addresses in range. Senders and forwarders stop instead, do not start if the rank has
failed before, and meet no peer at a barrier then: what they went on to send would overrun the rings of peers that are
only late. Those miss the rest, and time out with a report of their own.

Source: DeepEP csrc/kernels/intranode.cu, the `NUM_TIMEOUT_CYCLES` checks (which print and trap); its
receivers' waits for `start` and `end` have no such check
"""

import zlib
from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.types import I64, Sym
from nbep.emulator.machine.source import wait_loop

# A site: which role waits for which cell. A report has its number, which its file gives it by `site`.
SITES: dict[int, tuple[str, str, str]] = {}  # the words for each, of which the host makes a message
OF_NODE: set[int] = set()  # sites whose peer counts the ranks of the node
OWN_SITES = 100  # from here on: kernels that are not nbep's, see `own_site`


def site(number: int, role: str, cell: str, awaited: str, *, of_node: bool = False) -> int:
    """Name a site: who waits there, for which cell, and for what. Returns the number.

    of_node: its peer is numbered among the ranks of the node
    """
    SITES[number] = role, cell, awaited
    if of_node:
        OF_NODE.add(number)
    return number


def own_site(role: str, cell: str, awaited: str) -> int:
    """Name a site of a kernel that is not nbep's, as `site` does.

    Its number comes from the words. So it is the same in all processes, and in kernels that were compiled before.

    Raises:
        ValueError: if other words have the number
    """
    words = role, cell, awaited
    number = OWN_SITES + zlib.crc32("\n".join(words).encode()) % (1 << 24)
    if SITES.setdefault(number, words) != words:
        raise ValueError(f"site {words}: has the number of {SITES[number]}; change a word")
    return number


NO_WAIT = 8  # the site of what is reported without a wait: no room for what came. See `has_timed_out`


class Bounds(NamedTuple):
    """How a launch bounds its waits."""

    timeout_ns: I64  # longest time that one wait may take
    claim: Sym  # s32 in the rank's own memory, 0 until the first wait fails
    report: Sym  # the words of `FaultReport`, which the host can read while kernels run; 0: to time out is no fault


class FaultReport(NamedTuple):
    """The words of `Bounds.report`, s32 each, in this order. status is written last; 0 means that nothing failed."""

    status: int
    site: int
    peer: int
    expected: int
    seen: int
    block: int
    thread: int
    channel: int


@device_function
def has_fault(bounds):
    """Whether this rank has reported anything."""
    return ptx.ld_relaxed_gpu_s32(bounds.claim) != 0


@device_function
def has_timed_out(bounds):
    """Whether a wait of this rank timed out."""
    site = ptx.ld_relaxed_gpu_s32(bounds.claim)
    return site != 0 and site != NO_WAIT


@device_function
def start_wait(bounds):
    """Deadline of a wait that did not succeed at once: now + timeout, or past if a wait of this rank failed before."""
    if has_timed_out(bounds):
        return ptx.deadline_after(0) - 1
    deadline = ptx.deadline_after(bounds.timeout_ns)
    ptx.fault_due(deadline, bounds.report)
    return deadline


@device_function
def report_fault(bounds, site, peer, channel, expected, seen):
    """Report to the host which wait timed out; only the first one of a rank."""
    ptx.fault_reported()
    claimed = ptx.atom_cas_acq_rel_sys_s32(bounds.claim, 0, site)
    if claimed == NO_WAIT:
        # That was no wait: now later waits need not wait either.
        ptx.atom_cas_acq_rel_sys_s32(bounds.claim, claimed, site)
    if claimed == 0:
        ptx.st_relaxed_sys_s32(bounds.report + 4, site)
        ptx.st_relaxed_sys_s32(bounds.report + 8, peer)
        ptx.st_relaxed_sys_s32(bounds.report + 12, expected)
        ptx.st_relaxed_sys_s32(bounds.report + 16, seen)
        ptx.st_relaxed_sys_s32(bounds.report + 20, ptx.block_idx())
        ptx.st_relaxed_sys_s32(bounds.report + 24, ptx.thread_idx())
        ptx.st_relaxed_sys_s32(bounds.report + 28, channel)
        ptx.st_release_sys_s32(bounds.report, 1)  # the host polls it


class Waiter(NamedTuple):
    """Who waits, for a report: its site, the peer that it waits for or -1, and which cell of the site or -1."""

    site: int
    peer: int
    channel: int


@wait_loop
@device_function
def wait_until(load, cell, holds, wanted, bounds, expired):
    """Poll a cell until holds(load(cell), wanted). Returns what it held, and what `holds` said: false if it timed out.

    The order of the load is that of the wait: a `# PAIR` tag stands where it is named. There is no deadline
    before the first look has failed: most waits are over then. Reports of the emulator name the line that calls this.
    expired: ptx.wait_expired, or `teams.wait_expired_together`
    """
    deadline = 0
    while True:
        seen = load(cell)
        found = holds(seen, wanted)
        if found:
            return seen, found
        if deadline == 0:
            deadline = start_wait(bounds)
        if expired(deadline):
            return seen, found


@wait_loop
@device_function
def wait_or_report(load, cell, holds, wanted, bounds, waiter):
    """The same of one thread, which reports that it timed out: what it wanted, and what it saw."""
    seen, found = wait_until(load, cell, holds, wanted, bounds, ptx.wait_expired)
    if not found:
        report_fault(bounds, waiter.site, waiter.peer, waiter.channel, wanted, seen)
    return seen, found


@device_function
def is_at_least(seen, wanted):
    return seen >= wanted


@device_function
def is_set(seen, wanted):
    """Whether a cell that starts at 0 holds anything; wanted is for the report."""
    return seen != 0
