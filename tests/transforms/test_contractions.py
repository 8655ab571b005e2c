"""Matmuls, convolutions and attention under scalify."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir

from tests.products import equations
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.core import cudnn_of
from unitscale.transforms import cast_data, get_data_scale, scalify

from .agreement import HALF, check, close, narrow, normal


def test_plain_numbers_carry_their_own_magnitude() -> None:
    """Plain numbers, constant or traced, are split into mantissa and scale."""
    functions = lambda a, r: (a * 1e-3, a * r, a / r, a * 0.25)  # noqa: E731
    scales = scalify(lambda *args: [get_data_scale(y)[1] for y in functions(*args)])
    x = ScaledArray(jnp.ones(3, jnp.float16), jnp.float32(1.0))
    found = to_array(jax.jit(scales)(x, jnp.float32(1e-3)))
    np.testing.assert_array_equal(found, [2.0**-10, 2.0**-10, 2.0**10, 0.25])


def test_the_gradient_of_an_fp8_product_is_one_too() -> None:
    """All three matmuls have two 8-bit operands: E4M3 forward, E5M2 for the cotangent."""
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

    args = jnp.ones((2, 1, 3, 3)), jnp.arange(64.0).reshape(1, 1, 8, 8) / 64
    check({"convolution": (jax.grad(loss), *narrow(args))}, rtol=2**-4)  # E4M3 keeps 3 more bits


def test_on_other_platforms_float16_products_leave_the_matrix_unit_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One operand is scaled down first, so that no sum overflows float16."""
    taken = []

    def elsewhere(*args: Any, default: Any, **_: Any) -> Any:
        taken.append(default(*args))
        return taken[-1]

    rng = np.random.default_rng(0)
    x = ScaledArray(jnp.asarray(rng.normal(size=(4, 4096)), jnp.float16), jnp.float32(2.0**20))
    w = ScaledArray(jnp.asarray(rng.normal(size=(4096, 8)), jnp.float16), jnp.float32(2.0**-90))
    # The largest sum there is, of one sign: 64 times what the root of its terms lets expect.
    ones = ScaledArray(jnp.ones((4096,), jnp.float16), jnp.float32(1))
    exact = np.asarray(x.value, np.float64) @ np.asarray(w.value, np.float64)
    here = jax.jit(scalify(jnp.dot))(x, w)
    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)
    run = jax.jit(lambda x, w, ones: (scalify(jnp.dot)(x, w), scalify(jnp.dot)(ones, ones)))
    there, largest = run(x, w, ones)
    assert [t.dtype for t in taken] == [jnp.float16] * 2
    assert here.scale == there.scale
    for result in (here, there):
        np.testing.assert_allclose(result.value, exact, atol=2.0**-10 * np.abs(exact).max())
    assert float(largest.value) == 4096


PRODUCTS: dict[str, Callable[..., Any]] = {
    "dot": lambda x, w, size: x @ w,
    "dot with a fill": lambda x, w, size: jnp.full_like(x, size) @ w,
    "convolve": lambda x, w, size: jnp.convolve(x[0], w[0]),
    "ragged": lambda x, w, size: jax.lax.ragged_dot(x, w[None], jnp.asarray([4])),
}


def test_a_plain_operand_may_have_any_size() -> None:
    x, w = jnp.float32(normal(0, 4, 6)), narrow(normal(1, 6, 6))
    sizes = itertools.product(PRODUCTS, (1e-9, 1e11))
    table = {(n, m): (functools.partial(PRODUCTS[n], size=m), m * x, w) for n, m in sizes}
    check(table, atol=2 * HALF)


# what JAX traces as a call of its own, of a product or a ratio with a number
CALLS: list[Callable[[Any], Any]] = [
    jax.jit,
    jax.checkpoint,
    lambda f: jax.vmap(jax.jit(f), (0, None)),
    lambda f: lambda x, n: lax.cond(x[0] > 0, f, lambda x, n: x, x, n),
]


OPERATORS = lax.mul, lambda x, n: n * x, lax.div, lambda x, n: x - n * x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_number_that_enters_a_call(dtype: str) -> None:
    cases = list(itertools.product(CALLS, OPERATORS, (-0.0, jnp.inf, 3.3)))
    with jax.enable_x64(dtype == "float64"):
        x = as_scaled(jnp.asarray([1.0, -2.0, 3.0], dtype))
        table = {
            i: (lambda x, case=case: case[0](case[1])(x, case[2]), x)
            for i, case in enumerate(cases)
        }
        check(table, rtol=4 * float(jnp.finfo(dtype).eps))


def chain(x: Any, weights: Any) -> Any:
    return lax.scan(lambda c, w: (c @ w, None), x, weights)[0]


# Sums of one sign grow by the number of terms, not by its root, and must not saturate.
POSITIVE = np.abs(normal(0, 4, 512)), np.abs(normal(1, 512, 512))
MANY = 1e-3 * normal(2, 8, 24), 0.1 * normal(3, 60, 24, 24)
CHAINS: dict[str, tuple[Callable[..., Any], Any]] = {
    "60 in a loop": (chain, MANY),
    "12 in a row": (lambda x, w: functools.reduce(jnp.matmul, [x, *w[:12]]), MANY),
    "one sign": (lambda x, w: x @ w @ w @ w @ w @ w @ w, POSITIVE),
    "a power of one sign": (lambda x, w: x @ jnp.linalg.matrix_power(w, 6), POSITIVE),
}


