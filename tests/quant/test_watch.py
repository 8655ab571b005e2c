import warnings

import jax
import jax.numpy as jnp
import pytest

from unitscale.quant import (
    Contraction,
    Delayed,
    MatmulConfig,
    QuantState,
    StandingScalesWarning,
    Static,
    contract,
    fake_quantize_operands,
)

X, SPEC = jnp.ones((2, 2)), Contraction("ij", "jk", "ik")


def product(x, state, strategy):
    return contract(x, X, SPEC, config=MatmulConfig(strategy=strategy), state=state).sum()


def fake(x, state, strategy):
    config = MatmulConfig(strategy=strategy)
    return fake_quantize_operands(x, X, config, state=state)[0].sum()


def scanned(x, state, strategy):
    body = lambda total, row: (total + product(jnp.diag(row), state, strategy), None)  # noqa: E731
    return jax.lax.scan(body, 0.0, x)[0]


LOSSES = {
    "product": product,
    "operands": fake,
    "jit": jax.jit(product, static_argnums=2),
    "remat": jax.checkpoint(product, static_argnums=2),
    "scan": scanned,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_scales_that_would_stand_still(loss) -> None:
    state = QuantState.create(Delayed())
    with pytest.warns(StandingScalesWarning, match=r"unitscale\.nn\.value_and_grad"):
        jax.grad(loss)(X, state, Delayed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(X, state, Delayed())
        by_both = jax.grad(loss, (0, 1))(X, state, Delayed())
        jax.grad(loss)(X, QuantState.create(Static()), Static())
    assert (by_both[1].tally != 0).any()
