"""Keeps XLA from laying an array out as the product that made it likes best."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

row_major_p = Primitive("unitscale_row_major")
row_major_p.def_impl(lambda x: x)
row_major_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[row_major_p] = lambda args, dims: (row_major_p.bind(*args), dims[0])


def row_major(x: Any) -> Any:
    """Returns the array, laid out as parameters lie, in a program for one device.

    On several the constraint would gather a sharded array, so there it is left out.

    Example:
        >>> print(row_major(jnp.arange(3.0)))
        [0. 1. 2.]
    """
    return row_major_p.bind(jnp.asarray(x))


def _jvp(primals: Any, tangents: Any) -> Any:
    (tangent,) = tangents
    return row_major_p.bind(*primals), tangent


ad.primitive_jvps[row_major_p] = _jvp


def _constrained(x: Any) -> Any:
    return with_layout_constraint(x, Layout(tuple(range(jnp.ndim(x)))))


def _lower(context: Any, x: Any) -> Any:
    if getattr(context.module_context.axis_context, "num_devices", None) != 1:
        return [x]
    return mlir.lower_fun(_constrained, multiple_results=False)(context, x)


mlir.register_lowering(row_major_p, _lower)
