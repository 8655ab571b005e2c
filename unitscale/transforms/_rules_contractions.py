"""Rules for contractions: multiply data by data, and scale by scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..core import wide_dtype
from ._interpreter import Interpreter, register
from ._values import (
    MOST_STEPS,
    ONE,
    Scale,
    Value,
    aval_of,
    data_at,
    data_dtype,
    fit,
    is_complex,
    is_float,
    narrow,
    same_type,
    scale_of,
    spans,
    times,
    unit_of,
    wide_value,
    widen,
)

Growth: TypeAlias = Callable[[str, int], int]
StaticScaling: TypeAlias = str | Callable[[str, int], float]

STRATEGIES: dict[str, Callable[[str, int], float]] = {
    "unit": lambda primitive, terms: math.sqrt(terms),
    "identity": lambda primitive, terms: 1.0,
}


def growth_of(strategy: StaticScaling) -> Growth:
    """Return a function that maps a primitive and a number of terms to log2 of the growth.

    A sum of n independent terms grows by sqrt(n) ("unit"); with "identity" growth is ignored.
    """
    function = STRATEGIES.get(strategy) if isinstance(strategy, str) else strategy
    if not callable(function):
        error = ValueError if isinstance(strategy, str) else TypeError
        got = repr(strategy) if isinstance(strategy, str) else type(strategy).__name__
        raise error(
            f"unitscale.scalify: static_scaling must be one of {', '.join(STRATEGIES)} or a "
            f"function of (primitive, terms); got {got}"
        )

    def growth(primitive: str, terms: int) -> int:
        if terms <= 1:
            return 0
        result = function(primitive, terms)
        if not (isinstance(result, (int, float, np.number)) and 0 < result < math.inf):
            raise ValueError(
                "unitscale.scalify: static_scaling must return a positive finite number; got "
                f"{result!r} for {primitive} over {terms} terms"
            )
        return round(math.log2(result))

    return growth


def known_terms(dims: Iterable[Any]) -> int:
    """Return the number of terms of a sum; symbolic sizes in an export count as 1."""
    return max(math.prod(n for n in dims if isinstance(n, int)), 1)


# Sums with more terms count as two steps: if all terms have one sign, the sum grows by n and not by
# its root, which could use up most of the range of float16.
_MANY = 2**12
# A sum of this many products of numbers up to 1.5 is within the range of float16.
_FITS = 2**14


def _contract(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value], terms: int) -> Value:
    x, y, *rest = values
    if any(is_complex(v.data) for v in (x, y)):
        data = interpreter.bind(eqn, [*same_type([x.wide(), y.wide()]), *(r.data for r in rest)])
        return wide_value(data, data_dtype(x, y))
    x, y = x.stored(), y.stored()
    dtype = data_dtype(x, y)
    types = [jnp.result_type(v.data) for v in (x, y)]
    # Operands of two types are cast to the wider one; only dot_general takes two 8-bit types.
    is_dot = eqn.primitive is lax.dot_general_p
    if types[0] != types[1] and not (is_dot and all(t.itemsize == 1 for t in types)):
        pairs = zip((x, y), types, strict=True)
        types = [jnp.result_type(*(v.dtype if t.itemsize == 1 else t for v, t in pairs))] * 2
    left, right = (narrow(v.data, t) for v, t in zip((x, y), types, strict=True))
    scale = scale_of(x) * scale_of(y)
    wide = eqn.params["preferred_element_type"] or dtype
    wide = np.dtype(jnp.result_type(*map(wide_dtype, [wide, *types])))

    def contract(left: Any, right: Any, result: Any) -> Any:
        arrays = [left, right, *(r.data for r in rest)]
        return interpreter.bind(eqn, arrays, preferred_element_type=result)

    is_bfloat = dtype == jnp.bfloat16 and all(t.itemsize <= 2 for t in types)
    if spans(dtype) and scale.is_one:
        return Value(contract(left, right, dtype if is_bfloat else wide), ONE, dtype)
    steps = x.steps + y.steps + (1 if terms <= _MANY else 2)
    if x.scale is None or y.scale is None or steps > MOST_STEPS:
        return wide_value(times(contract(left, right, wide), scale), dtype)
    growth = interpreter.settings.growth(eqn.primitive.name, terms)

    def after(left: Any, right: Any) -> Any:
        return fit(times(contract(left, right, wide), Scale(-growth)), dtype)

    def inside(left: Any, right: Any) -> Any:
        return times(contract(left, right, dtype), Scale(-growth))

    def before(left: Any, right: Any) -> Any:
        if known_terms(left.shape) < known_terms(right.shape):
            left = times(left, Scale(-growth))
        else:
            right = times(right, Scale(-growth))
        return contract(left, right, dtype)

    if types[0] == types[1] == dtype == np.float16 and 0 <= growth <= 10:
        # Divide one operand by the growth: the sum could overflow float16, and the matmul should
        # not write float32. A small result that fits is divided instead, which XLA fuses. On a CPU,
        # XLA would also accumulate in float16, so there the float32 result is divided.
        arrays = left, right, aval_of(eqn.outvars[0])
        *sizes, result = (known_terms(a.shape) for a in arrays)
        fits = x.is_sized and y.is_sized and terms <= _FITS and result <= min(sizes)
        data = lax.platform_dependent(left, right, cpu=after, default=inside if fits else before)
    elif is_bfloat:  # bfloat16 has the range of float32
        data = inside(left, right)
    else:
        data = after(left, right)
    return Value(data, scale.shift(growth), dtype, steps)


@register("contraction", "dot_general", "ragged_dot_general")
def dot_general(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Multiply data and scales; divide the data by the root of the contracted size."""
    grouped = eqn.params.get("ragged_dot_dimension_numbers")
    dims = eqn.params["dimension_numbers"] if grouped is None else grouped.dot_dimension_numbers
    terms = known_terms(values[0].shape[axis] for axis in dims[0][0])
    return _contract(interpreter, eqn, values, terms)


