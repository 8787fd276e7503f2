"""Meetings of torch's processes that have an end: torch's own collective calls wait for minutes, and name no rank.

        rank 0                                      rank 1                            torch's store
 comes  "here", the 1st of 2                        computes                          here/0
        time is up: is there a verdict? "gone"                                        here/0, verdict gone
 comes                                              "here", the last: is there one?   here/0, here/1, verdict gone
        raises: rank 1 did not come                 raises: rank 0 has given up

Who comes last writes the verdict "all", who gives up "gone"; the first one counts. After "all" every rank goes on to a
collective call of torch, where all will be.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from hashlib import sha256
from typing import Any

from nbep.host.ranks.timeouts import MISSED_MEETING, PeerTimeout, join_ranks

LONGEST_MS = 1e9  # eleven days: the store counts in 32 bits of milliseconds
ALL, GONE = b"all", b"gone"

_num_meetings: Counter[str] = Counter()  # of this process, by group


def default_store() -> Any:
    """torch has no public name for it; programs that need it take this one."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def meet(group: Any, timeout_ns: int) -> None:
    """Wait until all ranks of a process group call this. Collective.

    Raises: PeerTimeout on every rank if some do not come in time
    """
    import torch.distributed

    rank, size, store = group.rank(), group.size(), default_store()
    members = sha256(repr(torch.distributed.get_process_group_ranks(group)).encode()).hexdigest()[:16]
    name = f"{group.group_name}/{members}"
    _num_meetings[name] += 1
    key = f"nbep/meeting/{name}/{_num_meetings[name]}"
    timeout_ms = min(timeout_ns / 1e6, LONGEST_MS)
    store.set(f"{key}/here/{rank}", "")
    verdict = b""
    if store.add(f"{key}/count", 1) == size:
        verdict = store.compare_set(f"{key}/verdict", "", ALL.decode())
    else:
        try:
            store.wait([f"{key}/verdict"], timedelta(milliseconds=timeout_ms))
        except RuntimeError:  # DistStoreError, which older versions do not have
            store.set(f"{key}/gone/{rank}", "")
            store.compare_set(f"{key}/verdict", "", GONE.decode())
        verdict = store.get(f"{key}/verdict")
    if verdict != ALL:
        others = [peer for peer in range(size) if peer != rank]
        missing = [peer for peer in others if not store.check([f"{key}/here/{peer}"])]
        missing = missing or [peer for peer in others if store.check([f"{key}/gone/{peer}"])]
        what = f"did not come to make, or to destroy, a Buffer in {timeout_ms:g} ms"
        raise PeerTimeout(f"rank {rank}: {join_ranks(missing)} {what}", rank, missing[0], MISSED_MEETING)
