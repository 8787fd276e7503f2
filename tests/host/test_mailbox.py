"""File descriptors that go from mailbox to mailbox; between processes they do in tests/mpi."""

import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
from processes import LIMIT_S

if sys.platform != "linux":
    pytest.skip("abstract sockets are Linux's", allow_module_level=True)

from nbep.host.target.cuda.mailbox import Mailbox, MailboxAddress


@pytest.fixture
def mailbox():
    box = Mailbox()
    yield box
    box.close()


def send_text(
    text: bytes, address: MailboxAddress, sender: int, own: Mailbox | None = None, timeout_s: float = LIMIT_S
) -> None:
    fd = os.memfd_create("text")
    os.pwrite(fd, text, 0)
    box = own or Mailbox()
    try:
        box.send(fd, address, sender, 1, timeout_s)
    finally:
        os.close(fd)
        if own is None:
            box.close()


def fill(box: Mailbox) -> None:
    """Any user of the host can: names are in /proc/net/unix."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, suppress(BlockingIOError):
        stranger.setblocking(False)
        while True:
            stranger.sendto(b"junk", box.address.name)


def text_of(fd: int) -> bytes:
    text = os.pread(fd, 100, 0)
    os.close(fd)
    return text


def test_descriptors_are_distinguished_by_sender_in_whatever_order_they_come(mailbox):
    for sender in (3, 0, 7):
        send_text(b"from %d" % sender, mailbox.address, sender)
    assert [text_of(mailbox.receive(sender)) for sender in (0, 7, 3)] == [b"from 0", b"from 7", b"from 3"]


def test_seven_peers_send_before_any_is_received(mailbox):
    for sender in range(7):
        send_text(b"%d" % sender, mailbox.address, sender)
    assert [text_of(mailbox.receive(sender)) for sender in range(7)] == [b"%d" % sender for sender in range(7)]


def test_a_sender_that_does_not_come_is_named(mailbox):
    send_text(b"another", mailbox.address, 1)
    with pytest.raises(TimeoutError, match=r"no file descriptor came from rank 2 in 0.05 s"):
        mailbox.receive(2, timeout_s=0.05)
    assert text_of(mailbox.receive(1)) == b"another"


def test_a_queue_that_stays_full_is_named_by_its_rank(mailbox):
    fill(mailbox)
    with pytest.raises(TimeoutError, match=r"^timed out: the queue of rank 1 is full$"):
        send_text(b"no room", mailbox.address, 0, timeout_s=0.05)


def test_ranks_whose_queues_strangers_fill_reach_each_other():
    """Each sends first, and takes junk out of its own queue meanwhile."""
    with closing(Mailbox()) as first, closing(Mailbox()) as second:
        boxes = first, second
        for box in boxes:
            fill(box)

        def exchange(rank):
            send_text(b"from %d" % rank, boxes[1 - rank].address, rank, boxes[rank])
            assert text_of(boxes[rank].receive(1 - rank)) == b"from %d" % (1 - rank)

        with ThreadPoolExecutor(2) as ranks:
            list(ranks.map(exchange, range(2)))


def test_a_wait_ends_in_time_while_strangers_send_on(mailbox):
    done = threading.Event()

    def send_on():
        while not done.is_set():
            fill(mailbox)

    with ThreadPoolExecutor(1) as strangers:
        strangers.submit(send_on)
        try:
            with pytest.raises(TimeoutError, match=r"no file descriptor came from rank 2 in 0\.1 s"):
                mailbox.receive(2, timeout_s=0.1)
        finally:
            done.set()


@pytest.mark.parametrize("with_fd", [True, False])
def test_what_comes_without_the_key_is_thrown_away(mailbox, with_fd):
    if with_fd:
        send_text(b"forged", mailbox.address._replace(key=bytes(16)), 1)
    else:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(mailbox.address.key + bytes([1, 0, 0, 0]), mailbox.address.name)
    send_text(b"true", mailbox.address, 1)
    assert text_of(mailbox.receive(1)) == b"true"


def test_a_closed_mailbox_takes_nothing_and_keeps_nothing(mailbox):
    send_text(b"first", mailbox.address, 1)
    send_text(b"second", mailbox.address, 2)
    os.close(mailbox.receive(2))
    (kept,) = mailbox._arrived.values()
    mailbox.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)
    with pytest.raises(ConnectionRefusedError):
        send_text(b"late", mailbox.address, 1)
