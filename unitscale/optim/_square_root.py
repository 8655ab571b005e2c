"""A non-negative array as the ScaledArray of its square root."""

from typing import Any

import jax
import jax.numpy as jnp

from ..core import ScaledArray, widen


@jax.tree_util.register_pytree_with_keys_class
class SquareRoot:
    """A non-negative array, stored as the ScaledArray of its square root.

    Attributes:
        root: the square root, with the sign of the value, should that be negative.

    Example:
        >>> print(SquareRoot(ScaledArray(jnp.array([3.0, 0.5]), 2.0)).value)
        [36.  1.]
    """

    __slots__ = ("root",)

    def __init__(self, root: ScaledArray) -> None:
        self.root = root

    @property
    def value(self) -> jax.Array:
        """``root.value**2``, with the sign of the root, in float32."""
        root = widen(self.root.value)
        return root * jnp.abs(root)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.root.shape

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale together."""
        return self.root.nbytes

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flattens into the root."""
        return ((jax.tree_util.GetAttrKey("root"), self.root),), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "SquareRoot":
        """Rebuilds without checks: JAX unflattens placeholders too."""
        new = object.__new__(cls)
        (new.root,) = children
        return new

    def __repr__(self) -> str:
        return f"SquareRoot({self.root!r})"
