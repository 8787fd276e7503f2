"""Typical wrong solutions of puzzles 1 to 6: a message, and who speaks for whom.."""

WRONG = """
1
the number once more | race | Store the number before the flag, and load it after the loop
    send:
    -     st_release_sys_s32(flag, 1)
    +     st_release_sys_s32(flag, 1)
    +     st_weak_s32(data, value)
subscript | error | and not an array
    send: st_weak_s32(data, value) => data[0] = value
reads with a subscript | error | write `ld_weak_s32(data)`
    receive: ld_weak_s32(data) => data[0]
assignment | deadlock | changes a name of Python and no memory
    send: st_release_sys_s32(flag, 1) => flag = 1
an address returned | wrong result | write `return ld_weak_s32(data)`
    receive: return ld_weak_s32(data) => return data
no kind | error | write `st_weak_s32`
    send: st_weak_s32(data, value) => st_weak(data, value)
no mask | error | Write `syncwarp(FULL_MASK)`
    send:
    - st_weak_s32(data, value)
    + st_weak_s32(data, value)
    +     syncwarp()
returns the flag | wrong result | which is the flag
    receive: return ld_weak_s32(data) => return ld_weak_s32(flag)
a fence of CUDA | error | write `fence_acq_rel_sys()`
    send:
    - st_weak_s32(data, value)
    + st_weak_s32(data, value)
    +     cuda.threadfence_system()
no value | error | Write `st_release_sys_s32(address, value)`
    send: st_release_sys_s32(flag, 1) => st_release_sys_s32(flag)
a store that acquires | error | Write `st_release_sys_s32`
    send: st_release_sys_s32(flag, 1) => st_acquire_sys_s32(flag, 1)
returns nothing | memory | `receive` can end without a value
    receive: return ld_weak_s32(data) => ld_weak_s32(data)
another flag | deadlock | the number goes to `data`
    send: st_release_sys_s32(flag, 1) => st_release_sys_s32(flag, value)
scope gpu | race | does not reach another rank
    send: st_release_sys => st_release_gpu
relaxed flag | race | Nothing in `send` is a release
    send: st_release => st_relaxed
weak flag | race | Nothing in `send` is a release
    send: st_release_sys_s32 => st_weak_s32
relaxed poll | race | Nothing in `receive` is an acquire
    receive: ld_acquire => ld_relaxed
fence behind the flag | race | so its place matters
    send:
    - st_release_sys_s32(flag, 1)
    + st_relaxed_sys_s32(flag, 1)
    +     fence_acq_rel_sys()
no flag | deadlock | a flag that no thread raises
    send: st_release_sys_s32(flag, 1) => pass
no wait | wrong result | read `data` before
    receive: ld_acquire_sys_s32(flag) != 1 => False
flag first | race | Store the number before the flag
    send:
    - st_weak_s32(data, value)
    -     st_release_sys_s32(flag, 1)
    + st_release_sys_s32(flag, 1)
    +     st_weak_s32(data, value)

2
forgot the 4 | memory | An address counts bytes
    send: data + 4 * lane => data + lane
forgot the lane | wrong result | The number of a lane is at data + 4 * lane
    send: data + 4 * lane => data
steps of 8 | wrong result | The number of a lane is at data + 4 * lane
    send: data + 4 * lane => data + 8 * lane
waits for 32 | deadlock | The flag is 1, and rank 1 waits for another value
    receive: wait_at_least(flag, 1, bounds) => wait_at_least(flag, 32, bounds)
no flag | deadlock | one lane of rank 0 has to store 1 there
    send: st_release_sys_s32(flag, 1) => pass
subscript | error | `st_weak_s32(data + 4 * lane, value)`
    send: st_weak_s32(data + 4 * lane, value) => data[lane] = value
no syncwarp in send |  | raises the flag for 32 lanes
    send: syncwarp(FULL_MASK) => pass
no syncwarp in receive |  | each lane has to wait for the flag itself
    receive: syncwarp(FULL_MASK) => pass
relaxed flag | race | Nothing in `send` is a release
    send: st_release => st_relaxed
one lane syncs | divergence | Move the call out of the `if`
    send:
    -     syncwarp(FULL_MASK)
    -     if lane == 0:
    +     if lane == 0:
    +         syncwarp(FULL_MASK)

3
polls second | deadlock | It has to wait for `first`
    pass_on: ld_acquire_sys_s32(first) => ld_acquire_sys_s32(second)
polls first volatile | race | volatile load of `first` reads its value
    pass_on: ld_acquire_sys_s32 => ld_volatile_s32
scope gpu | race | write `st_release_sys_s32`
    pass_on: st_release_sys => st_release_gpu
stores in the loop |  | behind the loop, not in it
    pass_on:
    -         if give_up(bounds, deadline):
    -             return
    -     st_release_sys_s32(second, 1)
    +         st_release_sys_s32(second, 1)
    +         if give_up(bounds, deadline):
    +             return
relaxed poll | race | Nothing in your code is an acquire
    pass_on: ld_acquire => ld_relaxed
relaxed store | race | The chain breaks at rank 1
    pass_on: st_release => st_relaxed
no wait |  | behind the loop, not in it
    pass_on: ld_acquire_sys_s32(first) == 0 => False
wrong cell | deadlock | at `second`, and not at `first`
    pass_on: st_release_sys_s32(second => st_release_sys_s32(first

4
two loads and stores | wrong result | An atomic does it in one step
    add_and_arrive: atom_add_relaxed_gpu_s32(total, value) => st_weak_s32(total, ld_weak_s32(total) + value)
    add_and_arrive:
    - return atom_add_acq_rel_gpu_s32(arrivals, 1) == grid_dim() - 1
    + n = ld_weak_s32(arrivals)
    +     st_weak_s32(arrivals, n + 1)
    +     return n == grid_dim() - 1
releases only | race | releases: it says what its own block has added. It does not acquire
    add_and_arrive: atom_add_acq_rel_gpu_s32 => atom_add_release_gpu_s32
adds to the address | wrong result | changes a name of Python
    add_and_arrive: atom_add_relaxed_gpu_s32(total, value) => total += value
adds with a subscript | error | `atom_add_relaxed_gpu_s32(total, value)`
    add_and_arrive: atom_add_relaxed_gpu_s32(total, value) => total[0] += value
CUDA's atomic | error | write `atom_add_relaxed_gpu_s32(address, value)`
    add_and_arrive: atom_add_relaxed_gpu_s32(total, value) => cuda.atomic.add(total, 0, value)
not called | wrong result | `grid_dim` is a function: call it
    add_and_arrive: grid_dim() - 1 => grid_dim
returns nothing | wrong result | `add_and_arrive` can end without a value
    add_and_arrive:
    - return atom_add_acq_rel_gpu_s32(arrivals, 1) == grid_dim() - 1
    + atom_add_acq_rel_gpu_s32(arrivals, 1)
meets too late | divergence | put it before the line that lets some of them return
    add_and_arrive:
    -     syncthreads()
    -     if thread_idx() != 0:
    -         return False
    -
    +     if thread_idx() != 0:
    +         return False
    +     syncthreads()
    +
each thread arrives | wrong result | Each block arrives once
    add_and_arrive:
    -     if thread_idx() != 0:
    -         return False
    -
    +
relaxed arrival | race | The atomic on `arrivals` is relaxed
    add_and_arrive: atom_add_acq_rel_gpu_s32(arr => atom_add_relaxed_gpu_s32(arr
no meeting |  | Thread 0 speaks for 64 threads
    add_and_arrive: syncthreads() => pass
no atomic | wrong result | Some numbers are missing
    add_and_arrive:
    - atom_add_relaxed_gpu_s32(total, value)
    + st_relaxed_gpu_s32(total, ld_relaxed_gpu_s32(total) + value)
never the last | wrong result | No thread wrote the sum
    add_and_arrive: grid_dim() - 1 => grid_dim()

5
nobody meets |  | One thread speaks for 64. They have to meet
    barrier:
    -     syncthreads()
    -     if thread_idx() < peers
    +     if thread_idx() < peers
    barrier:
    - bounds)
    -     syncthreads()
    + bounds)
no bounds | error | Write `wait_at_least(cell, wanted, bounds)`
    barrier: peers.num_ranks, bounds) => peers.num_ranks)
an array of peers | memory | Write `buffer_of(peers, thread_idx())`
    barrier: buffer_of(peers, thread_idx()) + ARRIVED => peers[thread_idx()] + ARRIVED
only its own |  | to the cell of every rank
    barrier: buffer_of(peers, thread_idx()) + ARRIVED => buffer_of(peers, peers.rank) + ARRIVED
relaxed | race | Nothing in your code is a release
    barrier: atom_add_release => atom_add_relaxed
no first meeting |  | The block has to meet before
    barrier:
    - syncthreads()
    -     if thread_idx() < peers.num_ranks:
    + if thread_idx() < peers.num_ranks:
no second meeting |  | The block has to meet before
    barrier:
    - bounds)
    -     syncthreads()
    + bounds)
one for each thread | deadlock | add 1 to the cell `arrived` of every rank
    barrier: if thread_idx() < peers.num_ranks: => if thread_idx() < 1:
one less |  | as many arrivals as there are ranks
    barrier: peers.num_ranks, bounds => peers.num_ranks - 1, bounds
no atomic | deadlock | An atomic adds in one step
    barrier:
    - atom_add_release_sys_s32(buffer_of(peers, thread_idx()) + ARRIVED, 1)
    + cell = buffer_of(peers, thread_idx()) + ARRIVED
    +         st_release_sys_s32(cell, ld_relaxed_sys_s32(cell) + 1)
some threads meet | divergence | not stand where only some of them come
    barrier:
    - bounds)
    -     syncthreads()
    + bounds)
    +         syncthreads()
no such primitive | error | Do you mean `atom_add_re
    barrier: atom_add_release_sys_s32 => atom_add_release_cta_s32

6
exactly so many | deadlock | wait until it is 3 or more
    barrier:
    - wait_at_least(buffer_of(peers, peers.rank) + ARRIVED, peers.num_ranks * (turn + 1), bounds)
    + while ld_acquire_sys_s32(buffer_of(peers, peers.rank) + ARRIVED) != peers.num_ranks * (turn + 1):
    +         if wait_expired(1 << 62):
    +             return
one barrier too few |  | lets a rank through too early
    barrier: (turn + 1) => turn
meets | divergence | leave it out
    barrier:
    -     for rank in range(peers
    +     syncthreads()
    +     for rank in range(peers
the same for all |  | lets a rank through too early
    barrier: peers.num_ranks * (turn + 1) => peers.num_ranks
set back | deadlock | An arrival got lost
    barrier:
    - wait_at_least(buffer_of(peers, peers.rank) + ARRIVED, peers.num_ranks * (turn + 1), bounds)
    + wait_at_least(buffer_of(peers, peers.rank) + ARRIVED, peers.num_ranks, bounds)
    +     st_relaxed_sys_s32(buffer_of(peers, peers.rank) + ARRIVED, 0)
relaxed | race | Nothing in your code is a release
    barrier: atom_add_release => atom_add_relaxed
"""
