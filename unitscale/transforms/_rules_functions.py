"""Functions of the value: they see ``data * scale`` in float32, and their result has scale 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ._doubt import UNKNOWN
from ._interpreter import Interpreter
from ._registry import register
from ._settle import finish
from ._values import ONE, Value, data_dtype, is_float, numeric, widen

_FUNCTIONS = (
    "cos",
    "acos",
    "log",
    "log2",
    "acosh",
    "bessel_i0e",
    "bessel_i1e",
    "tanh",
    "logistic",
    "erf",
    "sin",
    "asin",
    "atan",
    "log1p",
    "asinh",
    "atanh",
    "erf_inv",
    "erfc",
    "igamma",
    "igammac",
    "igamma_grad_a",
    "random_gamma_grad",
    "regularized_incomplete_beta",
    "cbrt",
    "exp",
    "exp2",
    "expm1",
    "sinh",
    "cosh",
    "tan",
    "pow",
    "lgamma",
    "digamma",
    "polygamma",
    "zeta",
    "floor",
    "ceil",
    "round",
    "log_softmax",
    "cumlogsumexp",
    "one_minus_square",
    "polynomial",
    "reduce_prod",
    "cumprod",
    "nextafter",
)


def wide_values(values: Sequence[Value]) -> list[Any]:
    """Returns what the operands stand for, in the wide types of the program."""
    return [widen(numeric(v)) if is_float(v.data) else v.data for v in values]


@register("function", *_FUNCTIONS)
def function_of(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """f(data * scale) in float32, at scale 1 until it is rounded or leaves: then at its own.

    What has no bound may be large, and what vanishes, at zero, a root or in a tail, as small.
    """
    if (apart := interpreter.decoupled(eqn, values)) is not None:
        return apart
    data = interpreter.bind(eqn, wide_values(values))
    dtype = data_dtype(*values)
    return finish(data, ONE, 0.0, dtype, doubt=UNKNOWN)
