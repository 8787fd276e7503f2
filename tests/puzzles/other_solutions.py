"""Right solutions of the puzzles that differ from those in the tree: as edits of these, like the wrong ones."""

RIGHT_TOO = """
1
fences
    send:
    - st_release_sys_s32(flag, 1)
    + fence_acq_rel_sys()
    +     st_relaxed_sys_s32(flag, 1)
    receive: ld_acquire_sys_s32(flag) != 1 => ld_relaxed_sys_s32(flag) != 1
    receive:
    -     return ld_weak
    +     fence_acq_rel_sys()
    +     return ld_weak

2
all lanes wait
    receive:
    -     if lane == 0:
    -         wait
    +     if True:
    +         wait

4
a fence
    add_and_arrive:
    -     return atom_add_acq_rel_gpu_s32(arrivals, 1) == grid_dim() - 1
    +     fence_acq_rel_gpu()
    +     arrived = atom_add_relaxed_gpu_s32(arrivals, 1)
    +     fence_acq_rel_gpu()
    +     return arrived == grid_dim() - 1

5
one thread tells all
    barrier:
    -     if thread_idx() < peers.num_ranks:
    -         atom_add_release_sys_s32(buffer_of(peers, thread_idx()) + ARRIVED, 1)
    -     if thread_idx() == 0:
    -
    +     if thread_idx() == 0:
    +         for rank in range(peers.num_ranks):
    +             atom_add_release_sys_s32(buffer_of(peers, rank) + ARRIVED, 1)
    +

9
one more
    announce: -count - 1 => count + 1
    await_count: -ld_relaxed_sys_s32(cell) - 1 => ld_relaxed_sys_s32(cell) - 1

10
a relaxed head
    receive: st_release => st_relaxed
    send:
    -     wait_at_least(head, i + 1 - NUM_SLOTS, bounds)
    +     while ld_relaxed_sys_s32(head) < i + 1 - NUM_SLOTS and not wait_expired(1 << 62):
    +         pass

18
waits for at least the ticket
    post: != ticket => < ticket

19
fences
    post:
    -         st_release_sys_s32(record
    +         fence_acq_rel_sys()
    +         st_relaxed_sys_s32(record
    post:
    -         st_release_sys_s32(doorbell
    +         fence_acq_rel_sys()
    +         st_relaxed_sys_s32(doorbell

21
room first
    forward:
    -     wait_at_least(tail_in, n + 1, bounds)
    -
    +
    forward:
    - OUT_SLOTS, bounds)
    + OUT_SLOTS, bounds)
    +     wait_at_least(tail_in, n + 1, bounds)
"""
