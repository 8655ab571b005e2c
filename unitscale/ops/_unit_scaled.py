"""A function of one's own as a unit-scaled op, its factors found by simulation."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .. import rules
from ..core import ScaledArray, is_scaled, result_dtype
from ..rules import Constraint, Factors, is_floating
from ._wide import wide_op


@dataclasses.dataclass(frozen=True)
class _Placed:
    """The function, of its floating arguments first and the others after them."""

    fn: Callable[..., Any]
    floats: tuple[int, ...]
    count: int

    def __call__(self, *args: Any) -> Any:
        full: list[Any] = [None] * self.count
        others = [i for i in range(self.count) if i not in self.floats]
        for i, x in zip((*self.floats, *others), args, strict=True):
            full[i] = x
        return self.fn(*full)


@dataclasses.dataclass(frozen=True)
class UnitScaled:
    """A function with unit-scaling factors: call it as the function.

    Attributes:
        fn: the function.
        factors: the factors in use, constrained; one backward factor per floating argument.
        floats: positions of the floating arguments.
        is_loss: whether the result is a scalar.

    Example:
        >>> op = unit_scaled(jnp.negative, [jnp.zeros(1024)])
        >>> op.is_loss
        False
    """

    fn: Callable[..., Any]
    factors: Factors
    floats: tuple[int, ...]
    is_loss: bool

    def __call__(self, *args: Any) -> Any:
        """Returns ``fwd * fn(*args)``, a ScaledArray without a scale; of a loss a plain scalar."""
        chosen = [x.value if is_scaled(x) else jnp.asarray(x) for x in args]
        floating = [i for i, x in enumerate(chosen) if jnp.issubdtype(x.dtype, jnp.floating)]
        if tuple(floating) != self.floats:
            raise TypeError(
                f"unitscale.ops.unit_scaled: arguments {list(self.floats)} must be floating, as in "
                f"the example; got floating arguments {floating}"
            )
        constants = tuple(x for i, x in enumerate(chosen) if i not in self.floats)
        operands = [chosen[i] for i in self.floats]
        y = wide_op(
            _Placed(self.fn, self.floats, len(chosen)),
            *operands,
            fwd=self.factors.fwd,
            bwd=self.factors.bwd,
            constants=constants,
            out_dtype=jnp.float32 if self.is_loss else result_dtype(*operands),
        )
        return y if self.is_loss else ScaledArray(y)


def unit_scaled(
    fn: Callable[..., Any],
    example: Sequence[Any],
    *,
    constraint: Constraint = "to_output_scale",
    cut: Sequence[int] = (),
    seeds: int = 32,
) -> UnitScaled:
    """Makes a unit-scaled op of a function by simulating its factors.

    Scaling:
        data = fwd * fn(x), scale 1, dx[i] = bwd[i] times the true gradient. The ideal factors make
        result and gradients unit for arguments and cotangents from N(0, 1) in the shapes of the
        example (`rules.simulate`), or are those of a rule, if one is known
        (`rules.closed_form`). Arguments in ``cut`` keep their own, the others share one with the
        result by the constraint. A scalar result is a loss: forward 1, and one factor for all
        arguments outside of ``cut``, their geometric mean, which brings out the 1 / N of a mean.
        The factors are those of the example, whatever shapes the op is called with: where a batch
        is divided between devices, give one of the whole batch.

    Args:
        fn: function of arrays, computed in float32, hashable, returning one floating array.
        example: arguments; of floating ones only the shapes count.
        constraint: how result and gradients come to share a factor.
        cut: positions of arguments that are cut edges, such as weights.
        seeds: number of draws.

    Returns:
        `UnitScaled`, a function of arrays and ScaledArrays, whose scale is folded in.

    Raises:
        TypeError: if ``fn`` is no function that JAX can trace, or the result is not one floating
            array.
        ValueError: if no argument is floating, ``cut`` has one that is not, the constraint does
            not fit, the function has side effects, or the result or a gradient is constant or not
            finite.

    Example:
        >>> import jax
        >>> decay = unit_scaled(lambda x: jax.lax.cumsum(x) / 3, [jnp.zeros(512)])
        >>> x = jax.random.normal(jax.random.key(1), (512,))
        >>> decay(x)
        ScaledArray(float32[512], scale=None)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, empirical factors.
    """
    floats = tuple(i for i, x in enumerate(example) if is_floating(jnp.asarray(x)))
    if not set(cut) <= set(floats):
        raise ValueError(
            f"unitscale.ops.unit_scaled: cut must name floating arguments, of {list(floats)}; got "
            f"{list(cut)}"
        )
    known = rules.closed_form(fn, example)
    is_loss = False
    if known is None:
        found = rules.simulate(fn, example, seeds=seeds, name="ops.unit_scaled")
        known, is_loss = found.factors, found.is_loss
    ideal = dict(zip(floats, known.bwd, strict=True))
    joined = [i for i in floats if i not in cut]
    fwd = known.fwd
    if is_loss and joined:
        shared = math.exp(math.fsum(math.log(ideal[i]) for i in joined) / len(joined))
        ideal |= dict.fromkeys(joined, shared)
    elif joined:
        fwd, *together = rules.constrain(constraint, fwd, *(ideal[i] for i in joined))
        ideal |= dict(zip(joined, together, strict=True))
    return UnitScaled(fn, Factors(fwd, tuple(ideal[i] for i in floats)), floats, is_loss)
