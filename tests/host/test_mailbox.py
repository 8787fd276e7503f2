"""File descriptors that go from mailbox to mailbox; between processes they do in tests/mpi."""

import os
import socket
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("abstract sockets are Linux's", allow_module_level=True)

from nbep.host.target.cuda.mailbox import Mailbox, MailboxAddress, send


@pytest.fixture
def mailbox():
    box = Mailbox()
    yield box
    box.close()


def send_text(text: bytes, address: MailboxAddress, sender: int) -> None:
    fd = os.memfd_create("text")
    os.pwrite(fd, text, 0)
    send(fd, address, sender)
    os.close(fd)


def text_of(fd: int) -> bytes:
    text = os.pread(fd, 100, 0)
    os.close(fd)
    return text


def test_descriptors_are_told_apart_by_sender_in_whatever_order_they_come(mailbox):
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
