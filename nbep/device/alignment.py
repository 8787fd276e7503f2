"""What the layouts of all modes share: alignment, the table of pointers, cells of matrices, and division by a number
that the host knows.

Such a division is a multiplication by the inverse; to divide takes thirty instructions. What few tokens wait for is
code that is fetched anew, so a kernel that a token waits for does not divide on its way.
"""

from nbep.device.jit import device_function

ALIGNMENT_BYTES = 128
MAX_POINTERS = 256  # ranks that a table has room for
POINTER_TABLE_BYTES = 8 * MAX_POINTERS
INVERSE_BITS = 30


@device_function
def align_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


def inverse_of(divisor: int) -> int:
    """The inverse, for the device to divide by: rounded up, so that quotients of multiples are right."""
    return (1 << INVERSE_BITS) // divisor + 1


@device_function
def divided(value, inverse):
    """value // divisor for 0 <= value and value * divisor < 2**30."""
    return value * inverse >> INVERSE_BITS


@device_function
def matrix_cell(matrix, row, column, num_columns):
    """The address of matrix[row, column]: 4 bytes each, row by row."""
    return matrix + 4 * (row * num_columns + column)
