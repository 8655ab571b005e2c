"""Rules of movers (which keep the scale), functions (computed wide), casts, and the default."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..core import cast
from ._decouple import can_decouple, decoupled
from ._interpreter import Interpreter, register
from ._values import (
    Value,
    aval_of,
    data_dtype,
    fit,
    is_complex,
    is_float,
    narrow,
    same_type,
    scale_of,
    spans,
    spread,
    wide_value,
    widen,
)

# -- movers ------------------------------------------------------------------------------------

_SAME_PLACE = ("neg", "abs", "copy", "stop_gradient", "name", "sharding_constraint")
_SAME_PLACE += ("layout_constraint", "unitscale_row_major", "xla_metadata_value")
_WHOLE = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "rev", "tile", "reshard")
_WHOLE += ("relayout", "with_memory_space_constraint")
_PARTS = ("slice", "dynamic_slice", "cummax", "cummin", "reduce_window_max", "reduce_window_min")
_PARTS += ("reduce_max", "reduce_min", "split", "unstack", "top_k", "approx_top_k")
_EACH = ("sort", "optimization_barrier", "device_put", "tie", "dce_sink")


@register("mover", *_SAME_PLACE)
def same_place(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Apply to data; every element keeps its scale."""
    return values[0].with_data(interpreter.bind(eqn, [values[0].data]))


