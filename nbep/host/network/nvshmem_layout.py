"""The structures in which NVSHMEM keeps its queue pairs: the fields that nbep reads, and where they are.

 nvshmemi_ibgda_device_state_d --globalmem.rcs--> queue pairs --tx_wq.cq--> completion queues
                               --constmem, globalmem--> keys
 nvshmemi_device_state_d       --peer_heap_base_remote--> where each rank's heap is for itself

NVSHMEM has no interface for it, and its structures may change with every version. These are of 3.8, with 64-bit
addresses. `tests/network` compares the table with what a compiler makes of NVSHMEM's own headers.

Source: NVSHMEM include/device_host_transport/nvshmem_common_ibgda.h, include/device_host/nvshmem_types.h
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

LIBRARY_VERSION = (3, 8)
VERSION_1 = 1 << 16


class Layout(NamedTuple):
    """A structure by its name in C: its bytes, and for each field its first byte and its code in the struct module."""

    c_name: str
    num_bytes: int
    fields: dict[str, tuple[int, str]]

    def read(self, image: bytes, start: int = 0) -> dict[str, Any]:
        """The fields of the structure that begins at byte `start`: integers, and bytes for an array.

        Raises: RuntimeError if the image ends before it, or if its version is another; then offsets are others, too
        """
        if len(image) - start < self.num_bytes:
            raise RuntimeError(f"{self.c_name}: got {len(image) - start} bytes; the structure has {self.num_bytes}")
        values = {
            name: struct.unpack_from(f"<{code}", image, start + offset)[0]
            for name, (offset, code) in self.fields.items()
        }
        if values.get("version", self.version) != self.version:
            raise RuntimeError(f"{self.c_name}: got version {values['version']:#x}; nbep knows {self.version:#x} alone")
        return values

    def read_all(self, image: bytes) -> Iterator[dict[str, Any]]:
        """The structures of an array. Raises: as read"""
        return (self.read(image, start) for start in range(0, len(image), self.num_bytes))

    @property
    def version(self) -> int:
        """What the field `version` holds, if there is one: it changes with the size, and that is all it says."""
        return VERSION_1 + self.num_bytes


IBGDA_STATE = Layout(
    "nvshmemi_ibgda_device_state_t",
    8384,
    {
        "version": (0, "i"),
        "num_rc_per_pe": (28, "I"),  # of each NIC
        "log2_cumem_granularity": (40, "Q"),  # of a chunk's bytes
        "num_devices_initialized": (48, "i"),  # NICs
        "use_async_postsend": (55, "?"),  # the CPU rings the doorbells
        "constmem.lkeys": (56, "1024s"),  # [MAX_CONST_KEYS] KEY, the first ones
        "constmem.rkeys": (1080, "1024s"),  # the same
        "globalmem.rcs": (8272, "Q"),  # [NICs * queue pairs, ranks] QUEUE_PAIR
        "globalmem.lkeys": (8296, "Q"),  # the others; all of them [chunks, NICs]
        "globalmem.rkeys": (8304, "Q"),  # the others; all of them [chunks, ranks, NICs]
        "num_default_rc_per_pe": (8312, "i"),  # which NVSHMEM's own calls use
    },
)
MAX_CONST_KEYS = 64

QUEUE_PAIR = Layout(
    "nvshmemi_ibgda_device_qp_t",
    184,
    {
        "version": (0, "i"),
        "qp_type": (4, "i"),
        "qpn": (8, "I"),
        "dev_idx": (12, "I"),
        "ibuf.buf": (24, "Q"),  # its first slot takes what nobody reads
        "ibuf.lkey": (32, "I"),
        "tx_wq.nwqes": (40, "H"),
        "tx_wq.wqe": (48, "Q"),
        "tx_wq.dbrec": (56, "Q"),
        "tx_wq.bf": (64, "Q"),
        "tx_wq.cq": (72, "Q"),
        "mvars.tx_wq.resv_head": (96, "Q"),
        "mvars.tx_wq.ready_head": (104, "Q"),
    },
)
TYPE_RC = 3

COMPLETION_QUEUE = Layout(
    "nvshmemi_ibgda_device_cq_t",
    72,
    {"version": (0, "i"), "cqe": (16, "Q"), "ncqes": (60, "I"), "qpn": (64, "I")},
)

KEY = Layout("nvshmemi_ibgda_device_key_t", 16, {"key": (0, "I"), "next_addr": (8, "Q")})

HOST_STATE = Layout(
    "nvshmemi_device_host_state_t",
    848,
    {
        "version": (0, "i"),
        "mype": (4, "i"),
        "npes": (8, "i"),
        "heap_base": (40, "Q"),
        "heap_size": (48, "Q"),
        "peer_heap_base_remote": (64, "Q"),  # [ranks] addresses
        "enable_rail_opt": (73, "?"),  # traffic goes over ranks of the same number in their node
        "ibgda_is_initialized": (768, "?"),
        "nvshmemi_is_nvshmem_initialized": (769, "?"),
    },
)

LAYOUTS = (IBGDA_STATE, QUEUE_PAIR, COMPLETION_QUEUE, KEY, HOST_STATE)
