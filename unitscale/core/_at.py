"""Out-of-place updates of a ScaledArray: what ``x.at[index]`` returns."""

from collections.abc import Callable
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

    def get(self) -> Any:
        """Returns ``x[index]``."""
        return self._x[self._index]

    def set(self, values: Any) -> Any:
        """Returns x with the elements at the index replaced."""
        return self._update("set", values, lambda at, v: at.set(v))

    def add(self, values: Any) -> Any:
        """Returns x with values added at the index; repeated indices add up."""
        return self._update("add", values, lambda at, v: at.add(v))

    def multiply(self, values: Any) -> Any:
        """Returns x with the elements at the index multiplied by values."""
        value = arithmetic.value(*self._pair("multiply", values))
        return self._x.map_data(
            lambda x: narrow(widen(x).at[self._index].multiply(widen(value)), x.dtype)
        )

    def _pair(self, name: str, values: Any) -> arithmetic.Pair:
        pair = arithmetic.operand(values)
        if pair is None:
            raise TypeError(
                f"unitscale.ScaledArray.at[...].{name}: expected a real array, ScaledArray or "
                f"number; got {type(values).__name__}"
            )
        return pair

    def _update(self, name: str, values: Any, fn: Callable[[Any, jax.Array], jax.Array]) -> Any:
        data, scale = self._pair(name, values)
        target = self._x.full_scale
        if arithmetic.varies_over(self._x.data, target, None):
            target = jnp.broadcast_to(to_float(target), self._x.shape)[self._index]
        else:
            target = arithmetic.scalar_scale(target)
        update = arithmetic.at_scale(data, scale, target, widen(self._x.data).dtype)
        return self._x.map_data(
            lambda old: narrow(fn(widen(old).at[self._index], update), np.dtype(old.dtype))
        )
