"""Products in 8 bits have one derivative, and a second is refused: it would be 0 or NaN."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import quant
from unitscale.quant import Block, Delayed, Dynamic, MatmulConfig, Unit

pytestmark = pytest.mark.filterwarnings("ignore::unitscale.quant.StandingScalesWarning")

X, W = (jnp.asarray(np.random.default_rng(i).normal(size=(32, 32)), jnp.float32) for i in (0, 1))
STRATEGIES = {"unit": Unit(), "dynamic": Dynamic(), "block": Block(), "delayed": Delayed()}


def product(strategy: Any) -> Callable[[Any, Any], Any]:
    config = MatmulConfig(strategy=strategy)
    state = quant.QuantState.create(strategy) if isinstance(strategy, Delayed) else None
    spec = quant.Contraction("ab", "bc", "ac")
    return lambda x, w: quant.contract(x, w, spec, config=config, state=state)


def grouped(x: Any, w: Any) -> Any:
    return quant.grouped(x, w[None], jnp.array([32]), config=MatmulConfig(strategy=Unit()))


PRODUCTS = {name: product(strategy) for name, strategy in STRATEGIES.items()} | {"groups": grouped}


def penalty(f: Callable[[Any, Any], Any], w: Any) -> Any:
    """That of a gradient by the input, as of WGAN-GP."""
    return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.tanh(f(x, w))))(X) ** 2)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_second_derivative_is_refused(name: str) -> None:
    f = PRODUCTS[name]
    assert np.isfinite(penalty(f, W))
    for wrap in (lambda g: g, jax.jit, jax.checkpoint):
        with pytest.raises(TypeError, match=r"no second derivative.*policy='bfloat16'"):
            jax.grad(wrap(lambda w: penalty(f, w)))(W)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap], ids=lambda f: f.__name__)
def test_one_derivative_is_as_before(wrap: Any, name: str) -> None:
    f = PRODUCTS[name]
    given = (X[None], W[None]) if wrap is jax.vmap else (X, W)
    found = wrap(jax.grad(lambda x, w: jnp.sum(jnp.tanh(f(x, w))), (0, 1)))(*given)
    expected = jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ w)), (0, 1))(X, W)
    for a, e in zip(found, expected, strict=True):
        error = jnp.linalg.norm(a.reshape(e.shape) - e) / jnp.linalg.norm(e)
        assert float(error) < 0.2


def test_operands_of_16_bits_may_be_differentiated_again() -> None:
    config = MatmulConfig(lhs="bfloat16", rhs="bfloat16", cotangent="bfloat16", strategy=Unit())
    spec = quant.Contraction("ab", "bc", "ac")
    found = jax.grad(lambda w: penalty(lambda x, w: quant.contract(x, w, spec, config=config), w))(
        W
    )
    expected = jax.grad(lambda w: penalty(lambda x, w: x @ w, w))(W)
    assert float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)) < 0.05
