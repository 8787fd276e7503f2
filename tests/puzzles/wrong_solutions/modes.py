"""Typical wrong solutions of puzzles 13 to 17: FP8, low latency, combine, a whole dispatch. See `test_puzzles` for what an entry is."""

WRONG = {
    13: [
        (
            "449 in place of 448",
            [("scales_of", "f32_div_rn(f32(448), amax)", "f32_div_rn(f32(449), amax)")],
            "wrong result",
            "multiply by 448 / amax",
        ),
        (
            "half of the lanes shuffle",
            [
                (
                    "largest_of_warp",
                    "value = f32_max(value, shfl_xor_f32(FULL_MASK, value, bit))",
                    "value = f32_max(value, shfl_xor_f32(FULL_MASK, value, bit)) if thread_idx() < 16 else value",
                )
            ],
            "divergence",
            "All 32 lanes have to come to the same shuffles",
        ),
        (
            "half of the range",
            [("scales_of", "f32_div_rn(f32(448), amax)", "f32_div_rn(f32(224), amax)")],
            "wrong result",
            "became 224, not 448",
        ),
        (
            "no mask",
            [("largest_of_warp", "shfl_xor_f32(FULL_MASK, value, bit)", "shfl_xor_f32(value, bit)")],
            "error",
            "Write `shfl_xor_f32(FULL_MASK, value, lane_mask)`",
        ),
        (
            "no kind",
            [("largest_of_warp", "shfl_xor_f32", "shfl_xor")],
            "error",
            "or another kind: f32",
        ),
        (
            "one scale",
            [
                (
                    "scales_of",
                    "return f32_div_rn(f32(448), amax), f32_div_rn(amax, f32(448))",
                    "return f32_div_rn(f32(448), amax)",
                )
            ],
            "error",
            "return all of its values",
        ),
        (
            "returns nothing",
            [("largest_of_warp", "    return value", "    value")],
            "",
            "`largest_of_warp` can end without a value",
        ),
        (
            "each lane alone",
            [("largest_of_warp", "while bit > 0:", "while bit > 16:")],
            "wrong result",
            "a scale of its own",
        ),
        (
            "half the warp",
            [("largest_of_warp", "while bit > 0:", "while bit > 1:")],
            "wrong result",
            "the maximum is not that of all 32 lanes",
        ),
        ("no floor", [("scales_of", "amax = f32_max(amax, f32(1e-4))", "pass")], "", "at least 1e-4"),
        (
            "scales the wrong way",
            [
                (
                    "scales_of",
                    "f32_div_rn(f32(448), amax), f32_div_rn(amax, f32(448))",
                    "f32_div_rn(f32(448), amax), f32_div_rn(f32(448), amax)",
                )
            ],
            "wrong result",
            "what the receiver multiplies by",
        ),
    ],
    14: [
        (
            "a load and a store take the slot",
            [
                (
                    "put_row",
                    "slot = atom_add_relaxed_gpu_s32(next_slot, 1)",
                    "slot = ld_weak_s32(next_slot)\n        st_weak_s32(next_slot, slot + 1)",
                )
            ],
            "wrong result",
            "a load and a store give two warps the same one",
        ),
        (
            "subscripts",
            [("put_row", "st_weak_s32(slots + ROW_BYTES * slot + 4 * lane, value)", "slots[slot][lane] = value")],
            "error",
            "is `slots + ROW_BYTES * slot + 4 * lane`",
        ),
        (
            "no 4",
            [("put_row", "+ 4 * lane", "+ lane")],
            "memory",
            "Write `slots + ROW_BYTES * slot + 4 * lane`",
        ),
        (
            "no row",
            [("put_row", "ROW_BYTES * slot", "slot")],
            "memory",
            "Slot k begins ROW_BYTES * k bytes",
        ),
        (
            "all lanes count",
            [("put_row", "    if lane == 0:\n        atom_add_release", "    if True:\n        atom_add_release")],
            "wrong result",
            "one lane adds 1 to `count`",
        ),
        (
            "count for this GPU",
            [("put_row", "atom_add_release_sys_s32(count", "atom_add_acq_rel_gpu_s32(count")],
            "race",
            "It takes the scope `sys`",
        ),
        (
            "each lane a slot",
            [
                ("put_row", "    if lane == 0:\n        slot = atom", "    if True:\n        slot = atom"),
                ("put_row", "    slot = shfl_idx_s32(FULL_MASK, slot, 0)\n", ""),
            ],
            "memory",
            "one lane takes a slot for its whole warp",
        ),
        (
            "no broadcast",
            [("put_row", "    slot = shfl_idx_s32(FULL_MASK, slot, 0)\n", "")],
            "",
            "have to learn its number",
        ),
        (
            "relaxed count",
            [("put_row", "atom_add_release", "atom_add_relaxed")],
            "race",
            "Nothing in your code is a release",
        ),
        ("no syncwarp", [("put_row", "syncwarp(FULL_MASK)", "pass")], "", "they have to meet at a syncwarp"),
        (
            "no count",
            [("put_row", "atom_add_release_sys_s32(count, 1)", "pass")],
            "deadlock",
            "Rank 1 waits until `count` is 9",
        ),
    ],
    15: [
        (
            "lane 0 alone waits",
            [("send_call", "    wait_at_least(", "    if lane == 0:\n        wait_at_least(")],
            "wrong result",
            "A half is written while it is still in use",
        ),
        (
            "subscript",
            [("send_call", "st_weak_s32(half + DATA + 4 * lane, value)", "half[lane] = value")],
            "error",
            "write `st_weak_s32(half + 4 * lane, value)`",
        ),
        (
            "no data offset",
            [("send_call", "half + DATA + 4 * lane", "half + 4 * lane")],
            "",
            "They begin at half + DATA",
        ),
        (
            "gives no credit",
            [("end_call", "atom_add_release_sys_s32(credit, 1)", "pass")],
            "deadlock",
            "has to add 1 at the address `credit`",
        ),
        (
            "no 4",
            [("send_call", "DATA + 4 * lane", "DATA + lane")],
            "memory",
            "Write `half + DATA + 4 * lane`",
        ),
        ("relaxed credit", [("end_call", "atom_add_release", "atom_add_relaxed")], "race", "Nothing in `end_call` is"),
        ("relaxed count", [("send_call", "atom_add_release", "atom_add_relaxed")], "race", "Nothing in `send_call` is"),
        (
            "credit first",
            [
                (
                    "end_call",
                    "st_weak_s32(half + COUNT, 0)\n        atom_add_release_sys_s32(credit, 1)",
                    "atom_add_release_sys_s32(credit, 1)\n        st_weak_s32(half + COUNT, 0)",
                )
            ],
            "deadlock",
            "Both ranks change `count`",
        ),
        (
            "no credit",
            [("send_call", "wait_at_least(credit, n - 1, bounds)", "pass")],
            "",
            "No thread waits for a credit",
        ),
        ("one call too late", [("send_call", "n - 1, bounds", "n + 1, bounds")], "deadlock", "needs n - 1 credits"),
        (
            "count not set back",
            [("end_call", "st_weak_s32(half + COUNT, 0)", "pass")],
            "",
            "No thread sets `count` back",
        ),
        (
            "no syncwarp",
            [("send_call", "syncwarp(FULL_MASK)", "pass"), ("end_call", "syncwarp(FULL_MASK)", "pass")],
            "",
            "In `send_call` lane 0 speaks",
        ),
    ],
    16: [
        (
            "row 0 for an expert that is not there",
            [("combine_word", "        if index >= 0:", "        index = max(index, 0)\n        if True:")],
            "wrong result",
            "A -1 adds nothing",
        ),
        (
            "subscript",
            [("combine_word", "ld_nc_s32(indices + 4 * k)", "indices[k]")],
            "error",
            "write `ld_weak_s32(indices + 4 * k)`",
        ),
        (
            "no 4",
            [("combine_word", "ld_nc_s32(indices + 4 * k)", "ld_nc_s32(indices + k)")],
            "memory",
            "Write `indices + 4 * k`",
        ),
        (
            "returns nothing",
            [("combine_word", "return f32x2", "f32x2")],
            "memory",
            "`combine_word` can end without a value",
        ),
        ("rows of one byte", [("combine_word", "ROW_BYTES * index", "index")], "memory", "lane i has 4 of them"),
        (
            "halves exchanged",
            [("combine_word", "f32x2_to_bf16x2(low, high)", "f32x2_to_bf16x2(high, low)")],
            "wrong result",
            "have changed places",
        ),
        (
            "rounds each step",
            [
                (
                    "combine_word",
                    "high = f32_add_rn(high, f32_mul_rn(weight, b))",
                    "high = f32_add_rn(high, f32_mul_rn(weight, b))\n            low, high = bf16x2_to_f32x2(f32x2_to_bf16x2(low, high))",
                )
            ],
            "wrong result",
            "rounded once",
        ),
        ("takes -1", [("combine_word", "if index >= 0:", "if True:")], "memory", "Row -1 lies in front"),
        (
            "no weight",
            [("combine_word", "ld_nc_f32(weights + 4 * k)", "f32(1)")],
            "wrong result",
            "Has each row its weight",
        ),
        ("backwards", [("combine_word", "range(NUM_TOPK)", "(2, 1, 0)")], "wrong result", "Add in order"),
    ],
    17: [
        (
            "the row once more",
            [
                (
                    "send_tokens",
                    "(tail, n + 1)",
                    "(tail, n + 1)\n            st_weak_s32(slot_of(peers, me, dst, n) + 4 * lane, ld_nc_s32(x + ROW_BYTES * token + 4 * lane))",
                )
            ],
            "race",
            "Is the tail behind the stores of all lanes",
        ),
        (
            "slot by token",
            [("send_tokens", "slot_of(peers, me, dst, n)", "slot_of(peers, me, dst, token)")],
            "",
            "which is not `token`",
        ),
        (
            "next slot",
            [("receive_tokens", "slot_of(peers, src, me, n)", "slot_of(peers, src, me, n + 1)")],
            "",
            "which is not `n + 1`",
        ),
        (
            "ranks exchanged",
            [("receive_tokens", "slot_of(peers, src, me, n)", "slot_of(peers, me, src, n)")],
            "",
            "slot_of(peers, src, me, n), and not slot_of(peers, me, src, n)",
        ),
        (
            "no 4",
            [("send_tokens", "n) + 4 * lane", "n) + lane")],
            "memory",
            "+ 4 * lane` in place of",
        ),
        (
            "one lane knows the count",
            [("receive_tokens", "num_rows = await_count", "num_rows = 0 if lane else await_count")],
            "divergence",
            "Do all find the same counts",
        ),
        (
            "moves no head",
            [("receive_tokens", "st_release_sys_s32(head, n + 1)", "pass")],
            "deadlock",
            "a slot is free again when the head is n - 3",
        ),
        (
            "tail relaxed",
            [("send_tokens", "st_release", "st_relaxed")],
            "race",
            "Nothing in `send_tokens` is a release",
        ),
        (
            "count as it is",
            [
                (
                    "send_tokens",
                    "-count_tokens(is_token_in_rank, dst, num_tokens) - 1",
                    "count_tokens(is_token_in_rank, dst, num_tokens)",
                )
            ],
            "deadlock",
            "a count of 0 may not travel as 0",
        ),
        (
            "no offsets",
            [("receive_tokens", "first += await_count", "first += 0 * await_count")],
            "wrong result",
            "begin behind those before it",
        ),
        (
            "no head",
            [("send_tokens", "wait_at_least(head, n + 1 - NUM_SLOTS, bounds)", "pass")],
            "",
            "Who waits for the head",
        ),
        (
            "no syncwarp",
            [("send_tokens", "syncwarp(FULL_MASK)", "pass"), ("receive_tokens", "syncwarp(FULL_MASK)", "pass")],
            "",
            "In `send_tokens` lane 0 moves the tail",
        ),
    ],
}
