"""Typical wrong solutions of puzzle 22: rows in groups. See `test_puzzles` for what an entry is."""

WRONG = {
    22: [
        (
            "too few turns",
            [("exclusive_sum", "while delta < 32", "while delta < 16")],
            "wrong result",
            "Each group begins at the sum of all rounded counts before it",
        ),
        (
            "no gaps",
            [("find_start", "exclusive_sum(padded, lane)", "exclusive_sum(count, lane)")],
            "wrong result",
            "without gaps",
        ),
        (
            "the sum is rounded",
            [
                (
                    "find_start",
                    "exclusive_sum(padded, lane)",
                    "(exclusive_sum(count, lane) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT",
                )
            ],
            "wrong result",
            "round each count, then add up",
        ),
        (
            "its own rows too",
            [("find_start", "exclusive_sum(padded, lane)", "exclusive_sum(padded, lane) + padded")],
            "wrong result",
            "behind its own rows",
        ),
        (
            "a gap for nobody",
            [("find_start", "(count + ALIGNMENT - 1) // ALIGNMENT", "(count // ALIGNMENT + 1)")],
            "wrong result",
            "without tokens takes no rows",
        ),
        (
            "its own lane",
            [("find_row", "shfl_idx_s32(FULL_MASK, start, max(expert, 0))", "start")],
            "wrong result",
            "in the lane of its expert",
        ),
        (
            "all in one row",
            [("find_row", "begin + below if", "begin if")],
            "wrong result",
            "Two tokens have the same row",
        ),
        (
            "lanes above",
            [("find_row", "same & ((1 << lane) - 1)", "same & ~((2 << lane) - 1)")],
            "wrong result",
            "count only lanes below with the same expert",
        ),
        (
            "itself as well",
            [("find_row", "(1 << lane) - 1", "(2 << lane) - 1")],
            "wrong result",
            "one row too far",
        ),
        (
            "a row without a token",
            [("find_row", "begin + below if expert >= 0 else -1", "begin + below")],
            "wrong result",
            "has no token: its row is -1",
        ),
        (
            "some lanes return",
            [
                (
                    "find_row",
                    "    begin = shfl",
                    "    if expert < 0:\n        return -1\n    begin = shfl",
                )
            ],
            "divergence",
            "Let all lanes call them",
        ),
    ]
}
