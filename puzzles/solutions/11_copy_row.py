"""Puzzle 11, solved: lane i takes vectors i, i + 32, i + 64."""

from nbep.lang import device_function, ld_nc_v4, st_na_v4


@device_function
def copy_row(dst, src, num_vectors, lane):
    i = lane
    while i < num_vectors:
        st_na_v4(dst + 16 * i, ld_nc_v4(src + 16 * i))
        i += 32


HINTS = (
    "Lane i takes vectors i, i + 32, i + 64, as long as there is one.",
    "A while loop whose index grows by 32; vector i begins 16 * i bytes behind the first.",
)
