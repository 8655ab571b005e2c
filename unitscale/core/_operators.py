"""Operators and methods of arrays as those of ScaledArray, made from functions of pairs."""

from collections.abc import Callable
from typing import Any

import jax

from . import _arithmetic as arithmetic


def operator(fn: Callable[..., arithmetic.Pair], aligned: bool = False) -> tuple[Any, Any]:
    """An operator and its mirror image; ``aligned`` if it brings operands to one scale."""

    def apply(self: Any, other: Any, swap: bool = False) -> Any:
        own = self.pair
        pair = arithmetic.operand(other, beside=own[1] if aligned else None)
        if pair is None:
            return NotImplemented
        return type(self)(*(fn(pair, own) if swap else fn(own, pair)))

    return apply, lambda self, other: apply(self, other, swap=True)


def comparison(fn: Callable[..., jax.Array]) -> Any:
    """A comparison of values, which gives a plain array."""

    def compare(self: Any, other: Any) -> jax.Array:
        pair = arithmetic.operand(other, beside=(own := self.pair)[1])
        return NotImplemented if pair is None else arithmetic.compare(fn, own, pair)

    return compare


def of_value(name: str) -> Any:
    """A method of `jax.Array` whose result has no scale to keep, as one that takes the value."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(arithmetic.summable(self.value), name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"As `jax.Array.{name}`, of the value; the result is a plain one."
    return method
