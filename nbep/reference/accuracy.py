"""How far two arrays are apart, as DeepEP measures it.

Source: DeepEP tests/utils.py, calc_diff
"""

import numpy as np


def calc_diff(x: np.ndarray, y: np.ndarray) -> float:
    """0 if x and y are the same; about the mean square of their difference relative to that of x + 1 and y + 1.

    0, too, if they have no elements.
    """
    if x.size == 0:
        return 0.0
    x, y = x.astype(np.float64) + 1, y.astype(np.float64) + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())
