"""Scales as formulas: what cancels while tracing, and that arrays stay normal numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.transforms._lazy_scale import LazyScale, clipped, largest, ratio


def scale(number: float) -> LazyScale:
    return LazyScale.of(jnp.float32(number))


def test_formulas_cancel_without_an_operation() -> None:
    s, t = scale(8.0), scale(0.5)
    assert s * t / s == t
    assert (s * s / s**2).is_static
    assert (s * t).degree == 2
    assert hash(s * t) == hash(t * s)
    assert (s**2).root() == s
    assert s.root() is None
    assert LazyScale(4).root() == LazyScale(2)
    assert LazyScale(3).root() is None
    assert s != scale(8.0), "atoms are equal only if they are the same"


@pytest.mark.parametrize("powers", [(1, 0), (2, -1), (-1, -1), (0, 3), (3, -3)])
@pytest.mark.parametrize("shift", [0, -7, 130])
def test_array_is_the_product(powers: tuple[int, int], shift: int) -> None:
    made = (scale(8.0) ** powers[0] * scale(0.25) ** powers[1]).shift(shift)
    exact = 8.0 ** powers[0] * 0.25 ** powers[1] * 2.0**shift
    assert float(made.array()) == np.clip(exact, 2.0**-126, 2.0**127)


@pytest.mark.parametrize("exponents", [(100, 100, -100), (-100, -100, 100), (120, 120, 120)])
def test_products_that_leave_the_range_in_between(exponents: tuple[int, ...]) -> None:
    made = LazyScale()
    for exponent in exponents:
        made = made * scale(2.0 ** abs(exponent)) ** (1 if exponent > 0 else -1)
    assert float(made.array()) == 2.0 ** float(np.clip(sum(exponents), -126, 127))


def test_an_array_made_in_a_loop_is_not_used_outside() -> None:
    s = scale(4.0) * scale(2.0)

    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return carry * s.array(), None

    total, _ = jax.lax.scan(body, jnp.float32(1), None, length=2)
    assert float(total * s.array()) == 512.0


@pytest.mark.parametrize(("number", "near"), [(1.0, 1.0), (2.0**40, 256.0), (2.0**-40, 2.0**-8)])
def test_clipped_and_its_rest_multiply_to_the_scale(number: float, near: float) -> None:
    clip, rest = clipped(scale(number), 8)
    assert float(clip.array()) == near
    assert float(rest.array()) * near == number


def test_largest_and_ratio() -> None:
    s, t = scale(8.0), scale(0.5)
    assert largest(s.shift(3), s) == s.shift(3)
    assert float(largest(s, t).array()) == 8.0
    assert ratio(s * t, t) == s
    assert float(ratio(s, t).array()) == 16.0
    items = LazyScale.of(jnp.asarray([[1.0], [32.0]]))
    np.testing.assert_array_equal(largest(items, s).array(), [[8.0], [32.0]])


def test_equal_formulas_are_one_array() -> None:
    s, t = scale(8.0), scale(0.5)
    assert (s * t).array() is (t * s).array()
    assert (s * t).array() is not (s / t).array()


def test_bare_scales() -> None:
    s = scale(8.0)
    assert s.is_bare
    assert not any(x.is_bare for x in (LazyScale(), s.shift(1), s * s, s / scale(2.0)))


@pytest.mark.parametrize("shapes", [((1, 4), (3, 1)), ((3, 4), (4,)), ((3, 4), ()), ((), (1, 4))])
def test_scales_of_several_sizes(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (2.0 ** np.arange(np.prod(s, dtype=int), dtype=np.float32).reshape(s) for s in shapes)
    x, y = (LazyScale.of(jnp.asarray(array)) for array in (a, b))
    made = {"*": (x * y, a * b), "/": (x / y, a / b), "ratio": (ratio(x, y), a / b)}
    made["largest"] = (largest(x, y), np.maximum(a, b))
    for name, (scale, expected) in made.items():
        np.testing.assert_array_equal(scale.array(), expected, err_msg=name)
