"""A kernel on another stream that reads what an asynchronous call brings, without a wait for its event, is a race."""

import numpy as np
import pytest
from parts import both_parts

import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import ld_weak_s32, st_weak_s32, thread_idx
from nbep.device.types import I32, In, Out
from nbep.emulator import DataRace


@kernel(max_threads=32)
def read(out: Out, x: In, num_words: I32):
    if thread_idx() == 0:
        for i in range(num_words):
            st_weak_s32(out, ld_weak_s32(x + 4 * i))


def main(comm, waits_for_event, host_waits):
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 20)
    x, topk_idx = np.ones((4, 16), np.float16), np.array([[0], [1], [0], [1]])
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
    recv_x, *_, event = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=np.ones((4, 1), np.float32),
        num_tokens_per_rank=per_rank,
        num_tokens_per_expert=per_expert,
        is_token_in_rank=is_in_rank,
        async_finish=True,
    )
    if waits_for_event:
        event.current_stream_wait()
    out, words = np.zeros(1, np.int32), recv_x.view(np.int32)
    compute = comm.runtime.current_stream
    comm.runtime.launch(compute, read, 1, 32, 0, out, words, words.size)
    if host_waits:
        compute.synchronize()
    event.current_stream_wait()
    buffer.destroy()


@pytest.mark.emulator_only("looks for races")
@pytest.mark.parametrize("host_waits", both_parts([True], thorough=[False]))
def test_a_read_without_the_event_is_found_also_if_the_host_waits_for_it(host_waits):
    with pytest.raises(DataRace, match=r"has waited for no event of stream `.*`"):
        nbep.spawn(main, 2, "emulator", (False, host_waits), memory_model="checked")
    nbep.spawn(main, 2, "emulator", (True, host_waits), memory_model="checked")
