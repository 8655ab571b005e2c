"""The forms in which values cross from one turn of a loop to the next."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import as_scaled, scalify, to_array
from unitscale.transforms._carry import Form, crossing, enter, first_form, joined
from unitscale.transforms._doubt import Doubt
from unitscale.transforms._lazy_scale import LazyScale
from unitscale.transforms._values import Value

SCALED = Value(jnp.ones(2, jnp.float16), LazyScale(3))


def test_forms_only_move_up() -> None:
    plain, fixed = Form(None, jnp.dtype("float32")), Form(LazyScale(3), jnp.dtype("float16"))
    assert first_form(Value(jnp.ones(2))) == plain
    assert first_form(SCALED) == fixed
    assert joined(fixed, SCALED) == fixed
    wide = joined(plain, SCALED)
    assert wide == Form(LazyScale(), jnp.dtype("float16"), wide=True)
    assert joined(wide, SCALED) == joined(wide, Value(jnp.ones(2))) == wide
    assert joined(fixed, Value(jnp.ones(2, jnp.float16), LazyScale(4))).is_variable
    assert joined(fixed, Value(jnp.ones(2))).is_variable
    uncertain = Value(SCALED.data, SCALED.scale, doubt=Doubt(2.0))
    assert joined(fixed, uncertain).is_variable, "its doubt would add up"


def test_what_starts_plain_crosses_unrounded() -> None:
    form = Form(LazyScale(), jnp.dtype("float16"), wide=True)
    numbers = jnp.asarray([1e-20, 1 / 3, 1e20], jnp.float32)
    (data,) = crossing([Value(numbers / 8, LazyScale(3), dtype=jnp.float16)], [form])
    np.testing.assert_allclose(data, numbers, rtol=1e-6)
    (value,) = enter([data], [form])
    assert value.dtype == jnp.float16
    assert value.doubt.is_great, "it is measured where it is rounded"


def test_what_changes_has_a_scale_of_its_own_or_one() -> None:
    """Narrow leaves carry their scale, those with the range of float32 are at 1."""
    for dtype, variable in ((jnp.float16, True), (jnp.bfloat16, False), (jnp.float32, False)):
        value = Value(jnp.full(2, 3.0, dtype), LazyScale(4), doubt=Doubt(4.0))
        form = first_form(value)
        assert form.is_variable == variable
        data, *scale = crossing([value], [form])
        assert len(scale) == variable
        (back,) = enter([data, *scale], [form])
        np.testing.assert_array_equal(np.asarray(back.wide()), 48.0)


def test_crossing_and_back() -> None:
    values = [
        SCALED,
        Value(jnp.arange(3)),
        Value(jnp.full(2, 3.0, jnp.float16), LazyScale(1), doubt=Doubt(4.0)),
    ]
    forms = [first_form(v) for v in values]
    arrays = crossing(values, forms)
    assert len(arrays) == 4
    for before, after in zip(values, enter(arrays, forms), strict=True):
        one = 1.0 if before.scale is None else float(before.scale.array())
        other = 1.0 if after.scale is None else float(after.scale.array())
        np.testing.assert_array_equal(np.asarray(before.data) * one, np.asarray(after.data) * other)


def test_a_fixed_form_is_kept_whatever_arrives() -> None:
    value = Value(jnp.full(2, 4.0), LazyScale(5), doubt=Doubt(4.0))
    (data,) = crossing([value], [Form(LazyScale(3), jnp.dtype("float32"))])
    np.testing.assert_array_equal(data, 16.0)


@pytest.mark.parametrize("size", [1.0, 1e6, 1e-9])
def test_complex_numbers_cross(size: float) -> None:
    def states(x):
        turn = 0.9 * jnp.exp(0.3j)
        step = lambda h, u: (turn * h + u, (h.real, jnp.abs(h)))  # noqa: E731
        return lax.scan(step, jnp.zeros(3, jnp.complex64), x)[1]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)) * size, jnp.float32)
    found = to_array(jax.jit(scalify(states))(as_scaled(x, dtype="float16")), jnp.float32)
    for a, b in zip(found, states(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=5e-3 * size)
