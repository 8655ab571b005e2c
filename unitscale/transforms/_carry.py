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
from ._dynamic import unit_of
from ._values import (
    ONE,
    Value,
    correction,
    data_dtype,
    is_float,
    narrow,
    saturate,
    settle,
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


def _exact_scale(value: Value) -> LazyScale | None:
    """The scale that exact settling gives, from what is known without the data; None if it varies."""
    if value.scale is None or value.scale.ndim:
        return None
    return value.scale.shift(correction(value, exactly=True))


def first_form(value: Value) -> Form:
    """Returns the form that assumes least: scales do not change, plain leaves stay plain."""
    if value.scale is None:
        return Form(None, jnp.result_type(value.data))
    if value.const == 0.0:
        return Form("variable", value.dtype)
    scale = _exact_scale(value)
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
    if form.is_variable or _exact_scale(result) != form.scale:
        return Form("variable", dtype)
    return Form(form.scale, dtype)


def leave(value: Value, form: Form) -> list[Any]:
    """Returns the arrays that a value crosses as: data, and its scale if that is variable."""
    if form.scale is None:
        return [value.data]
    if value.const == 0.0 and form.is_variable:
        zeros = jnp.zeros(value.shape, form.dtype)
        return [zeros, jnp.asarray(SMALLEST.array())]
    if value.scale is None:
        data = times(widen(value.data), ONE / form.scale) if not form.is_variable else value.data
        value = Value(data, ONE if form.is_variable else form.scale, dtype=form.dtype)
    else:
        value = settle(uniform(value), exactly=True)
        if form.is_variable and value.doubt > 1 and np.dtype(form.dtype) == np.float16:
            # What every turn adds to the doubt would add up unseen.
            assert value.scale is not None, "settling keeps the scale"
            wide = widen(value.data)
            unit = LazyScale.of(unit_of(wide))
            value = Value(times(wide, ONE / unit), value.scale * unit, dtype=value.dtype)
    data = narrow(saturate(widen(value.data), form.dtype), form.dtype)
    if not form.is_variable:
        return [data]
    assert value.scale is not None, "a variable leaf is scaled"
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
