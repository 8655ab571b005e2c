"""What a rate of u-muP is to a plain model: the same step of its function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from unitscale import nn, ops
from unitscale.optim import umup, umup_rates

WIDTH = 64


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.table = nn.Embed(10, WIDTH, rngs=rngs)
        self.up = nn.Dense(WIDTH, 32, rngs=rngs)
        self.out = nn.Readout(32, 4, rngs=rngs)


def test_a_step_moves_the_function_as_a_plain_step_does() -> None:
    """Of one layer, for the same signs of gradients: Adam's first step is its rate times these."""
    model = Model()
    params = nnx.state(model, nnx.Param)
    (rate,) = [r for r in umup_rates(params) if r.path == "up.kernel"]
    tx = umup(optax.sign_sgd(0.5), params)
    signs = jnp.sign(jnp.sin(jnp.arange(WIDTH * 32.0) + 1)).reshape(WIDTH, 32)
    grads = jax.tree.map(jnp.zeros_like, params)
    grads["up"]["kernel"].set_value(signs)
    moved = optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
    x = jax.random.normal(jax.random.key(0), (3, WIDTH))
    step = (
        ops.dense(x, moved["up"]["kernel"].get_value()).value
        - ops.dense(x, params["up"]["kernel"].get_value()).value
    )
    np.testing.assert_allclose(step, -0.5 * rate.plain * (x @ signs), rtol=1e-3, atol=1e-4)


def test_table_and_start() -> None:
    rates = umup_rates(nnx.state(Model(), nnx.Param))
    by_path = {rate.path: rate for rate in rates}
    assert by_path["up.kernel"].plain == pytest.approx(1 / WIDTH)
    assert by_path["out.kernel"].plain == pytest.approx(1 / 32)
    assert by_path["table.embedding"].plain == by_path["table.embedding"].factor
    assert rates.start(1e-3) == pytest.approx(1e-3 * WIDTH)
    head, *rows, last = str(rates).splitlines()
    assert head.split()[:3] == ["parameter", "role", "u-muP"]
    assert [row.split()[0] for row in rows] == [rate.path for rate in rates]
    assert last.startswith(f"Start at {WIDTH} x your plain model's Adam learning rate")


def test_the_start_is_a_mean_over_hidden_kernels() -> None:
    stack = nn.TransformerStack(2, WIDTH, 4, 4 * WIDTH, rngs=nnx.Rngs(0))
    rates = umup_rates(nnx.state(stack, nnx.Param))
    # Five kernels of WIDTH inputs and one of four times as many, in each of 4 branches.
    assert rates.start(1.0) == pytest.approx(WIDTH * 4 ** (1 / 6) * 4**0.5)


def test_a_parameter_without_a_role() -> None:
    with pytest.raises(ValueError, match=r"umup: .*; w has none; make"):
        umup_rates({"w": jnp.ones(3)})
