"""What ranks, their NICs and launches are called. A NIC has a number of its own, as if it were a rank, and memory."""

NIC_NUMBERS = 256  # from here up: 256 + the rank whose NIC it is


def name_of(number: int) -> str:
    """`rank 3`, or `the NIC of rank 3`."""
    return f"rank {number}" if number < NIC_NUMBERS else f"the NIC of rank {number - NIC_NUMBERS}"


def title_of(kernel: str, number: int) -> str:
    """`kernel x`, and from its second launch on a rank, which launch."""
    return f"kernel `{kernel}`" + (f", launch {number}" if number > 1 else "")
