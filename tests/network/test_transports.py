"""What every transport answers for itself."""

import pytest

from nbep.host.transport.base import Transport


class CardOfItsOwn(Transport):
    """A transport whose author has not asked whether a card may still read what was sent."""

    allocate = handle = open = close = None


def test_a_transport_that_does_not_say_what_its_nic_has_to_read_is_not_made():
    """zero_copy hands memory out by this answer: a default of "nothing" would hand out what a card still reads."""
    with pytest.raises(TypeError, match="unread_by_nic"):
        CardOfItsOwn()
