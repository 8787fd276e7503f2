"""The transport over queue pairs that the GPU writes itself, here with the software NIC at their other end.

 symmetric memory   the buffer | received [num_ranks, num_qps] s32: entries that came on each peer's queue pairs
 queues             descriptions | remote_bases | local_keys | remote_keys | for each queue pair its words and entries
 NIC's memory       queue pairs as it sees them | regions of all ranks | stop

A key is what an mlx5 card makes of one: 24 bits of index and 8 of its own, big-endian. Chunk i of a buffer is region i
of its rank; the last region is the queues themselves, where the old values of atomics go.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from nbep.device.alignment import ALIGNMENT_BYTES, align_up
from nbep.device.network import nic as device_nic
from nbep.device.network.ibgda import queue_pair
from nbep.device.network.ibgda.completion import (
    COMPLETION_BYTES,
    INVALID,
    NONE_YET,
    STATUS_WORD,
    has_ended,
    index_of,
    opcode_of,
)
from nbep.device.network.ibgda.entry import ENTRY_BYTES
from nbep.device.network.ibgda.transport import MOST_PIECES, IbgdaNetwork
from nbep.device.network.nic import (
    FROM_BOTH,
    FROM_DOORBELL,
    FROM_RECORD,
    NO_ENTRY,
    NO_QUEUE_PAIR,
    Nic,
    Troubles,
    signed_16,
    software_nic,
)
from nbep.device.protocols.peers import Bounds
from nbep.host.arguments import refuse
from nbep.host.faults import syndrome_name
from nbep.host.target.base import Runtime
from nbep.host.target.memory import Memory, Reach, SymmetricMemory, WantedMemory
from nbep.host.transport.base import NetworkOptions, NicOptions, Transport

FIRST_QPN = 0x40
QUEUE_PAIR_STRIDE = 256  # of a queue pair's own words
RECORD_AT = COMPLETION_BYTES
DOORBELL_AT = RECORD_AT + 64
RESULT_AT = DOORBELL_AT + 64
ALL_RIGHTS = device_nic.REMOTE_WRITE | device_nic.REMOTE_ATOMIC


class IbgdaHandle(NamedTuple):
    """What a rank tells the others: how to reach its memory, where it sees that itself, and the keys of its chunks."""

    memory: Any
    base: int
    keys: list[int]


def swap(values: Any) -> np.ndarray:
    """Words of 32 bits in the order of bytes of an entry."""
    return np.array(values, np.uint32).byteswap().view(np.int32)


class Layout:
    """Where everything lies in the memory of the queues; offsets in bytes."""

    def __init__(self, num_ranks: int, num_qps: int, num_chunks: int, num_entries: int):
        self.num_qps = num_qps
        self.num_entries = num_entries
        self.num_queue_pairs = num_ranks * num_qps
        self.remote_bases = self.num_queue_pairs * queue_pair.QUEUE_PAIR_BYTES
        self.local_keys = align_up(self.remote_bases + 8 * num_ranks, ALIGNMENT_BYTES)
        self.remote_keys = align_up(self.local_keys + 4 * num_chunks, ALIGNMENT_BYTES)
        self.words = align_up(self.remote_keys + 4 * num_ranks * num_chunks, ALIGNMENT_BYTES)
        self.entries = self.words + self.num_queue_pairs * QUEUE_PAIR_STRIDE
        self.num_bytes = self.entries + self.num_queue_pairs * num_entries * ENTRY_BYTES

    def words_of(self, number: int) -> int:
        return self.words + number * QUEUE_PAIR_STRIDE

    def entries_of(self, number: int) -> int:
        return self.entries + number * self.num_entries * ENTRY_BYTES

    def describe(self, offset: int) -> str:
        """Name the cell at an offset, for reports."""
        if offset >= self.entries:
            number, byte = divmod(offset - self.entries, self.num_entries * ENTRY_BYTES)
            return f"entry {byte // ENTRY_BYTES} of {self.name_of(number)} + {byte % ENTRY_BYTES}"
        if offset >= self.words:
            number, byte = divmod(offset - self.words, QUEUE_PAIR_STRIDE)
            names = ((RESULT_AT, "result"), (DOORBELL_AT, "doorbell"), (RECORD_AT, "record"), (0, "completion"))
            begin, name = next((at, name) for at, name in names if byte >= at)
            return f"{name} of {self.name_of(number)}" + (f" + {byte - begin}" if byte > begin else "")
        if offset < self.remote_bases:
            number, byte = divmod(offset, queue_pair.QUEUE_PAIR_BYTES)
            word = {queue_pair.RESERVED: "RESERVED", queue_pair.READY: "READY"}.get(byte // 8, f"word {byte // 8}")
            return f"{word} of {self.name_of(number)}"
        return f"keys and addresses + {offset - self.remote_bases}"

    def name_of(self, number: int) -> str:
        peer, queue = divmod(number, self.num_qps)
        return f"queue pair {FIRST_QPN + number} (queue {queue} to rank {peer})"


class IbgdaTransport(Transport):
    """See above. Peers of the same node are mapped, unless the options say otherwise."""

    network_type = IbgdaNetwork
    num_blocks_taken = 1

    def __init__(self, runtime: Runtime, rank: int, num_ranks: int, options: NetworkOptions, nic: NicOptions):
        self._runtime = runtime
        self._rank = rank
        self._num_ranks = num_ranks
        self._options = options
        self._nic_options = nic
        self._first = nic.first_entry & 0xFFFFFFFF
        self._nic: Any = None
        self._memories: list[Memory] = []
        self._is_running = False

    # Memory

    def allocate(self, comm: Any, wanted: WantedMemory) -> SymmetricMemory:
        num_bytes = self._received = wanted.num_bytes
        total = align_up(num_bytes + 4 * self._num_ranks * self._options.num_qps, ALIGNMENT_BYTES)
        if self._runtime.max_symmetric_bytes is not None and total > self._runtime.max_symmetric_bytes:
            most = f"at most {self._runtime.max_symmetric_bytes}"
            refuse("num_rdma_bytes", f"{total} with what the network needs", most)

        def describe_all(offset: int) -> str:
            if offset < num_bytes:
                return wanted.describe(offset)
            peer, queue = divmod((offset - num_bytes) // 4, self._options.num_qps)
            return f"received[rank {peer}, queue {queue}]"

        is_all_mapped = all(self._options.is_mapped(self._rank, peer) for peer in range(self._num_ranks))
        reach = Reach(self._options.num_nvl_peers, by_nics=not is_all_mapped)
        memory = self._runtime.allocate_symmetric(comm, wanted._replace(num_bytes=total, describe=describe_all), reach)
        with ExitStack() as undo:
            undo.callback(memory.free)
            memory.write(num_bytes, np.full((total - num_bytes) // 4, self._first, np.uint32).view(np.int32))
            undo.pop_all()
        self._symmetric = memory
        self._num_chunks = -(-total // self._nic_options.chunk_bytes)
        return memory

    @property
    def handle(self) -> IbgdaHandle:
        keys = [index << 8 | (16 * self._rank + index + 1) & 0xFF for index in range(self._num_chunks + 1)]
        return IbgdaHandle(self._symmetric.handle, self._symmetric.address, keys)

    # Open

    def open(self, handles: list[IbgdaHandle], table_offset: int, bounds: Bounds) -> IbgdaNetwork:
        options, rank = self._options, self._rank
        self._nic = self._runtime.create_nic()
        seen_by_nic = self._nic.open_peers(self._symmetric, [handle.memory for handle in handles], rank)
        mapped = [options.is_mapped(rank, peer) for peer in range(self._num_ranks)]
        wanted = [handle.memory if there else None for handle, there in zip(handles, mapped, strict=True)]
        addresses = self._symmetric.open_peers(wanted, rank)
        self._symmetric.write(table_offset, np.array(addresses, np.int64))

        layout = Layout(self._num_ranks, options.num_qps, self._num_chunks, self._nic_options.num_entries)
        queues = self._own(self._runtime.allocate(layout.num_bytes, "queue pairs", layout.describe))
        self._layout, self._queues = layout, queues
        self._write_queues(handles)
        unmapped = [peer for peer in range(self._num_ranks) if not mapped[peer]]
        self._start_nic(handles, seen_by_nic, unmapped, bounds.timeout_ns)
        return IbgdaNetwork(
            buffer_ptrs=self._symmetric.address + table_offset,
            rank=rank,
            num_ranks=self._num_ranks,
            own_buffer=addresses[rank],
            num_qps=options.num_qps,
            log2_batch=self._nic_options.batch.bit_length() - 1,
            queue_pairs=queues.address,
            remote_bases=queues.address + layout.remote_bases,
            local_keys=queues.address + layout.local_keys,
            remote_keys=queues.address + layout.remote_keys,
            num_chunks=self._num_chunks,
            log2_chunk=self._nic_options.chunk_bytes.bit_length() - 1,
            heap_offset=0,
            timeout_ns=bounds.timeout_ns,
            claim=bounds.claim,
            report=bounds.report,
        )

    def show(self, network: IbgdaNetwork, table_offset: int, addresses: np.ndarray) -> IbgdaNetwork:
        self._symmetric.write(table_offset, addresses)
        return network

    def _own(self, memory: Memory) -> Memory:
        self._memories.append(memory)
        return memory

    def _write_queues(self, handles: list[IbgdaHandle]) -> None:
        """Describe the queue pairs to the GPU, and write down keys and addresses of all ranks."""
        layout, queues = self._layout, self._queues
        own_keys = handles[self._rank].keys
        table = np.zeros((layout.num_queue_pairs, queue_pair.NUM_WORDS), np.int64)
        words = queues.address + layout.words + QUEUE_PAIR_STRIDE * np.arange(layout.num_queue_pairs)
        entry_bytes = layout.num_entries * ENTRY_BYTES
        table[:, queue_pair.ENTRIES] = queues.address + layout.entries + entry_bytes * np.arange(len(table))
        table[:, queue_pair.RECORD] = words + RECORD_AT
        table[:, queue_pair.DOORBELL] = words + DOORBELL_AT
        table[:, queue_pair.COMPLETION] = words
        table[:, queue_pair.RESULT] = words + RESULT_AT
        table[:, queue_pair.NUM_ENTRIES] = layout.num_entries
        table[:, queue_pair.QPN] = FIRST_QPN + np.arange(len(table))
        table[:, queue_pair.RESULT_KEY] = swap(own_keys[-1:])[0]
        table[:, [queue_pair.RESERVED, queue_pair.READY]] = self._first
        queues.write(0, table.reshape(-1))
        queues.write(layout.remote_bases, np.array([handle.base for handle in handles], np.int64))
        queues.write(layout.local_keys, swap(own_keys[:-1]))
        queues.write(layout.remote_keys, swap([handle.keys[:-1] for handle in handles]).reshape(-1))
        first = self._first & 0xFFFF
        status = np.array([NONE_YET & ~0xFFFF | index_of(first - 1 & 0xFFFF)], np.int32)
        record = swap([first])
        for number in range(len(table)):
            words, qpn = layout.words_of(number), FIRST_QPN + number
            queues.write(words + STATUS_WORD, status)
            queues.write(words + RECORD_AT, record)
            queues.write(words + DOORBELL_AT, swap([first << 8, qpn << 8]))

    def _start_nic(self, handles: list[IbgdaHandle], seen_by_nic: list[int], peers: list[int], timeout_ns: int) -> None:
        """Tell the NIC of the queue pairs to these peers, and of all regions; start it."""
        layout, options = self._layout, self._options
        numbers = [peer * options.num_qps + queue for peer in peers for queue in range(options.num_qps)]
        here = self._nic.address_of(self._queues)
        pairs = np.zeros((len(numbers), device_nic.NUM_WORDS), np.int64)
        for row, number in zip(pairs, numbers, strict=True):
            peer, queue = divmod(number, options.num_qps)
            words = here + layout.words_of(number)
            row[device_nic.ENTRIES] = here + layout.entries_of(number)
            row[device_nic.RECORD] = words + RECORD_AT
            row[device_nic.DOORBELL] = words + DOORBELL_AT
            row[device_nic.COMPLETION] = words
            row[device_nic.NUM_ENTRIES] = layout.num_entries
            row[device_nic.QPN] = FIRST_QPN + number
            row[device_nic.PEER] = peer
            row[device_nic.SERVED] = self._nic_options.first_entry
            row[device_nic.RECEIVED] = seen_by_nic[peer] + self._received + 4 * (self._rank * options.num_qps + queue)
        regions = self._regions(handles, seen_by_nic, here)

        def describe(offset: int) -> str:
            """Name the cell at an offset of what the NIC keeps, for reports."""
            number, byte = divmod(offset, device_nic.QUEUE_PAIR_BYTES)
            if number < len(numbers):
                words = {device_nic.SERVED: "SERVED", device_nic.STATE: "STATE", device_nic.REFUSED: "REFUSED"}
                word = words.get(byte // 8, f"word {byte // 8}")
                return f"{word} of {layout.name_of(numbers[number])}"
            return "regions" if offset < pairs.nbytes + regions.nbytes else "stop"

        memory = self._own(self._nic.allocate(pairs.nbytes + regions.nbytes + ALIGNMENT_BYTES, "NIC", describe))
        memory.write(0, pairs.reshape(-1))
        memory.write(pairs.nbytes, regions.reshape(-1))
        self._stop = memory, pairs.nbytes + regions.nbytes
        self._served = numbers
        address = memory.address
        nic = Nic(
            address,
            address + pairs.nbytes,
            len(numbers),
            self._num_chunks + 1,
            self._rank,
            address + self._stop[1],
            0,
        )
        if numbers:
            self._runtime.load(software_nic)
            self._nic.start(software_nic, self._queues, len(numbers), timeout_ns, nic, self._troubles())
            self._nic.explain(self.describe)
            self._is_running = True

    def _regions(self, handles: list[IbgdaHandle], seen_by_nic: list[int], queues_here: int) -> np.ndarray:
        """[num_ranks, num_regions, words]: the chunks of all ranks, and this rank's queues."""
        chunk_bytes = self._nic_options.chunk_bytes
        table = np.zeros((self._num_ranks, self._num_chunks + 1, device_nic.REGION_BYTES // 8), np.int64)
        begins = chunk_bytes * np.arange(self._num_chunks)
        for row, handle, here in zip(table, handles, seen_by_nic, strict=True):
            row[:, device_nic.KEY] = handle.keys
            row[:-1, device_nic.BEGIN] = handle.base + begins
            row[:-1, device_nic.END] = handle.base + np.minimum(begins + chunk_bytes, self._symmetric.num_bytes)
            row[:-1, device_nic.HERE] = here + begins
            row[:-1, device_nic.RIGHTS] = ALL_RIGHTS
        own = table[self._rank, -1]
        own[device_nic.BEGIN] = self._queues.address
        own[device_nic.END] = self._queues.address + self._layout.num_bytes
        own[device_nic.HERE] = queues_here
        return table

    def _troubles(self) -> Troubles:
        options = self._nic_options
        lost, stopped, first = options.lost, options.stopped, options.first_entry
        queue_pair_number, entry, last = NO_QUEUE_PAIR, NO_ENTRY, NO_ENTRY
        if lost is not None and lost[0] == self._rank:
            _, peer, queue, entry = lost
            entry += first
            queue_pair_number = FIRST_QPN + peer * self._options.num_qps + queue
        if stopped is not None and stopped[0] == self._rank:
            last = first + stopped[1]
        source = FROM_RECORD if options.from_record else FROM_DOORBELL
        if options.from_record is None and options.seed != 0:
            source = FROM_BOTH
        return Troubles(options.seed, options.max_delay_ns, source, queue_pair_number, entry, last)

    def close(self) -> None:
        if self._is_running:
            self._nic.explain(None)
            memory, offset = self._stop
            memory.write(offset, np.ones(1, np.int32))
            self._nic.join()
            self._is_running = False
        if self._nic is not None:
            self._nic.close()
            self._nic = None
        for memory in self._memories:
            memory.free()
        self._memories.clear()
        self._symmetric.close_peers()

    def check_message(self, num_bytes: int) -> None:
        if num_bytes > (MOST_PIECES - 1) * self._nic_options.chunk_bytes:
            allowed = f"at least {-(-num_bytes // (MOST_PIECES - 1))} for messages of {num_bytes} bytes"
            refuse("nic: chunk_bytes", self._nic_options.chunk_bytes, allowed)

    def unread_by_nic(self) -> int | None:
        for number in range(self._layout.num_queue_pairs):
            words = self._layout.words_of(number)
            num_rung = int(swap(self._queues.read(words + RECORD_AT, 1, np.uint32))[0])
            status = int(self._queues.read(words + STATUS_WORD, 1, np.int32)[0])
            if not has_ended(status, num_rung - 1):
                return number // self._options.num_qps
        return None

    # Reports

    def describe(self, peer: int) -> list[str]:
        if self._options.is_mapped(self._rank, peer):
            return []
        num_qps = self._options.num_qps
        came = self._symmetric.read(self._received + 4 * peer * num_qps, num_qps, np.uint32)
        sent = [self._describe_queue(peer, queue) for queue in range(num_qps)]
        first = FIRST_QPN + self._rank * num_qps  # of the peer's queue pairs to this rank
        got = [
            f"queue {queue} (its queue pair {first + queue}): done up to entry {(count - 1) & 0xFFFFFFFF}"
            for queue, count in enumerate(came.tolist())
            if count != self._first
        ]
        return [
            f"the network to rank {peer}: {'; '.join(filter(None, sent)) or 'nothing sent'}",
            f"the network from rank {peer}: {'; '.join(got) or 'nothing has come'}",
        ]

    def _describe_queue(self, peer: int, queue: int) -> str:
        """What has become of the entries of one queue pair; "" if it has had none."""
        number = peer * self._options.num_qps + queue
        row = self._queues.read(number * queue_pair.QUEUE_PAIR_BYTES, queue_pair.NUM_WORDS, np.int64)
        end, num_reserved = int(row[queue_pair.READY]) & 0xFFFFFFFF, self._since_first(row[queue_pair.RESERVED])
        if num_reserved == 0:
            return ""
        words, num_ready = self._layout.words_of(number), self._since_first(end)
        status = int(self._queues.read(words + STATUS_WORD, 1, np.int32)[0])
        doorbell = int(swap(self._queues.read(words + DOORBELL_AT, 1, np.uint32))[0]) >> 8
        num_rung = self._since_first(end + signed_16(doorbell - end))
        text = f"queue {queue} (queue pair {FIRST_QPN + number}): {num_ready} entries"
        if num_reserved != num_ready:
            text += f" of {num_reserved} that are reserved"
        if num_rung != num_ready:
            text += f", rung for {num_rung}"
        refused = self.first_refused(peer, queue)
        if refused is not None:
            return f"{text}, entry {refused[0]} refused: {syndrome_name(refused[1])}, nothing after it"
        if opcode_of(status) == INVALID:
            return f"{text}, none done"
        return f"{text}, done up to entry {(end + signed_16(index_of(status) - end)) & 0xFFFFFFFF}"

    def _since_first(self, number: int) -> int:
        """How many entries a queue has had, from a counter of 32 bits."""
        return (int(number) - self._first) & 0xFFFFFFFF

    def first_refused(self, peer: int, queue: int) -> tuple[int, int] | None:
        number = peer * self._options.num_qps + queue % self._options.num_qps
        memory, _ = self._stop
        at = device_nic.QUEUE_PAIR_BYTES * self._served.index(number) + 8 * device_nic.REFUSED
        refused = int(memory.read(at, 1, np.int64)[0])
        return (refused >> 8 & 0xFFFFFFFF, refused & 0xFF) if refused else None
