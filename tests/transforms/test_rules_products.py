"""Products and contractions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import cast_data, get_data_scale, scalify

from .law import law
from .table import PRODUCTS

test_value_and_gradient = law(PRODUCTS)


def scale_of(function: Callable[..., Any], *args: Any) -> float:
    return float(scalify(lambda *a: get_data_scale(function(*a))[1])(*args))


@pytest.mark.parametrize("width", [1, 16, 48, 64, 1024])
def test_dot_grows_by_the_root_of_the_contraction(width: int) -> None:
    x = ScaledArray(jnp.ones((2, width)), jnp.float32(4.0))
    w = ScaledArray(jnp.ones((width, 3)), jnp.float32(0.5))
    expected = 2.0 * 2.0 ** round(np.log2(np.sqrt(width)))
    assert scale_of(lambda a, b: a @ b, x, w) == expected


def test_plain_numbers_carry_their_own_magnitude() -> None:
    """Known or not, a number is split into mantissa and scale; data stays at unit size."""
    x = ScaledArray(jnp.ones(3, jnp.float16), jnp.float32(1.0))
    rate = jnp.float32(1e-3)
    assert scale_of(lambda a: a * 1e-3, x) == 2.0**-10
    assert scale_of(lambda a, r: a * r, x, rate) == 2.0**-10
    assert scale_of(lambda a, r: a / r, x, rate) == 2.0**10
    assert scale_of(lambda a: a * 0.25, x) == 0.25


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_dot_sees_fp8_operands_after_a_cast(name: str) -> None:
    dtype = jnp.dtype(name)
    x = as_scaled(jnp.ones((4, 8)), dtype=jnp.float16)
    w = as_scaled(jnp.ones((8, 2)), dtype=jnp.float16)
    product = jax.jit(scalify(lambda a, b: cast_data(a, dtype) @ cast_data(b, dtype)))
    (call,) = jax.make_jaxpr(product)(x, w).eqns
    (dot,) = [e for e in call.params["jaxpr"].eqns if e.primitive.name == "dot_general"]
    assert [v.aval.dtype for v in dot.invars] == [dtype, dtype]
    result = product(x, w)
    assert result.dtype == jnp.float16
    np.testing.assert_array_equal(result.value, 8.0)


def test_the_gradient_of_an_fp8_product_is_one_too() -> None:
    """E4M3 forward, E5M2 for the cotangent: three products, each with two 8-bit operands."""
    e4m3, e5m2 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = cast_data(x, e4m3) @ cast_data(w, e4m3)
        return jnp.sum(jnp.tanh(cast_data(y, e5m2, on="backward")))

    args = as_scaled((jnp.ones((8, 2)), jnp.ones((4, 8))), dtype=jnp.float16)
    jaxpr = jax.make_jaxpr(scalify(jax.grad(loss, argnums=(0, 1))))(*args)
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    found = sorted([sorted(v.aval.dtype.name for v in e.invars) for e in dots])
    mixed = [e4m3.name, e5m2.name]
    assert found == [[e4m3.name] * 2, mixed, mixed]


def test_a_convolution_of_two_8_bit_formats_meets_in_the_type_of_the_data() -> None:
    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        x, kernel = cast_data(x, jnp.float8_e4m3fn), cast_data(kernel, jnp.float8_e4m3fn)
        y = jax.lax.conv(x, kernel, (1, 1), "SAME")
        return cast_data(y, jnp.float8_e5m2, on="backward").sum()

    kernel, x = jnp.ones((2, 1, 3, 3)), jnp.arange(64.0).reshape(1, 1, 8, 8) / 64
    found = jax.jit(scalify(jax.grad(loss)))(*as_scaled((kernel, x), dtype=jnp.float16))
    # E4M3 keeps 3 bits behind the leading one.
    np.testing.assert_allclose(to_array(found), jax.grad(loss)(kernel, x), rtol=2**-4)


@pytest.mark.parametrize("fill", [0.0, np.inf, np.nan])
def test_products_with_a_fill_of_any_scale(fill: float) -> None:
    def function(x: jax.Array) -> jax.Array:
        return x * jnp.full_like(x, fill)

    x = ScaledArray(jnp.asarray([1.0, 2.0]), jnp.float32(8.0))
    for program in (scalify(function), jax.jit(scalify(function))):
        np.testing.assert_array_equal(to_array(program(x)), function(x.value))


def test_on_other_platforms_float16_products_leave_the_matrix_unit_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One operand is made small before, so that no sum is beyond float16."""
    taken = []

    def elsewhere(*args: Any, default: Any, **_: Any) -> Any:
        taken.append(default(*args))
        return taken[-1]

    rng = np.random.default_rng(0)
    x = ScaledArray(jnp.asarray(rng.normal(size=(4, 4096)), jnp.float16), jnp.float32(2.0**20))
    w = ScaledArray(jnp.asarray(rng.normal(size=(4096, 8)), jnp.float16), jnp.float32(2.0**-90))
    exact = np.asarray(x.value, np.float64) @ np.asarray(w.value, np.float64)
    here = scalify(jnp.dot)(x, w)
    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)
    there = scalify(jnp.dot)(x, w)
    assert [t.dtype for t in taken] == [jnp.float16]
    assert here.scale == there.scale
    for result in (here, there):
        np.testing.assert_allclose(result.value, exact, atol=2.0**-10 * np.abs(exact).max())

    # The largest sum there is, of one sign: 64 times what the root of its terms lets expect.
    ones = ScaledArray(jnp.ones((4096,), jnp.float16), jnp.float32(1))
    assert float(scalify(jnp.dot)(ones, ones).value) == 4096
    assert len(taken) == 2


