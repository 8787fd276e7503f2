"""Typical wrong solutions of puzzles 1 to 6: a message, and who speaks for whom. See `test_puzzles` for what an entry is."""

WRONG = {
    1: [
        (
            "the number once more",
            [
                (
                    "send",
                    "    st_release_sys_s32(flag, 1)",
                    "    st_release_sys_s32(flag, 1)\n    st_weak_s32(data, value)",
                )
            ],
            "race",
            "Store the number before the flag, and load it after the loop",
        ),
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
            "race",
            "Store the number before the flag",
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
        ("no syncwarp in send", [("send", "syncwarp(FULL_MASK)", "pass")], "", "raises the flag for 32 lanes"),
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
            "two loads and stores",
            [
                (
                    "add_and_arrive",
                    "atom_add_relaxed_gpu_s32(total, value)",
                    "st_weak_s32(total, ld_weak_s32(total) + value)",
                ),
                (
                    "add_and_arrive",
                    "return atom_add_acq_rel_gpu_s32(arrivals, 1) == grid_dim() - 1",
                    "n = ld_weak_s32(arrivals)\n    st_weak_s32(arrivals, n + 1)\n    return n == grid_dim() - 1",
                ),
            ],
            "wrong result",
            "An atomic does it in one step",
        ),
        (
            "releases only",
            [("add_and_arrive", "atom_add_acq_rel_gpu_s32", "atom_add_release_gpu_s32")],
            "race",
            "releases: it says what its own block has added. It does not acquire",
        ),
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
            "nobody meets",
            [
                ("barrier", "    syncthreads()\n    if thread_idx() < peers", "    if thread_idx() < peers"),
                ("barrier", "bounds)\n    syncthreads()", "bounds)"),
            ],
            "",
            "One thread speaks for 64. They have to meet",
        ),
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
}
