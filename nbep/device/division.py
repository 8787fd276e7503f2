"""Division by a number that the host knows: a multiplication by its inverse; a division takes thirty instructions.

What few tokens wait for is code that is fetched anew, so a kernel that a token waits for does not divide on its way.
"""

from nbep.device.jit import device_function

INVERSE_BITS = 30


def inverse_of(divisor: int) -> int:
    """The inverse, for the device to divide by: rounded up, so that quotients of multiples are right."""
    return (1 << INVERSE_BITS) // divisor + 1


@device_function
def divided(value, inverse):
    """value // divisor for 0 <= value and value * divisor < 2**30."""
    return value * inverse >> INVERSE_BITS