@pytest.mark.slow
def test_chains_of_products_neither_overflow_nor_drift() -> None:
    check({name: (f, *narrow(args)) for name, (f, args) in CHAINS.items()}, atol=20 * HALF)
    step, (x, w) = jax.jit(scalify(jnp.matmul)), narrow(POSITIVE)
    exact = x.value @ np.linalg.matrix_power(np.asarray(w.value, np.float64), 6)
    for _ in range(6):
        x = step(x, w)
        assert x.dtype == jnp.float16
        assert 0.25 <= np.sqrt(np.mean(np.square(np.asarray(x.data, np.float64)))) <= 4
    np.testing.assert_allclose(x.value / exact, 1, rtol=4 * HALF)


def down(primitive: str, terms: int) -> float:
    return 2.0 ** math.floor(math.log2(terms) / 2)


@pytest.mark.parametrize(
    ("strategy", "scale"), [("unit", 8.0), ("identity", 1.0), (down, 4.0), (lambda p, n: n, 64.0)]
)
def test_growth_decides_the_scale_of_a_product(strategy: Any, scale: float) -> None:
    x = ScaledArray(jnp.ones((2, 48)), jnp.float32(1.0))
    product = scalify(lambda a: get_data_scale(a @ a.T)[1], static_scaling=strategy)
    # One term does not grow.
    assert list(jax.jit(lambda x: (product(x), product(x[:, :1])))(x)) == [scale, 1.0]
    for wrong in (0.0, math.inf, "big"):
        with pytest.raises(ValueError, match="static_scaling"):
            scalify(lambda a: a @ a.T, static_scaling=lambda p, n, wrong=wrong: wrong)(x)


SHAPE = (2, 16, 3, 8)  # batch, time, heads, features


def _attention(q: Any, k: Any, v: Any, bias: Any, scale: float, mask_type: Any) -> Any:
    q, k, v, bias = (x.astype(jnp.float32) for x in (q, k, v, bias))
    logits = scale * jnp.einsum("bthd,bshd->bhts", q, k) + (bias if bias.size else 0)
    if mask_type.name == "CAUSAL":
        logits = jnp.where(jnp.tri(*logits.shape[-2:]) > 0, logits, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)


def _forward(q, k, v, bias, *_, scale, mask_type, is_training, **__):
    out = _attention(q, k, v, bias, scale, mask_type).astype(q.dtype)
    statistics = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))  # which `_backward` does without
    return [out, statistics] if is_training else [out]


def _backward(*operands, scale, mask_type, variadic_args, **_):
    f = functools.partial(_attention, scale=scale, mask_type=mask_type)
    gradients = jax.vjp(f, *operands[:4])[1](operands[-1].astype(jnp.float32))
    _, has_bias_gradient = variadic_args
    return gradients[: 3 + has_bias_gradient]


@pytest.fixture(scope="module", autouse=True)
def reference() -> Iterator[None]:
    """Give the kernels a lowering for the CPU."""
    x = jnp.ones(SHAPE, jnp.bfloat16)
    with cudnn_of((9, 0), 91200):
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: attend(x, x, x).sum()))(x)
        found = {eqn.primitive.name: eqn.primitive for eqn in equations(jaxpr.jaxpr)}
        for name, function in (("fwd", _forward), ("bwd", _backward)):
            primitive = found[f"dot_product_attention_{name}_wrapper"]
            lowering = mlir.lower_fun(function, multiple_results=True)
            mlir.register_lowering(primitive, lowering, platform="cpu")
        yield


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)


def plain(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)


def attention_program(attention: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def loss(w: Any, x: Any, r: Any) -> Any:
        q, k, v = (x @ u for u in w)
        out = attention(q, 2.0 * k + 0.01, v, **options)
        return jnp.sum(out * r), out

    return jax.grad(loss, has_aux=True)


MASK = jnp.asarray(np.random.default_rng(3).random((2, 1, 16, 16)) < 0.7).at[..., 0].set(True)
OPTIONS: list[dict[str, Any]] = [{"scale": 0.25, "is_causal": True}, {"mask": MASK}, {}]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (OPTIONS[0], jnp.float16),
        *(pytest.param(o, jnp.float16, marks=pytest.mark.slow) for o in OPTIONS[1:]),
        pytest.param(OPTIONS[0], jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_of_attention(options: Any, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    of_w, of_x = 2.0**-12, 2.0**10
    sizes = (of_w, (3, 8, 8)), (of_x, SHAPE), (1e-4, SHAPE)
    args = tuple(jnp.asarray(n * rng.normal(size=s), jnp.float32) for n, s in sizes)

    @jax.jit
    def both(args: Any) -> Any:
        expected = attention_program(plain, **options)(*to_array(args, jnp.float32))
        found = scalify(attention_program(attend, **options))(*args)
        return to_array(found, jnp.float32), expected

    close(*both(as_scaled(args, dtype=dtype)), atol=8 * float(jnp.finfo(dtype).eps))


def test_the_kernel_takes_the_data_of_the_operands() -> None:
    """The scales of q and k are multiplied in; that of v becomes the result's scale."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=SHAPE), jnp.float16) for _ in range(3))
    given = [ScaledArray(x, jnp.float32(s)) for x, s in ((q, 2.0), (k, 0.5), (v, 2.0**30))]
    both = jax.jit(lambda *qkv: (scalify(attend)(*qkv).value, plain(*(x.value for x in qkv))))
    np.testing.assert_allclose(*both(*given), rtol=0, atol=2.0**30 * 4e-3)
    with pytest.raises(NotImplementedError, match="16-bit data"):
        scalify(attend)(*as_scaled((q, k, v), dtype=jnp.float32))
