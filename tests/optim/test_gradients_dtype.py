"""Gradients kept in bfloat16 and FP8, from the backward pass to the optimizer."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import unitscale
from tests.optimizers import scaled
from unitscale import ScaledArray, nn, ops, optim, to_array
from unitscale.core import format_of
from unitscale.parallel import all_reduce

FORMATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


WEIGHTS = {"w": numbers(0, 8, 16), "stack": numbers(1, 3, 8, 4), "b": numbers(2, 16)}
# Items of a stack that share no power of two, and a scale for the weights themselves.
SIZES = np.array([1e-6, 1.0, 3e5], np.float32).reshape(3, 1, 1)


FACTORS = {"w": 1e-3, "stack": SIZES, "b": 1.0}


def loss(tree: Any) -> Any:
    return sum(jnp.sum(jnp.sin(to_array(w, jnp.float32)) * FACTORS[k]) for k, w in tree.items())


@pytest.mark.parametrize("dtype", FORMATS)
def test_values_are_those_of_float64_up_to_one_rounding(dtype: str) -> None:
    """A scale per matrix leaves errors of half an epsilon, or of half a step near zero."""
    fmt = format_of(dtype)
    differentiate = jax.jit(unitscale.value_and_grad(loss, gradients_dtype=dtype))
    stored = WEIGHTS | {"w": ScaledArray(WEIGHTS["w"], 2.0**9)}
    for params in (WEIGHTS, stored):
        _, gradients = differentiate(params)
        assert gradients["b"].dtype == jnp.float32
        for name, w in params.items():
            exact = np.cos(np.asarray(to_array(w), np.float64)) * FACTORS[name]
            got = np.asarray(to_array(gradients[name]), np.float64)
            if name == "b":
                np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)
                continue
            assert gradients[name].dtype == dtype
            largest = np.abs(exact).max((-2, -1), keepdims=True)
            smallest = 2 * largest / fmt.max * fmt.smallest_subnormal
            # FP8 gradients were bfloat16 before.
            eps = fmt.eps / 2 + (2.0**-8 if fmt.name != "bfloat16" else 1e-5)
            assert np.all(np.abs(got - exact) <= eps * np.abs(exact) + smallest / 2)
    if dtype != "bfloat16":
        assert gradients["stack"].scale.shape == (3, 1, 1)
        data = np.abs(np.asarray(gradients["stack"].data, np.float32)).max((1, 2))
        assert np.all((data > fmt.max / 2.1) & (data <= fmt.max))


@pytest.mark.parametrize("dtype", FORMATS[1:])
@pytest.mark.parametrize("bad", [0.0, np.inf, -np.inf, np.nan, 2.0**-140, 3e38])
def test_zero_tiny_huge_and_not_finite(dtype: str, bad: float) -> None:
    """Items of a stack do not affect each other, and what is not finite is never lost."""
    factor = np.stack([np.zeros((4, 4)), np.ones((4, 4))]).astype(np.float32)
    factor[0, 1, 2] = bad
    f = lambda w: jnp.sum(jnp.where(factor == 0, 0.0, w * factor))  # noqa: E731
    gradient = jax.jit(unitscale.grad(f, gradients_dtype=dtype))(jnp.ones((2, 4, 4)))
    first, second = np.asarray(gradient.value)
    np.testing.assert_array_equal(second, 1)
    if not np.isfinite(bad):
        assert np.isnan(first).all()
        return
    assert np.isfinite(first).all()
    np.testing.assert_allclose(first, factor[0], rtol=2**-2, atol=2.0**-126)
    assert (gradient.scale > 0).all()


def test_a_key_makes_rounding_unbiased_and_differs_by_array() -> None:
    x = jnp.full((2, 64, 64), 17.0).at[:, 0, 0].set(448.0)
    f = lambda w: sum(jnp.sum(each * x) for each in w)  # noqa: E731
    one = partial(unitscale.grad, f, gradients_dtype="float8_e4m3fn")
    nearest = one()([x, x])[0].value
    np.testing.assert_array_equal(nearest[:, 1:], 16)
    random = [g.value for g in one(gradients_key=jax.random.key(0))([x, x])]
    assert not np.array_equal(*random)
    for g in random:
        assert set(np.unique(g[:, 1:])) == {16, 18}
        # The mean of 8,000 numbers that are 16 or 18 has a standard error of 0.01.
        np.testing.assert_allclose(np.mean(g[:, 1:]), 17, atol=0.05)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


@pytest.mark.parametrize(
    ("inner", "dtype"), [(CLIPPED, "float8_e4m3fn"), (optax.sgd(0.1, 0.9), "bfloat16")]
)
def test_optimizers_take_the_values(inner: optax.GradientTransformation, dtype: str) -> None:
    """`scaled` and `nn.Optimizer` do with narrow gradients as with the same ones in float32."""
    grads = unitscale.grad(loss, gradients_dtype=dtype)(WEIGHTS)
    wide = jax.tree.map(jnp.float32, to_array(grads))
    np.testing.assert_allclose(optim.global_norm(grads), optim.global_norm(wide), rtol=1e-6)
    own = scaled(inner)
    for tx in (own, optim.skip_nonfinite(own), optim.skip_nonfinite(inner)):
        params = tx.scale_params(jax.tree.map(jnp.asarray, WEIGHTS))
        step = jax.jit(tx.step)
        results = [step(params, tx.init(params), g) for g in (grads, wide)]
        chex.assert_trees_all_equal(*results)


def test_bad_steps_are_skipped_and_mistakes_are_refused() -> None:
    tx = optim.skip_nonfinite(scaled(optax.adam(1e-2)))
    params = tx.scale_params({"w": jnp.ones((4, 4))})
    bad = unitscale.grad(lambda p: jnp.sum(p["w"].value) * jnp.inf, gradients_dtype="float8_e5m2")
    new, state = tx.step(params, tx.init(params), bad(params))
    assert int(state.skipped) == 1
    np.testing.assert_array_equal(new["w"].value, params["w"].value)

    for dtype in ("float16", "float8_e4m3fnuz", "E4M3"):
        for where in (unitscale.grad, nn.grad):
            with pytest.raises(ValueError, match="gradients_dtype"):
                where(lambda w: w.sum(), gradients_dtype=dtype)
    eight = scaled(optax.sgd(0.1), weights="float8_e4m3fn")
    weights = eight.scale_params({"w": jnp.ones((4, 4))})
    data = jax.grad(lambda p: jnp.sum(p["w"].value))(weights)
    with pytest.raises(TypeError, match="ScaledArray"):
        eight.step(weights, eight.init(weights), data)
    narrow = ScaledArray(jnp.ones((2, 4), jnp.float8_e5m2), jnp.ones((2, 1)))
    with pytest.raises(TypeError, match="to_array"):
        jax.vmap(lambda g: all_reduce(g, "data"), axis_name="data")({"w": narrow})


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("policy", ["float32", "bfloat16", "fp8", "fp8_delayed"])
def test_models(policy: str, scan: bool) -> None:
    """Gradients of a model are those in float32, rounded; amax state is not."""
    x = jnp.asarray(numbers(3, 2, 6, 16))

    def value(stack: Any) -> Any:
        return ops.mse_loss(stack(x), jnp.ones_like(x))

    make = partial(nn.TransformerStack, 2, 16, 2, scan=scan, remat="layer", policy=policy)
    found = {}
    for dtype in (None, "bfloat16", "float8_e4m3fn"):
        model = make(rngs=nnx.Rngs(0))
        found[dtype] = nnx.jit(nn.grad(value, gradients_dtype=dtype))(model)
        if policy == "fp8_delayed":
            amax = jax.tree.leaves(nnx.state(model, nn.AmaxState))
            found["amax"] = found.get("amax", amax)
            for own, first in zip(amax, found["amax"], strict=True):
                np.testing.assert_array_equal(own, first)
    for dtype, rtol in (("bfloat16", 2**-7), ("float8_e4m3fn", 2**-4)):
        pairs = zip(*(nnx.to_flat_state(found[d]) for d in (dtype, None)), strict=True)
        for (path, got), (_, exact) in pairs:
            got, exact = got.get_value(), exact.get_value()
            assert got.dtype == (dtype if exact.ndim > 1 else "float32"), path
            # The gradient of a key's bias is zero up to rounding.
            if path[-2:] != ("key", "bias"):
                error = np.linalg.norm(np.asarray(to_array(got)) - exact)
                assert error <= rtol * np.linalg.norm(exact), (path, error)


def test_nn_optimizer_and_decorators() -> None:
    @nn.value_and_grad(gradients_dtype="float8_e4m3fn", gradients_key=jax.random.key(0))
    def differentiate(model: Any) -> Any:
        return ops.mse_loss(model(jnp.ones((4, 8))), jnp.zeros((4, 4)))

    for tx in (optax.adam(1e-2), scaled(optax.adam(1e-2))):
        model = nn.Dense(8, 4, policy="fp8", rngs=nnx.Rngs(0))
        optimizer = nn.Optimizer(model, tx, wrt=nnx.Param)
        first, grads = differentiate(model)
        assert grads["kernel"].get_value().dtype == "float8_e4m3fn"
        optimizer.update(model, grads)
        assert differentiate(model)[0] < first
