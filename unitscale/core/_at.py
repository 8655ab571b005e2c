"""Out-of-place updates of a ScaledArray: what ``x.at[index]`` returns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _arithmetic as arithmetic
from ._cast import narrow, widen
from ._scale import to_float


class At:
    """What ``x.at`` returns: waits for an index."""

    __slots__ = ("_x",)

    def __init__(self, x: Any) -> None:
        self._x = x

    def __getitem__(self, index: Any) -> "AtIndex":
        return AtIndex(self._x, index)


class AtIndex:
    """What ``x.at[index]`` returns: reads or updates the elements at an index."""

    __slots__ = ("_index", "_x")

    def __init__(self, x: Any, index: Any) -> None:
        self._x = x
        self._index = index

    def get(self, *, mode: Any = None, fill_value: Any = None, **options: Any) -> Any:
        """Returns ``x[index]``; arguments are those of JAX, and ``fill_value`` is a value."""
        if fill_value is None:
            return self._x._rearrange(
                lambda x: x.at[self._index].get(mode=mode, **options),
                lambda scale: scale.at[self._index].get(mode="clip", **options),
            )
        data, scale = self._pair("get", fill_value)
        found = self.get(mode=mode, **options)
        inside = jnp.ones(self._x.shape, bool).at[self._index]
        inside = inside.get(mode=mode, fill_value=False, **options)
        fill = arithmetic.at_scale(data, scale, found.full_scale, widen(found.data).dtype)
        return found.map_data(lambda x: jnp.where(inside, x, narrow(fill, x.dtype)))

    def set(self, values: Any, **options: Any) -> Any:
        """Returns x with the elements at the index replaced."""
        return self._update("set", values, options)

    def add(self, values: Any, **options: Any) -> Any:
        """Returns x with values added at the index; repeated indices add up."""
        return self._update("add", values, options)

    def subtract(self, values: Any, **options: Any) -> Any:
        """Returns x with values subtracted at the index; repeated indices add up."""
        return self._update("subtract", values, options)

    def min(self, values: Any, **options: Any) -> Any:
        """Returns x with the smaller of its elements at the index and of the values there."""
        return self._update("min", values, options)

    def max(self, values: Any, **options: Any) -> Any:
        """Returns x with the larger of its elements at the index and of the values there."""
        return self._update("max", values, options)

    def multiply(self, values: Any, **options: Any) -> Any:
        """Returns x with the elements at the index multiplied by values."""
        value = arithmetic.value(*self._pair("multiply", values))
        return self._x.map_data(
            lambda x: narrow(widen(x).at[self._index].multiply(widen(value), **options), x.dtype)
        )

    def _pair(self, name: str, values: Any) -> arithmetic.Pair:
        pair = arithmetic.operand(values)
        if pair is None:
            raise TypeError(
                f"unitscale.ScaledArray.at[...].{name}: expected a real array, ScaledArray or "
                f"number; got {type(values).__name__}"
            )
        return pair

    def _update(self, name: str, values: Any, options: dict[str, Any]) -> Any:
        data, scale = self._pair(name, values)
        target = self._x.full_scale
        if arithmetic.varies_over(self._x.data, target, None):
            target = jnp.broadcast_to(to_float(target), self._x.shape)
            target = target.at[self._index].get(mode="clip")
        else:
            target = arithmetic.scalar_scale(target)
        update = arithmetic.at_scale(data, scale, target, widen(self._x.data).dtype)

        def updated(old: jax.Array) -> jax.Array:
            at = widen(old).at[self._index]
            return narrow(getattr(at, name)(update, **options), np.dtype(old.dtype))

        return self._x.map_data(updated)
