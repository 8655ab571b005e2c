"""Storage type and arithmetic type apart: at run time the scale says which arithmetic is safe.

An experiment. Functions of a value are computed in float32, whatever their data is stored in. Where
the exponent of the scale and the largest of float16 data show that float16 arithmetic gives the
same, rounded, it is done in that instead: the great decoupling of the Scalify design.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._values import ONE, Scale, Value, wide_value, widen

# Results of float16 arithmetic stay this near unit size, so that nobody need measure them.
_NEAR = 2.0**4
_LARGEST = float(np.finfo(np.float16).max)
_SMALLEST = float(np.finfo(np.float16).tiny)


class Safe(NamedTuple):
    """Where a function may be computed in float16.

    Attributes:
        most: the largest magnitude of the value.
        scale: the smallest scale. From 1 on data times scale is exact; below, what is small loses
            bits, which matters unless the function is flat at zero.
        near: whether results are near unit size then; else they stay at scale 1 on both ways.
    """

    most: float
    scale: float = 1.0
    near: bool = True


_LOG = float(np.log(_NEAR))
# Not cbrt, exp2, expm1, asinh, log1p, logistic, pow, rsqrt, tan: XLA makes them of others, each
# rounded to float16, and they end more than one unit in the last place from what they should be.
_SAFE = {
    "exp": Safe(_LOG, scale=_SMALLEST),
    "cosh": Safe(_LOG, scale=_SMALLEST),
    "cos": Safe(_LARGEST, scale=_SMALLEST, near=False),
    "erfc": Safe(2.0, scale=_SMALLEST, near=False),
    "log": Safe(_LARGEST, near=False),
    "log2": Safe(_LARGEST, near=False),
    "sinh": Safe(_LOG),
    "tanh": Safe(_LARGEST),
    "erf": Safe(_LARGEST),
    "sin": Safe(_LARGEST),
    "atan": Safe(_LARGEST),
    "sqrt": Safe(_NEAR**2),
}


@dataclass(frozen=True)
class Branch:
    """How often one place of a program was computed in float16, and what that changed.

    Attributes:
        primitive: the function.
        source: ``file:line (function)`` of the user's code, where known.
        narrow: how many times in float16.
        wide: how many times in float32.
        ulps: the largest difference of a result from that of float32, in units in the last place
            of float16.

    Example:
        >>> print(Branch("exp", "model.py:7 (block)", 3, 1, 0.5))
        exp at model.py:7 (block): 3 times in float16 (0.50 ulp), 1 in float32
    """

    primitive: str
    source: str
    narrow: int
    wide: int
    ulps: float

    def __str__(self) -> str:
        return (
            f"{self.primitive} at {self.source}: {self.narrow} times in float16 "
            f"({self.ulps:.2f} ulp), {self.wide} in float32"
        )


class Branches:
    """Counts, while a program runs, which way its decoupled functions go."""

    def __init__(self) -> None:
        """Starts at nothing."""
        self._found: dict[tuple[int, str, str], list[tuple[bool, float]]] = {}

    def watch(self, primitive: str, source: str, safe: Any, narrow: Any, wide: Any) -> None:
        """Adds to the program that it tells, at this place, which way it goes."""
        seen = self._found.setdefault((len(self._found), primitive, source), [])
        step = jnp.ldexp(np.float32(1), jnp.maximum(jnp.frexp(wide)[1] - 11, -24))
        narrow = narrow.astype(np.float32)
        same = (narrow == wide) | (jnp.isnan(narrow) & jnp.isnan(wide))
        ulps = jnp.max(jnp.where(same, 0.0, jnp.abs(narrow - wide) / step), initial=0.0)
        jax.debug.callback(lambda *told: seen.append((bool(told[0]), float(told[1]))), safe, ulps)

    def found(self) -> list[Branch]:
        """Returns what was counted, in the order of the program."""
        jax.effects_barrier()
        branches = []
        # Bodies of loops are traced more than once, and run in one of these traces.
        ran = ((place, seen) for place, seen in self._found.items() if seen)
        for (_, primitive, source), seen in ran:
            narrow = [ulps for safe, ulps in seen if safe]
            wide = len(seen) - len(narrow)
            branches.append(Branch(primitive, source, len(narrow), wide, max(narrow, default=0.0)))
        return branches


def limits(primitive: str, operands: Sequence[Value]) -> Safe | None:
    """Returns where a function of these operands may be computed in float16; None for nowhere."""
    x = operands[0]
    one_scale = x.scale is not None and not x.scale.ndim
    if not one_scale or jnp.result_type(x.data) != np.float16 or not jnp.size(x.data):
        return None
    return _SAFE.get(primitive)


def decoupled(
    safe: Safe,
    apply: Callable[[Any], Any],
    x: Value,
    watch: Callable[[Any, Any, Any], None] | None = None,
) -> Value:
    """Computes a function in float16 or in float32, as scale and data say at run time.

    Args:
        safe: where float16 will do.
        apply: the function, of an array in either type.
        x: its operand, float16 data at one scale.
        watch: told which way it goes, and both results.
    """
    assert x.scale is not None, "only scaled values are decoupled"
    scale = jnp.asarray(x.scale.factor())
    size = lax.abs(lax.stop_gradient(x.data))
    most = widen(lax.reduce_max(size, tuple(range(size.ndim)))) * scale
    # A larger scale is none of float16, and times zeros it would be NaN.
    is_safe = (scale >= safe.scale) & (scale <= np.float32(2.0**15)) & (most <= safe.most)
    if safe.near and safe.scale == 1:  # what vanishes at zero is as small as its operand
        is_safe &= most >= 1 / _NEAR

    def in_float16() -> tuple[Any, Any]:
        # The scale is 1; written so, it is spread over devices as the other branch's is.
        return apply(x.data * scale.astype(np.float16)), is_safe.astype(np.float32)

    def in_float32() -> tuple[Any, Any]:
        data = apply(x.wide())
        if not safe.near:
            return data.astype(np.float16), (~is_safe).astype(np.float32)
        value = wide_value(data, np.float16).measured()
        assert value.scale is not None, "what is measured has a scale"
        return value.data, value.scale.factor()

    if watch is not None:
        watch(is_safe, in_float16()[0], apply(x.wide()))
    data, scale = lax.cond(is_safe, in_float16, in_float32)
    return Value(data, Scale(0, scale) if safe.near else ONE, x.dtype)
