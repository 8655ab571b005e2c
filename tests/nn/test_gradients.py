"""Every parameter's gradient is a positive constant times the truth: each layer, a whole model."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.gradients import WrongGradient, check
from tests.modules import FLOAT64, build, model_loss
from unitscale import nn, ops
from unitscale.core import ScaledArray

from .models import Decoder

BATCH, TIME, WIDTH = 2, 5, 4


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def rngs(seed: int = 0) -> nnx.Rngs:
    return nnx.Rngs(seed)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


class Parallel(nnx.Module):
    """A layer beside another path from its input to the loss, so that its input is no cut edge.

    The gradient of `before` adds up both paths: it is wrong as soon as the layer's input gradient
    has another factor than its output.
    """

    def __init__(self, layer: Any, apply: Callable[..., Any] | None = None):
        self.before = nn.Dense(3, WIDTH, policy=FLOAT64, rngs=rngs(1))
        self.layer, self.apply = layer, apply

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.before(x)
        y = self.layer(h) if self.apply is None else self.apply(self.layer, h)
        return jnp.sum(jnp.sin(y.value + 0.3) * normal(7, *y.shape)) + jnp.sum(
            jnp.cos(h.value) * normal(8, *h.shape)
        )


def check_layer(
    make: Callable[[], Any], apply: Callable[..., Any] | None = None, **options: Any
) -> dict:
    model = build(lambda: Parallel(make(), apply))
    x = normal(3, BATCH, TIME, 3)
    return check(*model_loss(model, lambda m: m(x)), **options)


UNARY = ["to_output_scale", "to_grad_input_scale", "gmean", "hmean", "amean"]


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_no_constraint_is_caught_off_a_cut_edge_and_right_on_one(kind) -> None:
    make = {"dense": nn.Dense, "conv": nn.Conv}[kind]
    args = (WIDTH, 9, 3) if kind == "conv" else (WIDTH, 9)

    def layer():
        return make(*args, constraint=None, policy=FLOAT64, rngs=rngs())

    with pytest.raises(WrongGradient, match="before"):
        check_layer(layer)
    before = lambda: nn.Dense(3, WIDTH, policy=FLOAT64, rngs=rngs(1))  # noqa: E731
    chain = build(lambda: nnx.Sequential(before(), layer()))
    x = normal(3, BATCH, TIME, 3)
    check(*model_loss(chain, lambda m: jnp.sum(jnp.sin(m(x).value))))


LAYERS: dict[str, Callable[[], Any]] = {
    "layer_norm": lambda: nn.LayerNorm(WIDTH, policy=FLOAT64),
    "layer_norm_plain": lambda: nn.LayerNorm(
        WIDTH, use_bias=False, use_scale=False, policy=FLOAT64
    ),
    "rms_norm": lambda: nn.RMSNorm(WIDTH, policy=FLOAT64),
    "dropout": lambda: nn.Dropout(0.4, rngs=rngs()),
    "positions": lambda: nn.PositionalEmbed(TIME + 2, WIDTH, policy=FLOAT64, rngs=rngs()),
    "residual": lambda: nn.Residual(
        nn.Dense(WIDTH, WIDTH, policy=FLOAT64, rngs=rngs()), tau=0.7, depth=3
    ),
    **{
        f"mlp_{name}": lambda name=name: nn.MLP(
            WIDTH, 8, activation=name, mult=1.3, dropout_rate=0.2, policy=FLOAT64, rngs=rngs()
        )
        for name in ("relu", "tanh", "silu_glu", "gelu_glu")
    },
    **{
        f"moe_{name}": lambda options=options: nn.MoE(
            WIDTH, 6, experts=4, activation="silu_glu", policy=FLOAT64, rngs=rngs(), **options
        )
        for name, options in {
            "one": {"top_k": 1, "router_mult": 1.5},
            "probabilities": {"top_k": 3, "renormalize": False},
        }.items()
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name) -> None:
    check_layer(LAYERS[name])


# A bias of the keys shifts all logits of a query alike, which softmax does not see.
ATTENTION = {
    "self": ({}, None, ["key.bias"]),
    "causal": ({"is_causal": True, "max_length": 9, "mult": 3.0}, None, ["key.bias"]),
    "rope": ({"is_causal": True, "rotary_base": 50.0, "mult": 2.0}, None, []),
    "grouped": ({"num_kv_heads": 1, "rotary_base": 50.0}, None, []),
    "dropout": ({"dropout_rate": 0.3, "mult": 2.0}, None, ["key.bias"]),
    "cross": (
        {"in_kv_features": 3},
        lambda layer, h: layer(h, normal(11, BATCH, 7, 3)),
        ["key.bias"],
    ),
    "mask": (
        {"mult": 2.0},
        lambda layer, h: layer(h, mask=jnp.arange(TIME) != 2),
        ["key.bias"],
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name) -> None:
    options, apply, zero = ATTENTION[name]

    def layer():
        return nn.MultiHeadAttention(2, WIDTH, 8, **options, policy=FLOAT64, rngs=rngs())

    check_layer(layer, apply, zero=zero)


# The models below have all schemes with norms before the branches.
@pytest.mark.parametrize(
    ("placement", "scheme"),
    [
        ("post", "depth"),
        ("none", "running_mean"),
        pytest.param("post", "fixed", marks=pytest.mark.slow),
    ],
)
def test_stack(placement, scheme) -> None:
    stack = functools.partial(
        nn.TransformerStack,
        2,
        WIDTH,
        2,
        6,
        residual_scheme=scheme,
        residual_mult=0.8,
        residual_attention_ratio=1.4,
        norm="layer" if scheme == "fixed" else "rms",
        norm_placement=placement,
        rotary_base=50.0,
        dropout_rate=0.2 if scheme == "depth" else 0.0,
        remat="layer" if scheme == "running_mean" else "none",
        policy=FLOAT64,
    )
    check_layer(lambda: stack(rngs=rngs()), directions=2)


class Unsplit(nnx.Module):
    """A residual branch whose weight is applied to the value alone: the cotangent misses it."""

    def __init__(self, tau: float):
        self.branch, self.tau = nn.Dense(WIDTH, WIDTH, policy=FLOAT64, rngs=rngs()), tau

    def __call__(self, x: ScaledArray) -> ScaledArray:
        return ops.residual_add(self.branch(x), x, self.tau)


def test_a_residual_without_its_split_is_caught() -> None:
    with pytest.raises(WrongGradient, match="before"):
        check_layer(lambda: Unsplit(0.5))


DECODERS = {
    "tied, gated, grouped": {
        "tied": True,
        "rotary_base": 50.0,
        "activation": "silu_glu",
        "num_kv_heads": 2,
        "dropout_rate": 0.2,
        "residual_scheme": "fixed",
        "residual_tau": 0.4,
    },
    "learned, grouped": {
        "learned": True,
        "num_kv_heads": 1,
        "norm": "layer",
        "residual_mult": 0.7,
        "residual_attention_ratio": 1.5,
    },
}


@pytest.mark.parametrize("name", DECODERS)
def test_language_model(name) -> None:
    """From ids to the loss, with norms before the branches; each row has what others leave out."""
    model = build(lambda: Decoder(8, policy=FLOAT64, **DECODERS[name]))
    ids = np.random.default_rng(5).integers(0, 11, (2, 7))
    check(*model_loss(model, lambda m: m.loss(ids[:, :-1], ids[:, 1:])), directions=2)


@pytest.mark.parametrize(
    ("kind", "constraint"),
    [
        *(("dense", c) for c in UNARY),
        ("readout", "gmean"),
        ("conv", "hmean"),
        ("lora", "gmean"),
        ("lora", "to_output_scale"),
    ],
)
def test_linear_layers_under_every_constraint(kind, constraint) -> None:
    make = {
        "dense": lambda **k: nn.Dense(WIDTH, 6, **k),
        "readout": lambda **k: nn.Readout(WIDTH, 6, use_bias=True, **k),
        "conv": lambda **k: nn.Conv(WIDTH, 6, 3, 2, feature_group_count=2, **k),
        "lora": lambda **k: nn.LoRALinear(WIDTH, 6, lora_rank=2, **k),
    }[kind]
    constants = check_layer(lambda: make(constraint=constraint, policy=FLOAT64, rngs=rngs()))
    if (kind, constraint) == ("lora", "to_output_scale"):
        # The update's own factors, over those of the value: 4^-1/2, and 2^-1/2 of the rank.
        items = BATCH * TIME
        expected = {"lora_a": (4 * 2 / (6 * items)) ** 0.5, "lora_b": (2 / items) ** 0.5}
        for name, constant in expected.items():
            assert constants[f"layer.lora.{name}"] == pytest.approx(constant, rel=1e-6)