@register("mover", *_WHOLE)
def whole(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Apply to data with one scale."""
    x = values[0].uniform()
    return x.with_data(interpreter.bind(eqn, [x.data]))


@register("mover", *_PARTS)
def part(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Any:
    """Apply to data with one scale; the size of the result is unknown."""
    x, *rest = values
    x = x.uniform()
    results = interpreter.bind(eqn, [x.data, *(r.data for r in rest)])
    if not eqn.primitive.multiple_results:
        return x.with_part(results)
    return [x.with_part(r) if is_float(r) else Value(r) for r in results]


@register("mover", *_EACH)
def each(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Apply to the data of all operands together; each result keeps the scale of its operand."""
    values = [v.uniform() for v in values]
    results = interpreter.bind(eqn, [v.data for v in values])
    return [v.with_data(r) for v, r in zip(values, results, strict=True)]


@register("mover", "gather")
def gather(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Apply to data with one scale; compute wide if the fill value is neither 0 nor NaN."""
    number = eqn.params.get("fill_value")
    if number is None or number == 0 or math.isnan(number):
        return part(interpreter, eqn, values)
    return interpreter.wide(eqn, values)


@register("mover", "mul", "div")
def times_power_of_two(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Fold multiplication or division by a power of two into the scale; otherwise compute wide."""
    x, y = values
    if eqn.primitive is lax.mul_p and x.const is not None:
        x, y = y, x
    mantissa, exponent = math.frexp(y.const or 0.0)
    is_power = abs(mantissa) == 0.5 and abs(exponent) <= 14  # within the range of float16
    # Float32 and bfloat16 data takes the factor exactly, while a scale could leave its range.
    folds = x.is_stored and not spans(x.dtype)
    if not is_power or not folds or x.shape != aval_of(eqn.outvars[0]).shape:
        return interpreter.wide(eqn, values)
    shift = exponent - 1 if eqn.primitive is lax.mul_p else 1 - exponent
    data = lax.neg(x.data) if mantissa < 0 else x.data
    return Value(data, scale_of(x).shift(shift), x.dtype, x.steps)


def at_one_scale(values: Sequence[Value]) -> list[Any] | None:
    """Return the data of operands that are stored at one scale, or are 0, infinite or NaN.

    None if the operands must be combined wide.
    """
    scaled = [v for v in values if v.scale is not None]
    scale = scale_of(scaled[0])
    if scale.ndim or not all(v.is_stored and scale.same(v.scale) for v in scaled):
        return None
    if any(jnp.result_type(v.data).itemsize == 1 for v in scaled):
        return None  # some 8-bit formats have no infinity
    dtype, *others = {jnp.result_type(v.data) for v in scaled}
    holds = all(v.is_neutral for v in values if v.scale is None)
    return [narrow(v.data, dtype) for v in values] if holds and not others else None


def _choose(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    values: Sequence[Value],
    apply: Callable[..., Any] | None = None,
) -> Value:
    """Apply an operation that selects elements from several arrays."""
    places = [i for i, v in enumerate(values) if v.scale is not None or is_float(v.data)]
    cases = [values[i] for i in places]
    found = at_one_scale(cases)
    arrays = [v.data for v in values]
    for i, array in zip(places, found or same_type([v.wide() for v in cases]), strict=True):
        arrays[i] = array
    data = interpreter.bind(eqn, arrays) if apply is None else apply(*arrays)
    if found is None:
        return wide_value(data, data_dtype(*cases))
    return next(v for v in cases if v.scale is not None).with_part(data)


@register("mover", "max", "min", "select_n", "concatenate", "stack", "pad", "dynamic_update_slice")
def choice(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Apply to data if operands share one scale or are 0, infinite or NaN; else compute wide."""
    return _choose(interpreter, eqn, values)


def _scattered(eqn: JaxprEqn, *arrays: Any) -> Any:
    """Apply a scatter to arrays of a type other than the one it was traced with."""
    params = {k: v for k, v in eqn.params.items() if not k.startswith("update_")}
    return getattr(lax, eqn.primitive.name.replace("-", "_"))(*arrays, **params)


@register("mover", "scatter", "scatter_max", "scatter_min")
def scatter(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Treat as a choice among operands; use the default rule if it applies a function."""
    if eqn.primitive is lax.scatter_p and eqn.params["update_jaxpr"] is not None:
        return interpreter.default(eqn, values)
    return _choose(interpreter, eqn, values, lambda *arrays: _scattered(eqn, *arrays))


# -- functions, sums and comparisons: wide ---------------------------------------------------------

_FUNCTIONS = """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil cos cosh cumlogsumexp
    cumprod digamma erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac lgamma log
    log1p log2 log_softmax logistic nextafter one_minus_square polygamma polynomial pow
    random_gamma_grad reduce_prod regularized_incomplete_beta rem round rsqrt sign sin sinh sqrt tan
    tanh zeta integer_pow square clamp conj real imag complex fft
"""
_SUMS = ["add", "sub", "add_any", "reduce_sum", "cumsum", "reduce_window_sum"]
_SUMS += ["select_and_scatter_add", "select_and_gather_add"]
_COMPARISONS = "eq ne lt le gt ge eq_to lt_to le_to argmax argmin is_finite"


@register("wide", *_FUNCTIONS.split(), *_COMPARISONS.split())
def function(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Any:
    """Apply to ``data * scale``, in float32 or wider."""
    if interpreter.settings.decouple and can_decouple(eqn.primitive.name, values):
        return decoupled(eqn.primitive.name, values[0], lambda x: interpreter.bind(eqn, [x]))
    return interpreter.wide(eqn, values)


@register("wide", *_SUMS)
def summed(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Any:
    """Apply to ``data * scale``, in float32 or wider; adding a known zero changes nothing."""
    if eqn.primitive.name in ("add", "add_any"):
        for x, y in (values, values[::-1]):
            if y.const == 0 and x.is_stored and x.shape == aval_of(eqn.outvars[0]).shape:
                return x
    return interpreter.wide(eqn, values)


def _is_one_per_row(eqn: JaxprEqn) -> bool:
    """Return whether a scatter adds to one entry per row, as the transpose of `take_along_axis`."""
    dims, shape = eqn.params["dimension_numbers"], aval_of(eqn.invars[0]).shape
    rows, last = tuple(range(len(shape) - 1)), (len(shape) - 1,)
    return (
        dims.operand_batching_dims == dims.scatter_indices_batching_dims == rows
        and dims.scatter_dims_to_operand_dims == dims.inserted_window_dims == last
        and aval_of(eqn.invars[2]).shape == (*shape[:-1], 1)
    )


@register("wide", "scatter_add", "scatter_sub")
def scatter_add(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Scatter wide; write a scatter of one update per row as an element-wise selection."""
    x, indices, updates = values
    operand, added = x.data, updates.data
    if x.scale is not None or updates.scale is not None:
        operand, added = same_type([x.wide(), updates.wide()])
    if not _is_one_per_row(eqn):
        data = _scattered(eqn, operand, indices.data, added)
    else:  # element by element, which XLA fuses, while a scatter is a separate kernel
        index, last = indices.data[..., 0], operand.ndim - 1
        index = index.astype(jnp.promote_types(index.dtype, "int32"))  # 8 bits may be too few
        if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, operand.shape[last] - 1)
        places = lax.broadcasted_iota(index.dtype, operand.shape, last)
        change = lax.add if eqn.primitive is lax.scatter_add_p else lax.sub
        changed = change(operand, spread(added, operand))
        data = lax.select(lax.eq(places, spread(index, operand)), changed, operand)
    if x.scale is None and updates.scale is None:
        return Value(data)
    return wide_value(data, data_dtype(x, updates))


@register("wide", "reduce_precision")
def reduce_precision(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Round the value; rounding to its own precision, as a barrier for XLA, acts on data."""
    own = jnp.finfo(aval_of(eqn.invars[0]).dtype)
    if (own.nexp, own.nmant) == (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]):
        return same_place(interpreter, eqn, values)
    return interpreter.wide(eqn, values)


# -- casts ---------------------------------------------------------------------------------------


@register("cast", "convert_element_type")
def convert(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Cast the value; a cast from float to float casts the data, and changes the storage type."""
    (x,) = values
    before, dtype = aval_of(eqn.invars[0]).dtype, eqn.params["new_dtype"]
    if not is_float(dtype):
        return Value(interpreter.bind(eqn, [x.numeric(before)]))
    if before == dtype:
        return x
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return wide_value(lax.convert_element_type(x.wide(), dtype), x.dtype)
    if is_complex(x.data):
        return wide_value(widen(lax.convert_element_type(lax.real(x.wide()), dtype)), dtype)
    if dtype.itemsize == 1:
        return narrowed(x, dtype)
    if x.is_stored and (spans(dtype) or x.is_sized or jnp.result_type(x.data) == dtype):
        return Value(fit(x.data, dtype), x.scale, dtype, x.steps)
    wide = x.wide()
    return wide_value(narrow(wide, jnp.promote_types(wide.dtype, dtype)), dtype).stored()


def narrowed(x: Value, dtype: Any) -> Value:
    """Cast to an 8-bit type, saturating; results computed from it have the original type."""
    x = x.uniform()
    x = x if x.is_sized else x.measured(dtype)
    return x.with_data(cast(x.data, dtype))


@register("cast", "bitcast_convert_type")
def bitcast(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Return the bits of the value in the program's type."""
    (x,) = values
    data = interpreter.bind(eqn, [x.numeric(aval_of(eqn.invars[0]).dtype)])
    return wide_value(data, x.dtype) if is_float(data) else Value(data)


# -- the default ---------------------------------------------------------------------------------

_LINEAR_ALGEBRA = """
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product linear_solve lu
    ormqr qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve
"""
_GENERIC = """
    clamp_gradient linear_call mulhi random_gamma reduce reduce_window rng_uniform scatter_mul
    select_and_scatter
"""
_OUTSIDE = """
    check debug_callback debug_print ffi_call global_array_to_host_local_array
    host_local_array_to_global_array inspect_sharding io_callback pure_callback
"""
_REFERENCES = """
    accum_grad_in_ref addupdate box_get box_set empty_ref free_ref freeze get log_extend log_read
    new_box new_log new_ref run_state swap
"""
_INTEGERS = """
    after_all and axis_index clz create_token from_edtype iota not or population_count random_bits
    random_fold_in random_seed random_split random_unwrap random_wrap reduce_and reduce_or
    reduce_xor rng_bit_generator shift_left shift_right_arithmetic shift_right_logical threefry2x32
    to_edtype xor
"""


def _default(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> object:
    """Apply to ``data * scale`` in the program's types; results are wide."""
    return interpreter.default(eqn, values)


def _without_scale(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> object:
    """Apply unchanged: integers, keys and tokens have no scale."""
    return interpreter.default(eqn, values)


register("without scale", *_INTEGERS.split())(_without_scale)
register("default: linear algebra", *_LINEAR_ALGEBRA.split())(_default)
register("default: generic reductions and solves", *_GENERIC.split())(_default)
register("default: internal", "call_hi_primitive", "custom_lin", "eval_jaxpr", "stage")(_default)
register("default: code outside JAX", *_OUTSIDE.split())(_default)
register("default: mutable references hold plain values", *_REFERENCES.split())(_default)
