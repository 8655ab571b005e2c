"""Gradients of layers are positive constants times the true ones."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.gradients import WrongGradient, check
from tests.modules import FLOAT64, build, model_loss
from unitscale import nn

from .table import CELLS, LAYERS

BATCH, TIME, WIDTH = 2, 5, 4


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def of(kind: Any, *args: Any, seed: int = 0, **options: Any) -> Callable[[], Any]:
    return lambda: kind(*args, **options, policy=FLOAT64, rngs=nnx.Rngs(seed))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


class Parallel(nnx.Module):
    """A layer with a second path from its input to the loss, so that its input is not a cut edge.

    The gradient of `before` is a sum over both paths, which is wrong if the factor of the layer's
    input gradient differs from that of its output.
    """

    def __init__(self, layer: Any, features: int, apply: Callable[..., Any] | None):
        self.before, self.layer, self.apply = of(nn.Dense, 3, features, seed=1)(), layer, apply

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.before(x)
        y = self.layer(h) if self.apply is None else self.apply(self.layer, h)
        return jnp.sum(jnp.sin(y.value + 0.3) * normal(7, *y.shape)) + jnp.sum(
            jnp.cos(h.value) * normal(8, *h.shape)
        )


def check_layer(
    make: Callable[[], Any],
    apply: Callable[..., Any] | None = None,
    shape: tuple[int, ...] = (TIME, WIDTH),
    **options: Any,
) -> dict[str, float]:
    model = build(lambda: Parallel(make(), shape[-1], apply))
    x = normal(3, BATCH, *shape[:-1], 3)
    return check(*model_loss(model, lambda m: m(x)), directions=2, **options)


@pytest.mark.parametrize(("kind", "args"), [(nn.Dense, (9,)), (nn.Conv, (9, 3))])
def test_no_constraint_is_caught_off_a_cut_edge_and_right_on_one(kind, args) -> None:
    layer = of(kind, WIDTH, *args, constraint=None)
    with pytest.raises(WrongGradient, match="before"):
        check_layer(layer)
    chain = build(lambda: nnx.Sequential(of(nn.Dense, 3, WIDTH, seed=1)(), layer()))
    x = normal(3, BATCH, TIME, 3)
    check(*model_loss(chain, lambda m: jnp.sum(jnp.sin(m(x).value))))


MORE: dict[str, Callable[[], Any]] = {
    "mlp, dropout": of(nn.MLP, WIDTH, 8, activation="tanh", mult=1.3, dropout_rate=0.2),
    "readout, gmean": of(nn.Readout, WIDTH, 6, use_bias=True, constraint="gmean"),
    "conv, groups": of(nn.Conv, WIDTH, 6, 3, 2, feature_group_count=2, constraint="hmean"),
    "stack, none": of(
        nn.TransformerStack,
        2,
        WIDTH,
        2,
        6,
        norm_placement="none",
        remat="layer",
        residual_scheme="running_mean",
        residual_mult=0.8,
        residual_attention_ratio=1.4,
        rotary_base=50.0,
    ),
    "moe of one": of(nn.MoE, WIDTH, 6, experts=4, top_k=1, router_mult=1.5),
    "moe, probabilities": of(
        nn.MoE, WIDTH, 6, experts=4, top_k=3, renormalize=False, activation="silu_glu"
    ),
}
# A readout has its own constant for a cut edge, and a weighted loss of a router is no constant.
NAMES = [n for n in (*LAYERS, *MORE) if n not in ("readout", "moe")]
OFTEN = {"dense", "conv transpose", "lora", "group_norm", "positions", "residual", "gated", "gru"}
OFTEN |= {"stack, none", "readout, gmean", "conv, groups", "moe of one"}


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_layer(name) -> None:
    if name in MORE:
        check_layer(MORE[name])
        return
    layer = LAYERS[name]
    make = lambda: layer.make(policy=FLOAT64, rngs=nnx.Rngs(0))  # noqa: E731
    zero = ["key.bias"] if name in ("attention", "stack") else []  # softmax does not see it
    constants = check_layer(make, shape=layer.shape, zero=zero)
    items, expected = BATCH * math.prod(layer.shape[:-1]), {}
    if name == "lora":
        # The update's own factors, over those of the value: 8^-1/2, and 2^-1/2 of the rank.
        expected = {"lora.lora_a": (8 * 2 / (6 * items)) ** 0.5, "lora.lora_b": (2 / items) ** 0.5}
    elif name in CELLS:
        # The factor of batch and steps, over the forward factor of 6 features of state, 8 of input.
        kernels = {"dense_h.0": 6, "dense_i": 8}
        expected = {f"cell.{k}.kernel": (n / items) ** 0.5 for k, n in kernels.items()}
    for own, constant in expected.items():
        assert constants[f"layer.{own}"] == pytest.approx(constant, rel=1e-6)


def cross(layer, h):
    return layer(h, normal(11, BATCH, 7, 3))


def masked(layer, h):
    return layer(h, mask=jnp.arange(TIME) != 2)


# A bias of the keys shifts all logits of a query alike, which softmax does not see.
@pytest.mark.parametrize(
    ("options", "apply", "zero"),
    [
        ({"is_causal": True, "max_length": 9, "mult": 3.0}, None, ["key.bias"]),
        ({"num_kv_heads": 1, "rotary_base": 50.0}, None, []),
        ({"dropout_rate": 0.3, "mult": 2.0}, masked, ["key.bias"]),
        ({"in_kv_features": 3}, cross, ["key.bias"]),
    ],
    ids=["causal", "grouped, rotary", "masked, dropout", "cross"],
)
def test_attention(options, apply, zero) -> None:
    check_layer(of(nn.MultiHeadAttention, 2, WIDTH, 8, **options), apply, zero=zero)
