"""The layouts of mlx5 queues, field by field, as headers of others have them. Nothing here comes from nbep.

A field is its offset and how many bytes it has. All numbers are big-endian; what follows an inline header are bytes as
they are. Sources:

 rdma-core   https://github.com/linux-rdma/rdma-core, providers/mlx5/mlx5dv.h; qp.c where it says so
 NVSHMEM     https://github.com/NVIDIA/nvshmem, non_abi/device/pt-to-pt/ibgda_device.cuh
 DeepEP      https://github.com/deepseek-ai/DeepEP, v1.2.1, csrc/kernels/ibgda_device.cuh
"""

from collections.abc import Mapping
from typing import NamedTuple

ENTRY_BYTES = 64  # rdma-core MLX5_SEND_WQE_BB


class Field(NamedTuple):
    offset: int
    num_bytes: int


# rdma-core mlx5_wqe_ctrl_seg; mlx5dv_set_ctrl_seg: its first words are opmod << 24 | pi << 8 | opcode and qpn << 8 | ds
CONTROL = {
    "opmod": Field(0, 1),
    "index": Field(1, 2),
    "opcode": Field(3, 1),
    "qpn": Field(4, 3),
    "ds": Field(7, 1),  # segments of 16 bytes, this one among them
    "signature": Field(8, 1),
    "dci_stream_channel_id": Field(9, 2),
    "fm_ce_se": Field(11, 1),
    "imm": Field(12, 4),
}
# rdma-core mlx5_wqe_raddr_seg
REMOTE_ADDRESS = {"raddr": Field(0, 8), "rkey": Field(8, 4), "reserved": Field(12, 4)}
# rdma-core mlx5_wqe_data_seg
DATA = {"byte_count": Field(0, 4), "lkey": Field(4, 4), "addr": Field(8, 8)}
# rdma-core mlx5_wqe_inl_data_seg, and behind it the bytes as they are
INLINE_HEADER = {"byte_count": Field(0, 4)}
# NVSHMEM ibgda_atomic_32_masked_fa_seg_t; DeepEP has the same
MASKED_FETCH_ADD_32 = {"add_data": Field(0, 4), "field_boundary": Field(4, 4), "reserved": Field(8, 8)}
# NVSHMEM ibgda_atomic_64_masked_fa_seg_t
MASKED_FETCH_ADD_64 = {"add_data": Field(0, 8), "field_boundary": Field(8, 8)}

# rdma-core MLX5_OPCODE_RDMA_WRITE, MLX5_OPCODE_ATOMIC_MASKED_FA, MLX5_WQE_CTRL_CQ_UPDATE, MLX5_INLINE_SEG
OPCODE_RDMA_WRITE = 0x08
OPCODE_MASKED_FETCH_ADD = 0x15
CQ_UPDATE = 0x08
INLINE_SEG = 0x8000_0000
# NVSHMEM IBGDA_4_BYTE_EXT_AMO_OPMOD, IBGDA_8_BYTE_EXT_AMO_OPMOD: their top bytes
OPMOD_4_BYTES = 0x08
OPMOD_8_BYTES = 0x09

# rdma-core qp.c, post_send_db: htobe32(cur_post & 0xffff)
DOORBELL_RECORD = {"zero": Field(0, 2), "num_entries": Field(2, 2)}
# DeepEP ibgda_ring_db: the first words of a control segment. Its index is the number of entries so far
DOORBELL = {"opmod": Field(0, 1), "index": Field(1, 2), "opcode": Field(3, 1), "qpn": Field(4, 3), "ds": Field(7, 1)}

# rdma-core mlx5_cqe64 and mlx5_err_cqe: what both have, and what the latter has besides
COMPLETION = {"wqe_counter": Field(60, 2), "signature": Field(62, 1), "op_own": Field(63, 1)}
ERROR_COMPLETION = {"vendor_err_synd": Field(54, 1), "syndrome": Field(55, 1), **COMPLETION}
COMPLETION_BYTES = 64
# rdma-core MLX5_CQE_REQ, MLX5_CQE_REQ_ERR, MLX5_CQE_INVALID: the upper half of op_own; its lowest bit is the owner
CQE_REQ = 0x0
CQE_REQ_ERR = 0xD
CQE_INVALID = 0xF
# rdma-core MLX5_CQE_SYNDROME_*
SYNDROMES = {
    "LOCAL_LENGTH_ERR": 0x01,
    "LOCAL_QP_OP_ERR": 0x02,
    "LOCAL_PROT_ERR": 0x04,
    "REMOTE_INVAL_REQ_ERR": 0x12,
    "REMOTE_ACCESS_ERR": 0x13,
}

Layout = Mapping[str, Field]


def pack(layout: Layout, size: int, **values: int) -> bytes:
    """The bytes of a segment; fields that are not given are zeros."""
    out = bytearray(size)
    for name, value in values.items():
        field = layout[name]
        out[field.offset : field.offset + field.num_bytes] = value.to_bytes(field.num_bytes)
    return bytes(out)


def unpack(layout: Layout, data: bytes) -> dict[str, int]:
    """The fields of a segment."""
    return {name: int.from_bytes(data[field.offset : field.offset + field.num_bytes]) for name, field in layout.items()}


def control(opcode: int, index: int, qpn: int, num_segments: int, opmod: int = 0) -> bytes:
    return pack(
        CONTROL, 16, opmod=opmod, index=index & 0xFFFF, opcode=opcode, qpn=qpn, ds=num_segments, fm_ce_se=CQ_UPDATE
    )


def write_entry(index: int, qpn: int, raddr: int, rkey: int, *pieces: tuple[int, int, int]) -> bytes:
    """An RDMA write of one or two pieces: address, key, bytes. DeepEP ibgda_write_rdma_write_wqe."""
    return b"".join(
        [
            control(OPCODE_RDMA_WRITE, index, qpn, 2 + len(pieces)),
            pack(REMOTE_ADDRESS, 16, raddr=raddr, rkey=rkey),
            *(pack(DATA, 16, addr=addr, lkey=lkey, byte_count=size) for addr, lkey, size in pieces),
        ]
    )


def inline_entry(index: int, qpn: int, raddr: int, rkey: int, value: bytes) -> bytes:
    """An RDMA write of bytes that are in the entry. DeepEP ibgda_write_rdma_write_inl_wqe."""
    return b"".join(
        [
            control(OPCODE_RDMA_WRITE, index, qpn, 3),
            pack(REMOTE_ADDRESS, 16, raddr=raddr, rkey=rkey),
            pack(INLINE_HEADER, 4, byte_count=INLINE_SEG | len(value)),
            value,
        ]
    )


def add_entry(index: int, qpn: int, raddr: int, rkey: int, value: int, num_bytes: int, result: int, lkey: int) -> bytes:
    """A fetch-and-add. DeepEP ibgda_write_amo_add_wqe; of 8 bytes: NVSHMEM ibgda_write_atomic_wqe, NVSHMEMI_AMO_ADD."""
    is_long = num_bytes == 8
    layout = MASKED_FETCH_ADD_64 if is_long else MASKED_FETCH_ADD_32
    opmod = OPMOD_8_BYTES if is_long else OPMOD_4_BYTES
    return b"".join(
        [
            control(OPCODE_MASKED_FETCH_ADD, index, qpn, 4, opmod),
            pack(REMOTE_ADDRESS, 16, raddr=raddr, rkey=rkey),
            pack(layout, 16, add_data=value % (1 << 8 * num_bytes)),
            pack(DATA, 16, addr=result, lkey=lkey, byte_count=num_bytes),
        ]
    )
