"""What a loop carries: which of its leaves are scaled, in which type, and whose scale changes.

The answer is a fixed point: a leaf that starts plain may come back scaled, and then it has to start
scaled. Leaves only ever move up from plain to fixed scale to variable scale, so few rounds do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ._align import at_scale, held
from ._doubt import DOUBT, UNKNOWN
from ._lazy_scale import LazyScale
from ._settle import measured, settle
from ._values import (
    ONE,
    Value,
    is_complex,
    is_float,
    narrow,
    saturate,
    spans,
    uniform,
    widen,
)

_TURNS = "changes from turn to turn"


class Form(NamedTuple):
    """How one carried leaf crosses from one iteration to the next.

    Attributes:
        scale: None for a plain leaf, a formula for a scale that no iteration changes (1 where those
            of data with the range of float32 differ), "variable".
        dtype: type of what is computed from it, and of the data unless that is wide.
        wide: whether data crosses in float32, at scale 1: where the program starts with a plain
            array of its own, such as a sum with zeros, which rounding in every turn would stop.
    """

    scale: LazyScale | str | None
    dtype: Any
    wide: bool = False

    @property
    def is_variable(self) -> bool:
        """Whether the scale is carried as an array."""
        return self.scale == "variable"


def _fixed_scale(value: Value) -> LazyScale | None:
    """The scale of a value that turns cannot drift away from; None if it has to be variable.

    What every turn adds to the doubt would add up unseen.
    """
    if value.scale is None or value.scale.ndim or not value.doubt.within(DOUBT):
        return None
    return value.scale.shift(round(value.drift))


def changing(dtype: Any) -> Form:
    """The form of a leaf that has no scale of one formula."""
    return Form(ONE if is_float(dtype) and spans(dtype) else "variable", dtype)


def first_form(value: Value) -> Form:
    """Returns the form that assumes least: scales do not change, plain leaves stay plain."""
    if value.scale is None:
        return Form(None, jnp.result_type(value.data))
    scale = None if value.const == 0.0 else _fixed_scale(value)
    return changing(value.dtype) if scale is None else Form(scale, value.dtype)


def joined(form: Form, result: Value) -> Form:
    """Returns the form that holds both what went in and what came out of an iteration."""
    if result.scale is None:
        return form if form.scale is None or form.wide else changing(form.dtype)
    if form.scale is None and is_float(form.dtype):
        return Form(ONE, np.dtype(result.dtype), wide=not is_complex(result.data))
    if form.scale is None:
        return changing(form.dtype)
    dtype = np.dtype(jnp.result_type(form.dtype, result.dtype))
    if form.wide:
        return form._replace(dtype=dtype)
    if form.is_variable or _fixed_scale(result) != form.scale:
        return changing(dtype)
    return Form(form.scale, dtype)


def leave(value: Value, form: Form) -> list[Any]:
    """Returns the arrays that a value crosses as: data, and its scale if that is variable."""
    if form.scale is None:
        return [value.data]
    if form.wide:
        return [widen(at_scale(uniform(value), ONE, form.dtype))]
    if isinstance(form.scale, LazyScale):
        data = at_scale(uniform(value), form.scale, form.dtype)
        return [narrow(saturate(data, form.dtype), form.dtype)]
    value = held(value, form.dtype) if value.scale is None else uniform(value)
    value = settle(value) if value.doubt.within(DOUBT) else measured(value)
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
            scale = LazyScale.of(next(scales), _TURNS) if form.is_variable else form.scale
            assert isinstance(scale, LazyScale), "a scaled leaf has a scale"
            doubt = UNKNOWN if form.wide or (scale == ONE and spans(form.dtype)) else DOUBT
            values.append(Value(data, scale, 0.0, form.dtype, doubt=doubt))
    return values


def crossing(values: list[Value], forms: list[Form]) -> list[Any]:
    """Returns the arrays of all carried leaves in the order that `enter` reads."""
    pairs = [leave(v, f) for v, f in zip(values, forms, strict=True)]
    return [p[0] for p in pairs] + [p[1] for p in pairs if len(p) > 1]
