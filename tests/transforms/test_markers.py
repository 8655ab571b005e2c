"""Markers: identities outside of scalify, with an effect inside."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from tests.refusals import refuses
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import (
    cast_data,
    dynamic_rescale,
    get_data_scale,
    scalify,
    set_scaling,
    stop_scaling,
)

from .agreement import close, scaled

X = jnp.asarray([3.0, -300.0, 0.5])
MARKERS: dict[str, Callable[[Any], Any]] = {
    "set_scaling both": lambda x: set_scaling(x, 4.0, on="both"),
    "stop_scaling": stop_scaling,
    "get_data_scale": lambda x: get_data_scale(x)[0],
    "dynamic_rescale": lambda x: dynamic_rescale(x, on="both"),
    "cast_data": lambda x: cast_data(x, jnp.float8_e4m3fn, on="both"),
}


def test_identity_outside_and_the_same_value_inside() -> None:
    def inside(marker: Any, x: Any) -> Any:
        marked = scalify(lambda a: jax.value_and_grad(lambda b: jnp.sum(marker(b) ** 2))(a))
        return to_array(marked(x))

    def outside(marker: Any, x: Any) -> Any:
        slope = jax.grad(lambda x: jnp.sum(marker(x) ** 2))(x)
        return marker(x), jax.vmap(marker)(x), jax.jvp(marker, (x,), (x,))[1], slope / 2

    x = ScaledArray(X, jnp.float32(2.0))
    exact = {*MARKERS} - {"cast_data", "get_data_scale"}
    table = {name: (functools.partial(outside, marker), X) for name, marker in MARKERS.items()}
    table |= {(name,): (functools.partial(inside, MARKERS[name]), x) for name in exact}
    for name, found in compute(table).items():
        with entry(name):
            if name in MARKERS:
                close(found, [X] * 4)
            else:
                close(found, (np.sum(x.value**2), 2 * x.value), rtol=1e-6)


@pytest.mark.parametrize("on", ["forward", "backward"])
def test_each_direction_alone(on: Any) -> None:
    """The requested scale shows only in the marked direction."""
    x = ScaledArray(X, jnp.float32(2.0))

    def scales(a: Any) -> Any:
        marked, pull = jax.vjp(lambda b: set_scaling(b, 64.0, on=on), a)
        return get_data_scale(marked)[1], get_data_scale(pull(a)[0])[1]

    assert [float(s) for s in scalify(scales)(x)] == ([64, 2] if on == "forward" else [2, 64])


def test_rescaled_and_cast_data() -> None:
    x = ScaledArray(X.astype(jnp.float16), jnp.float32(2.0))
    by_amax = scalify(lambda a: dynamic_rescale(a, "amax"))(x)
    assert float(by_amax.scale) == 512.0
    assert scalify(lambda a: cast_data(a, jnp.float8_e5m2))(x).dtype == jnp.float8_e5m2
    back = scalify(lambda a: cast_data(a, jnp.float8_e5m2) + 0.5)(x)
    assert back.dtype == jnp.float16, "results have the type from before the cast"
    for run in (lambda f: f, jax.jit):
        traced = run(scalify(set_scaling))(x, jnp.float32(8.0))
        assert float(traced.scale) == 8.0
        np.testing.assert_array_equal(traced.value, x.value)


def test_the_data_of_a_product_is_measured_before_8_bits() -> None:
    small = scaled(2.0**-6 * np.ones((4, 4)))
    found = jax.jit(scalify(lambda a: cast_data(a @ a, jnp.float8_e4m3fn)))(small)
    assert found.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(found.value, 2.0**-10)


def test_a_backward_cast_rounds_the_cotangent() -> None:
    x = as_scaled(jnp.asarray([1.3, 0.7]), dtype=jnp.float16)

    def loss(a: Any) -> Any:
        return jnp.sum(cast_data(a, jnp.float8_e5m2, on="backward") ** 2)

    gradient = to_array(scalify(jax.grad(loss))(x))
    exact = 2 * np.asarray(x.value)
    assert np.any(gradient != exact)
    np.testing.assert_allclose(gradient, exact, rtol=2.0**-3)


test_bad_input = refuses(
    [
        *(
            (ValueError, lambda n=n: set_scaling(X, n), "scale")
            for n in (0.0, -1.0, np.inf, np.nan)
        ),
        (ValueError, lambda: set_scaling(X, X), r"scale .*\(3,\)"),
        (ValueError, lambda: set_scaling(X, 2.0, on="up"), "on .*'up'"),
        (ValueError, lambda: dynamic_rescale(X, "mean"), "statistic .*'mean'"),
        (TypeError, lambda: stop_scaling(jnp.arange(3)), "int32"),
        (ValueError, lambda: cast_data(X, "float99"), "float99"),
    ]
)


def test_a_scale_that_is_too_small_saturates() -> None:
    x = as_scaled(jnp.array([1.0, -2.0]), dtype=jnp.float16)
    found = scalify(lambda x: set_scaling(x, 2.0**-20))(x)
    np.testing.assert_array_equal(found.value, np.array([65504, -65504]) * 2.0**-20)
    found = scalify(lambda x: set_scaling(cast_data(x, jnp.float8_e4m3fn), 2.0**-10))(x)
    np.testing.assert_array_equal(found.value, np.array([448, -448]) * 2.0**-10)


def test_statistics_fit_8_bits_and_scales_are_read_eagerly() -> None:
    outlier = jnp.zeros(1 << 20).at[0].set(1.0)
    for narrow in (lambda x: cast_data(x, jnp.float8_e4m3fn), lambda x: x.astype("float8_e4m3fn")):
        assert float(to_array(scalify(narrow)(as_scaled(outlier)))[0]) == 1
    held = ScaledArray(outlier.astype(jnp.float8_e4m3fn), jnp.float32(1))
    assert float(to_array(scalify(dynamic_rescale)(held))[0]) == 1
    scale = as_scaled(jnp.float32(4.0))
    assert float(scalify(set_scaling)(as_scaled(jnp.ones(2)), scale).scale) == 4
