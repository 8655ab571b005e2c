"""The reductions of ScaledArray: over data where the reduced elements share a scale."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from . import _arithmetic as arithmetic
from ._cast import widen
from ._shaping import Shaping

if TYPE_CHECKING:
    from typing import Self


class Reductions(Shaping):
    """Reductions of a class that has ``data`` and ``scale``.

    They are computed in float32. Where the scale varies over the reduced elements they are taken
    of the value, and the result has no scale.
    """

    __slots__ = ()

    def sum(self, axis: Any = None, keepdims: bool = False) -> "Self":
        """Returns the sum; its scale grows by the power of two nearest sqrt(count)."""
        if arithmetic.varies_over(*self.pair, axis):
            return type(self)(jnp.sum(self.value, axis=axis, keepdims=keepdims))
        return type(self)(*arithmetic.reduce_sum(self.pair, axis, keepdims))

    def mean(self, axis: Any = None, keepdims: bool = False) -> "Self":
        """Returns the mean; data is averaged in float32."""
        return self._reduce(jnp.mean, axis, keepdims)

    def var(self, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> "Self":
        """Returns the variance, at the square of the scale."""
        var = self._reduce(lambda x, **kwargs: jnp.var(x, ddof=ddof, **kwargs), axis, keepdims)
        return type(self)(*arithmetic.multiply(var.pair, (jnp.asarray(1.0), var.scale)))

    def std(self, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> "Self":
        """Returns the standard deviation."""
        return self._reduce(lambda x, **kwargs: jnp.std(x, ddof=ddof, **kwargs), axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> "Self":
        """Returns the maximum, exactly where the reduced elements share a scale."""
        return self._reduce(jnp.max, axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> "Self":
        """Returns the minimum, exactly where the reduced elements share a scale."""
        return self._reduce(jnp.min, axis, keepdims)

    def argmax(self, axis: Any = None, keepdims: bool = False) -> jax.Array:
        """Returns the index of the maximum, as an integer array."""
        return jnp.argmax(self._comparable(axis), axis=axis, keepdims=keepdims)

    def argmin(self, axis: Any = None, keepdims: bool = False) -> jax.Array:
        """Returns the index of the minimum, as an integer array."""
        return jnp.argmin(self._comparable(axis), axis=axis, keepdims=keepdims)

    def _comparable(self, axis: Any) -> jax.Array:
        data, scale = self.pair
        if arithmetic.is_zero(scale) or arithmetic.varies_over(data, scale, axis):
            return widen(self.value)
        return widen(data)

    def _reduce(self, fn: Callable[..., jax.Array], axis: Any, keepdims: bool) -> "Self":
        data, scale = self.pair
        if arithmetic.varies_over(data, scale, axis):
            return type(self)(fn(self.value, axis=axis, keepdims=keepdims))
        reduced = fn(widen(data), axis=axis, keepdims=keepdims)
        scale = arithmetic.reduce_scale(scale, data, axis, keepdims)
        return type(self)(reduced.astype(arithmetic.result_dtype(data)), scale)
