"""Activations, gated linear units, softmax and dropout."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import ScaledArray, result_dtype, scale as scale_both, upcast
from ..rules import Constraint
from ._operands import ArrayLike, scale_argument, shape_error, times, unpack, wide_op

# gelu(x) = x * sigmoid(2 u) with 2 u = (8 / pi)^1/2 * (x + 0.044715 x^3).
_LINEAR = math.sqrt(8 / math.pi)
_CUBIC = 0.044715 * _LINEAR


@jax.custom_jvp
def _gate(x: jax.Array) -> jax.Array:
    """Return (1 + tanh u) / 2 as sigmoid(2 u), which is accurate where it is close to zero."""
    # Negated twice, because XLA expands logistic(-z) to 1 / (1 + exp(z)), where the signs cancel.
    return lax.logistic(-(x * (-_LINEAR - _CUBIC * (x * x))))


@_gate.defjvp
def _gate_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    gate = _gate(x)
    square = jnp.minimum(x * x, 1e4)  # the gate is 0 or 1 here; infinity times 0 would give NaN
    return gate, gate * (1 - gate) * (_LINEAR + 3 * _CUBIC * square) * dx


def _gelu(x: jax.Array) -> jax.Array:
    return x * _gate(x)


def _silu(x: jax.Array) -> jax.Array:
    return x * lax.logistic(x)


def _of_value(f, mult, x, scale):
    return f(times(times(x, scale), mult))


def _elementwise(
    op: str, f: Callable[..., Any], x: ArrayLike, mult: float, constraint: Constraint
) -> ScaledArray:
    data, scale = unpack(op, "x", x)
    factors = rules.elementwise(f, mult=mult, constraint=constraint)
    static, constants = (f, float(mult)), (scale_argument(scale),)
    return ScaledArray(
        wide_op(_of_value, data, factors=factors, static=static, constants=constants)
    )


def elementwise(
    f: Callable[[jax.Array], jax.Array],
    x: ArrayLike,
    *,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Apply any element-wise function, ``f(mult * x)``, scaled to unit variance.

    Scaling: `rules.elementwise`. ``f`` gets the value of x; the result has no scale.

    Args:
        f: element-wise function of one float32 array; hashable, finite and not constant.
        x: operand.
        mult: static multiplier of the argument (inverse temperature).
        constraint: see `unitscale.ops`.

    Example:
        >>> y = elementwise(jnp.cos, jax.random.normal(jax.random.key(0), (4096,)))
        >>> print(bool(abs(y.data.std() - 1) < 0.1))
        True
    """
    return _elementwise("elementwise", f, x, mult, constraint)


