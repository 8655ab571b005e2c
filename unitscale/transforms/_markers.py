"""Markers: identity functions that tell `scalify` what to do with a scale or a dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from ..core import check_choice, format_of
from ._interpreter import Interpreter, register
from ._rules_arrays import narrowed
from ._values import (
    ONE,
    Scale,
    Statistic,
    Value,
    aval_of,
    fit,
    narrow,
    times,
    unit_of,
    widen,
)

Direction = Literal["forward", "backward", "both"]
"""Whether a marker such as `cast_data` acts on the value, on its cotangent, or on both."""

# The action of a marker on a value: its name and its static argument.
Action = tuple[str, Any]

marker_p = Primitive("unitscale_marker")
data_scale_p = Primitive("unitscale_data_scale")
data_scale_p.multiple_results = True

marker_p.def_impl(lambda x, *rest, **_: x)
marker_p.def_abstract_eval(lambda x, *rest, **_: x)
mlir.register_lowering(marker_p, lambda context, x, *rest, **_: [x])


def _bind(x: Any, rest: Sequence[Any], forward: Action | None, backward: Action | None) -> Any:
    if forward is None and backward is None:
        return x
    return marker_p.bind(x, *rest, forward=forward, backward=backward)


def _marker_jvp(primals: Any, tangents: Any, forward: Any, backward: Any) -> Any:
    x, *rest = primals
    tangent = tangents[0]
    out = _bind(x, rest, forward, backward)
    if not isinstance(tangent, ad.Zero):
        # This marker does nothing to the tangent; transposed, it acts on the cotangent.
        tangent = _bind(tangent, rest if backward and backward[0] == "set" else (), None, backward)
    return out, tangent


def _marker_transpose(cotangent: Any, x: Any, *rest: Any, forward: Any, backward: Any) -> Any:
    if not isinstance(cotangent, ad.Zero):
        cotangent = _bind(cotangent, rest, backward, None)
    return [cotangent, *(None for _ in rest)]


def _marker_batch(args: Any, dims: Any, forward: Any, backward: Any) -> Any:
    x, *rest = args
    pairs = zip(rest, dims[1:], strict=True)
    rest = [r if d is None else lax.index_in_dim(r, 0, d, False) for r, d in pairs]
    return _bind(x, rest, forward, backward), dims[0]


ad.primitive_jvps[marker_p] = _marker_jvp
ad.primitive_transposes[marker_p] = _marker_transpose
batching.primitive_batchers[marker_p] = _marker_batch

data_scale_p.def_impl(lambda x: [x, jnp.ones((), jnp.float32)])
data_scale_p.def_abstract_eval(
    lambda x: [x, jax.typeof(jax.ShapeDtypeStruct((), jnp.dtype(np.float32)))]
)
mlir.register_lowering(
    data_scale_p, mlir.lower_fun(lambda x: [x, jnp.ones((), jnp.float32)], multiple_results=True)
)


def _data_scale_jvp(primals: Any, tangents: Any) -> Any:
    data, scale = data_scale_p.bind(*primals)
    (tangent,) = tangents
    if not isinstance(tangent, ad.Zero):
        tangent = tangent / lax.stop_gradient(scale).astype(tangent.dtype)
    return [data, scale], [tangent, ad.Zero(jax.typeof(scale).to_tangent_aval())]


ad.primitive_jvps[data_scale_p] = _data_scale_jvp
batching.primitive_batchers[data_scale_p] = lambda x, dims: (data_scale_p.bind(*x), [*dims, None])


def _floating(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"unitscale.{name}: x must be a floating array; got dtype {x.dtype}")
    return x


def _sides(name: str, on: str, action: Action) -> tuple[Action | None, Action | None]:
    check_choice(f"unitscale.{name}", "on", on, Direction)
    return (action if on != "backward" else None), (action if on != "forward" else None)


def set_scaling(x: Any, scale: Any, *, on: Direction = "forward") -> Any:
    """Set the scale of a value; the value stays the same.

    Args:
        x: floating array.
        scale: positive scalar, a number or an array. Under `jax.vmap` all examples get the first
            one's scale.
        on: "forward" for ``x``, "backward" for its cotangent, or "both".

    Returns:
        ``x``. Under `scalify` its data is ``value / scale``.

    Raises:
        ValueError: if the scale is not a positive finite scalar, or ``on`` is unknown.
        TypeError: if ``x`` is not floating.

    Example:
        >>> from unitscale import scalify, as_scaled
        >>> scalify(lambda x: set_scaling(x, 4.0))(as_scaled(jnp.ones(2)))
        ScaledArray(float32[2], scale=4)
    """
    if jnp.ndim(scale):
        raise ValueError(
            f"unitscale.set_scaling: scale must be a scalar; got shape {jnp.shape(scale)}"
        )
    concrete = not isinstance(scale, Tracer)
    if concrete and (isinstance(scale, bool) or not 0 < float(scale) < float("inf")):
        raise ValueError(f"unitscale.set_scaling: scale must be positive and finite; got {scale!r}")
    forward, backward = _sides("set_scaling", on, ("set", None))
    scale = lax.stop_gradient(jnp.asarray(scale, jnp.float32))
    return _bind(_floating("set_scaling", x), [scale], forward, backward)


def stop_scaling(x: Any) -> Any:
    """Return the value as a plain array without a scale.

    Example:
        >>> from unitscale import scalify, as_scaled
        >>> print(scalify(stop_scaling)(as_scaled(jnp.full(2, 8.0))))
        [8. 8.]
    """
    return _bind(_floating("stop_scaling", x), (), ("stop", None), None)


def get_data_scale(x: Any) -> tuple[Any, Any]:
    """Return data and scale as two plain arrays; outside of `scalify`, return ``x`` and 1.

    Example:
        >>> from unitscale import scalify, as_scaled
        >>> data, scale = scalify(get_data_scale)(as_scaled(jnp.full(2, 8.0)))
        >>> print(data, scale)
        [1. 1.] 8.0
    """
    data, scale = data_scale_p.bind(_floating("get_data_scale", x))
    return data, scale


def dynamic_rescale(x: Any, statistic: Statistic = "rms", *, on: Direction = "forward") -> Any:
    """Measure the data at run time, and set the scale to the power of two nearest its size.

    Args:
        x: floating array.
        statistic: the size: "rms" (data gets an RMS near 1) or "amax" (a largest magnitude near 1).
        on: "forward" for ``x``, "backward" for its cotangent, or "both".

    Returns:
        ``x``; the value stays the same.

    Raises:
        ValueError: if ``statistic`` or ``on`` is unknown.
        TypeError: if ``x`` is not floating.

    Example:
        >>> from unitscale import scalify, as_scaled
        >>> f = scalify(lambda x: dynamic_rescale(x * x))
        >>> print(f(as_scaled(jnp.full(2, 3.0))).data)
        [1.125 1.125]
    """
    check_choice("unitscale.dynamic_rescale", "statistic", statistic, Statistic)
    forward, backward = _sides("dynamic_rescale", on, ("rescale", statistic))
    return _bind(_floating("dynamic_rescale", x), (), forward, backward)


def cast_data(x: Any, dtype: Any, *, on: Direction = "forward") -> Any:
    """Cast the data to a format; finite values beyond its range saturate.

    To run a matmul in FP8, cast both operands. Its result has the type that the data had before the
    cast. A cast to float32 is different: everything computed from its result is float32, matmuls
    included, until a result is cast to a narrow type, as in ``y.astype(jnp.bfloat16)``.

    Args:
        x: floating array.
        dtype: a format that `unitscale.core.format_of` knows, such as ``jnp.float8_e4m3fn``.
        on: "forward" for ``x``, "backward" for its cotangent, or "both".

    Returns:
        ``x``, rounded to the format under `scalify` and unchanged outside of it.

    Raises:
        ValueError: if the format or ``on`` is unknown.
        TypeError: if ``x`` is not floating.

    Example:
        >>> from unitscale import scalify, as_scaled
        >>> scalify(lambda x: cast_data(x, jnp.float8_e4m3fn))(as_scaled(jnp.ones(2)))
        ScaledArray(float8_e4m3fn[2], scale=1)

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433.
    """
    forward, backward = _sides("cast_data", on, ("cast", format_of(dtype)))
    return _bind(_floating("cast_data", x), (), forward, backward)


@register("marker", marker_p)
def _mark(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Apply `set_scaling`, `stop_scaling`, `dynamic_rescale` or `cast_data`."""
    x, *rest = values
    if eqn.params["forward"] is None:
        return x
    kind, argument = eqn.params["forward"]
    if kind == "stop":
        return Value(x.numeric(aval_of(eqn.invars[0]).dtype), const=x.const)
    x = Value(x.data, ONE) if x.scale is None else x.uniform()
    if kind == "cast":
        if argument.dtype is None or argument.dtype.itemsize < 4:
            return narrowed(x, argument)
        dtype = jnp.promote_types(x.dtype, argument.dtype)
        return Value(lax.convert_element_type(x.data, dtype), x.scale, dtype, x.steps)
    wide, held = x.wide(), jnp.result_type(x.data) if x.is_stored else x.dtype
    if kind == "set":
        scale = _scale_to_set(rest[0])
    else:
        scale = Scale(0, unit_of(wide, argument, format_of(held).max))
    return Value(fit(times(wide, scale.inverse()), held), scale, x.dtype, 0)


def _scale_to_set(value: Value) -> Scale:
    """Return the scale that a marker sets: static if it is known to be a power of two."""
    mantissa, exponent = math.frexp(value.const or 0.0)
    if mantissa == 0.5:
        return Scale(exponent - 1)
    return Scale(0, lax.stop_gradient(value.numeric()))


@register("marker", data_scale_p)
def _data_and_scale(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Return data and scale as plain arrays."""
    x = values[0].uniform().stored()
    if x.scale is None:
        return [x, Value(np.float32(1), const=1.0)]
    data = narrow(widen(x.data), aval_of(eqn.invars[0]).dtype)
    return [Value(data), Value(jnp.asarray(x.scale.factor()))]