@pytest.mark.parametrize("size", [1e-9, 1e11])
def test_a_plain_operand_may_have_any_size(size: float) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(size * rng.normal(size=(4, 6)), jnp.float32)
    w = as_scaled(jnp.asarray(rng.normal(size=(6, 6)), jnp.float32), dtype=jnp.float16)
    products = {
        "dot": jnp.dot,
        "dot with a fill": lambda x, w: jnp.full_like(x, size) @ w,
        "convolve": lambda x, w: jnp.convolve(x[0], w[0]),
        "ragged": lambda x, w: jax.lax.ragged_dot(x, w[None], jnp.asarray([4])),
    }
    for name, f in products.items():
        expected = f(x, w.value)
        found = to_array(jax.jit(scalify(f))(x, w))
        atol = 2 * float(jnp.finfo(jnp.float16).eps) * np.max(np.abs(expected))
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=name)


# what JAX traces as a call of its own, of a product or a ratio with a number
CALLS: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: jax.vmap(jax.jit(f), (0, None)),
    "cond": lambda f: lambda x, n: lax.cond(x[0] > 0, f, lambda x, n: x, x, n),
}


@pytest.mark.parametrize("number", [0.0, -0.0, jnp.inf, jnp.nan, 3.3])
@pytest.mark.parametrize("call", CALLS)
def test_a_number_that_enters_a_call(call: str, number: float) -> None:
    value = jnp.asarray([1.0, -2.0, 3.0])

    def function(x: jax.Array) -> list[jax.Array]:
        operators = (lax.mul, lambda x, n: n * x, lax.div, lambda x, n: x - n * x)
        return [CALLS[call](f)(x, number) for f in operators]

    for bits, dtypes in {32: ["float32", "bfloat16", "float16"], 64: ["float64"]}.items():
        with jax.enable_x64(bits == 64):
            for dtype in dtypes:
                x = as_scaled(value.astype(dtype))
                expected = [np.asarray(y, np.float64) for y in function(to_array(x))]
                for found, e in zip(to_array(scalify(function)(x)), expected, strict=True):
                    np.testing.assert_allclose(found, e, rtol=4 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("width", [16, 256, 1024])
@pytest.mark.parametrize("program", ["chain", "power", "steps"])
def test_products_of_one_sign_grow_by_the_number_of_terms(program: str, width: int) -> None:
    """In one program, and from step to step: nothing saturates, though its root was expected."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(4, width))
    matrix = rng.uniform(size=(width, width))
    given = as_scaled(jax.tree.map(jnp.float32, (x, matrix)), dtype=jnp.float16)
    if program == "chain":
        found = jax.jit(scalify(lambda x, w: x @ w @ w @ w @ w @ w @ w))(*given)
    elif program == "power":
        found = jax.jit(scalify(lambda x, w: x @ jnp.linalg.matrix_power(w, 6)))(*given)
    else:
        step, (found, weights) = jax.jit(scalify(jnp.matmul)), given
        for _ in range(6):
            found = step(found, weights)
    right = x @ np.linalg.matrix_power(matrix, 6)
    assert found.dtype == jnp.float16
    values = np.asarray(found.data, np.float64) * float(found.scale)
    np.testing.assert_allclose(values, right, rtol=4e-3)
