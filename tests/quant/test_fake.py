"""Operands that are rounded before a product in wider arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.quant import (
    Block,
    Delayed,
    Dynamic,
    MatmulConfig,
    QuantState,
    Static,
    Unit,
    fake_quantize_operands,
    quantize,
)

LHS = jnp.asarray([[0.3, 500.0, -3.0, 7e-3]])
RHS = jnp.asarray([[1.0], [2e4], [0.0], [3.0]])
AXES = ((1,), (0,))


@pytest.mark.parametrize(
    "strategy", [Unit(), Dynamic(), Dynamic("channel"), Static(8.0), Block(2)], ids=str
)
def test_values_are_those_of_quantize(strategy) -> None:
    config = MatmulConfig(rhs="e5m2", strategy=strategy)
    lhs, rhs = fake_quantize_operands(LHS, RHS, config, axes=AXES)
    np.testing.assert_array_equal(lhs, quantize(LHS, "e4m3fn", strategy, axis=1).value)
    np.testing.assert_array_equal(rhs, quantize(RHS, "e5m2", strategy, axis=0).value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_are_kept_and_saturate(dtype: str) -> None:
    top = float(jnp.finfo(dtype).max)
    x = jnp.full((1, 2), top, dtype)
    lhs, rhs = fake_quantize_operands(x, x.T, MatmulConfig(strategy=Dynamic()))
    assert lhs.dtype == rhs.dtype == dtype
    # Rounded up to E4M3 it would be beyond the largest float16.
    assert np.all(np.isfinite(np.float32(lhs)))


def test_gradients_pass_and_the_state_sees_both_operands() -> None:
    config = MatmulConfig(strategy=Delayed(history=2))
    state = QuantState.create(config.strategy)

    @jax.jit
    def gradients(lhs, rhs, state):
        def f(lhs, rhs, state):
            a, b = fake_quantize_operands(lhs, rhs, config, axes=AXES, state=state)
            return jnp.sum(jnp.sin(a)) + 2 * jnp.sum(b)

        return jax.grad(f, (0, 1, 2))(lhs, rhs, state)

    dlhs, drhs, seen = gradients(LHS, RHS, state)
    rounded, _ = fake_quantize_operands(LHS, RHS, config, axes=AXES, state=state)
    np.testing.assert_allclose(dlhs, np.cos(rounded), rtol=1e-5)
    np.testing.assert_array_equal(drhs, np.full((4, 1), 2.0))
    after = state.advance(seen)
    np.testing.assert_array_equal(after.scale, [2.0, 64.0, 1.0])
    np.testing.assert_array_equal(after.counts[:, :2], [[1, 4], [1, 4], [0, 0]])


def test_a_state_is_needed() -> None:
    with pytest.raises(ValueError, match=r"fake_quantize_operands: Static.* keeps its scales"):
        fake_quantize_operands(LHS, RHS, MatmulConfig(strategy=Static()))


def test_by_default_operands_meet_as_in_a_matrix_product() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 8)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 5)), jnp.float32)
    w = w.at[:, 3].multiply(2.0**14)  # beside which the other rows are small, if scales are theirs
    config = MatmulConfig(strategy=Dynamic("channel"))
    found = fake_quantize_operands(x, w, config)
    for a, b in zip(found, fake_quantize_operands(x, w, config, axes=((2,), (1,))), strict=True):
        np.testing.assert_array_equal(a, b)
