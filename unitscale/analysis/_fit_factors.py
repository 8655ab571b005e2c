"""Find the factors of any function by simulation."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .. import rules
from ..rules import Factors


@dataclasses.dataclass(frozen=True)
class FittedFactors(rules.Simulation):
    """A `rules.Simulation` (factors before any constraint), with the exact factors if known."""

    closed_form: Factors | None

    def __str__(self) -> str:
        exact, factors = self.closed_form, self.factors
        rows = [("forward   ", factors.fwd, self.fwd_interval, exact and exact.fwd)]
        for i, (factor, interval) in enumerate(zip(factors.bwd, self.bwd_intervals, strict=True)):
            rows.append((f"backward {i}", factor, interval, exact and exact.bwd[i]))
        return "\n".join(
            f"{name}  {factor:.5g} [{low:.5g}, {high:.5g}]"
            + ("" if known is None else f"  exact {known:.5g}")
            for name, factor, (low, high), known in rows
        )


def fit_factors(
    fn: Callable[..., Any], example: Sequence[Any], *, seeds: int = 32
) -> FittedFactors:
    """Find the forward and backward factors of an op or loss by `rules.simulate`.

    `ops.unit_scaled` makes a unit-scaled op from a function and such factors.

    Args:
        fn: differentiable function that returns one floating array; a scalar counts as a loss.
        example: sequence of arguments. Floating arrays among them are replaced by random ones of
            the same shape; others are passed unchanged.
        seeds: number of draws, at least 2.

    Raises:
        TypeError: if JAX cannot trace ``fn``, ``example`` is a single array, or the result is not
            one floating array.
        ValueError: if no argument is floating, the function has side effects, or the result or a
            gradient is constant or not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> print(fit_factors(jnp.tanh, [jnp.zeros(4096)]))
        forward     1.59... [..., ...]  exact 1.59...
        backward 0  1.4... [..., ...]  exact 1.4...
    """
    found = rules.simulate(fn, example, seeds=seeds, name="analysis.fit_factors")
    return FittedFactors(**vars(found), closed_form=rules.closed_form(fn, example))
