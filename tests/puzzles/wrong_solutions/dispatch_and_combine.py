"""Typical wrong solutions of puzzles 7 to 12: counts, rings and copies.."""

WRONG = """
7
a look at the count | race | All threads count into the same cells
    count_token:
    -             atom_add
    +             if ld_weak_s32(per_rank + 4 * rank) >= 0:
    +                 atom_add
marks with the rank | wrong result | is_token_in_rank has a row for each token
    count_token: st_weak_s32(in_rank + 4 * rank, 1) => st_weak_s32(in_rank + 4 * rank, rank)
subscript | error | write `ld_weak_s64(experts + 8 * k)`
    count_token: ld_nc_s64(experts + 8 * k) => experts[k]
steps of 4 | memory | An address counts bytes
    count_token: ld_nc_s64(experts + 8 * k) => ld_nc_s64(experts + 4 * k)
another rank | wrong result | Expert e belongs to rank e // EXPERTS_PER_RANK
    count_token: expert // EXPERTS_PER_RANK => expert % NUM_RANKS
shifts by -1 | error | Skip it: ask `if expert >= 0`
    count_token: if expert >= 0: => if True:
half an expert | wrong result | The experts are s64
    count_token: ld_nc_s64(experts + 8 * k) => ld_nc_s32(experts + 4 * k)
counts experts | wrong result | counted too often
    count_token:
    -             bits |= 1 << (expert // EXPERTS_PER_RANK)
    +             bits |= 1 << (expert // EXPERTS_PER_RANK)
    +             atom_add_relaxed_gpu_s32(per_rank + 4 * (expert // EXPERTS_PER_RANK), 1)
    count_token:
    -             atom_add_relaxed_gpu_s32(per_rank + 4 * rank, 1)
    -
    +
takes -1 | memory | An expert of -1 belongs to no rank
    count_token:
    -         if expert >= 0:
    -             bits |= 1 << (expert // EXPERTS_PER_RANK)
    +         st_weak_s32(in_rank + 4 * (expert // EXPERTS_PER_RANK), 1)
no atomic | wrong result | is counted too seldom
    count_token:
    - atom_add_relaxed_gpu_s32(per_rank + 4 * rank, 1)
    + st_weak_s32(per_rank + 4 * rank, ld_weak_s32(per_rank + 4 * rank) + 1)

8
three turns | wrong result | The lanes below 8 are right
    exclusive_sum: delta < 32 => delta < 8
greater than | wrong result | the condition is `lane >= delta`, not `lane > delta`
    exclusive_sum: if lane >= delta: => if lane > delta:
no mask | error | Write `shfl_up_s32(FULL_MASK, value, delta)`
    exclusive_sum: shfl_up_s32(FULL_MASK, total, delta) => shfl_up_s32(total, delta)
passes on the value | wrong result | Shuffle the sum so far
    exclusive_sum: shfl_up_s32(FULL_MASK, total, delta) => shfl_up_s32(FULL_MASK, value, delta)
one turn less | wrong result | the turn with delta 16 is missing
    exclusive_sum: while delta < 32 => while delta < 16
downwards | wrong result | write shfl_up_s32
    exclusive_sum: shfl_up_s32 => shfl_down_s32
returns nothing | memory | `exclusive_sum` can end without a value
    exclusive_sum: return total - value => total - value
inclusive | wrong result | with the lane's own value
    exclusive_sum: total - value => total
all lanes add | wrong result | Lane 0 has no lane below
    exclusive_sum: if lane >= delta: => if True:
shuffle in some lanes | divergence | some lanes do not come
    exclusive_sum:
    -         below = shfl_up_s32(FULL_MASK, total, delta)
    -         if lane >= delta:
    -             total += below
    +         if lane >= delta:
    +             total += shfl_up_s32(FULL_MASK, total, delta)

9
loop turned around |  | Some lanes of rank 1 wait for a cell
    await_count: (cell) == 0 => (cell) != 0
the cell of another lane | deadlock | add nothing to it
    announce: st_relaxed_sys_s32(cell, => st_relaxed_sys_s32(cell + 4 * lane_id(),
as it is | deadlock | their count is 0, and it was sent as 0
    announce: -count - 1 => count
    await_count: -ld_relaxed_sys_s32(cell) - 1 => ld_relaxed_sys_s32(cell)
one off | wrong result | Lane 1 returned 6, and its count is 5
    await_count: (cell) - 1 => (cell)
weak store | race | no place for weak accesses
    announce: st_relaxed_sys_s32 => st_weak_s32

10
the row once more | race | Either the tail moves before all lanes have stored
    send:
    - (tail, i + 1)
    + (tail, i + 1)
    +     st_weak_s32(slot + 4 * lane, value)
no 4 | memory | An address counts bytes
    send: slot + 4 * lane => slot + lane
subscript | error | write `ld_weak_s32(slot + 4 * lane)`
    receive: value = ld_weak_s32(slot + 4 * lane) => value = slot[lane]
waits for the first row |  | wait until the tail is i + 1
    receive: wait_at_least(tail, i + 1 => wait_at_least(tail, 1
the slot twice | wrong result | is the slot of row i already
    send: slot + 4 * lane => slot + 128 * (i % NUM_SLOTS) + 4 * lane
head before the load |  | move the head only behind its load
    receive:
    -     value = ld_weak_s32(slot + 4 * lane)
    -
    +
    receive:
    -     return value
    +     return ld_weak_s32(slot + 4 * lane)
no head |  | overwritten by a later one
    send: wait_at_least(head, i + 1 - NUM_SLOTS, bounds) => pass
relaxed tail | race | Nothing in `send` is a release
    send: st_release => st_relaxed
lanes share a word | wrong result | but not in their places
    send: slot + 4 * lane => slot
one lane waits | wrong result | meet at a syncwarp the lane that does
    receive: wait_at_least(tail => lane != 0 or wait_at_least(tail
returns nothing | memory | `receive` can end without a value
    receive: return value => return
one slot too many |  | the head has to be i - 3
    send: i + 1 - NUM_SLOTS => i - NUM_SLOTS
waits for its own row | deadlock | Row i - 4 has been read when
    send: i + 1 - NUM_SLOTS => i + 1
no syncwarp |  | In `send` lane 0 moves the tail
    send: syncwarp(FULL_MASK) => pass
    receive: syncwarp(FULL_MASK) => pass

11
half a vector too far | memory | An address counts bytes
    copy_row: dst + 16 * i => dst + 16 * i + 8
subscripts | error | and not an array
    copy_row: st_na_v4(dst + 16 * i, ld_nc_v4(src + 16 * i)) => dst[i] = src[i]
no 16 | memory | An address counts bytes
    copy_row: ld_nc_v4(src + 16 * i) => ld_nc_v4(src + i)
no kind | error | write `st_na_v4`
    copy_row: st_na_v4 => st_na
all from 0 | wrong result | How far does lane i go
    copy_row: i = lane => i = 0
no bound | memory | Ask before you load
    copy_row: while i < num_vectors: => while i < 96:
one turn | wrong result | were never written
    copy_row: i += 32 => i += 128
four bytes apart | memory | An address counts bytes
    copy_row: st_na_v4(dst + 16 * i => st_na_v4(dst + 4 * i

12
2 in place of 1 | wrong result | each lane adds 1, once, to its own word
    add_one: (stage + 4 * lane) + 1 => (stage + 4 * lane) + 2
adds nothing | wrong result | The row has come through as it was
    add_one: st_shared_s32(stage + 4 * lane, ld_shared_s32(stage + 4 * lane) + 1) => pass
no 4 | memory | An address counts bytes
    add_one: st_shared_s32(stage + 4 * lane, => st_shared_s32(stage + lane,
subscript | error | and not an array
    add_one: st_shared_s32(stage + 4 * lane, ld_shared_s32(stage + 4 * lane) + 1) => stage[lane] += 1
no commit | memory | comes between store and wait
    store: tma_store_commit() => pass
the other parity | memory | the phase with parity 0
    add_one: (full, 0) => (full, 1)
no wait for the load |  | No thread waits for the load
    add_one:
    -     while not mbarrier_try_wait_parity(full, 0):
    -         pass
    -
    +
no proxy fence | memory | A proxy fence is missing
    add_one: fence_proxy_async_shared() => pass
no wait for the store |  | The kernel ends while the engine still writes
    store: tma_store_wait_all() => pass
no meeting |  | only then do all lanes meet
    add_one: syncwarp(FULL_MASK) => pass
"""
