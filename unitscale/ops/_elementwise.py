"""Element-wise functions: activations and gated linear units."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import rules
from ..core import ScaledArray, result_dtype
from ..rules import Constraint
from ._operands import ArrayLike, scale_argument, shape_error, unpack
from ._wide import wide_op


def _times(x: jax.Array, factor: Any) -> jax.Array:
    return x if factor is None or (isinstance(factor, float) and factor == 1) else x * factor


# Of x and x^3 in what gelu takes the sigmoid of, 2 u = (8 / pi)^1/2 * (x + 0.044715 x^3).
_LINEAR = math.sqrt(8 / math.pi)
_CUBIC = 0.044715 * _LINEAR


@jax.custom_jvp
def _gate(x: jax.Array) -> jax.Array:
    """Returns (1 + tanh u) / 2 as the sigmoid of 2 u, which does not cancel where it is small.

    Of the negative of -2 u: of two signs XLA leaves none.
    """
    return jax.nn.sigmoid(-(x * (-_LINEAR - _CUBIC * (x * x))))


@_gate.defjvp
def _gate_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    gate = _gate(x)
    square = jnp.minimum(x * x, 1e4)  # where it is 0 or 1 already; no infinity to multiply it by
    return gate, gate * (1 - gate) * (_LINEAR + 3 * _CUBIC * square) * dx


def _gelu(x: jax.Array) -> jax.Array:
    """Returns x / 2 * (1 + tanh u).

    In few operations, and its derivative too, most of them the same: they are what the kernels
    around a product wait for.
    """
    return x * _gate(x)


@dataclasses.dataclass(frozen=True)
class _OfValue:
    """``f(mult * x * scale)``."""

    f: Callable[..., Any]
    mult: float

    def __call__(self, x: jax.Array, scale: jax.Array | None) -> jax.Array:
        return self.f(_times(_times(x, scale), self.mult))


@dataclasses.dataclass(frozen=True)
class _Gated:
    """``x * f(mult * gate * scale)``; the scale of x is carried outside."""

    f: Callable[..., Any]
    mult: float

    def __call__(self, x: jax.Array, gate: jax.Array, scale: jax.Array | None) -> jax.Array:
        return x * self.f(_times(_times(gate, scale), self.mult))


def elementwise(
    f: Callable[[jax.Array], jax.Array],
    x: ArrayLike,
    *,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Applies an element-wise function of your own with unit-scaling factors.

    Scaling:
        data = fwd * f(mult * x.value) with fwd = 1 / std of f(mult * z), z ~ N(0, 1); the scale of
        x is folded in, the result has none. dx = bwd * df/dx, before the constraint bwd = 1 / RMS
        of the derivative. Both by quadrature: see `rules.elementwise`.

    Args:
        f: function of one float32 array, element-wise, hashable.
        x: floating array or ScaledArray.
        mult: static multiplier of the argument (inverse temperature).
        constraint: how the output and the input gradient come to share a factor.

    Returns:
        ScaledArray of the shape and dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if ``x`` is not floating.
        ValueError: if ``f`` is constant or not finite, or the constraint is unknown.

    Example:
        >>> y = elementwise(jnp.cos, jax.random.normal(jax.random.key(0), (4096,)))
        >>> print(bool(abs(y.data.std() - 1) < 0.1))
        True

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, factors of activations.
    """
    return _elementwise(getattr(f, "__name__", "elementwise"), f, x, mult, constraint)


def _elementwise(op, f, x, mult, constraint) -> ScaledArray:
    data, scale = unpack(op, "x", x)
    factors = rules.elementwise(f, mult=mult, constraint=constraint)
    y = wide_op(
        _OfValue(f, float(mult)),
        data,
        fwd=factors.fwd,
        bwd=factors.bwd,
        constants=(scale_argument(scale),),
        out_dtype=result_dtype(data),
    )
    return ScaledArray(y)