def gelu(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Apply the Gaussian error linear unit (tanh approximation); see `elementwise`."""
    return _elementwise("gelu", _gelu, x, mult, constraint)


def silu(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Apply the sigmoid linear unit (swish); see `elementwise`."""
    return _elementwise("silu", _silu, x, mult, constraint)


def tanh(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Apply the hyperbolic tangent; see `elementwise`."""
    return _elementwise("tanh", jnp.tanh, x, mult, constraint)


def sigmoid(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Apply the logistic function; see `elementwise`."""
    return _elementwise("sigmoid", lax.logistic, x, mult, constraint)


def relu(
    x: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Apply the rectified linear unit; see `elementwise`. The result keeps the scale of x."""
    data, scale = unpack("relu", "x", x)
    return ScaledArray(_elementwise("relu", jax.nn.relu, data, mult, constraint).data, scale)


def _gated(f, mult, x, gate, scale):
    return x * _of_value(f, mult, gate, scale)


def _glu(op, f, x, gate, mult, constraint) -> ScaledArray:
    (a, a_scale), (b, b_scale) = unpack(op, "x", x), unpack(op, "gate", gate)
    if a.shape != b.shape:
        raise shape_error(op, "x and gate must have the same shape", x=a.shape, gate=b.shape)
    factors, dtype = rules.glu(f, mult=mult, constraint=constraint), result_dtype(a, b)
    static, constants = (f, float(mult)), (scale_argument(b_scale),)
    y = wide_op(_gated, a, b, factors=factors, static=static, constants=constants, out_dtype=dtype)
    return ScaledArray(y, a_scale)


def silu_glu(
    x: ArrayLike, gate: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Apply a gated linear unit: ``x * silu(mult * gate)``, scaled to unit variance.

    Scaling: `rules.glu`. The gate is multiplied by its scale; the result keeps the scale of x.

    Args:
        x: linear input.
        gate: gating input, of the same shape.
        mult: static multiplier of the gate (inverse temperature).
        constraint: see `unitscale.ops` (left is x, right is gate).

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.
    """
    return _glu("silu_glu", _silu, x, gate, mult, constraint)


def gelu_glu(
    x: ArrayLike, gate: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Apply a gated linear unit: ``x * gelu(mult * gate)``; see `silu_glu`."""
    return _glu("gelu_glu", _gelu, x, gate, mult, constraint)


def sigmoid_glu(
    x: ArrayLike, gate: ArrayLike, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Apply a gated linear unit: ``x * sigmoid(mult * gate)``; see `silu_glu`."""
    return _glu("sigmoid_glu", lax.logistic, x, gate, mult, constraint)


def _softmax(axis, mult, x, scale):
    return jax.nn.softmax(times(x, scale) * mult, axis=axis)


def softmax(
    x: ArrayLike, axis: int = -1, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Apply softmax over an axis, scaled to unit variance.

    Scaling: `rules.softmax`. The logits are multiplied by their scale; the result has no scale.

    Args:
        x: logits.
        axis: axis along which entries sum to 1 before the forward factor.
        mult: static multiplier of the logits (inverse temperature).
        constraint: see `unitscale.ops`.
    """
    data, scale = unpack("softmax", "x", x, ())
    if not -data.ndim <= axis < data.ndim:
        raise ValueError(
            f"unitscale.ops.softmax: axis must be in [{-data.ndim}, {data.ndim}) for x of shape "
            f"{data.shape}; got {axis}"
        )
    factors = rules.softmax(data.shape[axis], mult=mult, constraint=constraint)
    static, constants = (axis, float(mult)), (scale_argument(scale),)
    return ScaledArray(wide_op(_softmax, data, factors=factors, static=static, constants=constants))


def dropout(
    x: ArrayLike,
    rate: float,
    *,
    key: jax.Array | None = None,
    deterministic: bool = False,
    broadcast_dims: Sequence[int] = (),
) -> ScaledArray:
    """Set elements to zero at random, keeping unit variance.

    Scaling: `rules.dropout`. The result keeps the scale of x; the gradient is exact.

    Args:
        x: operand.
        rate: probability of setting an element to zero, in [0, 1).
        key: `jax.random` key; not needed if deterministic or if the rate is 0.
        deterministic: whether to replace the random mask by its expected value.
        broadcast_dims: dimensions along which all elements are dropped together.

    References:
        Srivastava et al., "Dropout", JMLR 2014.
    """
    data, x_scale = unpack("dropout", "x", x)
    data = upcast(data, result_dtype(data))
    factor = rules.dropout(rate).fwd
    if rate == 0:
        return ScaledArray(data, x_scale)
    if deterministic:
        return ScaledArray(scale_both(data, factor, factor), x_scale)
    if key is None:
        raise ValueError(
            "unitscale.ops.dropout: key must be a jax.random key unless deterministic=True; "
            "got None"
        )
    if not all(-data.ndim <= dim < data.ndim for dim in broadcast_dims):
        raise ValueError(
            "unitscale.ops.dropout: broadcast_dims must be dimensions of x; got "
            f"{tuple(broadcast_dims)} for shape {data.shape}"
        )
    dims = {dim % data.ndim for dim in broadcast_dims}
    shape = [1 if i in dims else n for i, n in enumerate(data.shape)]
    mask = jax.random.bernoulli(key, 1 - rate, shape)
    kept = factor / (1 - rate)
    return ScaledArray(jnp.where(mask, scale_both(data, kept, kept), 0.0), x_scale)
