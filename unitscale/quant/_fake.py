"""Quantization of operands whose product itself is not quantized, as that of a convolution."""

from functools import partial

import jax

from ..core import custom_vjp
from ._config import MatmulConfig
from ._product import LHS, RHS, quantize_tensor
from ._quantize import values_of
from ._state import QuantState, check_state, state_gradient
from ._watch import watched

Axes = tuple[int, ...]


@partial(custom_vjp, nondiff_argnums=(3, 4))
def _fake(lhs, rhs, state, config, axes):
    return _fake_fwd(lhs, rhs, state, config, axes)[0]


def _fake_fwd(lhs, rhs, state, config, axes):
    q_lhs, saw_lhs = quantize_tensor(lhs, LHS, axes[0], config, state)
    q_rhs, saw_rhs = quantize_tensor(rhs, RHS, axes[1], config, state)
    values = values_of(q_lhs, lhs), values_of(q_rhs, rhs)
    return values, (state, (saw_lhs, saw_rhs, None), (lhs.size, rhs.size, 0))


def _fake_bwd(config, axes, residuals, cotangents):
    state, seen, sizes = residuals
    return *cotangents, None if state is None else state_gradient(state, seen, sizes)


_fake.defvjp(_fake_fwd, _fake_bwd)


def fake_quantize_operands(
    lhs: jax.Array,
    rhs: jax.Array,
    config: MatmulConfig,
    *,
    axes: tuple[Axes, Axes] = ((-1,), (-2,)),
    state: QuantState | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rounds both operands of a product to the formats of ``config``, and keeps their dtypes.

    Backward is the identity, so that cotangents are not rounded.

    Args:
        lhs: left operand, floating.
        rhs: right operand, floating.
        config: formats and strategy.
        axes: the dimensions that the product sums over, for channel and block scales.
        state: the scales of a strategy that keeps them; its gradient is what was seen.

    Returns:
        Both operands.

    Raises:
        ValueError: if the strategy needs a state and has none, or the state of another strategy.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[0.3, 9.3]])
        >>> print(fake_quantize_operands(x, x.T, MatmulConfig())[0])
        [[0.3125 9.    ]]
    """
    check_state("fake_quantize_operands", config, state)
    positive = tuple(
        tuple(a % x.ndim for a in own) for x, own in zip((lhs, rhs), axes, strict=True)
    )
    lhs, rhs = watched((lhs, rhs), state)
    return _fake(lhs, rhs, state, config, positive)
