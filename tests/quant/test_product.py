"""The one differentiable contraction, against float64 products of operands cast by ml_dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.products import conversions
from unitscale.quant import Contraction, MatmulConfig, contract, product

SPECS = {
    "dense": (Contraction("bk", "kn", "bn"), (3, 8), (8, 4)),
    "batch": (Contraction("abk", "akn", "abn"), (2, 3, 8), (2, 8, 4)),
    "transposed": (Contraction("kb", "nk", "nb"), (8, 3), (4, 8)),
    "two sums": (Contraction("abk", "kan", "bn"), (2, 3, 8), (8, 2, 4)),
    "batch last": (Contraction("kba", "kna", "bna"), (8, 3, 2), (8, 4, 2)),
}
PLAIN = SPECS["dense"][0]
FACTORS = (0.25, 0.125, 0.5)


def cast(x: np.ndarray, dtype) -> np.ndarray:
    dtype = jnp.dtype(dtype)
    x = np.asarray(x, np.float32)
    if dtype.itemsize == 1:
        top = float(jnp.finfo(dtype).max)
        x = np.clip(x, -top, top)
    return x.astype(dtype).astype(np.float64)


def einsum(spec: Contraction, lhs, rhs) -> np.ndarray:
    return np.einsum(f"{spec.lhs},{spec.rhs}->{spec.out}", lhs, rhs)


def draw(seed: int, *shapes) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


@pytest.mark.parametrize("cotangent", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", SPECS)
def test_three_quantized_products(name: str, cotangent: str) -> None:
    spec, *shapes = SPECS[name]
    config = MatmulConfig(cotangent=cotangent)
    lhs, rhs = draw(0, *shapes)
    lhs[(0,) * lhs.ndim] = 500.0  # saturates to 448, and is not NaN

    @jax.jit
    def run(lhs, rhs, dy):
        y, vjp = jax.vjp(lambda *a: contract(*a, spec, factors=FACTORS, config=config), lhs, rhs)
        return y, vjp(dy)

    qlhs, qrhs = cast(lhs, "float8_e4m3fn"), cast(rhs, "float8_e4m3fn")
    expected = FACTORS[0] * einsum(spec, qlhs, qrhs)
    (dy,) = draw(1, expected.shape)
    dy[(0,) * dy.ndim] = 1e6  # saturates in either format
    y, (dlhs, drhs) = run(lhs, rhs, dy)
    tolerance = {"rtol": 2e-6, "atol": 1e-4}
    np.testing.assert_allclose(y, expected, **tolerance)
    qdy = cast(dy, cotangent)
    grad_lhs = einsum(Contraction(spec.out, spec.rhs, spec.lhs), qdy, qrhs)
    grad_rhs = einsum(Contraction(spec.lhs, spec.out, spec.rhs), qlhs, qdy)
    np.testing.assert_allclose(dlhs, FACTORS[1] * grad_lhs, rtol=2e-6, atol=1e-1)
    np.testing.assert_allclose(drhs, FACTORS[2] * grad_rhs, rtol=2e-6, atol=1e-1)


def leaves(config, lhs_dtype, rhs_dtype, transform=lambda f: f) -> dict[str, int]:
    """Bytes of what the backward pass keeps, by dtype."""
    lhs, rhs = (jnp.ones((16, 16), d) for d in (lhs_dtype, rhs_dtype))
    f = transform(lambda *a: contract(*a, PLAIN, factors=FACTORS, config=config))
    _, vjp = jax.vjp(f, lhs, rhs)
    found: dict[str, int] = {}
    for leaf in jax.tree.leaves(vjp):
        found[leaf.dtype.name] = found.get(leaf.dtype.name, 0) + leaf.nbytes
    return {name: size for name, size in found.items() if size}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_backward_keeps_8_bit_operands(transform) -> None:
    kept = leaves(MatmulConfig(cotangent="e5m2"), "bfloat16", "float32", transform)
    factors = {"float32": 8}  # those of the two gradients
    assert kept == {"float8_e4m3fn": 512, **factors}
    mixed = leaves(MatmulConfig(lhs="e5m2"), "bfloat16", "float32", transform)
    assert mixed == {"float8_e5m2": 256, "float8_e4m3fn": 256, **factors}


def test_without_a_config_the_backward_keeps_the_operands_as_they_came() -> None:
    assert leaves(None, "bfloat16", "float32") == {"bfloat16": 512, "float32": 1024}


DTYPES = [
    # lhs, rhs, config, result
    ("bfloat16", "float32", MatmulConfig(), "bfloat16"),
    ("float16", "float32", MatmulConfig(), "float16"),
    ("float32", "bfloat16", MatmulConfig(), "float32"),
    ("float8_e4m3fn", "float8_e5m2", MatmulConfig(rhs="e5m2"), "bfloat16"),
    ("bfloat16", "bfloat16", MatmulConfig(lhs="E4M3", rhs="E4M3", cotangent="E4M3"), "bfloat16"),
    ("float32", "float16", MatmulConfig(lhs="float16", rhs="bfloat16"), "float32"),
    ("bfloat16", "float32", None, "float32"),
    ("float16", "float16", None, "float16"),
    ("float8_e4m3fn", "float8_e4m3fn", None, "bfloat16"),
    ("float8_e5m2", "bfloat16", None, "bfloat16"),
]


@pytest.mark.parametrize(("lhs", "rhs", "config", "result"), DTYPES)
def test_dtypes(lhs, rhs, config, result) -> None:
    a, b = jnp.full((2, 4), 2.0, lhs), jnp.full((4, 3), 4.0, rhs)
    y, vjp = jax.vjp(lambda a, b: contract(a, b, PLAIN, config=config), a, b)
    grads = vjp(jnp.ones_like(y))
    assert y.dtype.name == result
    assert [g.dtype.name for g in grads] == [lhs, rhs]
    np.testing.assert_array_equal(np.float32(y), 32)
    np.testing.assert_array_equal(np.float32(grads[0]), 12)
    np.testing.assert_array_equal(np.float32(grads[1]), 4)


def test_gradient_of_an_8_bit_operand_saturates() -> None:
    a, b = jnp.full((2, 4), 2.0, jnp.float8_e4m3fn), jnp.full((4, 3), 3.0, jnp.float32)
    for config in (None, MatmulConfig()):
        _, vjp = jax.vjp(lambda a, config=config: contract(a, b, PLAIN, config=config), a)
        dy = jnp.full((2, 3), 400.0, jnp.bfloat16 if config else jnp.float32)
        np.testing.assert_array_equal(np.float32(vjp(dy)[0]), 448)


def test_float16_factor_is_applied_before_rounding() -> None:
    a, b = jnp.full((1, 4096), 4.0, jnp.float16), jnp.full((4096, 1), 4.0, jnp.float16)
    y = contract(a, b, PLAIN, factors=(1 / 64, 1.0, 1.0))
    assert y.dtype == jnp.float16
    assert y == 1024
    tiny = jnp.full((1, 16), 2.0**-14, jnp.float16)
    y = contract(tiny, tiny.T, PLAIN, factors=(4096.0, 1.0, 1.0))
    assert y == 2.0**-12  # 16 * 2**-28 * 4096; one product is below float16's range
    for config in (None, MatmulConfig()):
        _, vjp = jax.vjp(
            lambda a, config=config: contract(a, b, PLAIN, factors=(1, 0.25, 1), config=config), a
        )
        (da,) = vjp(jnp.full((1, 1), 448.0, jnp.float16))
        np.testing.assert_array_equal(da, 448)


def test_float16_sum_beyond_the_range_of_float16_with_8_bit_operands() -> None:
    a = jnp.full((1, 64), 448.0, jnp.float16)
    y = contract(a, a.T, PLAIN, factors=(2.0**-10, 1, 1), config=MatmulConfig())
    assert y == np.float16(64 * 448**2 / 1024)


def test_the_cotangent_is_quantized_once() -> None:
    lhs, rhs = draw(0, (3, 8), (8, 4))
    dy = jnp.ones((3, 4))
    _, vjp = jax.vjp(
        lambda *a: contract(*a, PLAIN, config=MatmulConfig(cotangent="e5m2")), lhs, rhs
    )
    assert conversions(jax.make_jaxpr(vjp)(dy), "float8_e5m2") == [(3, 4)]


def test_products_are_emitted_in_the_direct_form() -> None:
    """A dot of 8-bit operands straight into bfloat16, then one multiplication by a literal."""
    a = jnp.ones((4, 8), jnp.float8_e4m3fn)
    f = lambda a: product(a, a.T, PLAIN, 0.125, jnp.bfloat16)  # noqa: E731
    names = [e.primitive.name for e in jax.make_jaxpr(f)(a).eqns]
    assert names == ["transpose", "dot_general", "mul"]


@pytest.mark.parametrize("config", [None, MatmulConfig()], ids=["plain", "fp8"])
def test_transformations_agree(config) -> None:
    lhs, rhs = draw(2, (2, 3, 8), (8, 4))

    def f(lhs, rhs):
        return contract(lhs, rhs, PLAIN, factors=FACTORS, config=config)

    def pull(f):
        y, vjp = jax.vjp(f, lhs, rhs)
        return y, *vjp(jnp.cos(y))

    def vmapped(lhs, rhs):
        return jax.vmap(f, (0, None))(lhs, rhs)

    def scanned(lhs, rhs):
        return jax.lax.scan(lambda c, x: (c, f(x, rhs)), 0, lhs)[1]

    def looped(lhs, rhs):
        return jnp.stack([f(x, rhs) for x in lhs])

    expected = pull(looped)
    for g in (vmapped, scanned, jax.checkpoint(looped), jax.jit(looped)):
        for actual, wanted in zip(pull(g), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def test_contraction_names_its_gradients() -> None:
    spec = Contraction("abk", "kn", "abn")
    assert spec.grad_lhs == Contraction("abn", "kn", "abk")
    assert spec.grad_rhs == Contraction("abk", "abn", "kn")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_dithered_cotangents_keep_their_mean(dtype: str) -> None:
    """Numbers below the middle of a step, which rounded to the nearest all go down."""
    step = float(jnp.finfo(dtype).eps)
    cotangent = jnp.linspace(1.0, 1.0 + step / 2, 4096)[:, None]

    def mean_of_gradients(config: MatmulConfig | None) -> float:
        spec = Contraction("tk", "kn", "tn")
        _, vjp = jax.vjp(
            lambda w: contract(jnp.ones((4096, 1)), w, spec, config=config), jnp.ones((1, 1))
        )
        return vjp(cotangent)[0].item() / 4096

    nearest = MatmulConfig(lhs="float32", rhs="float32", cotangent=dtype)
    assert mean_of_gradients(nearest) == pytest.approx(1.0, abs=step / 100)
    dithered = mean_of_gradients(dataclasses.replace(nearest, dither=True))
    assert dithered == pytest.approx(mean_of_gradients(None), abs=step / 50)


def test_dithered_cotangents_saturate() -> None:
    """Also the largest of float16, which rounded up are beyond it."""
    config = MatmulConfig(lhs="float32", rhs="float32", dither=True)
    lhs = jnp.ones((1, 1), jnp.float16)
    _, vjp = jax.vjp(lambda x: contract(x, lhs, PLAIN, config=config), lhs)
    assert vjp(jnp.full((1, 1), 65472, jnp.float16))[0].item() == 448
