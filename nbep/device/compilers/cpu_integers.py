"""Integers of kernels for the CPU: where Python's arithmetic raises an error, and Numba's gives 0 or anything."""

from __future__ import annotations

import operator
from functools import partial

from numba import types
from numba.core import callconv, imputils
from numba.core.registry import cpu_target


class IntegerErrors(callconv.NumpyErrorModel):
    """What arithmetic raises, in the terms of Numba: a division of integers by 0, and none of floats."""

    def fp_zero_division(self, builder, exc_args=None, loc=None):
        is_raised = exc_args is not None and exc_args[0].startswith("integer")
        if is_raised:
            self.call_conv.return_user_exc(builder, ZeroDivisionError, exc_args, loc)
        return is_raised


INTEGER_ERRORS = "nbep"
callconv.error_models[INTEGER_ERRORS] = IntegerErrors
_lowered = imputils.Registry("nbep")


def _shift(context, builder, signature, arguments, to_left):
    result = signature.return_type
    value, amount = map(context.cast, [builder] * 2, arguments, signature.args, [result] * 2)
    right = builder.ashr if result.signed else builder.lshr
    if not isinstance(context.error_model, IntegerErrors):
        return (builder.shl if to_left else right)(value, amount)
    zero, last = amount.type(0), amount.type(result.bitwidth - 1)
    with builder.if_then(builder.icmp_signed("<", amount, zero), likely=False):
        context.call_conv.return_user_exc(builder, ValueError, ("negative shift count",))
    is_far = builder.icmp_unsigned(">", amount, last)
    near = builder.select(is_far, last, amount)
    if to_left or not result.signed:
        return builder.select(is_far, zero, (builder.shl if to_left else right)(value, near))
    return right(value, near)


for one in operator.lshift, operator.ilshift, operator.rshift, operator.irshift:
    _lowered.lower(one, types.Integer, types.Integer)(partial(_shift, to_left="lshift" in one.__name__))
cpu_target.target_context.refresh()  # first with Numba's own: intrinsics go to the first registry that there is
cpu_target.target_context.install_registry(_lowered)
