"""File descriptors from process to process of one host, through Unix sockets with abstract names.

 rank s: send(fd, mailbox of r) --datagram: key of r, s, and fd--> queue of the mailbox --receive(s)--> rank r

A send only fills the receiver's queue, which has room for the 7 peers of a node (net.unix.max_dgram_qlen, 10 by
default). So ranks that all send first and then receive wait for no receiver. It takes no privilege. Anyone on the host
can send to an abstract name, so a mailbox has a key.

Source: unix(7), "Abstract sockets" and SCM_RIGHTS
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import NamedTuple

KEY_BYTES = 16
RANK_BYTES = 4
TIMEOUT_S = 30.0


class MailboxAddress(NamedTuple):
    """What a rank tells those that shall send to it. name is the socket's; key is what they put into the message."""

    name: bytes
    key: bytes


def send(fd: int, address: MailboxAddress, sender: int, timeout_s: float = TIMEOUT_S) -> None:
    """Put a copy of fd into a mailbox, from rank `sender`.

    Raises: OSError if there is no such mailbox in this network namespace, or if its queue stays full
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.settimeout(timeout_s)
        own.connect(address.name)
        socket.send_fds(own, [address.key + sender.to_bytes(RANK_BYTES, "little")], [fd])


class Mailbox:
    """Where one rank receives. `address` goes to the senders."""

    def __init__(self) -> None:
        self.address = MailboxAddress(b"\0nbep-" + secrets.token_hex(8).encode(), secrets.token_bytes(KEY_BYTES))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address.name)
        self._arrived: dict[int, int] = {}  # file descriptors by sender

    def receive(self, sender: int, timeout_s: float = TIMEOUT_S) -> int:
        """The file descriptor that a rank sent; it is the caller's to close.

        Raises: TimeoutError that names the rank if it does not come
        """
        deadline = time.monotonic() + timeout_s
        while sender not in self._arrived:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                message, fds, _, _ = socket.recv_fds(self._socket, KEY_BYTES + RANK_BYTES, 1)
            except TimeoutError:
                raise TimeoutError(f"no file descriptor came from rank {sender} in {timeout_s:g} s") from None
            key, rank = message[:KEY_BYTES], int.from_bytes(message[KEY_BYTES:], "little")
            if fds and key == self.address.key and rank not in self._arrived:
                self._arrived[rank] = fds[0]
            else:
                for fd in fds:
                    os.close(fd)
        return self._arrived.pop(sender)

    def close(self) -> None:
        """Take no more, and close what nobody asked for."""
        self._socket.close()
        while self._arrived:
            os.close(self._arrived.popitem()[1])
