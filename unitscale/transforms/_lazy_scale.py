"""Scales of which a program knows the formula: 2**log2 times integer powers of unknown arrays.

Propagating scales through a program multiplies, divides and compares many of them, and nearly all
of that is known while tracing: ``s * s / s`` is ``s``, and two tensors of the same formula need no
alignment. A `LazyScale` keeps the formula and becomes an array only where data is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import get_opaque_trace_state

# The smallest normal float32: ratios stop there, so that an infinity times a ratio is no NaN.
_SMALLEST = 2.0**-126


def made_once(made: dict[Any, tuple[Any, Any]], key: Any, make: Callable[[], Any]) -> Any:
    """Returns what was made for a key in this trace, or makes it.

    An array made inside a loop's body must not be found outside of it.
    """
    level = get_opaque_trace_state(convention="flax")
    if key not in made or made[key][0] != level:
        made[key] = level, make()
    return made[key][1]


class Atom:
    """A scale of which only the array is known; two atoms are equal if they are the same object."""

    __slots__ = ("array", "made", "reason")

    def __init__(self, array: jax.Array, reason: str = ""):
        """Keeps a float32 array, a scalar or of the rank of its data, and why it is one."""
        self.array = array
        self.reason = reason
        # What was computed from formulas in which this atom comes first, and where.
        self.made: dict[LazyScale, tuple[Any, jax.Array]] = {}

    @property
    def ndim(self) -> int:
        """Number of dimensions: 0 for a scale per tensor."""
        return jnp.ndim(self.array)


class LazyScale:
    """The scale ``2**log2 * prod(atom.array**power)``.

    Args:
        log2: static exponent; whole, except where a loop corrects the drift of its data.
        powers: power of every atom, none of them zero.

    Example:
        >>> s = LazyScale.of(jnp.float32(8))
        >>> (s * s / s) == s, (s / s).is_static
        (True, True)
        >>> print((s * s).shift(-1).array())
        32.0
    """

    __slots__ = ("log2", "powers")

    def __init__(self, log2: float = 0, powers: dict[Atom, int] | None = None):
        """Builds the scale; see the class."""
        self.log2 = log2
        self.powers = powers or {}

    @classmethod
    def of(cls, array: jax.Array, reason: str = "") -> LazyScale:
        """Returns the scale that is this array; the reason tells a user why it is no formula."""
        return cls(0, {Atom(array, reason): 1})

    @property
    def is_static(self) -> bool:
        """Whether the scale is a known power of two."""
        return not self.powers

    @property
    def is_bare(self) -> bool:
        """Whether the scale is one array, as it is."""
        return not self.log2 and list(self.powers.values()) == [1]

    @property
    def degree(self) -> int:
        """How many arrays are multiplied or divided."""
        return sum(abs(power) for power in self.powers.values())

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array that it becomes."""
        return max((atom.ndim for atom in self.powers), default=0)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LazyScale) and self.log2 == other.log2 and self.powers == other.powers
        )

    def __hash__(self) -> int:
        return hash((self.log2, frozenset(self.powers.items())))

    def _combine(self, other: LazyScale, sign: int) -> LazyScale:
        powers = dict(self.powers)
        for atom, power in other.powers.items():
            total = powers.pop(atom, 0) + sign * power
            if total:
                powers[atom] = total
        return LazyScale(self.log2 + sign * other.log2, powers)

    def __mul__(self, other: LazyScale) -> LazyScale:
        return self._combine(other, 1)

    def __truediv__(self, other: LazyScale) -> LazyScale:
        return self._combine(other, -1)

    def __pow__(self, exponent: int) -> LazyScale:
        powers = {a: p * exponent for a, p in self.powers.items() if p * exponent}
        return LazyScale(self.log2 * exponent, powers)

    def shift(self, exponent: float) -> LazyScale:
        """Returns the scale times ``2**exponent``."""
        return LazyScale(self.log2 + exponent, self.powers) if exponent else self

    def root(self) -> LazyScale | None:
        """Returns the square root if it is a formula of the same kind, else None."""
        if self.log2 % 2 or any(power % 2 for power in self.powers.values()):
            return None
        return LazyScale(self.log2 / 2, {a: p // 2 for a, p in self.powers.items()})

    def _factors(self) -> tuple[list[jax.Array], list[jax.Array]]:
        above, below = [], []
        for atom, power in self.powers.items():
            (above if power > 0 else below).extend([atom.array] * abs(power))
        return above, below

    def array(self) -> jax.Array:
        """Returns the scale as a float32 array, kept within the normal numbers of float32.

        Only a scale that is out of range as a whole is changed by that.
        """
        if not self.powers:
            return np.float32(2.0 ** min(max(self.log2, -126), 127))  # type: ignore[return-value]
        made = min(self.powers, key=id).made
        return made_once(made, self, lambda: _product(*self._factors(), self.log2))


def _product(above: list[jax.Array], below: list[jax.Array], log2: float) -> jax.Array:
    """Returns prod(above) / prod(below) * 2**log2 within the normal numbers of float32."""
    # Alternating, so that what comes between stays in range as long as the whole does.
    result: Any = above[0] if above else np.float32(1)
    for up, down in zip_longest(above[1:], below):
        if down is not None:
            result = lax.div(*_ranked(result, down))
        if up is not None:
            result = lax.mul(*_ranked(result, up))
    while abs(log2) > 120:
        step = np.copysign(120, log2)
        # Bounded in between, or XLA would multiply the constants first, beyond their range.
        result, log2 = _bounded(lax.mul(result, np.float32(2.0**step))), log2 - step
    if log2:
        result = lax.mul(result, np.float32(2.0**log2))
    if log2 or len(above) + len(below) > 1:
        result = _bounded(result)
    return result


def _bounded(x: jax.Array) -> jax.Array:
    return lax.clamp(np.float32(_SMALLEST), x, np.float32(2.0**127))


def _ranked(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Broadcasts a scalar scale against one that has dimensions, or two that differ in size."""
    if jnp.shape(x) == jnp.shape(y) or not (jnp.ndim(x) and jnp.ndim(y)):
        return x, y
    return tuple(jnp.broadcast_arrays(x, y))  # type: ignore[return-value]


def clipped(scale: LazyScale, limit: int) -> tuple[LazyScale, LazyScale]:
    """Returns a scale of one atom within 2**-limit and 2**limit, and what is left of the scale.

    Example:
        >>> near, rest = clipped(LazyScale.of(jnp.float32(1024)), 8)
        >>> print(near.array(), rest.array())
        256.0 4.0
    """
    whole = scale.array()
    near = lax.clamp(np.float32(2.0**-limit), whole, np.float32(2.0**limit))
    return LazyScale.of(near, "a product of many"), LazyScale.of(lax.div(whole, near))


def ratio(x: LazyScale, y: LazyScale) -> LazyScale:
    """Returns x / y: as a formula if that is short, else from the arrays that both are already.

    Example:
        >>> s = LazyScale.of(jnp.float32(8))
        >>> ratio(s.shift(2), s).is_static
        True
    """
    quotient = x / y
    if quotient.degree <= 1:
        return quotient
    quotient = _bounded(lax.div(*_ranked(x.array(), y.array())))
    return LazyScale.of(quotient, "a quotient of many")


def largest(x: LazyScale, y: LazyScale) -> LazyScale:
    """Returns the larger of two scales: while tracing if they have one formula, else at run time.

    Example:
        >>> s = LazyScale.of(jnp.float32(8))
        >>> largest(s, s.shift(1)) == s.shift(1)
        True
    """
    if x.powers == y.powers:
        return x if x.log2 >= y.log2 else y
    return LazyScale.of(lax.max(*_ranked(x.array(), y.array())), "the larger of two")
