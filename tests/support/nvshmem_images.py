"""NVSHMEM's state as bytes, with planted values, and the memory of the GPU that it points to."""

import struct

from nbep.host.network import nvshmem_layout as layout
from nbep.host.network.nvshmem_layout import COMPLETION_QUEUE, HOST_STATE, IBGDA_STATE, KEY, QUEUE_PAIR, Layout
from nbep.host.network.nvshmem_state import Images

HEAP, HEAP_BYTES = 0x7000_0000_0000, 1 << 24
RCS, LKEYS, RKEYS, QUEUES, HEAPS = 0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000, 0x5000_0000


def pack(structure: Layout, **values) -> bytes:
    """The bytes of a structure. A dot in a field's name is written as two underscores; other bytes are 0xEE."""
    image = bytearray(b"\xee" * structure.num_bytes)
    values = {"version": structure.version} | {name.replace("__", "."): value for name, value in values.items()}
    for name, (offset, code) in structure.fields.items():
        if name in values or name != "version":
            struct.pack_into(f"<{code}", image, offset, values.pop(name))
    values.pop("version", None)
    assert not values, f"no fields {sorted(values)}"
    return bytes(image)


class FakeNic:
    """The state of rank 1. Change its attributes, then take `images` and `read`.

    Queue pair [row, peer] has number 0x100 * row + peer; rows are those of NIC 0, then those of NIC 1.
    """

    def __init__(self, num_ranks: int = 4, num_rows: int = 2, num_default: int = 2, num_nics: int = 1, log2: int = 16):
        self.num_ranks, self.num_rows, self.num_nics, self.log2 = num_ranks, num_rows, num_nics, log2
        self.version = layout.LIBRARY_VERSION
        self.host = {
            "mype": 1,
            "npes": num_ranks,
            "heap_base": HEAP,
            "heap_size": HEAP_BYTES,
            "peer_heap_base_remote": HEAPS,
            "enable_rail_opt": False,
            "ibgda_is_initialized": True,
            "nvshmemi_is_nvshmem_initialized": True,
        }
        self.state = {
            "num_rc_per_pe": num_rows // num_nics,
            "log2_cumem_granularity": log2,
            "num_devices_initialized": num_nics,
            "use_async_postsend": False,
            "globalmem__rcs": RCS,
            "globalmem__lkeys": LKEYS,
            "globalmem__rkeys": RKEYS,
            "num_default_rc_per_pe": num_default // num_nics,
        }
        self.pair = {"qp_type": layout.TYPE_RC, "tx_wq__nwqes": 1024}  # what all have, unless it is planted
        self.planted: dict[tuple[int, int], dict] = {}  # (row, peer) -> fields of one
        self.cqe_of_none = False

    @property
    def num_chunks(self) -> int:
        return HEAP_BYTES >> self.log2

    def local_key(self, chunk: int, nic: int = 0) -> int:
        return 0x8000_0000 + 0x100 * chunk + nic

    def remote_key(self, chunk: int, peer: int, nic: int = 0) -> int:
        return 0x4000_0000 + 0x10000 * chunk + 0x100 * peer + nic

    def keys(self, values: list[int]) -> tuple[bytes, bytes]:
        """Those in the constant, and the others."""
        image = b"".join(pack(KEY, key=value, next_addr=1) for value in values)
        split = layout.MAX_CONST_KEYS * KEY.num_bytes
        return image[:split].ljust(split, b"\xff"), image[split:]

    @property
    def _local(self) -> tuple[bytes, bytes]:
        return self.keys([self.local_key(c, nic) for c in range(self.num_chunks) for nic in range(self.num_nics)])

    @property
    def _remote(self) -> tuple[bytes, bytes]:
        places = [
            (c, r, n) for c in range(self.num_chunks) for r in range(self.num_ranks) for n in range(self.num_nics)
        ]
        return self.keys([self.remote_key(*place) for place in places])

    @property
    def images(self) -> Images:
        state = pack(IBGDA_STATE, constmem__lkeys=self._local[0], constmem__rkeys=self._remote[0], **self.state)
        return Images(state, pack(HOST_STATE, **self.host), self.version)

    def queue_pair(self, row: int, peer: int) -> dict:
        number = 0x100 * row + peer
        fields = {
            "qpn": number,
            "dev_idx": row // (self.num_rows // self.num_nics),
            "ibuf__buf": 0xB000_0000 + number,
            "ibuf__lkey": 0xA000_0000 + number,
            "tx_wq__wqe": 0xC000_0000 + number,
            "tx_wq__dbrec": 0xD000_0000 + number,
            "tx_wq__bf": 0xE000_0000 + number,
            "tx_wq__cq": QUEUES + 128 * (row * self.num_ranks + peer),
            "mvars__tx_wq__resv_head": (5 << 32) + number,
            "mvars__tx_wq__ready_head": (5 << 32) + number,
        }
        return fields | self.pair | self.planted.get((row, peer), {})

    def read(self, address: int, num_bytes: int) -> bytes:
        """What the GPU's memory holds there. Raises: KeyError where there is nothing"""
        places = [(row, peer) for row in range(self.num_rows) for peer in range(self.num_ranks)]
        memory = {
            RCS: b"".join(pack(QUEUE_PAIR, **self.queue_pair(*place)) for place in places),
            LKEYS: self._local[1],
            RKEYS: self._remote[1],
            HEAPS: struct.pack(f"<{self.num_ranks}Q", *(HEAP + (peer << 32) for peer in range(self.num_ranks))),
        }
        for number, (row, peer) in enumerate(places):
            cqe = 0 if self.cqe_of_none else 0xF000_0000 + 0x100 * row + peer
            memory[QUEUES + 128 * number] = pack(COMPLETION_QUEUE, cqe=cqe, ncqes=1024, qpn=0x100 * row + peer)
        found = memory[address][:num_bytes]
        assert len(found) == num_bytes, f"{num_bytes} bytes from {address:#x} on; there are {len(found)}"
        return found
