"""Loops that stop on what they compute, which run wide: a rounded carry may never get there.

A tolerance asks for digits that 16 bits do not hold, and a loop that stops on one would turn for
ever. Where the stop only counts turns, nothing is wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from ..core import wide_dtype
from ._doubt import UNKNOWN
from ._values import Value, data_dtype, is_float


def stops_on_floats(condition: ClosedJaxpr, body: ClosedJaxpr, first: int, second: int) -> bool:
    """Whether the number of turns of a loop depends on floating numbers, carried or constant.

    Args:
        condition: the test of a `lax.while_loop`.
        body: a turn of it.
        first: how many operands of the test are constants.
        second: how many of the body's are.
    """
    _, read = dce_jaxpr(condition.jaxpr, [True])
    decides, floats = read[first:], _floats(condition, read)
    while True:
        _, read = dce_jaxpr(body.jaxpr, decides)
        floats = floats or _floats(body, read)
        more = [a or b for a, b in zip(decides, read[second:], strict=True)]
        if more == decides:
            return floats
        decides = more


def _floats(program: ClosedJaxpr, read: Sequence[bool]) -> bool:
    return any(is_float(aval) for aval, used in zip(program.in_avals, read, strict=True) if used)


def wide_results(value: Value) -> Value:
    """Returns the same value, of which what is computed from it is wide."""
    if value.dtype is None or np.dtype(value.dtype).itemsize >= 4:
        return value
    return value.with_data(value.data, dtype=wide_dtype(value.dtype))


def to_be_rounded(value: Value, start: Value, operands: Sequence[Value]) -> Value:
    """Marks a result of a wide loop: where a chain ends it is rounded to the type it went in with.

    Its size is not known. What follows in element-wise operations sees what the loop has computed:
    the entries of two arrays may lie far apart, and those of their product close together.

    Args:
        value: a carried leaf after the last turn.
        start: the same before the first, which may be plain.
        operands: of the loop: where the start is plain, their type is the result's.
    """
    types: list[Any] = [v for v in operands if v.dtype is not None]
    if value.scale is None or not types:
        return value
    dtype = data_dtype(*types) if start.dtype is None else start.dtype
    return value.with_data(value.data, dtype=dtype, doubt=UNKNOWN)
