"""Plain models made unit-scaled: function, variance, and what is said of each layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.table import parameters
from unitscale import nn


class Decoder(nnx.Module):
    """What a user has: modules in lists, one of them in two places, and code between them."""

    def __init__(self, width: int = 32, **options) -> None:
        rngs = nnx.Rngs(1)
        self.embed = nnx.Embed(11, width, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, width, decode=False, deterministic=True, rngs=rngs, **options
        )
        self.mlp = nnx.List(
            [nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)]
        )
        self.again = self.mlp[0]
        self.mix = nnx.LinearGeneral(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=True, rngs=rngs)
        self.head = nnx.Linear(width, 11, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(ids))
        x = x + self.mlp[1](nnx.silu(self.mlp[0](x)) * self.again(x))
        return self.head(self.dropout(self.mix(x)))


IDS = jnp.arange(12).reshape(2, 6) % 11


def test_a_model_keeps_its_function_and_the_old_one_itself() -> None:
    model = Decoder(dropout_rate=0.2)
    before = nnx.graphdef(model)
    scaled, report = nn.unit_scale(model, keep_function=True, readout=["head"], max_length=6)
    assert nnx.graphdef(model) == before
    np.testing.assert_allclose(scaled(IDS), model(IDS), rtol=1e-4, atol=1e-5)
    assert scaled.again is scaled.mlp[0]
    assert isinstance(scaled.head, nn.Readout)
    assert report.changed == ("again", "attention", "embed", "head", "mlp.1", "norm")
    assert report.skipped == {
        "dropout": "in evaluation it would multiply by (1 - rate)^1/2",
        "mix": "LinearGeneral is not converted",
    }
    text = str(report)
    assert text.startswith("6 of 8 layers unit-scaled\nlayer ")
    assert "attend is divided by 32 features" in text
    assert text.endswith("losses between layers")
    for path, parameter in parameters(scaled).items():
        if "mlp" in path and path.endswith("kernel"):
            assert float(jnp.std(parameter[...])) == pytest.approx(1, abs=0.1)
    other, _ = nn.unit_scale(model, keep_function=True)
    assert isinstance(other.attention, nnx.MultiHeadAttention)


def test_new_parameters_are_unit_and_train() -> None:
    scaled, report = nn.unit_scale(Decoder(), policy="bfloat16", rngs=nnx.Rngs(3))
    assert set(report.skipped) == {"mix"}
    assert isinstance(scaled.dropout, nn.Dropout)
    for path, parameter in parameters(scaled).items():
        if path.endswith(("kernel", "embedding")) and "mix" not in path:
            assert parameter.role in ("weight", "embedding"), path
            rms = float(jnp.sqrt(jnp.mean(jnp.square(parameter[...]))))
            assert abs(rms - 1) < 5 / (2 * parameter.size) ** 0.5, path
    hidden = scaled.mlp[0](jax.random.normal(jax.random.key(0), (64, 32)))
    assert hidden.dtype == jnp.bfloat16
    assert abs(float(jnp.mean(jnp.square(hidden.astype(jnp.float32)))) - 1) < 0.15
    grads = nn.grad(lambda m: jnp.sum(jnp.sin(m(IDS).astype(jnp.float32))))(scaled)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_errors() -> None:
    with pytest.raises(ValueError, match="give rngs=, which new parameters are drawn from"):
        nn.unit_scale(Decoder())
    with pytest.raises(ValueError, match=r"'hea' matches none of again, head, mlp\.1"):
        nn.unit_scale(Decoder(), keep_function=True, readout=["head", "hea"])
    with pytest.raises(ValueError, match="policy must be one of"):
        nn.unit_scale(Decoder(), policy="fp9", keep_function=True)
