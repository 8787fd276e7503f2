"""Where an entry of a matrix lies."""

from nbep.device.jit import device_function


@device_function
def matrix_cell(matrix, row, column, num_columns):
    """The address of matrix[row, column]: 4 bytes each, row by row."""
    return matrix + 4 * (row * num_columns + column)
