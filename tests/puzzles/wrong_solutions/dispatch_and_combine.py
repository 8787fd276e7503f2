"""Typical wrong solutions of puzzles 7 to 12: counts, rings and copies. See `test_puzzles` for what an entry is."""

WRONG = {
    7: [
        (
            "a look at the count",
            [
                (
                    "count_token",
                    "            atom_add",
                    "            if ld_weak_s32(per_rank + 4 * rank) >= 0:\n                atom_add",
                )
            ],
            "race",
            "All threads count into the same cells",
        ),
        (
            "marks with the rank",
            [("count_token", "st_weak_s32(in_rank + 4 * rank, 1)", "st_weak_s32(in_rank + 4 * rank, rank)")],
            "wrong result",
            "is_token_in_rank has a row for each token",
        ),
        (
            "subscript",
            [("count_token", "ld_nc_s64(experts + 8 * k)", "experts[k]")],
            "error",
            "write `ld_weak_s64(experts + 8 * k)`",
        ),
        (
            "steps of 4",
            [("count_token", "ld_nc_s64(experts + 8 * k)", "ld_nc_s64(experts + 4 * k)")],
            "memory",
            "Write `experts + 8 * k` in place of `experts + 4 * k`",
        ),
        (
            "a float",
            [("count_token", "expert // EXPERTS_PER_RANK", "expert / EXPERTS_PER_RANK")],
            "error",
            "are ints: write `//`",
        ),
        (
            "another rank",
            [("count_token", "expert // EXPERTS_PER_RANK", "expert % NUM_RANKS")],
            "wrong result",
            "Expert e belongs to rank e // EXPERTS_PER_RANK",
        ),
        (
            "shifts by -1",
            [("count_token", "if expert >= 0:", "if True:")],
            "error",
            "Skip it: ask `if expert >= 0`",
        ),
        (
            "half an expert",
            [("count_token", "ld_nc_s64(experts + 8 * k)", "ld_nc_s32(experts + 4 * k)")],
            "wrong result",
            "The experts are s64",
        ),
        (
            "counts experts",
            [
                (
                    "count_token",
                    "            bits |= 1 << (expert // EXPERTS_PER_RANK)",
                    "            bits |= 1 << (expert // EXPERTS_PER_RANK)\n            atom_add_relaxed_gpu_s32(per_rank + 4 * (expert // EXPERTS_PER_RANK), 1)",
                ),
                ("count_token", "            atom_add_relaxed_gpu_s32(per_rank + 4 * rank, 1)\n", ""),
            ],
            "wrong result",
            "counted too often",
        ),
        (
            "takes -1",
            [
                (
                    "count_token",
                    "        if expert >= 0:\n            bits |= 1 << (expert // EXPERTS_PER_RANK)",
                    "        st_weak_s32(in_rank + 4 * (expert // EXPERTS_PER_RANK), 1)",
                )
            ],
            "memory",
            "An expert of -1 belongs to no rank",
        ),
        (
            "no atomic",
            [
                (
                    "count_token",
                    "atom_add_relaxed_gpu_s32(per_rank + 4 * rank, 1)",
                    "st_weak_s32(per_rank + 4 * rank, ld_weak_s32(per_rank + 4 * rank) + 1)",
                )
            ],
            "wrong result",
            "is counted too seldom",
        ),
    ],
    8: [
        (
            "three turns",
            [("exclusive_sum", "delta < 32", "delta < 8")],
            "wrong result",
            "The lanes below 8 are right",
        ),
        (
            "greater than",
            [("exclusive_sum", "if lane >= delta:", "if lane > delta:")],
            "wrong result",
            "the condition is `lane >= delta`, not `lane > delta`",
        ),
        (
            "no mask",
            [("exclusive_sum", "shfl_up_s32(FULL_MASK, total, delta)", "shfl_up_s32(total, delta)")],
            "error",
            "Write `shfl_up_s32(FULL_MASK, value, delta)`",
        ),
        (
            "passes on the value",
            [("exclusive_sum", "shfl_up_s32(FULL_MASK, total, delta)", "shfl_up_s32(FULL_MASK, value, delta)")],
            "wrong result",
            "Shuffle the sum so far",
        ),
        (
            "one turn less",
            [("exclusive_sum", "while delta < 32", "while delta < 16")],
            "wrong result",
            "the turn with delta 16 is missing",
        ),
        (
            "downwards",
            [("exclusive_sum", "shfl_up_s32", "shfl_down_s32")],
            "wrong result",
            "write shfl_up_s32",
        ),
        (
            "returns nothing",
            [("exclusive_sum", "return total - value", "total - value")],
            "memory",
            "`exclusive_sum` can end without a value",
        ),
        ("inclusive", [("exclusive_sum", "total - value", "total")], "wrong result", "with the lane's own value"),
        (
            "all lanes add",
            [("exclusive_sum", "if lane >= delta:", "if True:")],
            "wrong result",
            "Lane 0 has no lane below",
        ),
        (
            "shuffle in some lanes",
            [
                (
                    "exclusive_sum",
                    "        below = shfl_up_s32(FULL_MASK, total, delta)\n        if lane >= delta:\n            total += below",
                    "        if lane >= delta:\n            total += shfl_up_s32(FULL_MASK, total, delta)",
                )
            ],
            "divergence",
            "some lanes do not come",
        ),
    ],
    9: [
        (
            "loop turned around",
            [("await_count", "(cell) == 0", "(cell) != 0")],
            "",
            "is turned around",
        ),
        (
            "the cell of another lane",
            [("announce", "st_relaxed_sys_s32(cell,", "st_relaxed_sys_s32(cell + 4 * lane_id(),")],
            "deadlock",
            "add nothing to it",
        ),
        (
            "asks the address",
            [("await_count", "ld_relaxed_sys_s32(cell) == 0", "cell == 0")],
            "wrong result",
            "is an address and does not change",
        ),
        (
            "as it is",
            [
                ("announce", "-count - 1", "count"),
                ("await_count", "-ld_relaxed_sys_s32(cell) - 1", "ld_relaxed_sys_s32(cell)"),
            ],
            "deadlock",
            "their count is 0, and it was sent as 0",
        ),
        ("one off", [("await_count", "(cell) - 1", "(cell)")], "wrong result", "Lane 1 returned 6, and its count is 5"),
        ("weak store", [("announce", "st_relaxed_sys_s32", "st_weak_s32")], "race", "no place for weak accesses"),
    ],
    10: [
        (
            "the row once more",
            [("send", "(tail, i + 1)", "(tail, i + 1)\n    st_weak_s32(slot + 4 * lane, value)")],
            "race",
            "Either the tail moves before all lanes have stored",
        ),
        (
            "no 4",
            [("send", "slot + 4 * lane", "slot + lane")],
            "memory",
            "Write `slot + 4 * lane`",
        ),
        (
            "subscript",
            [("receive", "value = ld_weak_s32(slot + 4 * lane)", "value = slot[lane]")],
            "error",
            "write `ld_weak_s32(slot + 4 * lane)`",
        ),
        (
            "waits for the first row",
            [("receive", "wait_at_least(tail, i + 1", "wait_at_least(tail, 1")],
            "",  # a race, or rows that came later: what the first seed shows
            "wait until the tail is i + 1",
        ),
        (
            "the slot twice",
            [("send", "slot + 4 * lane", "slot + 128 * (i % NUM_SLOTS) + 4 * lane")],
            "wrong result",
            "is the slot of row i already",
        ),
        (
            "head before the load",
            [
                ("receive", "    value = ld_weak_s32(slot + 4 * lane)\n", ""),
                ("receive", "    return value", "    return ld_weak_s32(slot + 4 * lane)"),
            ],
            "",
            "move the head only behind its load",
        ),
        (
            "no head",
            [("send", "wait_at_least(head, i + 1 - NUM_SLOTS, bounds)", "pass")],
            "",
            "overwritten by a later one",
        ),
        (
            "relaxed tail",
            [("send", "st_release", "st_relaxed")],
            "race",
            "Nothing in `send` is a release",
        ),
        (
            "lanes share a word",
            [("send", "slot + 4 * lane", "slot")],
            "wrong result",
            "but not in their places",
        ),
        (
            "one lane waits",
            [("receive", "wait_at_least(tail", "lane != 0 or wait_at_least(tail")],
            "wrong result",
            "meet at a syncwarp the lane that does",
        ),
        ("returns nothing", [("receive", "return value", "return")], "memory", "`receive` can end without a value"),
        ("one slot too many", [("send", "i + 1 - NUM_SLOTS", "i - NUM_SLOTS")], "", "the head has to be i - 3"),
        ("waits for its own row", [("send", "i + 1 - NUM_SLOTS", "i + 1")], "deadlock", "Row i - 4 has been read when"),
        (
            "no syncwarp",
            [("send", "syncwarp(FULL_MASK)", "pass"), ("receive", "syncwarp(FULL_MASK)", "pass")],
            "",
            "In `send` lane 0 moves the tail",
        ),
    ],
    11: [
        (
            "half a vector too far",
            [("copy_row", "dst + 16 * i", "dst + 16 * i + 8")],
            "memory",
            "Vector i begins 16 * i bytes behind the first one",
        ),
        (
            "subscripts",
            [("copy_row", "st_na_v4(dst + 16 * i, ld_nc_v4(src + 16 * i))", "dst[i] = src[i]")],
            "error",
            "write `st_na_v4(dst + 16 * i, ld_na_v4(src + 16 * i))`",
        ),
        (
            "no 16",
            [("copy_row", "ld_nc_v4(src + 16 * i)", "ld_nc_v4(src + i)")],
            "memory",
            "Write `src + 16 * i` in place of `src + i`",
        ),
        (
            "no kind",
            [("copy_row", "st_na_v4", "st_na")],
            "error",
            "write `st_na_v4`",
        ),
        (
            "all from 0",
            [("copy_row", "i = lane", "i = 0")],
            "wrong result",
            "How far does lane i go",
        ),
        ("no bound", [("copy_row", "while i < num_vectors:", "while i < 96:")], "memory", "Ask before you load"),
        ("one turn", [("copy_row", "i += 32", "i += 128")], "wrong result", "were never written"),
        (
            "four bytes apart",
            [("copy_row", "st_na_v4(dst + 16 * i", "st_na_v4(dst + 4 * i")],
            "memory",
            "Write `dst + 16 * i`",
        ),
    ],
    12: [
        (
            "2 in place of 1",
            [("add_one", "(stage + 4 * lane) + 1", "(stage + 4 * lane) + 2")],
            "wrong result",
            "each lane adds 1, once, to its own word",
        ),
        (
            "adds nothing",
            [("add_one", "st_shared_s32(stage + 4 * lane, ld_shared_s32(stage + 4 * lane) + 1)", "pass")],
            "wrong result",
            "The row has come through as it was",
        ),
        (
            "loads of global memory",
            [("add_one", "ld_shared_s32(stage + 4 * lane)", "ld_weak_s32(stage + 4 * lane)")],
            "memory",
            "`stage` lies in shared memory",
        ),
        (
            "no 4",
            [("add_one", "st_shared_s32(stage + 4 * lane,", "st_shared_s32(stage + lane,")],
            "memory",
            "Write `stage + 4 * lane`",
        ),
        (
            "subscript",
            [("add_one", "st_shared_s32(stage + 4 * lane, ld_shared_s32(stage + 4 * lane) + 1)", "stage[lane] += 1")],
            "error",
            "`st_shared_s32(stage + 4 * lane, ld_shared_s32(stage + 4 * lane) + 1)`",
        ),
        ("no commit", [("store", "tma_store_commit()", "pass")], "memory", "comes between store and wait"),
        ("the other parity", [("add_one", "(full, 0)", "(full, 1)")], "memory", "the phase with parity 0"),
        (
            "no wait for the load",
            [("add_one", "    while not mbarrier_try_wait_parity(full, 0):\n        pass\n", "")],
            "",
            "No thread waits for the load",
        ),
        ("no proxy fence", [("add_one", "fence_proxy_async_shared()", "pass")], "memory", "A proxy fence is missing"),
        (
            "no wait for the store",
            [("store", "tma_store_wait_all()", "pass")],
            "",
            "The kernel ends while the engine still writes",
        ),
        ("no meeting", [("add_one", "syncwarp(FULL_MASK)", "pass")], "", "only then do all lanes meet"),
    ],
}
