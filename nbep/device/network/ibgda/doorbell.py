"""The doorbell: how a GPU thread tells the NIC that a send queue has more entries.

 cell        written by                 with               read by    with
 record      whose turn it is           st_relaxed_sys     the NIC    ld_relaxed_sys
 doorbell    whose turn it is           st_release_sys     the NIC    ld_acquire_sys

 entry, entry, entry --> record: how many there are --> doorbell: look
                   weak stores                     one release publishes both

The record is 4 bytes in memory: 16 bits of the number of entries so far, big-endian. The doorbell is a register of the
NIC: 8 bytes, as the first of a control segment. The NIC may lose a ring when many come at once; then it reads the
record. So the record comes first.

Source: rdma-core providers/mlx5/qp.c (mlx5_send_wr_complete); DeepEP csrc/kernels/ibgda_device.cuh (ibgda_update_dbr,
ibgda_ring_db)
"""

from nbep.device.jit import device_function
from nbep.device.primitives import byteswap_u32, s32, st_relaxed_sys_s32, st_release_sys_s64

RECORD_BYTES = 4
DOORBELL_BYTES = 8


@device_function
def write_record(record, num_entries):
    """Say how many entries the queue has had so far."""
    st_relaxed_sys_s32(record, s32(byteswap_u32(num_entries & 0xFFFF)))


@device_function
def ring(doorbell, num_entries, qpn):
    """Have the NIC look. What this thread has written, and what it knows of, is published with it."""
    low = byteswap_u32((num_entries & 0xFFFF) << 8)
    st_release_sys_s64(doorbell, byteswap_u32(qpn << 8) << 32 | low)  # PAIR ibgda-doorbell
