"""Scaled weights and moments as state dictionaries and bytes of Flax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

from tests.optimizers import scaled
from unitscale import ScaledArray, nn


def stepped(seed: int, **options: Any) -> Any:
    tx = scaled(optax.adamw(1e-2), **options)
    w = np.random.default_rng(seed).normal(size=(4, 8))
    params = tx.scale_params({"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(8)})
    grads = jax.tree.map(lambda x: x.value, params, is_leaf=lambda x: isinstance(x, ScaledArray))
    return tx.step(params, tx.init(params), grads)


@pytest.mark.parametrize(
    "options",
    [{}, {"weights": "bfloat16", "block": 4}, {"weights": "e5m2", "moments": ("e4m3fn",) * 2}],
    ids=["5 bytes", "blocks", "3 bytes"],
)
def test_what_is_restored_is_what_was_saved(options: dict[str, Any]) -> None:
    saved, other = stepped(0, **options), stepped(1, **options)
    restored = serialization.from_bytes(other, serialization.to_bytes(saved))
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for a, e in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("pure", [True, False])
def test_a_model_with_its_optimizer(pure: bool) -> None:
    """Delayed scales, and moments that are trees of `nnx.State`; lists have numbers for keys."""

    def trained(steps: int) -> Any:
        model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)))
        nn.convert(model, "fp8_delayed")
        optimizer = nn.Optimizer(model, scaled(optax.adamw(1e-2)), wrt=nnx.Param)
        for _ in range(steps):
            _, grads = nn.value_and_grad(lambda m: jnp.sum(m(jnp.ones((2, 16))) ** 2))(model)
            optimizer.update(model, grads)
        state = nnx.state((model, optimizer))
        return nnx.to_pure_dict(state) if pure else state

    saved, other = trained(2), trained(0)
    restored = serialization.from_bytes(other, serialization.to_bytes(saved))
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for a, e in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(a, e)


def test_a_state_of_another_model_is_refused() -> None:
    state = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"keys bias, kernel; got"):
        serialization.from_state_dict(state, {"kernel": jnp.ones((2, 2))})


def test_without_a_scale() -> None:
    x = ScaledArray(jnp.arange(3.0))
    state = serialization.to_state_dict(x)
    assert state["scale"] is None
    restored = serialization.from_state_dict(ScaledArray(jnp.zeros(3)), state)
    np.testing.assert_array_equal(restored.value, x.value)


def test_a_state_of_plain_arrays_is_refused() -> None:
    x = ScaledArray(jnp.ones(3), 2.0)
    with pytest.raises(ValueError, match="data, scale; got ndarray"):
        serialization.from_bytes(x, serialization.to_bytes(jnp.ones(3)))
