"""Indexing and rearrangement of ScaledArray: the scale moves along with the data."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _arithmetic as arithmetic
from ._cast import narrow, widen
from ._operators import Operators, operand
from ._scale import Scale, is_static, to_float

if TYPE_CHECKING:
    from typing import Self


class Shaping(Operators):
    """Indexing, updates and rearrangement of a class that has ``data`` and ``scale``."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def block_shape(self) -> tuple[int, ...] | None: ...

    def _full(self) -> jax.Array:
        """The scale repeated to the shape of data."""
        return jnp.broadcast_to(to_float(self.pair[1]), self.data.shape)

    def _is_uniform(self) -> bool:
        return is_static(self.scale) or jnp.size(self.scale) == 1

    def _rearrange(self, fn: Callable[[jax.Array], jax.Array]) -> "Self":
        """Applies a rearrangement of elements to data, and to a scale that is not a scalar."""
        if self._is_uniform():
            return type(self)(fn(self.data), arithmetic.scalar_scale(self.scale))
        return type(self)(fn(self.data), fn(self._full()))

    def __getitem__(self, index: Any) -> "Self":
        return self._rearrange(lambda x: x[index])

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> "Iterator[Self]":
        return (self[i] for i in range(len(self)))

    @property
    def at(self) -> "At":
        """Out-of-place updates as in JAX: ``x.at[i].set(v)``; scale and dtype stay those of x.

        ``get``, ``set``, ``add`` and ``multiply`` take arrays or ScaledArrays. An array of static
        scale 0 takes the scale of what it is updated with.

        Example:
            >>> from unitscale import ScaledArray
            >>> x = ScaledArray(jnp.ones(3, jnp.float16), 4.0)
            >>> x.at[0].set(8.0)
            ScaledArray(float16[3], scale=4)
            >>> print(x.at[0].set(8.0).value)
            [8. 4. 4.]
        """
        return At(self)

    def reshape(self, *shape: Any) -> "Self":
        """Returns the same elements in another shape; a scalar scale stays a scalar."""
        return self._rearrange(lambda x: x.reshape(*shape))

    def ravel(self) -> "Self":
        """Returns the elements in one dimension."""
        return self.reshape(-1)

    def flatten(self) -> "Self":
        """Returns the elements in one dimension."""
        return self.reshape(-1)

    def squeeze(self, axis: Any = None) -> "Self":
        """Removes axes of size 1."""
        return self._rearrange(lambda x: x.squeeze(axis))

    def transpose(self, *axes: Any) -> "Self":
        """Permutes the axes of data and scale; a scale per channel or block stays one."""
        block = self.block_shape
        if block is not None:
            # The sizes of the transpose of an array of that shape, which repeats one number.
            block = np.broadcast_to(0, block).transpose(*axes).shape
        elif self._is_uniform():
            return self._rearrange(lambda x: x.transpose(*axes))
        scale = jnp.asarray(self.scale)
        data = self.data.transpose(*axes)
        return type(self)(data, scale.transpose(*axes), block_shape=block)

    @property
    def T(self) -> "Self":
        """The transpose."""
        return self.transpose()

    @property
    def mT(self) -> "Self":
        """The transpose of the last two axes."""
        return self.swapaxes(-1, -2)

    def swapaxes(self, axis1: int, axis2: int) -> "Self":
        """Exchanges two axes."""
        axes = list(range(self.data.ndim))
        axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
        return self.transpose(axes)


class At:
    """What ``x.at`` returns: waits for an index."""

    __slots__ = ("_x",)

    def __init__(self, x: Shaping) -> None:
        self._x = x

    def __getitem__(self, index: Any) -> "AtIndex":
        return AtIndex(self._x, index)


class AtIndex:
    """What ``x.at[index]`` returns: reads or updates the elements at an index."""

    __slots__ = ("_index", "_x")

    def __init__(self, x: Shaping, index: Any) -> None:
        self._x = x
        self._index = index

    def get(self) -> Any:
        """Returns ``x[index]``."""
        return self._x[self._index]

    def set(self, values: Any) -> Any:
        """Returns x with the elements at the index replaced."""
        return self._update(values, lambda at, v: at.set(v))

    def add(self, values: Any) -> Any:
        """Returns x with values added at the index; repeated indices add up."""
        return self._update(values, lambda at, v: at.add(v))

    def multiply(self, values: Any) -> Any:
        """Returns x with the elements at the index multiplied by values."""
        data, scale = self._pair(values, "multiply")
        value = arithmetic.value(data, scale)
        return self._x.map_data(
            lambda x: narrow(widen(x).at[self._index].multiply(widen(value)), x.dtype)
        )

    def _pair(self, values: Any, name: str) -> arithmetic.Pair:
        pair = operand(values)
        if pair is None:
            raise TypeError(
                f"unitscale.ScaledArray.at[...].{name}: expected a real array, ScaledArray or "
                f"number; got {type(values).__name__}"
            )
        return pair

    def _update(self, values: Any, fn: Callable[[Any, jax.Array], jax.Array]) -> Any:
        x = self._x
        data, scale = self._pair(values, "set")
        if arithmetic.is_zero(x.scale):
            if not (is_static(scale) or jnp.size(scale) == 1):
                data, scale = arithmetic.value(data, scale), 1
            x = type(x)(jnp.zeros_like(x.data), arithmetic.scalar_scale(scale))
        target: Scale = x.scale
        if not x._is_uniform():
            target = x._full()[self._index]
        elif not is_static(target):
            target = jnp.reshape(target, ())
        update = arithmetic.at_scale(data, scale, target, widen(x.data).dtype)
        return x.map_data(
            lambda old: narrow(fn(widen(old).at[self._index], update), np.dtype(old.dtype))
        )
