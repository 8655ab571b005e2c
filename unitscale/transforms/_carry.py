"""What a loop carries: which of its leaves are scaled, in which type, and whose scale changes.

The answer is a fixed point: a leaf that starts plain may come back scaled, and then it has to start
scaled. Leaves only ever move up from plain to fixed scale to variable scale, so few rounds do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core._lazy_scale import LazyScale
from ._settle import measured, settle
from ._values import (
    DOUBT,
    ONE,
    Value,
    data_dtype,
    is_float,
    narrow,
    saturate,
    scale_of,
    times,
    uniform,
    widen,
)

# The scale of zeros that do not know theirs yet: whatever they meet is larger.
SMALLEST = LazyScale(-126)


class Form(NamedTuple):
    """How one carried leaf crosses from one iteration to the next.

    Attributes:
        scale: None for a plain leaf, a formula for a scale that no iteration changes, "variable".
        dtype: type of the data.
    """

    scale: LazyScale | str | None
    dtype: Any

    @property
    def is_variable(self) -> bool:
        """Whether the scale is carried as an array."""
        return self.scale == "variable"


def _fixed_scale(value: Value) -> LazyScale | None:
    """The scale of a value that turns cannot drift away from; None if it has to be variable.

    What every turn adds to the doubt would add up unseen.
    """
    if value.scale is None or value.scale.ndim or value.doubt > DOUBT:
        return None
    return settle(value).scale


def first_form(value: Value) -> Form:
    """Returns the form that assumes least: scales do not change, plain leaves stay plain."""
    if value.scale is None:
        return Form(None, jnp.result_type(value.data))
    if value.const == 0.0:
        return Form("variable", value.dtype)
    scale = _fixed_scale(value)
    return Form("variable" if scale is None else scale, value.dtype)


def joined(form: Form, result: Value) -> Form:
    """Returns the form that holds both what went in and what came out of an iteration."""
    if result.scale is None:
        if form.scale is None or form.is_variable:
            return form
        return Form("variable", form.dtype)
    if form.scale is None:
        return Form("variable", result.dtype if is_float(form.dtype) else form.dtype)
    dtype = data_dtype(Value(result.data, ONE, dtype=form.dtype), result)
    if form.is_variable or _fixed_scale(result) != form.scale:
        return Form("variable", dtype)
    return Form(form.scale, dtype)


def leave(value: Value, form: Form) -> list[Any]:
    """Returns the arrays that a value crosses as: data, and its scale if that is variable."""
    if form.scale is None:
        return [value.data]
    if value.const == 0.0 and form.is_variable:
        zeros = jnp.zeros_like(value.data, form.dtype)
        return [zeros, jnp.asarray(SMALLEST.array())]
    if isinstance(form.scale, LazyScale):
        own = scale_of(uniform(value))
        data = times(widen(uniform(value).data), own / form.scale)
        return [narrow(saturate(data, form.dtype), form.dtype)]
    value = Value(value.data, ONE, dtype=form.dtype) if value.scale is None else uniform(value)
    value = measured(value) if value.doubt > DOUBT else settle(value)
    assert value.scale is not None, "a variable leaf is scaled"
    data = narrow(saturate(widen(value.data), form.dtype), form.dtype)
    return [data, lax.stop_gradient(jnp.asarray(value.scale.array(), np.float32))]


def enter(arrays: list[Any], forms: list[Form]) -> list[Value]:
    """Rebuilds carried values: data of all leaves, then the variable scales."""
    scales = iter(arrays[len(forms) :])
    values = []
    for data, form in zip(arrays, forms, strict=False):
        if form.scale is None:
            values.append(Value(data))
        else:
            scale = LazyScale.of(next(scales)) if form.is_variable else form.scale
            assert isinstance(scale, LazyScale), "a scaled leaf has a scale"
            values.append(Value(data, scale, 0.0, form.dtype))
    return values


def crossing(values: list[Value], forms: list[Form]) -> list[Any]:
    """Returns the arrays of all carried leaves in the order that `enter` reads."""
    pairs = [leave(v, f) for v, f in zip(values, forms, strict=True)]
    return [p[0] for p in pairs] + [p[1] for p in pairs if len(p) > 1]
