"""The primitives that take the default rule, each on purpose, and those that never see a scale."""

from __future__ import annotations

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ._interpreter import Interpreter
from ._registry import register
from ._values import Value

_LINEAR_ALGEBRA = (
    "cholesky_update",
    "eig",
    "eigh",
    "svd",
    "lu",
    "qr",
    "schur",
    "hessenberg",
    "householder_product",
    "geqrf",
    "geqp3",
    "ormqr",
    "symmetric_product",
    "triangular_solve",
    "tridiagonal",
    "tridiagonal_solve",
    "linear_solve",
)
_GENERIC = (
    "reduce",
    "reduce_window",
    "scatter_mul",
    "select_and_scatter",
    "rng_uniform",
    "random_gamma",
    "clamp_gradient",
    "linear_call",
    "mulhi",
)
_OUTSIDE = (
    "pure_callback",
    "io_callback",
    "debug_callback",
    "debug_print",
    "inspect_sharding",
    "ffi_call",
    "check",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
)
_INTEGERS = (
    "and",
    "or",
    "xor",
    "not",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "population_count",
    "clz",
    "random_bits",
    "random_fold_in",
    "random_seed",
    "random_split",
    "random_wrap",
    "random_unwrap",
    "threefry2x32",
    "rng_bit_generator",
    "from_edtype",
    "to_edtype",
    "iota",
    "axis_index",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    "after_all",
    "create_token",
)
_REFERENCES = (
    "new_ref",
    "empty_ref",
    "free_ref",
    "freeze",
    "get",
    "swap",
    "addupdate",
    "accum_grad_in_ref",
    "run_state",
    "new_box",
    "box_get",
    "box_set",
    "new_log",
    "log_extend",
    "log_read",
)


def _default(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> object:
    """Dequantize, apply, rescale by the power of two nearest the RMS of the result."""
    return interpreter.default(eqn, values)


def _never(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> object:
    """On integers, keys and tokens, which have no scale; applied as it is."""
    return interpreter.default(eqn, values)


@register("default: linear algebra", "cholesky")
def cholesky(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> object:
    """As the default; the upper triangle, which is undefined, is not measured."""
    return interpreter.default(eqn, values, clean=jnp.tril)


register("without scale", *_INTEGERS)(_never)
register("default: linear algebra", *_LINEAR_ALGEBRA)(_default)
register("default: generic reductions and solves", *_GENERIC)(_default)
register("default: code outside JAX", *_OUTSIDE)(_default)
register("default: mutable references hold plain values", *_REFERENCES)(_default)
