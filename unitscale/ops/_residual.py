"""Residual branches whose weighting reaches the gradients without shrinking the branch's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import rules
from ..core import ScaledArray, custom_vjp, narrow, result_dtype, scale_bwd, widen
from ._add import combine
from ._fan_out import fan_out
from ._operands import ArrayLike, shape_error, unpack

Tau = float | rules.ResidualFactors
"""The weight of a residual branch, or the factors that it makes: arrays where they are data."""


def _factors(tau: Tau) -> rules.ResidualFactors:
    return tau if isinstance(tau, rules.ResidualFactors) else rules.residual(tau)


@custom_vjp
def _scale_bwd(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x


def _scale_bwd_bwd(factor: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return narrow(widen(cotangent) * factor, cotangent.dtype), jnp.zeros_like(factor)


_scale_bwd.defvjp(lambda x, factor: (x, factor), _scale_bwd_bwd)


def _scaled_bwd(x: ScaledArray, factor: Any) -> ScaledArray:
    if isinstance(factor, jax.Array):
        return x.map_data(lambda data: _scale_bwd(data, factor))
    return scale_bwd(x, factor)


def residual_split(x: ArrayLike, tau: Tau) -> tuple[ScaledArray, ScaledArray]:
    """Splits a stream into the input of a residual branch and the skip connection.

    Scaling:
        Identities forward. Backward the branch's gradient is multiplied by tau / (1 + tau^2)^1/2
        and the skip's by 1 / (1 + tau^2)^1/2: the weights that the true derivative has at
        `residual_add`, delayed to here, so that gradients inside the branch are unit scaled. See
        `rules.residual`.

    Args:
        x: floating array or ScaledArray.
        tau: positive static ratio of the branch to the skip connection; or `rules.residual` of it,
            whose numbers may be arrays, where the layers of a scan differ in them.

    Returns:
        ``(branch, skip)``, both equal to ``x``.

    Raises:
        ValueError: if tau is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> branch, skip = residual_split(jnp.ones(2), 0.5)
        >>> print(residual_add(branch, skip, 0.5).data.round(3))
        [1.342 1.342]

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix G.
    """
    data, scale = unpack("residual_split", "x", x)
    factors = _factors(tau)
    x = ScaledArray(data, scale)
    branch, skip = fan_out(x, 2) if data.dtype.itemsize == 1 else (x, x)
    return _scaled_bwd(branch, factors.branch), _scaled_bwd(skip, factors.skip)


def residual_add(branch: ArrayLike, skip: ArrayLike, tau: Tau) -> ScaledArray:
    """Adds a residual branch to its skip connection.

    Scaling:
        value = (tau * branch + skip) / (1 + tau^2)^1/2, of unit variance for independent unit
        operands; backward the identity to both, because `residual_split` applies the weights.

    Args:
        branch: output of the branch.
        skip: the second output of `residual_split`, of the same shape.
        tau: as given to `residual_split`.

    Returns:
        ScaledArray of the same shape.

    Raises:
        ValueError: if the shapes differ or tau is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> print(residual_add(jnp.ones(1), jnp.zeros(1), 0.75).data)
        [0.6]

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix G.
    """
    left = unpack("residual_add", "branch", branch)
    right = unpack("residual_add", "skip", skip)
    if left[0].shape != right[0].shape:
        raise shape_error(
            "residual_add",
            "branch and skip must have the same shape",
            "The branch must keep the shape of its input.",
            branch=left[0].shape,
            skip=right[0].shape,
        )
    factors = _factors(tau)
    # The stream keeps its own dtype: a narrow branch does not narrow it, nor a wide one widen it.
    return combine(
        left,
        right,
        weights=(factors.branch, factors.skip),
        bwd=(1.0, 1.0),
        out=result_dtype(right[0]),
    )


def residual(fn: Callable[[ScaledArray], Any], x: ArrayLike, tau: Tau) -> ScaledArray:
    """Applies a residual branch: ``(tau * fn(x) + x) / (1 + tau^2)^1/2``.

    Scaling:
        `residual_split`, ``fn``, `residual_add`.

    Args:
        fn: the branch, from ScaledArray to an array or ScaledArray of the same shape.
        x: floating array or ScaledArray.
        tau: as for `residual_split`.

    Returns:
        ScaledArray of the same shape.

    Raises:
        ValueError: if ``fn`` changes the shape or tau is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> print(residual(lambda x: x, jnp.ones(1), 1.0).data.round(3))
        [1.414]

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix G.
    """
    branch, skip = residual_split(x, tau)
    return residual_add(fn(branch), skip, tau)
