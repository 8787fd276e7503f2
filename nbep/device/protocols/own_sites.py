"""Sites of kernels that are not nbep's: what a report says of a wait of theirs."""

import zlib

from nbep.device.protocols.waits import OWN_SITES, SITES


def own_site(role: str, cell: str, awaited: str) -> int:
    """Name a site of a kernel that is not nbep's.

    Its number comes from the words. So it is the same in all processes, and in kernels that were compiled before.

    Raises: ValueError if other words have the number
    """
    words = role, cell, awaited
    number = OWN_SITES + zlib.crc32("\n".join(words).encode()) % (1 << 24)
    if SITES.setdefault(number, words) != words:
        raise ValueError(f"site {words}: has the number of {SITES[number]}; change a word")
    return number
