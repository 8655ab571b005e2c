"""Loss scaling, which unit scaling does without, for comparison."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

FIRST = 2.0**16  # as PyTorch's GradScaler and flax's DynamicScale begin


class LossScale(NamedTuple):
    """A loss scale that follows the gradients, and the finite steps since it last changed.

    A step whose gradient is not finite is left out and halves the scale; `interval` others in a row
    double it.

    References:
      Micikevicius et al., "Mixed Precision Training", 2018, arXiv 1710.03740, section 3.2.
    """

    value: jax.Array
    good: jax.Array

    @classmethod
    def create(cls) -> Self:
        """The scale before the first step."""
        return cls(jnp.float32(FIRST), jnp.int32(0))

    def after(self, finite: jax.Array, interval: int) -> Self:
        """The scale for the next step."""
        doubles = self.good + 1 >= interval
        grown = jnp.where(doubles, 2 * self.value, self.value)
        value = jnp.where(finite, grown, self.value / 2)
        return self._replace(value=value, good=jnp.where(finite & ~doubles, self.good + 1, 0))
