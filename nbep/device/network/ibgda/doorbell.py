"""The doorbell: how a GPU thread tells the NIC that a send queue has more entries.

 cell        written by                 with               read by    with
 record      whose turn it is           st_release_sys     the NIC    ld_acquire_sys
 doorbell    whose turn it is           st_release_sys     the NIC    ld_acquire_sys

 entry, entry, entry --> record: how many there are --> doorbell: look
     weak stores    release                        release

The record is 4 bytes in memory: 16 bits of the number of entries so far, big-endian. The doorbell is a register of the
NIC: 8 bytes, as the first of a control segment. The NIC may lose a ring when many come at once; then it reads the
record. It may also read the record before any ring: so the record is released behind its entries, and the doorbell
behind the record.

Source: rdma-core providers/mlx5/qp.c (post_send_db: barrier, record, barrier, doorbell); DeepEP
csrc/kernels/ibgda_device.cuh (ibgda_update_dbr and ibgda_ring_db, a release each)
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function

RECORD_BYTES = 4
DOORBELL_BYTES = 8


@device_function
def write_record(record, num_entries):
    """Say how many entries the queue has had so far. From now on the NIC may read them."""
    ptx.st_release_sys_s32(record, ptx.s32(ptx.byteswap_u32(num_entries & 0xFFFF)))  # PAIR ibgda-record


@device_function
def ring(doorbell, num_entries, qpn):
    """Have the NIC look. What this thread has written, and what it knows of, is published with it."""
    low = ptx.byteswap_u32((num_entries & 0xFFFF) << 8)
    ptx.st_release_sys_s64(doorbell, ptx.byteswap_u32(qpn << 8) << 32 | low)  # PAIR ibgda-doorbell
