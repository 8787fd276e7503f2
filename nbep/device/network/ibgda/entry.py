"""Entries of a send queue: what a GPU thread writes, and an mlx5 NIC reads. 64 bytes, all numbers big-endian.

        control segment                 remote-address segment   data segment, one or two    or data in the entry
 +0     opmod:8 | index:16 | opcode:8   address:64               num_bytes:32                1:1 | num_bytes:31
 +4     queue pair:24 | segments:8                               key:32                      the bytes
 +8     flags in the last byte          key:32                   address:64
 +12    immediate (0)                   0

 fetch-and-add of 32 bits: opmod 8, of 64 bits: opmod 9; between the remote address and where the old value goes
 +0     what to add:32 or :64           boundary (0): the sum carries from every bit to the next

 bytes     write             write with its data inside    fetch-and-add
 0         control           control                       control
 16        remote address    remote address                remote address
 32        data              data in the entry             atomic
 48        data, or unused   -                             data: where the old value goes

Keys come in the order of bytes in which they go into an entry. Whoever writes an entry owns its slot, see
`queue_pair`.

 cell     written by            with     read by    with
 entry    the owner of its slot st_na    the NIC    ld_na, after the doorbell that publishes it

Source: rdma-core providers/mlx5/mlx5dv.h (mlx5_wqe_ctrl_seg, mlx5_wqe_raddr_seg, mlx5_wqe_data_seg,
mlx5_wqe_inl_data_seg, mlx5_wqe_atomic_seg); DeepEP csrc/kernels/ibgda_device.cuh (ibgda_write_rdma_write_wqe,
ibgda_write_rdma_write_inl_wqe, ibgda_write_amo_add_wqe, ibgda_atomic_32_masked_fa_seg_t)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function

ENTRY_BYTES = 64
SEGMENT_BYTES = 16
REMOTE_ADDRESS = 16
DATA = 32
MORE_DATA = 48
ATOMIC = 32
ATOMIC_RESULT = 48

RDMA_WRITE = 0x08  # opcodes
MASKED_FETCH_ADD = 0x15
OPMOD_32_BITS = 0x08
OPMOD_64_BITS = 0x09
CQ_UPDATE = 2 << 2  # of the flags: write a completion
INLINE = 1 << 31  # of num_bytes: the data follow


class Slot(NamedTuple):
    """Where an entry goes, its number in the queue, and the queue pair's number."""

    address: int
    number: int  # of which 16 bits are kept
    qpn: int


class Registered(NamedTuple):
    """A place in registered memory, and the key of its chunk."""

    address: int
    key: int


@device_function
def write_control(slot, opmod, opcode, num_segments):
    """The control segment."""
    what = ptx.byteswap_u32(opmod << 24 | (slot.number & 0xFFFF) << 8 | opcode)
    ptx.st_na_v4(slot.address, (what, ptx.byteswap_u32(slot.qpn << 8 | num_segments), CQ_UPDATE << 24, 0))


@device_function
def write_remote_address(slot, remote):
    words = (ptx.byteswap_u32(remote.address >> 32), ptx.byteswap_u32(remote.address), remote.key, 0)
    ptx.st_na_v4(slot.address + REMOTE_ADDRESS, words)


@device_function
def write_data(segment, address, key, num_bytes):
    """A data segment, at its own address."""
    ptx.st_na_v4(
        segment, (ptx.byteswap_u32(num_bytes), key, ptx.byteswap_u32(address >> 32), ptx.byteswap_u32(address))
    )


@device_function
def write_rdma_write(slot, remote, local, num_bytes, next_key, num_more):
    """Write num_bytes from `local` to `remote`, and behind them num_more, which lie in the next registered chunk."""
    write_control(slot, 0, RDMA_WRITE, 3 if num_more == 0 else 4)
    write_remote_address(slot, remote)
    write_data(slot.address + DATA, local.address, local.key, num_bytes)
    if num_more != 0:
        write_data(slot.address + MORE_DATA, local.address + num_bytes, next_key, num_more)


@device_function
def write_rdma_write_inline(slot, remote, value, num_bytes):
    """Write the low num_bytes (1 to 8) of a number to `remote`; they are in the entry."""
    write_control(slot, 0, RDMA_WRITE, 3)
    write_remote_address(slot, remote)
    ptx.st_na_v4(slot.address + DATA, (ptx.byteswap_u32(INLINE | num_bytes), ptx.u32(value), ptx.u32(value >> 32), 0))


@device_function
def write_fetch_add_32(slot, remote, value, result):
    """Add to the s32 at `remote`. What it was goes to `result`, big-endian."""
    write_control(slot, OPMOD_32_BITS, MASKED_FETCH_ADD, 4)
    write_remote_address(slot, remote)
    ptx.st_na_v4(slot.address + ATOMIC, (ptx.byteswap_u32(value), 0, 0, 0))
    write_data(slot.address + ATOMIC_RESULT, result.address, result.key, 4)


@device_function
def write_fetch_add_64(slot, remote, value, result):
    """Add to the s64 at `remote`. What it was goes to `result`, in the GPU's own order of bytes."""
    write_control(slot, OPMOD_64_BITS, MASKED_FETCH_ADD, 4)
    write_remote_address(slot, remote)
    ptx.st_na_v4(slot.address + ATOMIC, (ptx.byteswap_u32(value >> 32), ptx.byteswap_u32(value), 0, 0))
    write_data(slot.address + ATOMIC_RESULT, result.address, result.key, 8)
