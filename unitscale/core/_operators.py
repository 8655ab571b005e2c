"""The operators of ScaledArray: Python's arithmetic and comparisons on (data, scale) pairs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _arithmetic as arithmetic
from ._cast import widen
from ._scale import Scale

if TYPE_CHECKING:
    from typing import Self


def operand(x: Any) -> arithmetic.Pair | None:
    """Returns an operand as a pair, or None where it is not a real array or number."""
    if isinstance(x, Operators):
        return x.pair
    if isinstance(x, (bool, int, float)) and not isinstance(x, np.generic):
        return arithmetic.scalar_pair(float(x))
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        is_real = not jnp.issubdtype(x.dtype, jnp.complexfloating)
        if is_real and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
            return jnp.asarray(x), None
    return None


class Operators:
    """Arithmetic and comparisons of a class that has ``data`` and ``scale``.

    An operand may be of the class, a real array (with scale None) or a Python number, which is
    weakly typed as in JAX. To the right of a `jax.Array` the operators of `jax.Array` come first:
    they return a plain array of values.
    """

    __slots__ = ()
    __array_priority__ = 200.0  # numpy leaves mixed operators to this class

    data: jax.Array

    if TYPE_CHECKING:

        def __init__(
            self, data: Any, scale: Any = None, *, block_shape: tuple[int, ...] | None = None
        ) -> None: ...

        @property
        def scale(self) -> Scale: ...

        @property
        def value(self) -> jax.Array: ...

        @property
        def pair(self) -> arithmetic.Pair: ...

        def map_data(self, fn: Callable[[jax.Array], Any]) -> Self: ...

    def _binary(self, other: Any, fn: Callable[..., Any], swap: bool = False) -> "Self":
        pair = operand(other)
        if pair is None:
            return NotImplemented
        return type(self)(*(fn(pair, self.pair) if swap else fn(self.pair, pair)))

    def _compare(self, other: Any, fn: Callable[..., jax.Array]) -> jax.Array:
        pair = operand(other)
        return NotImplemented if pair is None else arithmetic.compare(fn, self.pair, pair)

    def __add__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.add)

    def __radd__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.add, swap=True)

    def __sub__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.subtract)

    def __rsub__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.subtract, swap=True)

    def __mul__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.multiply)

    def __rmul__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.multiply, swap=True)

    def __truediv__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.divide)

    def __rtruediv__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.divide, swap=True)

    def __matmul__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.matmul)

    def __rmatmul__(self, other: Any) -> "Self":
        return self._binary(other, arithmetic.matmul, swap=True)

    def __pow__(self, exponent: Any) -> "Self":
        number = isinstance(exponent, (int, float, np.integer, np.floating))
        if number and float(exponent).is_integer():
            return type(self)(*arithmetic.power(self.pair, int(exponent)))
        return self._binary(exponent, arithmetic.general_power)

    def __rpow__(self, base: Any) -> "Self":
        return self._binary(base, arithmetic.general_power, swap=True)

    def dot(self, other: Any) -> "Self":
        """Returns the product of vectors and matrices, as ``@``; a scalar operand multiplies."""
        pair = operand(other)
        if pair is None or max(self.data.ndim, pair[0].ndim) > 2:
            raise TypeError(
                "unitscale.ScaledArray.dot: expected arrays of at most 2 dimensions; got "
                f"{type(other).__name__}. Use @ for stacks of matrices."
            )
        return self * other if 0 in (self.data.ndim, pair[0].ndim) else self @ other

    def __neg__(self) -> "Self":
        return self.map_data(jnp.negative)

    def __pos__(self) -> "Self":
        return self

    def __abs__(self) -> "Self":
        return self.map_data(lambda data: jnp.abs(widen(data)).astype(data.dtype))

    def __eq__(self, other: Any) -> Any:
        return self._compare(other, jnp.equal)

    def __ne__(self, other: Any) -> Any:
        return self._compare(other, jnp.not_equal)

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, jnp.less)

    def __le__(self, other: Any) -> Any:
        return self._compare(other, jnp.less_equal)

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, jnp.greater)

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, jnp.greater_equal)

    __hash__ = None  # type: ignore[assignment]  # unhashable, as jax.Array is
