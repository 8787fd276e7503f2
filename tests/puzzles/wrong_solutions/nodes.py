"""Typical wrong solutions of puzzles 18 to 21: between nodes.."""

WRONG = """
18
no order | error | write `atom_add_relaxed_gpu_s32`
    post: atom_add_relaxed_gpu_s32(reserved, 1) => atom_add(reserved, 1)
no turn |  | No post waits for its turn
    post:
    -     deadline = start_wait(bounds)
    -     while ld_acquire_gpu_s32(ready) != ticket:
    -         if give_up(bounds, deadline):
    -             return
    -
    +
counts |  | No post waits for its turn
    post:
    -     while ld_acquire_gpu_s32(ready) != ticket:
    -         if give_up(bounds, deadline):
    -             return
    -     st_release_gpu_s32(ready, ticket + 1)
    +     atom_add_release_gpu_s32(ready, 1)
relaxed turn | race | Nothing in `post` is an acquire
    post: ld_acquire_gpu => ld_relaxed_gpu
relaxed ready | race | Nothing in `post` is a release
    post: st_release_gpu => st_relaxed_gpu
next turn | deadlock | The post with ticket 0 goes first
    post: != ticket: => != ticket + 1:
no atomic |  | take the same ticket
    post:
    - ticket = atom_add_relaxed_gpu_s32(reserved, 1)
    + ticket = ld_relaxed_gpu_s32(reserved)
    +     st_relaxed_gpu_s32(reserved, ticket + 1)
no 4 | memory | An address counts bytes
    post: entries + 4 * ticket => entries + ticket
entry behind the turn |  | store it first, then wait for the turn
    post:
    -     st_weak_s32(entries + 4 * ticket, value)
    -     deadline = start_wait(bounds)
    -     while ld_acquire_gpu_s32(ready) != ticket:
    -         if give_up(bounds, deadline):
    -             return
    -     st_release_gpu_s32(ready, ticket + 1)
    +     deadline = start_wait(bounds)
    +     while ld_acquire_gpu_s32(ready) != ticket:
    +         if give_up(bounds, deadline):
    +             return
    +     st_release_gpu_s32(ready, ticket + 1)
    +     st_weak_s32(entries + 4 * ticket, value)

19
always 1 | deadlock | Record and doorbell become n + 1
    post: (doorbell, n + 1) => (doorbell, 1)
rings first | wrong result | Store the record first, and then ring
    post:
    -         st_release_sys_s32(record, n + 1)
    -         st_release_sys_s32(doorbell, n + 1)
    +         st_release_sys_s32(doorbell, n + 1)
    +         st_release_sys_s32(record, n + 1)
relaxed record | race | Write `st_release_sys_s32(record, n + 1)`
    post: st_release_sys_s32(record => st_relaxed_sys_s32(record
relaxed doorbell | race | Write `st_release_sys_s32(doorbell, n + 1)`
    post: st_release_sys_s32(doorbell => st_relaxed_sys_s32(doorbell
no ring | deadlock | store n + 1 at the address `doorbell`
    post:
    -         st_release_sys_s32(doorbell, n + 1)
    +         pass
no record |  | store n + 1 at the address `record`
    post:
    -         st_release_sys_s32(record, n + 1)
    -
    +
no syncwarp |  | One lane speaks for 32
    post: syncwarp(FULL_MASK) => pass
subscript | error | `st_weak_s32(entry + 4 * lane, value)`
    post: st_weak_s32(entry + 4 * lane, value) => entry[lane] = value

20
plain store | race | `note` releases, with
    note: atom_exch_release_cta_shared_s32(cell, num_rows) => st_shared_s32(cell, num_rows)
weak look |  | write `ld_acquire_cta_shared_s32`
    least_progress:
    -     least = ld_acquire_cta_shared_s32(board)
    -     for warp in range(1, num_warps):
    -         least = min(least, ld_acquire_cta_shared_s32(board + 4 * warp))
    +     least = 9
    +     for warp in range(num_warps):
    +         least = min(least, ld_shared_s32(board + 4 * warp))
minimum of an address | error | An address is a number, and not a list
    least_progress:
    -     return least
    +     return min(board)
largest |  | not the largest one
    least_progress: min( => max(
first warp |  | not the first one
    least_progress: range(1, num_warps) => range(1, 1)
no syncwarp |  | One lane notes for 32
    note: syncwarp(FULL_MASK) => pass
relaxed note | race | `note` releases, with
    note: atom_exch_release_cta => atom_exch_relaxed_cta
relaxed look | race | `least_progress` acquires, with
    least_progress: ld_acquire_cta_shared_s32(board + 4 * warp) => ld_relaxed_cta_shared_s32(board + 4 * warp)
no note |  | `note` has to store num_rows at the address `cell`
    note: atom_exch_release_cta_shared_s32(cell, num_rows) => pass
returns nothing |  | `least_progress` can end without a value
    least_progress:
    -     return least
    +     least
subscript | error | `st_shared_s32(cell, value)`
    note: atom_exch_release_cta_shared_s32(cell, num_rows) => cell[0] = num_rows

21
does not wait for a row |  | Wait until tail_in is n + 1
    forward:
    -     wait_at_least(tail_in, n + 1, bounds)
    -
    +
does not wait for room |  | head_out is n + 1 - OUT_SLOTS
    forward:
    -     wait_at_least(head_out, n + 1 - OUT_SLOTS, bounds)
    -
    +
relaxed tail | race | The store to `tail_out` is no release
    forward: st_release_sys_s32(tail_out => st_relaxed_sys_s32(tail_out
no syncwarp |  | they have to meet at syncwarp(FULL_MASK)
    forward: syncwarp(FULL_MASK) => pass
frees nothing | deadlock | store n + 1 at head_in
    forward:
    -         st_release_sys_s32(head_in, n + 1)
    +         pass
tells nothing | deadlock | store n + 1 at tail_out
    forward:
    -         st_release_sys_s32(tail_out, n + 1)
    -
    +
frees first |  | store head_in only when all lanes have read
    forward:
    -     st_weak_s32(slot_out
    +     st_release_sys_s32(head_in, n + 1)
    +     st_weak_s32(slot_out
returns the address | error | write `ld_weak_s32(slot_in + 4 * lane)`
    forward: ld_weak_s32(slot_in + 4 * lane)) => slot_in[lane])
"""
