"""Ledgers are true: each has the cells that its file's code writes and reads, with their orders, and no others.

Small traced runs of all modes are compared with the tables at the heads of the files; see support/ledgers.py. Files and
tables are found by themselves. What a user's file or a benchmark has in its buffer has no names, so those are left out.
"""

from collections import defaultdict
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from ledgers import (
    Access,
    Accesses,
    Ledger,
    copies_noted,
    forgotten_resets,
    is_head,
    is_kernels_own,
    matters,
    missing,
    names_of,
    read_ledgers,
    rows_of,
    unseen,
    written_by_kernel,
)

import nbep
from nbep.lab.check.scenario import accepted, load_scenario

ONE_EXPERT = {"experts": 1, "topk": 2}
RUNS = (
    ("intranode.notify", {}),
    ("intranode.combine", {"fp8": 1, "hidden": 128}),
    ("intranode.combine", {"tma": 0}),
    ("intranode.combine", {"host": 1}),
    ("intranode.direct", {"fp8": 1, "hidden": 512, "tokens": 6}),
    ("intranode.direct", {"tma": 0, "fp8": 1, "hidden": 128}),
    ("intranode.differ", {}),
    ("elastic", {"fp8": 1, "hidden": 256, "cached": 1, "sync": 1, "rounds": 2}),
    ("elastic.expanded", {"fp8": 1, "hidden": 256, "cached": 1}),
    ("elastic.expanded", {"tma": 0}),
    ("elastic.once", {}),
    ("elastic.shared", {}),
    ("elastic.nodes", {"fp8": 1, "hidden": 256, "cached": 1, "sync": 1, "rounds": 2}),
    ("elastic.nodes", {"ranks": 4, "tma": 0}),
    ("elastic.nodes.once", {"ibgda": 1}),
    ("elastic.hybrid", {"ibgda": 1}),
    ("internode", {}),
    ("internode", {"tma": 0, "fp8": 1, "hidden": 128}),
    ("internode", {"ibgda": 1}),
    ("internode.cached", {}),
    ("internode.differ", {}),
    ("internode.differ", {"cached": 1}),
    ("low_latency", {"logfmt": 1, **ONE_EXPERT}),
    ("low_latency", {"nic": 1}),
    ("low_latency", {"dedup": 1, "nic": 1}),
    ("low_latency", {"host": 1}),
    ("low_latency", {"dedup": 1, "host": 1}),
    ("low_latency", {"tma": 0}),
    ("low_latency", {"dedup": 1, "tma": 0, "fp8": 1}),
    ("low_latency.masked", {}),
    ("low_latency.masked", {"dedup": 1}),
    ("low_latency.differ", {}),
    ("low_latency.differ", {"dedup": 1}),
)
# Benchmarks, whose buffers have no names; and what no emulator runs.
NOT_RUN = ("kernels/intranode/push.py", "kernels/network_push.py", "network/nvshmem.py")


NUM_TOKENS, HIDDEN, NUM_EXPERTS = 3, 128, 4
TOPK_IDX = (np.arange(NUM_TOKENS)[:, None] + [0, 1]) % NUM_EXPERTS  # some go to few ranks
WEIGHTS = np.full((NUM_TOKENS, 2), 0.5, np.float32)


def with_statistics(comm):
    """Casts, statistics, and masks that are asked for: no scenario has them."""
    x = np.full((NUM_TOKENS, HIDDEN), 1 + comm.rank, ml_dtypes.bfloat16)
    nbep.per_token_cast_back(*nbep.per_token_cast_to_fp8(x))
    num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, comm.size, NUM_EXPERTS)
    buffer = nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True, enable_shrink=True)
    for deduplicate in (False, True):
        waited = np.zeros(comm.size, np.int64)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
            x,
            TOPK_IDX,
            NUM_TOKENS,
            NUM_EXPERTS,
            cumulative_local_expert_recv_stats=np.zeros(NUM_EXPERTS // comm.size, np.int32),
            dispatch_wait_recv_cost_stats=waited,
            use_fp8=False,
            deduplicate=deduplicate,
            topk_weights=WEIGHTS if deduplicate else None,
        )
        buffer.low_latency_combine(recv_x, TOPK_IDX, WEIGHTS, handle, combine_wait_recv_cost_stats=waited)
    buffer.low_latency_query_mask_buffer(np.zeros(comm.size, np.int32))
    buffer.destroy()


def with_biases(comm):
    """Biases, and rows that stay unused: no scenario has them. With four ranks between nodes, else inside one."""
    x = np.full((NUM_TOKENS, HIDDEN), 1 + comm.rank, ml_dtypes.bfloat16)
    config, is_one_node = nbep.Config(2, 2, 4, 2, 4), comm.size == 2
    own = {"num_zero_copy_bytes": 1 << 18} if is_one_node else {"num_rdma_bytes": 1 << 18, "num_nvl_peers": 2}
    most = {"num_worst_tokens": NUM_TOKENS * comm.size} if is_one_node else {}
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 18, **own)
    per_rank, per_node, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(TOPK_IDX, NUM_EXPERTS)
    given = None, per_rank, per_node, is_token_in_rank, per_expert, TOPK_IDX, WEIGHTS
    for zero_copy in (False, True) if is_one_node else (False,):
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, *given, config=config, zero_copy=zero_copy, **most)
        buffer.combine(recv_x, handle, bias=(x, x), config=config, zero_copy=zero_copy)
    buffer.destroy()


