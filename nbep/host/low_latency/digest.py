"""What all ranks must pass alike to a low-latency call, as a digest: with what arrives, a receiver gets its sender's.

 dispatch   in the note of each message, in a word that was padding    24 bits
 combine    in each count, as its number: nobody counts rows there     13 bits

So it is one access to memory more for each message of a dispatch, and no message more. Calls that differ in one word
never have the same digest; others do one time in 16 million, and one time in 8191 in combine. What a combine is passed
comes from a dispatch that was compared, but for use_logfmt. Which word it is that differs, `difference` finds out.

A digest of dispatch is not 0, the word of a note that was read. One of combine is no number of tokens that a dispatch
would send, up to LEAST_OF_COMBINE: the verbs use the same counts.
"""

from __future__ import annotations

from nbep.device.layout.low_latency import LowLatencyShape
from nbep.device.protocols.waits import ONE
from nbep.host.calls import DIGESTS, digest_of

LEAST_OF_COMBINE = 1 << 13
DIGESTS_OF_COMBINE = 8191  # a prime: words that differ in one place have different digests


def for_dispatch(shape: LowLatencyShape, round_scale: bool) -> LowLatencyShape:
    """The shape with its digest."""
    return shape._replace(digest=ONE + digest_of((*shape[:-1], int(round_scale)), DIGESTS))


def for_combine(shape: LowLatencyShape) -> LowLatencyShape:
    """The shape with its digest."""
    return shape._replace(digest=LEAST_OF_COMBINE + digest_of(shape[:-1], DIGESTS_OF_COMBINE))
