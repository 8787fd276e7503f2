"""What ranks, their NICs and launches are called. A NIC has a number of its own, as if it were a rank, and memory."""

from collections.abc import Iterable, Sequence

NIC_NUMBERS = 256  # from here up: 256 + the rank whose NIC it is


def name_of(number: int) -> str:
    """`rank 3`, or `the NIC of rank 3`."""
    return f"rank {number}" if number < NIC_NUMBERS else f"the NIC of rank {number - NIC_NUMBERS}"


def title_of(kernel: str, number: int) -> str:
    """`kernel x`, and from its second launch on a rank, which launch."""
    return f"kernel `{kernel}`" + (f", launch {number}" if number > 1 else "")


def who_have(noun: str, numbers: Sequence[int]) -> str:
    """`thread 3 has` or `threads 0-2, 4 have`."""
    return f"{noun} {numbers[0]} has" if len(numbers) == 1 else f"{noun}s {ranges(numbers)} have"


def ranges(numbers: Iterable[int]) -> str:
    """`0-31, 64` for a set of integers."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts) or "none"