@register("contraction", "conv_general_dilated")
def conv_general_dilated(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Treat a convolution as `dot_general`, with one term per kernel element of a feature."""
    spec = eqn.params["dimension_numbers"].rhs_spec
    terms = known_terms(n for axis, n in enumerate(values[1].shape) if axis != spec[0])
    return _contract(interpreter, eqn, values, terms)


# -- cuDNN's attention -----------------------------------------------------------------------------


def _attention_operands(
    eqn: JaxprEqn, values: Sequence[Value]
) -> tuple[list[Value], list[Any], dict[str, Any], Scale]:
    """Return q, k, v; arrays up to the page tables; changed parameters; q's additional scale.

    The kernel adds a bias to the logits, so it must compute their true values. The static part of
    the scales of q and k goes into its ``scale``; the rest is multiplied into q and k, half each.
    """
    dtype = data_dtype(*values[:4])
    if dtype.itemsize != 2:
        dtype = aval_of(eqn.invars[0]).dtype
    if dtype.itemsize != 2:
        raise NotImplementedError(
            "unitscale.scalify: cuDNN's attention needs 16-bit data; got q, k and v in "
            f"{dtype.name}; store them in bfloat16 or float16"
        )
    q, k, v = (
        wide_value(x.wide(), dtype).stored() if x.dtype != dtype else x.stored() for x in values[:3]
    )
    product, into_q, left, right = scale_of(q) * scale_of(k), ONE, q.data, k.data
    if product.array is not None:
        into_q = Scale(0, unit_of(lax.sqrt(product.array)))
        left = fit(times(widen(left), into_q), dtype)
        right = fit(times(widen(right), Scale(0, product.array) * into_q.inverse()), dtype)
    arrays = [left, right, fit(v.data, dtype), fit(values[3].wide(), dtype)]
    arrays += [narrow(x.data, dtype) if is_float(x.data) else x.data for x in values[4:10]]
    return [q, k, v], arrays, {"scale": eqn.params["scale"] * 2.0**product.log2}, into_q


@register("contraction", "dot_product_attention_fwd_wrapper")
def attention(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Call the kernel on data: apply the scales of q and k; the result has the scale of v."""
    (_, _, v), arrays, changes, _ = _attention_operands(eqn, values)
    data, *statistics = interpreter.bind(eqn, arrays, **changes)
    return [v.with_data(data), *(wide_value(s, np.float32) for s in statistics)]


@register("contraction", "dot_product_attention_bwd_wrapper")
def attention_backward(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Call the kernel on data; the scales of its results follow from the chain rule."""
    (q, k, v), arrays, changes, into_q = _attention_operands(eqn, values)
    statistics, output, cotangent = values[10:]
    cotangent = wide_value(cotangent.wide(), v.dtype) if cotangent.dtype != v.dtype else cotangent
    cotangent = cotangent.stored()
    arrays += [statistics.wide(), data_at(output, scale_of(v), v.dtype), cotangent.data]
    results = interpreter.bind(eqn, arrays, **changes)
    of_v = scale_of(cotangent)
    of_logits = of_v * scale_of(v)
    # Derivative by q's value = derivative by the kernel's operand * (operand / value); also for k.
    into_k = Scale(0, (scale_of(q) * scale_of(k)).array) * into_q.inverse()
    of_q = of_logits * into_q * scale_of(q).inverse()
    of_k = of_logits * into_k * scale_of(k).inverse()
    scales = [of_q, of_k, of_v, of_logits]
    return [Value(r, s, v.dtype) for r, s in zip(results, scales, strict=False)]
