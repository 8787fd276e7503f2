"""Typical wrong solutions of the puzzles: edits of the right ones, and what the check has to say of each.

WRONG[number] is a list of (name, edits, kind, words): an edit is (function, old text, new text), kind that of the clue,
and words come out of the puzzle's own advice, not out of the emulator's report.
"""

WRONG = {
    1: [
        (
            "subscript",
            [("send", "st_weak_s32(data, value)", "data[0] = value")],
            "error",
            "write `st_weak_s32(data, value)`",
        ),
        (
            "reads with a subscript",
            [("receive", "ld_weak_s32(data)", "data[0]")],
            "error",
            "write `ld_weak_s32(data)`",
        ),
        (
            "assignment",
            [("send", "st_release_sys_s32(flag, 1)", "flag = 1")],
            "deadlock",
            "changes a name of Python and no memory",
        ),
        (
            "an address returned",
            [("receive", "return ld_weak_s32(data)", "return data")],
            "wrong result",
            "write `return ld_weak_s32(data)`",
        ),
        (
            "no kind",
            [("send", "st_weak_s32(data, value)", "st_weak(data, value)")],
            "error",
            "write `st_weak_s32`",
        ),
        (
            "no mask",
            [("send", "st_weak_s32(data, value)", "st_weak_s32(data, value)\n    syncwarp()")],
            "error",
            "Write `syncwarp(FULL_MASK)`",
        ),
        (
            "loop turned around",
            [("receive", "ld_acquire_sys_s32(flag) != 1", "ld_acquire_sys_s32(flag) == 1")],
            "",
            "write `while ld_acquire_sys_s32(flag) != 1`",
        ),
        (
            "returns the flag",
            [("receive", "return ld_weak_s32(data)", "return ld_weak_s32(flag)")],
            "wrong result",
            "which is the flag",
        ),
        (
            "arguments exchanged",
            [("send", "st_weak_s32(data, value)", "st_weak_s32(value, data)")],
            "memory",
            "write `st_weak_s32(data, value)`",
        ),
        (
            "polls the address",
            [("receive", "ld_acquire_sys_s32(flag) != 1", "flag != 1")],
            "memory",
            "is an address and does not change",
        ),
        (
            "a fence of CUDA",
            [("send", "st_weak_s32(data, value)", "st_weak_s32(data, value)\n    cuda.threadfence_system()")],
            "error",
            "write `fence_acq_rel_sys()`",
        ),
        (
            "no value",
            [("send", "st_release_sys_s32(flag, 1)", "st_release_sys_s32(flag)")],
            "error",
            "Write `st_release_sys_s32(address, value)`",
        ),
        (
            "a store that acquires",
            [("send", "st_release_sys_s32(flag, 1)", "st_acquire_sys_s32(flag, 1)")],
            "error",
            "Write `st_release_sys_s32`",
        ),
        (
            "returns nothing",
            [("receive", "return ld_weak_s32(data)", "ld_weak_s32(data)")],
            "memory",
            "`receive` can end without a value",
        ),
        (
            "another flag",
            [("send", "st_release_sys_s32(flag, 1)", "st_release_sys_s32(flag, value)")],
            "deadlock",
            "the number goes to `data`",
        ),
        ("scope gpu", [("send", "st_release_sys", "st_release_gpu")], "race", "does not reach another rank"),
        ("relaxed flag", [("send", "st_release", "st_relaxed")], "race", "Nothing in `send` is a release"),
        ("weak flag", [("send", "st_release_sys_s32", "st_weak_s32")], "race", "Nothing in `send` is a release"),
        ("relaxed poll", [("receive", "ld_acquire", "ld_relaxed")], "race", "Nothing in `receive` is an acquire"),
        (
            "fence behind the flag",
            [("send", "st_release_sys_s32(flag, 1)", "st_relaxed_sys_s32(flag, 1)\n    fence_acq_rel_sys()")],
            "race",
            "so its place matters",
        ),
        ("no flag", [("send", "st_release_sys_s32(flag, 1)", "pass")], "deadlock", "a flag that no thread raises"),
        ("no wait", [("receive", "ld_acquire_sys_s32(flag) != 1", "False")], "wrong result", "read `data` before"),
        (
            "flag first",
            [
                (
                    "send",
                    "st_weak_s32(data, value)\n    st_release_sys_s32(flag, 1)",
                    "st_release_sys_s32(flag, 1)\n    st_weak_s32(data, value)",
                )
            ],
            "wrong result",
            "read `data` before the number was there",
        ),
    ],
    2: [
        (
            "forgot the 4",
            [("send", "data + 4 * lane", "data + lane")],
            "memory",
            "Write `data + 4 * lane` in place of `data + lane`",
        ),
        (
            "forgot the lane",
            [("send", "data + 4 * lane", "data")],
            "wrong result",
            "The number of a lane is at data + 4 * lane",
        ),
        (
            "steps of 8",
            [("send", "data + 4 * lane", "data + 8 * lane")],
            "wrong result",
            "The number of a lane is at data + 4 * lane",
        ),
        (
            "waits for 32",
            [("receive", "wait_at_least(flag, 1, bounds)", "wait_at_least(flag, 32, bounds)")],
            "deadlock",
            "The flag is 1, and rank 1 waits for another value",
        ),
        (
            "no flag",
            [("send", "st_release_sys_s32(flag, 1)", "pass")],
            "deadlock",
            "one lane of rank 0 has to store 1 there",
        ),
        (
            "subscript",
            [("send", "st_weak_s32(data + 4 * lane, value)", "data[lane] = value")],
            "error",
            "write `st_weak_s32(data + 4 * lane, value)`",
        ),
        ("no syncwarp in send", [("send", "syncwarp(FULL_MASK)", "pass")], "", "Lane 0 speaks for 32 lanes"),
        (
            "no syncwarp in receive",
            [("receive", "syncwarp(FULL_MASK)", "pass")],
            "",
            "each lane has to wait for the flag itself",
        ),
        ("relaxed flag", [("send", "st_release", "st_relaxed")], "race", "Nothing in `send` is a release"),
        (
            "one lane syncs",
            [("send", "    syncwarp(FULL_MASK)\n    if lane == 0:", "    if lane == 0:\n        syncwarp(FULL_MASK)")],
            "divergence",
            "Move the call out of the `if`",
        ),
    ],
    3: [
        (
            "polls second",
            [("pass_on", "ld_acquire_sys_s32(first)", "ld_acquire_sys_s32(second)")],
            "deadlock",
            "It has to wait for `first`",
        ),
        (
            "polls first volatile",
            [("pass_on", "ld_acquire_sys_s32", "ld_volatile_s32")],
            "race",
            "volatile load of `first` reads its value",
        ),
        (
            "scope gpu",
            [("pass_on", "st_release_sys", "st_release_gpu")],
            "race",
            "write `st_release_sys_s32`",
        ),
        (
            "stores in the loop",
            [
                (
                    "pass_on",
                    "        if give_up(bounds, deadline):\n            return\n    st_release_sys_s32(second, 1)",
                    "        st_release_sys_s32(second, 1)\n        if give_up(bounds, deadline):\n            return",
                )
            ],
            "",
            "behind the loop, not in it",
        ),
        ("relaxed poll", [("pass_on", "ld_acquire", "ld_relaxed")], "race", "Nothing in your code is an acquire"),
        ("relaxed store", [("pass_on", "st_release", "st_relaxed")], "race", "The chain breaks at rank 1"),
        ("no wait", [("pass_on", "ld_acquire_sys_s32(first) == 0", "False")], "", "behind the loop, not in it"),
        (
            "wrong cell",
            [("pass_on", "st_release_sys_s32(second", "st_release_sys_s32(first")],
            "deadlock",
            "at `second`, and not at `first`",
        ),
    ],
    4: [
        (
            "adds to the address",
            [("add_and_arrive", "atom_add_relaxed_gpu_s32(total, value)", "total += value")],
            "wrong result",
            "write `atom_add_relaxed_gpu_s32(total, value)`",
        ),
        (
            "adds with a subscript",
            [("add_and_arrive", "atom_add_relaxed_gpu_s32(total, value)", "total[0] += value")],
            "error",
            "write `atom_add_relaxed_gpu_s32(total, value)`",
        ),
        (
            "CUDA's atomic",
            [("add_and_arrive", "atom_add_relaxed_gpu_s32(total, value)", "cuda.atomic.add(total, 0, value)")],
            "error",
            "write `atom_add_relaxed_gpu_s32(address, value)`",
        ),
        (
            "not called",
            [("add_and_arrive", "grid_dim() - 1", "grid_dim")],
            "wrong result",
            "`grid_dim` is a function: call it",
        ),
        (
            "returns nothing",
            [
                (
                    "add_and_arrive",
                    "return atom_add_acq_rel_gpu_s32(arrivals, 1) == grid_dim() - 1",
                    "atom_add_acq_rel_gpu_s32(arrivals, 1)",
                )
            ],
            "wrong result",
            "`add_and_arrive` can end without a value",
        ),
        (
            "meets too late",
            [
                (
                    "add_and_arrive",
                    "    syncthreads()\n    if thread_idx() != 0:\n        return False\n",
                    "    if thread_idx() != 0:\n        return False\n    syncthreads()\n",
                )
            ],
            "divergence",
            "put it before the line that lets some of them return",
        ),
        (
            "each thread arrives",
            [("add_and_arrive", "    if thread_idx() != 0:\n        return False\n", "")],
            "wrong result",
            "Each block arrives once",
        ),
        (
            "relaxed arrival",
            [("add_and_arrive", "atom_add_acq_rel_gpu_s32(arr", "atom_add_relaxed_gpu_s32(arr")],
            "race",
            "The atomic on `arrivals` is relaxed",
        ),
        ("no meeting", [("add_and_arrive", "syncthreads()", "pass")], "", "Thread 0 speaks for 64 threads"),
        (
            "no atomic",
            [
                (
                    "add_and_arrive",
                    "atom_add_relaxed_gpu_s32(total, value)",
                    "st_relaxed_gpu_s32(total, ld_relaxed_gpu_s32(total) + value)",
                )
            ],
            "wrong result",
            "Some numbers are missing",
        ),
        (
            "never the last",
            [("add_and_arrive", "grid_dim() - 1", "grid_dim()")],
            "wrong result",
            "No thread wrote the sum",
        ),
    ],
    5: [
        (
            "no bounds",
            [("barrier", "peers.num_ranks, bounds)", "peers.num_ranks)")],
            "error",
            "Write `wait_at_least(cell, wanted, bounds)`",
        ),
        (
            "an array of peers",
            [("barrier", "buffer_of(peers, thread_idx()) + ARRIVED", "peers[thread_idx()] + ARRIVED")],
            "memory",
            "Write `buffer_of(peers, thread_idx())`",
        ),
        (
            "only its own",
            [("barrier", "buffer_of(peers, thread_idx()) + ARRIVED", "buffer_of(peers, peers.rank) + ARRIVED")],
            "",
            "to the cell of every rank",
        ),
        ("relaxed", [("barrier", "atom_add_release", "atom_add_relaxed")], "race", "Nothing in your code is a release"),
        (
            "no first meeting",
            [("barrier", "syncthreads()\n    if thread_idx() < ", "if thread_idx() < ")],
            "",
            "The block has to meet before",
        ),
        (
            "no second meeting",
            [("barrier", "bounds)\n    syncthreads()", "bounds)")],
            "",
            "The block has to meet before",
        ),
        (
            "one for each thread",
            [("barrier", "if thread_idx() < peers.num_ranks:", "if thread_idx() < 1:")],
            "deadlock",
            "add 1 to the cell `arrived` of every rank",
        ),
        (
            "one less",
            [("barrier", "peers.num_ranks, bounds", "peers.num_ranks - 1, bounds")],
            "",
            "as many arrivals as there are ranks",
        ),
        (
            "no atomic",
            [
                (
                    "barrier",
                    "atom_add_release_sys_s32(buffer_of(peers, thread_idx()) + ARRIVED, 1)",
                    "cell = buffer_of(peers, thread_idx()) + ARRIVED\n        st_release_sys_s32(cell, ld_relaxed_sys_s32(cell) + 1)",
                )
            ],
            "deadlock",
            "An atomic adds in one step",
        ),
        (
            "some threads meet",
            [("barrier", "bounds)\n    syncthreads()", "bounds)\n        syncthreads()")],
            "divergence",
            "not stand where only some of them come",
        ),
        (
            "no such primitive",
            [("barrier", "atom_add_release_sys_s32", "atom_add_release_cta_s32")],
            "error",
            "Do you mean `atom_add_re",
        ),
    ],
    6: [
        (
            "exactly so many",
            [
                (
                    "barrier",
                    "wait_at_least(buffer_of(peers, peers.rank) + ARRIVED, peers.num_ranks * (turn + 1), bounds)",
                    "while ld_acquire_sys_s32(buffer_of(peers, peers.rank) + ARRIVED) != peers.num_ranks * (turn + 1):\n        if wait_expired(1 << 62):\n            return",
                )
            ],
            "deadlock",
            "wait until it is 3 or more",
        ),
        (
            "one barrier too few",
            [("barrier", "(turn + 1)", "turn")],
            "",
            "lets a rank through too early",
        ),
        (
            "meets",
            [("barrier", "    for rank in range(peers", "    syncthreads()\n    for rank in range(peers")],
            "divergence",
            "leave it out",
        ),
        (
            "the same for all",
            [("barrier", "peers.num_ranks * (turn + 1)", "peers.num_ranks")],
            "",
            "lets a rank through too early",
        ),
        (
            "set back",
            [
                (
                    "barrier",
                    "wait_at_least(buffer_of(peers, peers.rank) + ARRIVED, peers.num_ranks * (turn + 1), bounds)",
                    "wait_at_least(buffer_of(peers, peers.rank) + ARRIVED, peers.num_ranks, bounds)\n    st_relaxed_sys_s32(buffer_of(peers, peers.rank) + ARRIVED, 0)",
                )
            ],
            "deadlock",
            "An arrival got lost",
        ),
        ("relaxed", [("barrier", "atom_add_release", "atom_add_relaxed")], "race", "Nothing in your code is a release"),
    ],
    7: [
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
            "wrong result",
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
    13: [
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
            "",
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
