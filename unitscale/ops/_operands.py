"""Helpers of the ops (unpack operands, compute in float32, weighted sums), and `unit_scaled`."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .. import rules
from ..core import (
    Scale,
    ScaledArray,
    bounded_product,
    custom_vjp,
    is_floating,
    is_scaled,
    narrow,
    num_batch_shards,
    result_dtype,
    safe_scale,
    scale as scale,
    scale_bwd as scale_bwd,
    scale_fwd as scale_fwd,
    to_float,
    widen,
)
from ..rules import Constraint, Factors

ArrayLike: TypeAlias = jax.Array | ScaledArray
"""Operand type of ops such as `dense`: an array or a ScaledArray."""

Operand: TypeAlias = tuple[jax.Array, Scale]


def unpack(
    op: str, name: str, x: Any, uniform: tuple[int, ...] | EllipsisType | None = None
) -> Operand:
    """Return data and scale of an operand, with a scale constant along the axes in ``uniform``.

    Variation of the scale along these axes is moved into the data. ``...`` means all axes.
    """
    try:
        data, scale = x.pair if isinstance(x, ScaledArray) else (jnp.asarray(x), None)
    except (TypeError, ValueError):
        data, scale = None, None
    if data is None or not is_floating(data):
        raise TypeError(
            f"unitscale.ops.{op}: {name} must be a floating array or a ScaledArray; got "
            f"{getattr(data, 'dtype', type(x).__name__)}. Cast it first, for example with astype."
        )
    if scale is None or uniform is None:
        return data, scale
    if jnp.size(scale) == 1:
        return data, jnp.reshape(scale, ())
    full = jnp.reshape(scale, (1,) * (data.ndim - jnp.ndim(scale)) + jnp.shape(scale))
    axes = range(data.ndim) if isinstance(uniform, EllipsisType) else uniform
    axes = tuple(sorted({axis % data.ndim for axis in axes}))
    if all(full.shape[axis] == 1 for axis in axes):
        return data, full
    full = to_float(full)
    largest = safe_scale(jnp.max(full, axis=axes, keepdims=True, initial=0))
    # The ratio is at most 1, usually a power of two. bfloat16 has the range for it, float16 not.
    dtype = data.dtype if data.dtype == jnp.bfloat16 else widen(data).dtype
    data = (widen(data) * (full / largest)).astype(dtype)
    return data, jnp.reshape(largest, ()) if largest.size == 1 else largest


def multiply_scales(data: jax.Array, left: Scale, right: Scale) -> Operand:
    """Multiply two scales, clamped to float32's normal range; the remainder multiplies the data."""
    scale, rest = bounded_product(left, right)
    return data if isinstance(rest, int) else narrow(widen(data) * rest, data.dtype), scale


def output_dtype(*operands: Any) -> Any:
    """Return the promoted dtype of operands, where 8-bit data counts as bfloat16."""
    arrays = (x.data if isinstance(x, ScaledArray) else jnp.asarray(x) for x in operands)
    return result_dtype(*arrays)


def scale_argument(scale: Scale) -> jax.Array | None:
    """Return a scale as a constant for `wide_op`: a float array, or None."""
    return None if scale is None else to_float(scale)


def times(x: Any, factor: Any) -> jax.Array:
    """Return ``x * factor``, or ``x`` itself if the factor is None or 1."""
    return x if factor is None or (isinstance(factor, float) and factor == 1) else x * factor


def num_sharing(x: jax.Array, other: jax.Array, is_broadcast: bool) -> int:
    """Return how many shards of the batch the gradient of ``x`` is summed over."""
    shards = num_batch_shards(x, other)
    return shards if is_broadcast else shards // num_batch_shards(x)


