"""Source: DeepEP deep_ep/utils/math.py"""

from nbep.host.cast import per_token_cast_back, per_token_cast_to_fp8

__all__ = ["align", "ceil_div", "per_token_cast_back", "per_token_cast_to_fp8"]


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    return ceil_div(x, y) * y
