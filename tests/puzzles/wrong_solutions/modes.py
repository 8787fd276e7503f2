"""Typical wrong solutions of puzzles 13 to 17: FP8, low latency, combine, a whole dispatch.."""

WRONG = """
13
449 in place of 448 | wrong result | multiply by 448 / amax
    scales_of: f32_div_rn(f32(448), amax) => f32_div_rn(f32(449), amax)
half of the lanes shuffle | divergence | All 32 lanes have to come to the same shuffles
    largest_of_warp:
    - value = f32_max(value, shfl_xor_f32(FULL_MASK, value, bit))
    + value = f32_max(value, shfl_xor_f32(FULL_MASK, value, bit)) if thread_idx() < 16 else value
half of the range | wrong result | became 224, not 448
    scales_of: f32_div_rn(f32(448), amax) => f32_div_rn(f32(224), amax)
no mask | error | Write `shfl_xor_f32(FULL_MASK, value, lane_mask)`
    largest_of_warp: shfl_xor_f32(FULL_MASK, value, bit) => shfl_xor_f32(value, bit)
no kind | error | or another kind: f32
    largest_of_warp: shfl_xor_f32 => shfl_xor
one scale | error | return all of its values
    scales_of: return f32_div_rn(f32(448), amax), f32_div_rn(amax, f32(448)) => return f32_div_rn(f32(448), amax)
returns nothing |  | `largest_of_warp` can end without a value
    largest_of_warp:
    -     return value
    +     value
each lane alone | wrong result | a scale of its own
    largest_of_warp: while bit > 0: => while bit > 16:
half the warp | wrong result | the maximum is not that of all 32 lanes
    largest_of_warp: while bit > 0: => while bit > 1:
no floor |  | at least 1e-4
    scales_of: amax = f32_max(amax, f32(1e-4)) => pass
scales the wrong way | wrong result | what the receiver multiplies by
    scales_of:
    - f32_div_rn(f32(448), amax), f32_div_rn(amax, f32(448))
    + f32_div_rn(f32(448), amax), f32_div_rn(f32(448), amax)

14
a load and a store take the slot | wrong result | a load and a store give two warps the same one
    put_row:
    - slot = atom_add_relaxed_gpu_s32(next_slot, 1)
    + slot = ld_weak_s32(next_slot)
    +         st_weak_s32(next_slot, slot + 1)
subscripts | error | and not an array
    put_row: st_weak_s32(slots + ROW_BYTES * slot + 4 * lane, value) => slots[slot][lane] = value
no 4 | memory | An address counts bytes
    put_row: + 4 * lane => + lane
no row | memory | a row begins as many bytes behind the first one
    put_row: ROW_BYTES * slot => slot
all lanes count | wrong result | one lane adds 1 to `count`
    put_row:
    -     if lane == 0:
    -         atom_add_release
    +     if True:
    +         atom_add_release
count for this GPU | race | It takes the scope `sys`
    put_row: atom_add_release_sys_s32(count => atom_add_acq_rel_gpu_s32(count
each lane a slot | memory | one lane takes a slot for its whole warp
    put_row:
    -     if lane == 0:
    -         slot = atom
    +     if True:
    +         slot = atom
    put_row:
    -     slot = shfl_idx_s32(FULL_MASK, slot, 0)
    -
    +
no broadcast |  | have to learn its number
    put_row:
    -     slot = shfl_idx_s32(FULL_MASK, slot, 0)
    -
    +
relaxed count | race | Nothing in your code is a release
    put_row: atom_add_release => atom_add_relaxed
no syncwarp |  | they have to meet at a syncwarp
    put_row: syncwarp(FULL_MASK) => pass
no count | deadlock | Rank 1 waits until `count` is 9
    put_row: atom_add_release_sys_s32(count, 1) => pass

15
lane 0 alone waits | wrong result | A half is written while it is still in use
    send_call:
    -     wait_at_least(
    +     if lane == 0:
    +         wait_at_least(
subscript | error | `st_weak_s32(half + 4 * lane, value)`
    send_call: st_weak_s32(half + DATA + 4 * lane, value) => half[lane] = value
no data offset |  | They begin at half + DATA
    send_call: half + DATA + 4 * lane => half + 4 * lane
gives no credit | deadlock | has to add 1 at the address `credit`
    end_call: atom_add_release_sys_s32(credit, 1) => pass
no 4 | memory | An address counts bytes
    send_call: DATA + 4 * lane => DATA + lane
relaxed credit | race | Nothing in `end_call` is
    end_call: atom_add_release => atom_add_relaxed
relaxed count | race | Nothing in `send_call` is
    send_call: atom_add_release => atom_add_relaxed
credit first | deadlock | Both ranks change `count`
    end_call:
    - st_weak_s32(half + COUNT, 0)
    -         atom_add_release_sys_s32(credit, 1)
    + atom_add_release_sys_s32(credit, 1)
    +         st_weak_s32(half + COUNT, 0)
no credit |  | No thread waits for a credit
    send_call: wait_at_least(credit, n - 1, bounds) => pass
one call too late | deadlock | needs n - 1 credits
    send_call: n - 1, bounds => n + 1, bounds
count not set back |  | No thread sets `count` back
    end_call: st_weak_s32(half + COUNT, 0) => pass
no syncwarp |  | In `send_call` lane 0 speaks
    send_call: syncwarp(FULL_MASK) => pass
    end_call: syncwarp(FULL_MASK) => pass

16
row 0 for an expert that is not there | wrong result | A -1 adds nothing
    combine_word:
    -         if index >= 0:
    +         index = max(index, 0)
    +         if True:
subscript | error | write `ld_weak_s32(indices + 4 * k)`
    combine_word: ld_nc_s32(indices + 4 * k) => indices[k]
no 4 | memory | An address counts bytes
    combine_word: ld_nc_s32(indices + 4 * k) => ld_nc_s32(indices + k)
returns nothing | memory | `combine_word` can end without a value
    combine_word: return f32x2 => f32x2
rows of one byte | memory | a row begins as many bytes behind the first one
    combine_word: ROW_BYTES * index => index
halves exchanged | wrong result | have changed places
    combine_word: f32x2_to_bf16x2(low, high) => f32x2_to_bf16x2(high, low)
rounds each step | wrong result | rounded once
    combine_word:
    - high = f32_add_rn(high, f32_mul_rn(weight, b))
    + high = f32_add_rn(high, f32_mul_rn(weight, b))
    +             low, high = bf16x2_to_f32x2(f32x2_to_bf16x2(low, high))
takes -1 | memory | Row -1 lies in front
    combine_word: if index >= 0: => if True:
no weight | wrong result | Has each row its weight
    combine_word: ld_nc_f32(weights + 4 * k) => f32(1)
backwards | wrong result | Add in order
    combine_word: range(NUM_TOPK) => (2, 1, 0)

17
the row once more | race | Is the tail behind the stores of all lanes
    send_tokens:
    - (tail, n + 1)
    + (tail, n + 1)
    +             st_weak_s32(slot_of(peers, me, dst, n) + 4 * lane, ld_nc_s32(x + ROW_BYTES * token + 4 * lane))
slot by token |  | which is not `token`
    send_tokens: slot_of(peers, me, dst, n) => slot_of(peers, me, dst, token)
next slot |  | which is not `n + 1`
    receive_tokens: slot_of(peers, src, me, n) => slot_of(peers, src, me, n + 1)
ranks exchanged |  | slot_of(peers, src, me, n), and not slot_of(peers, me, src, n)
    receive_tokens: slot_of(peers, src, me, n) => slot_of(peers, me, src, n)
no 4 | memory | An address counts bytes
    send_tokens: n) + 4 * lane => n) + lane
one lane knows the count | divergence | Do all find the same counts
    receive_tokens: num_rows = await_count => num_rows = 0 if lane else await_count
moves no head | deadlock | a slot is free again when the head is n - 3
    receive_tokens: st_release_sys_s32(head, n + 1) => pass
tail relaxed | race | Nothing in `send_tokens` is a release
    send_tokens: st_release => st_relaxed
count as it is | deadlock | a count of 0 may not travel as 0
    send_tokens: -count_tokens(is_token_in_rank, dst, num_tokens) - 1 => count_tokens(is_token_in_rank, dst, num_tokens)
no offsets | wrong result | begin behind those before it
    receive_tokens: first += await_count => first += 0 * await_count
no head |  | Who waits for the head
    send_tokens: wait_at_least(head, n + 1 - NUM_SLOTS, bounds) => pass
no syncwarp |  | In `send_tokens` lane 0 moves the tail
    send_tokens: syncwarp(FULL_MASK) => pass
    receive_tokens: syncwarp(FULL_MASK) => pass
"""
