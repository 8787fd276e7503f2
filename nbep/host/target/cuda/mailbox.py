"""File descriptors from process to process of one host, through Unix sockets with abstract names.

 rank s: send(fd, mailbox of r) --datagram: key of r, s, and fd--> queue of the mailbox --receive(s)--> rank r

A send only fills the receiver's queue, which has room for the 7 peers of a node (net.unix.max_dgram_qlen, 10 by
default). It takes no privilege. Anyone on the host can send to an abstract name, which stands in /proc/net/unix. So a
mailbox has a key, and who waits for room in another queue empties its own: ranks that all send first wait only
for those that have not come yet, whoever fills their queues.

Source: unix(7), "Abstract sockets" and SCM_RIGHTS
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from typing import NamedTuple

KEY_BYTES = 16
RANK_BYTES = 4
TIMEOUT_S = 30.0
PAUSE_S = 0.05
MAX_TAKEN = 100  # messages, before anybody looks at the time again


class MailboxAddress(NamedTuple):
    """What a rank tells those that shall send to it. name is the socket's; key is what they put into the message."""

    name: bytes
    key: bytes


class Mailbox:
    """Where one rank receives. `address` goes to the senders."""

    def __init__(self) -> None:
        self.address = MailboxAddress(b"\0nbep-" + secrets.token_hex(8).encode(), secrets.token_bytes(KEY_BYTES))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self.address.name)
        self._arrived: dict[int, int] = {}  # file descriptors by sender

    def send(self, fd: int, address: MailboxAddress, sender: int, receiver: int, timeout_s: float = TIMEOUT_S) -> None:
        """Put a copy of fd, from rank `sender`, into the mailbox of rank `receiver`.

        Raises: OSError if there is no such mailbox in this network namespace; TimeoutError if its queue stays full
        """
        deadline = time.monotonic() + timeout_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.setblocking(False)
            own.connect(address.name)
            while True:
                try:
                    socket.send_fds(own, [address.key + sender.to_bytes(RANK_BYTES, "little")], [fd])
                    return
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"timed out: the queue of rank {receiver} is full") from None
                self._take_in()
                select.select([self._socket], [own], [], PAUSE_S)

    def receive(self, sender: int, timeout_s: float = TIMEOUT_S) -> int:
        """The file descriptor that a rank sent; it is the caller's to close.

        Raises: TimeoutError that names the rank if it does not come
        """
        deadline = time.monotonic() + timeout_s
        self._take_in()
        while sender not in self._arrived:
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise TimeoutError(f"no file descriptor came from rank {sender} in {timeout_s:g} s")
            select.select([self._socket], [], [], rest)
            self._take_in()
        return self._arrived.pop(sender)

    def _take_in(self) -> None:
        """Empty the queue: keep what has the key, and throw the rest away."""
        for _ in range(MAX_TAKEN):
            try:
                message, fds, _, _ = socket.recv_fds(self._socket, KEY_BYTES + RANK_BYTES, 1)
            except BlockingIOError:
                return
            key, rank = message[:KEY_BYTES], int.from_bytes(message[KEY_BYTES:], "little")
            if fds and secrets.compare_digest(key, self.address.key) and rank not in self._arrived:
                self._arrived[rank] = fds[0]
            else:
                for fd in fds:
                    os.close(fd)

    def close(self) -> None:
        """Take no more, and close the descriptors that no caller asked for."""
        self._socket.close()
        while self._arrived:
            os.close(self._arrived.popitem()[1])