def broadcast_shapes(op: str, expected: str, **shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape that shapes broadcast to, or raise a ValueError."""
    try:
        return jnp.broadcast_shapes(*shapes.values())
    except ValueError:
        raise shape_error(op, expected, **shapes) from None


def shape_error(op: str, expected: str, hint: str = "", /, **shapes: tuple[int, ...]) -> ValueError:
    """Return a ValueError for operands whose shapes do not fit."""
    got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return ValueError(f"unitscale.ops.{op}: {expected}; got {got}. {hint}".rstrip())


@partial(custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _wide_op(f, static, factors, out_dtype, args, constants):
    return narrow(times(f(*static, *map(widen, args), *constants), factors.fwd), out_dtype)


def _wide_op_fwd(f, static, factors, out_dtype, args, constants):
    return _wide_op(f, static, factors, out_dtype, args, constants), (args, constants)


def _wide_op_bwd(f, static, factors, out_dtype, residuals, cotangent):
    args, constants = residuals
    _, vjp = jax.vjp(lambda *wide: f(*static, *wide, *constants), *map(widen, args))
    rounded = tuple(
        narrow(times(grad, factor), x.dtype)
        for x, factor, grad in zip(args, factors.bwd, vjp(widen(cotangent)), strict=True)
    )
    return rounded, None


_wide_op.defvjp(_wide_op_fwd, _wide_op_bwd)


def wide_op(
    f: Callable[..., jax.Array],
    *args: jax.Array,
    factors: Factors | None = None,
    static: tuple[Any, ...] = (),
    constants: tuple[Any, ...] = (),
    out_dtype: Any = None,
) -> jax.Array:
    """Compute ``f(*static, *args, *constants)`` in float32, multiply by the factors, round once.

    The backward pass recomputes the function from the narrow operands. ``constants`` get no
    gradient. By default the result has the dtype of the first of ``args``.
    """
    out_dtype = jnp.dtype(result_dtype(args[0]) if out_dtype is None else out_dtype)
    factors = Factors(1.0, (1.0,) * len(args)) if factors is None else factors
    return _wide_op(f, static, factors, out_dtype, args, constants)


@partial(custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _combine(operands, ratios, traced, weights, bwd, out_dtype, avals):
    left, right = (
        times(times(times(widen(x), weight), variable), ratio)
        for x, ratio, variable, weight in zip(operands, ratios, traced, weights, strict=True)
    )
    return narrow(left + right, out_dtype)


def _combine_fwd(operands, ratios, traced, *static):
    return _combine(operands, ratios, traced, *static), ratios


def _combine_bwd(weights, bwd, out_dtype, avals, ratios, cotangent):
    wide, grads = widen(cotangent), []
    for (shape, dtype), ratio, factor in zip(avals, ratios, bwd, strict=True):
        grad, lead = times(wide, ratio), wide.ndim - len(shape)
        padded = (None,) * lead + shape  # sum over broadcast dimensions
        axes = tuple(i for i, n in enumerate(padded) if n != grad.shape[i])
        grad = jnp.sum(grad, axis=axes).reshape(shape) if axes else grad
        grads.append(narrow(times(grad, factor), dtype))
    return tuple(grads), None, None


_combine.defvjp(_combine_fwd, _combine_bwd)


def combine(
    left: Operand,
    right: Operand,
    *,
    weights: tuple[Any, ...] = (1.0, 1.0),
    bwd: tuple[float, ...] = (1.0, 1.0),
    scale: Scale | str = "left",
    out: Any = None,
) -> ScaledArray:
    """Return the weighted sum of two operands at ``scale``, with a backward factor for each.

    data = sum of weights[i] * x[i].data * (x[i].scale / scale) in float32, rounded once;
    dx[i] = bwd[i] * (x[i].scale / scale) * dy. Weights may be arrays.
    """
    target = left[1] if isinstance(scale, str) else scale
    ratios = tuple(
        None if s is target else to_float(s) / safe_scale(to_float(target))
        for s in (left[1], right[1])
    )
    is_traced = [isinstance(w, jax.Array) for w in weights]
    y = _combine(
        (left[0], right[0]),
        ratios,
        tuple(w if traced else None for w, traced in zip(weights, is_traced, strict=True)),
        tuple(1.0 if traced else float(w) for w, traced in zip(weights, is_traced, strict=True)),
        tuple(map(float, bwd)),
        left[0].dtype if out is None else out,
        tuple((x.shape, x.dtype) for x in (left[0], right[0])),
    )
    return ScaledArray(y, target)


def _in_order(fn, floats, count, *args):
    """Call ``fn`` with ``args`` in their original order; floating ones come first in ``args``."""
    order = (*floats, *(i for i in range(count) if i not in floats))
    by_position = dict(zip(order, args, strict=True))
    return fn(*(by_position[i] for i in range(count)))


@dataclasses.dataclass(frozen=True)
class UnitScaled:
    """A function with unit-scaling factors; the result of `unit_scaled`. Call it like the function.

    Attributes:
        fn: the function.
        factors: the constrained factors, with one backward factor per floating argument.
        floats: positions of the floating arguments.
        is_loss: whether the result is a scalar.
    """

    fn: Callable[..., Any]
    factors: Factors
    floats: tuple[int, ...]
    is_loss: bool

    def __call__(self, *args: Any) -> Any:
        """Return ``fwd * fn(*args)`` as a ScaledArray without a scale; a scalar array if a loss."""
        values = [x.value if is_scaled(x) else jnp.asarray(x) for x in args]
        floating = [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.floating)]
        if tuple(floating) != self.floats:
            raise TypeError(
                f"unitscale.ops.unit_scaled: arguments {list(self.floats)} must be floating, as in "
                f"the example; got floating arguments {floating}"
            )
        operands = [values[i] for i in self.floats]
        y = wide_op(
            _in_order,
            *operands,
            factors=self.factors,
            static=(self.fn, self.floats, len(values)),
            constants=tuple(x for i, x in enumerate(values) if i not in self.floats),
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
    """Turn any function into a unit-scaled op, with factors found by simulation.

    Scaling: `rules.closed_form` if the function has a known rule, else `rules.simulate`, with the
    shapes of the example. Arguments in ``cut`` keep their own backward factors; the others share
    one with the result. A scalar result is a loss, with forward factor 1; unless the constraint is
    None, its gradients share their geometric mean. ``fn`` is called with values.

    Args:
        fn: hashable function of arrays that returns one floating array. It runs in float32.
        example: example arguments; for floating arrays only the shapes matter.
        constraint: see `unitscale.ops`.
        cut: positions of arguments that are cut edges, such as weights.
        seeds: number of random draws.

    Raises:
        TypeError: if JAX cannot trace ``fn``, or the result is not one floating array.
        ValueError: if no argument is floating, if ``cut`` names one that is not floating, or if the
            result or a gradient is constant.

    Example:
        >>> decay = unit_scaled(lambda x: jax.lax.cumsum(x) / 3, [jnp.zeros(512)])
        >>> decay(jax.random.normal(jax.random.key(1), (512,)))
        ScaledArray(float32[512], scale=None)
    """
    floats = tuple(i for i, x in enumerate(example) if is_floating(jnp.asarray(x)))
    if not set(cut) <= set(floats):
        raise ValueError(
            "unitscale.ops.unit_scaled: cut must be among the positions of floating arguments, "
            f"{list(floats)}; got {list(cut)}"
        )
    known, is_loss = rules.closed_form(fn, example), False
    if known is None:
        found = rules.simulate(fn, example, seeds=seeds, name="ops.unit_scaled")
        known, is_loss = found.factors, found.is_loss
    ideal = dict(zip(floats, known.bwd, strict=True))
    joined = [i for i in floats if i not in cut]
    fwd = known.fwd
    if is_loss and joined:
        together = rules.constrain(constraint and "gmean", *(ideal[i] for i in joined))
        ideal |= dict(zip(joined, together, strict=True))
    elif joined:
        fwd, *together = rules.constrain(constraint, fwd, *(ideal[i] for i in joined))
        ideal |= dict(zip(joined, together, strict=True))
    return UnitScaled(fn, Factors(fwd, tuple(ideal[i] for i in floats)), floats, is_loss)