def gelu(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Applies the Gaussian error linear unit, in its tanh form, scaled to unit variance.

    Scaling:
        `elementwise` of it, with its arguments, result and errors. For mult = 1, fwd = 1.701, and
        bwd = 1.481 before the constraint.

    Example:
        >>> gelu(jnp.ones(3, jnp.float16))
        ScaledArray(float16[3], scale=None)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    return _elementwise("gelu", _gelu, x, mult, constraint)


def silu(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Applies the sigmoid linear unit, scaled to unit variance.

    Scaling:
        `elementwise` of it, with its arguments, result and errors. For mult = 1, fwd = 1.787, and
        bwd = 1.623 before the constraint.

    Example:
        >>> silu(jnp.ones(3, jnp.float16))
        ScaledArray(float16[3], scale=None)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    return _elementwise("silu", jax.nn.silu, x, mult, constraint)


def tanh(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Applies the hyperbolic tangent, scaled to unit variance.

    Scaling:
        `elementwise` of it, with its arguments, result and errors. For mult = 1, fwd = 1.593, and
        bwd = 1.467 before the constraint.

    Example:
        >>> tanh(jnp.ones(3, jnp.float16))
        ScaledArray(float16[3], scale=None)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    return _elementwise("tanh", jnp.tanh, x, mult, constraint)


def sigmoid(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Applies the logistic function, scaled to unit variance.

    Scaling:
        `elementwise` of it, with its arguments, result and errors. For mult = 1, fwd = 4.802, and
        bwd = 4.723 before the constraint.

    Example:
        >>> sigmoid(jnp.ones(3, jnp.float16))
        ScaledArray(float16[3], scale=None)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    return _elementwise("sigmoid", jax.nn.sigmoid, x, mult, constraint)


def relu(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Applies the rectified linear unit, scaled to unit variance.

    Scaling:
        data = fwd * relu(mult * x.data), scale = x.scale: relu is homogeneous, so the scale is
        carried. Arguments, dtype and errors are those of `elementwise`. For mult = 1, fwd = 1.713
        and before the constraint bwd = 1.414.

    Example:
        >>> print(relu(jnp.array([-1.0, 1.0])).data.round(3))
        [0.    1.713]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    data, scale = unpack("relu", "x", x)
    y, _ = _elementwise("relu", jax.nn.relu, data, mult, constraint).pair
    return ScaledArray(y, scale)


def gated_linear_unit(op, f, x, gate, mult, constraint) -> ScaledArray:
    """Returns ``x * f(mult * gate)`` with the factors of `rules.glu`; ``op`` names it in errors."""
    (a, a_scale), (b, b_scale) = unpack(op, "x", x), unpack(op, "gate", gate)
    if a.shape != b.shape:
        raise shape_error(
            op,
            "x and gate must have the same shape",
            "Project both to the hidden size.",
            x=a.shape,
            gate=b.shape,
        )
    factors = rules.glu(f, mult=mult, constraint=constraint)
    y = wide_op(
        _Gated(f, float(mult)),
        a,
        b,
        fwd=factors.fwd,
        bwd=factors.bwd,
        constants=(scale_argument(b_scale),),
        out_dtype=result_dtype(a, b),
    )
    return ScaledArray(y, a_scale)


def silu_glu(
    x: ArrayLike,
    gate: ArrayLike,
    *,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Applies a gated linear unit: ``x * silu(mult * gate)``, scaled to unit variance.

    Scaling:
        data = fwd * x.data * silu(mult * gate.value), scale = x.scale, with fwd = 1 / RMS of
        silu(mult * z); before the constraint dx has the same factor and dgate 1 / RMS of the
        derivative. See `rules.glu`.

    Args:
        x: linear half, floating array or ScaledArray.
        gate: gating half, of the same shape.
        mult: static multiplier of the gate (inverse temperature).
        constraint: how output and gradients come to share a factor (left is x, right is gate).

    Returns:
        ScaledArray of that shape in the promoted dtype (bfloat16 for 8-bit data).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes differ or the constraint is unknown.

    Example:
        >>> silu_glu(jnp.ones(3), jnp.ones(3))
        ScaledArray(float32[3], scale=None)

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202;
        Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix B (gated silu).
    """
    return gated_linear_unit("silu_glu", jax.nn.silu, x, gate, mult, constraint)


def gelu_glu(
    x: ArrayLike,
    gate: ArrayLike,
    *,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Applies a gated linear unit: ``x * gelu(mult * gate)``, scaled to unit variance.

    Scaling:
        As `silu_glu`, with its arguments, result and errors.

    Example:
        >>> gelu_glu(jnp.ones(3), jnp.ones(3))
        ScaledArray(float32[3], scale=None)

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202;
        Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix B (gated silu).
    """
    return gated_linear_unit("gelu_glu", _gelu, x, gate, mult, constraint)
