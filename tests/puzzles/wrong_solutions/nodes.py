"""Typical wrong solutions of puzzles 18 to 21: between nodes. See `test_puzzles` for what an entry is."""

WRONG = {
    18: [
        (
            "no order",
            [("post", "atom_add_relaxed_gpu_s32(reserved, 1)", "atom_add(reserved, 1)")],
            "error",
            "write `atom_add_relaxed_gpu_s32`",
        ),
        (
            "no turn",
            [
                (
                    "post",
                    "    deadline = start_wait(bounds)\n    while ld_acquire_gpu_s32(ready) != ticket:\n        if give_up(bounds, deadline):\n            return\n",
                    "",
                )
            ],
            "",
            "No post waits for its turn",
        ),
        (
            "counts",
            [
                (
                    "post",
                    "    while ld_acquire_gpu_s32(ready) != ticket:\n        if give_up(bounds, deadline):\n            return\n    st_release_gpu_s32(ready, ticket + 1)",
                    "    atom_add_release_gpu_s32(ready, 1)",
                )
            ],
            "",
            "No post waits for its turn",
        ),
        (
            "relaxed turn",
            [("post", "ld_acquire_gpu", "ld_relaxed_gpu")],
            "race",
            "Nothing in `post` is an acquire",
        ),
        (
            "relaxed ready",
            [("post", "st_release_gpu", "st_relaxed_gpu")],
            "race",
            "Nothing in `post` is a release",
        ),
        (
            "next turn",
            [("post", "!= ticket:", "!= ticket + 1:")],
            "deadlock",
            "The post with ticket 0 goes first",
        ),
        (
            "no atomic",
            [
                (
                    "post",
                    "ticket = atom_add_relaxed_gpu_s32(reserved, 1)",
                    "ticket = ld_relaxed_gpu_s32(reserved)\n    st_relaxed_gpu_s32(reserved, ticket + 1)",
                )
            ],
            "",
            "take the same ticket",
        ),
        (
            "no 4",
            [("post", "entries + 4 * ticket", "entries + ticket")],
            "memory",
            "Write `entries + 4 * ticket`",
        ),
        (
            "entry behind the turn",
            [
                (
                    "post",
                    "    st_weak_s32(entries + 4 * ticket, value)\n    deadline = start_wait(bounds)\n    while ld_acquire_gpu_s32(ready) != ticket:\n        if give_up(bounds, deadline):\n            return\n    st_release_gpu_s32(ready, ticket + 1)",
                    "    deadline = start_wait(bounds)\n    while ld_acquire_gpu_s32(ready) != ticket:\n        if give_up(bounds, deadline):\n            return\n    st_release_gpu_s32(ready, ticket + 1)\n    st_weak_s32(entries + 4 * ticket, value)",
                )
            ],
            "",
            "store it first, then wait for the turn",
        ),
    ],
    19: [
        (
            "always 1",
            [("post", "(doorbell, n + 1)", "(doorbell, 1)")],
            "deadlock",
            "Record and doorbell become n + 1",
        ),
        (
            "rings first",
            [
                (
                    "post",
                    "        st_release_sys_s32(record, n + 1)\n        st_release_sys_s32(doorbell, n + 1)",
                    "        st_release_sys_s32(doorbell, n + 1)\n        st_release_sys_s32(record, n + 1)",
                )
            ],
            "wrong result",
            "Store the record first, and then ring",
        ),
        (
            "relaxed record",
            [("post", "st_release_sys_s32(record", "st_relaxed_sys_s32(record")],
            "race",
            "Write `st_release_sys_s32(record, n + 1)`",
        ),
        (
            "relaxed doorbell",
            [("post", "st_release_sys_s32(doorbell", "st_relaxed_sys_s32(doorbell")],
            "race",
            "Write `st_release_sys_s32(doorbell, n + 1)`",
        ),
        (
            "no ring",
            [("post", "        st_release_sys_s32(doorbell, n + 1)", "        pass")],
            "deadlock",
            "store n + 1 at the address `doorbell`",
        ),
        (
            "no record",
            [("post", "        st_release_sys_s32(record, n + 1)\n", "")],
            "",
            "store n + 1 at the address `record`",
        ),
        (
            "no syncwarp",
            [("post", "syncwarp(FULL_MASK)", "pass")],
            "",
            "One lane speaks for 32",
        ),
        (
            "subscript",
            [("post", "st_weak_s32(entry + 4 * lane, value)", "entry[lane] = value")],
            "error",
            "write `st_weak_s32(entry + 4 * lane, value)`",
        ),
    ],
    20: [
        (
            "plain store",
            [("note", "atom_exch_release_cta_shared_s32(cell, num_rows)", "st_shared_s32(cell, num_rows)")],
            "race",
            "`note` releases, with",
        ),
        (
            "weak look",
            [
                (
                    "least_progress",
                    "    least = ld_acquire_cta_shared_s32(board)\n    for warp in range(1, num_warps):\n        least = min(least, ld_acquire_cta_shared_s32(board + 4 * warp))",
                    "    least = 9\n    for warp in range(num_warps):\n        least = min(least, ld_shared_s32(board + 4 * warp))",
                )
            ],
            "",
            "write `ld_acquire_cta_shared_s32`",
        ),
        (
            "minimum of an address",
            [("least_progress", "    return least", "    return min(board)")],
            "error",
            "An address is a number, and not a list",
        ),
        (
            "largest",
            [("least_progress", "min(", "max(")],
            "",
            "not the largest one",
        ),
        (
            "first warp",
            [("least_progress", "range(1, num_warps)", "range(1, 1)")],
            "",
            "not the first one",
        ),
        (
            "no syncwarp",
            [("note", "syncwarp(FULL_MASK)", "pass")],
            "",
            "One lane notes for 32",
        ),
        (
            "relaxed note",
            [("note", "atom_exch_release_cta", "atom_exch_relaxed_cta")],
            "race",
            "`note` releases, with",
        ),
        (
            "relaxed look",
            [
                (
                    "least_progress",
                    "ld_acquire_cta_shared_s32(board + 4 * warp)",
                    "ld_relaxed_cta_shared_s32(board + 4 * warp)",
                )
            ],
            "race",
            "`least_progress` acquires, with",
        ),
        (
            "no note",
            [("note", "atom_exch_release_cta_shared_s32(cell, num_rows)", "pass")],
            "",
            "`note` has to store num_rows at the address `cell`",
        ),
        (
            "returns nothing",
            [("least_progress", "    return least", "    least")],
            "",
            "`least_progress` can end without a value",
        ),
        (
            "subscript",
            [("note", "atom_exch_release_cta_shared_s32(cell, num_rows)", "cell[0] = num_rows")],
            "error",
            "write `st_shared_s32(cell, num_rows)`",
        ),
    ],
    21: [
        (
            "does not wait for a row",
            [("forward", "    wait_at_least(tail_in, n + 1, bounds)\n", "")],
            "",
            "Wait until tail_in is n + 1",
        ),
        (
            "does not wait for room",
            [("forward", "    wait_at_least(head_out, n + 1 - OUT_SLOTS, bounds)\n", "")],
            "",
            "head_out is n + 1 - OUT_SLOTS",
        ),
        (
            "relaxed tail",
            [("forward", "st_release_sys_s32(tail_out", "st_relaxed_sys_s32(tail_out")],
            "race",
            "The store to `tail_out` is no release",
        ),
        (
            "no syncwarp",
            [("forward", "syncwarp(FULL_MASK)", "pass")],
            "",
            "they have to meet at syncwarp(FULL_MASK)",
        ),
        (
            "frees nothing",
            [("forward", "        st_release_sys_s32(head_in, n + 1)", "        pass")],
            "deadlock",
            "store n + 1 at head_in",
        ),
        (
            "tells nothing",
            [("forward", "        st_release_sys_s32(tail_out, n + 1)\n", "")],
            "deadlock",
            "store n + 1 at tail_out",
        ),
        (
            "frees first",
            [
                (
                    "forward",
                    "    st_weak_s32(slot_out",
                    "    st_release_sys_s32(head_in, n + 1)\n    st_weak_s32(slot_out",
                )
            ],
            "",
            "store head_in only when all lanes have read",
        ),
        (
            "returns the address",
            [("forward", "ld_weak_s32(slot_in + 4 * lane))", "slot_in[lane])")],
            "error",
            "write `ld_weak_s32(slot_in + 4 * lane)`",
        ),
    ],
}