@cache
def accesses() -> tuple[Access, ...]:
    """What all runs have shown."""
    seen = Accesses()
    with copies_noted(seen):
        for name, changed in RUNS:
            scenario = load_scenario(name)
            values = {**scenario.parameters, **changed}
            given = accepted(scenario.main, values)
            nbep.spawn(
                lambda comm, main=scenario.main, given=given: main(comm, **given),
                values["ranks"],
                "emulator",
                tracer=seen.of_one_run(),
                on_deadlock="expire" if scenario.lets_time_pass else "raise",
            )
        for main, num_ranks in (with_statistics, 2), (with_biases, 2), (with_biases, 4):
            nbep.spawn(main, num_ranks, "emulator", tracer=seen.of_one_run())
    return tuple(seen.found)


def untrue() -> dict[str, list[str]]:
    """What is wrong, by file."""
    ledgers, written = read_ledgers(), written_by_kernel(accesses())
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for access in accesses():
        if matters(access, written) and (lack := missing(access, ledgers)) is not None:
            found[lack[0]][f"the ledger lacks {lack[1]}"] = None
    for path, ledger in ledgers.items():
        if is_kernels_own(path):
            for reset in forgotten_resets(ledger, ledgers, accesses()):
                found[path][f"the ledger lacks {reset}"] = None
            for order in [] if path in NOT_RUN else unseen(ledger, accesses()):
                found[path][f"no run has {order}"] = None
    return {path: list(found[path]) for path in sorted(found)}


@pytest.mark.thorough
def test_ledgers_have_the_cells_and_the_orders_of_their_files():
    """One test: others would have to do the runs again."""
    reached = {file for access in accesses() for file in access.files}
    assert [path for path in read_ledgers() if path not in reached] == list(NOT_RUN)
    lines = [f"nbep/device/{path}: {what}" for path, whats in untrue().items() for what in whats]
    assert not lines, "\n".join(lines)


LEDGER = """A kernel.

 cell       written by   with                  read by    with
 slots[h]   senders      atom_add_relaxed_gpu  -          -
            keeper       st_weak 0             senders    of a later launch
 tail       a sender     amo_add               receiver   ld_acquire_sys
"""
OWN = "kernels/own.py"


def ledger_without(text: str) -> dict[str, Ledger]:
    """The ledger above without the lines that have a text."""
    lines = [line for line in LEDGER.splitlines() if not text or text not in line]
    head = next(number for number, line in enumerate(lines) if is_head(line))
    return {OWN: Ledger(OWN, tuple(rows_of(lines[head], lines[head + 1 :])))}


def access_to(cell: str, *functions: str, is_write: bool = True, is_zero: bool = False) -> Access:
    primitive, *callers = functions
    chain = ("primitives/own.py", primitive), *(("network/own.py", name) for name in callers), (OWN, "kernel")
    return Access("kernel", chain, names_of(cell), is_write, is_zero)


RESET = access_to("slots[half 0, expert 1]", "st_weak_s32", is_zero=True)
ADD = access_to("slots[half 0, expert 1]", "atom_add_relaxed_gpu_s32")
TELL = access_to("tail[channel 0]", "atom_add_release_sys_s32", "amo_add")


@pytest.mark.parametrize("access", [RESET, ADD, TELL])
def test_an_access_that_the_ledger_has_is_right(access):
    assert missing(access, ledger_without("")) is None
    assert forgotten_resets(ledger_without("")[OWN], ledger_without(""), [access]) == []


def test_a_forgotten_reset_is_found():
    ledgers = ledger_without("keeper")
    assert missing(RESET, ledgers) == (OWN, "st_weak of slot, by kernel")
    assert forgotten_resets(ledgers[OWN], ledgers, [RESET, ADD]) == ["the reset of slot: st_weak, by kernel"]


def test_a_cell_that_is_not_there_is_found():
    assert missing(TELL, ledger_without("tail")) == (OWN, "the cell tail: atom_add_release_sys, by amo_add")


def test_another_order_is_found():
    relaxed = access_to("tail[channel 0]", "ld_relaxed_sys_s32", is_write=False)
    assert missing(relaxed, ledger_without("")) == (OWN, "ld_relaxed_sys of tail, by kernel")


def test_an_order_that_no_run_has_is_found():
    ledger = ledger_without("")[OWN]
    assert unseen(ledger, [RESET, ADD, TELL]) == ["ld_acquire_sys of tail"]
