"""Plain models made unit-scaled: function, variance, and what is said of each layer."""

from typing import Any

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


class Held(nnx.Module):
    """Layers in a tuple, and a parameter in two layers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.pair = nnx.data((nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)))
        self.embed, self.head = nnx.Embed(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.head.kernel = self.embed.embedding

    def __call__(self, ids):
        return self.head(self.pair[1](self.pair[0](self.embed(ids))))


@pytest.mark.parametrize("keep_function", [True, False])
def test_a_parameter_of_two_layers_stays_one(keep_function: bool) -> None:
    model = Held()
    scaled, report = nn.unit_scale(model, keep_function=keep_function, rngs=nnx.Rngs(1))
    assert report.changed == ("pair.0", "pair.1")
    assert set(report.skipped.values()) == {"embed.embedding is head.kernel too"}
    assert scaled.head.kernel is scaled.embed.embedding
    if keep_function:
        np.testing.assert_allclose(scaled(IDS % 4), model(IDS % 4), rtol=1e-5)


@nnx.split_rngs(splits=3)
@nnx.vmap
def stacked(rngs: nnx.Rngs) -> nnx.List:
    return nnx.List(
        [
            nnx.Linear(4, 4, rngs=rngs),
            nnx.Conv(4, 4, 3, rngs=rngs),
            nnx.Einsum("ab,bc->ac", (4, 4), rngs=rngs),
            nnx.Embed(4, 4, rngs=rngs),
            nnx.LayerNorm(4, rngs=rngs),
            nnx.BatchNorm(4, use_scale=False, use_bias=False, rngs=rngs),
            nnx.MultiHeadAttention(2, 4, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
        ]
    )


def frozen(layer: Any) -> Any:
    layer.kernel = nnx.Variable(layer.kernel[...])
    return layer


def own(*args: Any, **kwargs: Any) -> Any:
    return args[0]


RNGS = nnx.Rngs(0)
LEFT = {
    "its kernel is a Variable": frozen(nnx.Linear(4, 4, rngs=RNGS)),
    "it has its own dot_general": nnx.Linear(4, 4, dot_general=own, rngs=RNGS),
    "it has its own preferred_element_type": nnx.Linear(
        4, 4, preferred_element_type=jnp.float32, rngs=RNGS
    ),
    "it has its own promote_dtype": nnx.LayerNorm(4, promote_dtype=own, rngs=RNGS),
    "it has its own conv_general_dilated": nnx.Conv(4, 4, 3, conv_general_dilated=own, rngs=RNGS),
    "it has its own einsum_op": nnx.Einsum("ab,bc->ac", (4, 4), einsum_op=own, rngs=RNGS),
    "nnx.vmap has stacked it": stacked(nnx.Rngs(0)),
    "WeightNorm is not converted": nnx.WeightNorm(nnx.Linear(4, 4, rngs=RNGS), rngs=RNGS),
    "SpectralNorm is not converted": nnx.SpectralNorm(nnx.Linear(4, 4, rngs=RNGS), rngs=RNGS),
    "its bias, (1,), is not one of the kernel's outputs, (4,)": nnx.Einsum(
        "ab,bc->ac", (4, 4), (1,), rngs=RNGS
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_a_twin_lacks_leaves_the_layer_alone(reason: str) -> None:
    _, report = nn.unit_scale(LEFT[reason], rngs=nnx.Rngs(0))
    assert set(report.skipped.values()) == {reason}
    assert not report.changed


def test_a_bias_with_dimensions_of_one() -> None:
    layer = nnx.Einsum("bi,oi->bo", (32, 16), (1, 32), rngs=nnx.Rngs(0))
    layer.bias.set_value(jnp.arange(32.0)[None])
    x = jnp.ones((4, 16))
    new, _ = nn.unit_scale(layer, keep_function=True)
    np.testing.assert_allclose(new(x), layer(x), rtol=1e-5)


def test_errors() -> None:
    with pytest.raises(ValueError, match="give rngs=, from which"):
        nn.unit_scale(Decoder())
    with pytest.raises(ValueError, match=r"'hea' matches none of again, head, mlp\.1"):
        nn.unit_scale(Decoder(), keep_function=True, readout=["head", "hea"])
    with pytest.raises(ValueError, match="policy must be one of"):
        nn.unit_scale(Decoder(), policy="fp9", keep_function=True)


class _Own(nnx.Module):
    """Parameters of its own beside layers, as class tokens and gains of others' models are."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token = nnx.Param(jnp.zeros(4))
        self.gains = nnx.List([nnx.Param(jnp.ones(4))])
        self.dense = nnx.Linear(4, 4, rngs=rngs)


def test_parameters_of_modules_are_reported() -> None:
    _, report = nn.unit_scale(_Own(nnx.Rngs(0)), rngs=nnx.Rngs(1))
    assert report.changed == ("dense",)
    assert {path: reason[:13] for path, reason in report.skipped.items()} == {
        "": "its own token",
        "gains": "its own 0: wr",
    }
    assert str(report).startswith("1 of 3 layers unit-scaled")


def test_attention_that_is_told_not_to_decode() -> None:
    attention, _ = nn.unit_scale(
        nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)
    )
    x = jnp.ones((1, 3, 8))
    np.testing.assert_array_equal(attention(x, decode=False), attention(x))
    with pytest.raises(ValueError, match="takes no decode=True; call its method decode"):
        attention(x, decode=True)
