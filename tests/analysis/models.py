"""Models with correct gradients, and models that are broken on purpose, with the guilty ops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import nn, ops, quant

Model = tuple[Callable[..., jax.Array], Any]


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = normal(0, 5, 4)
SHAPES = {
    "a": (4, 6),
    "b": (6, 4),
    "c": (4, 4),
    "d": (4, 7),
    "stack": (3, 4, 4),
    "table": (9, 4),
    "gain": (4,),
}
WEIGHTS = {name: normal(i + 1, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
IDS = np.array([1, 3, 3, 0, 8])


def loss_of(h: Any) -> jax.Array:
    return jnp.sum(jnp.sin(getattr(h, "value", h) + 0.3) * normal(50, *h.shape))


def beside(layer: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A layer whose input also reaches the loss on another path."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = ops.dense(x, p["c"])
        return loss_of(layer(p, h)) + loss_of(ops.tanh(h))

    return loss


def chain(layer: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda p, x: loss_of(layer(p, ops.dense(x, p["c"])))


def two_denses(p, h, **k):
    return ops.dense(ops.dense(h, p["a"], **k), p["b"][:, :3], **k)


def residual(inner: Any = None, split: float = 0.5, add: float = 0.5) -> Callable[..., Any]:
    def layer(p, h):
        branch, skip = ops.residual_split(h, split)
        branch = ops.rms_norm(two_denses(p, branch), p["gain"][:3]).data
        branch = jnp.pad(branch, ((0, 0), (0, 1)))
        return ops.residual_add(branch if inner is None else inner(branch), skip, add)

    return layer


def scanned(activation: Callable[..., Any]) -> Callable[..., jax.Array]:
    def loss(p, x):
        def body(h, w):
            return ops.residual(lambda y: activation(ops.dense(y, w)), h, 0.7).data, None

        return loss_of(jax.lax.scan(body, x, p["stack"])[0])

    return loss


def recurrent(activation: Callable[..., Any]) -> Callable[..., jax.Array]:
    def loss(p, x):
        def body(h, x):
            return activation(ops.dense(h + x, p["c"])).data, None

        return loss_of(jax.lax.scan(jax.checkpoint(body), jnp.zeros((1, 4)), x[:, None])[0])

    return loss


def tied(readout: Callable[..., Any]) -> Callable[..., jax.Array]:
    def loss(p, x):
        h = ops.tanh(ops.embed(IDS, p["table"]))
        return ops.softmax_cross_entropy(readout(h, p["table"].T), IDS[::-1])

    return loss


@jax.custom_vjp
def bent(x):
    return jnp.sin(x)


bent.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) ** 2,))


def functional(loss: Callable[..., jax.Array]) -> Callable[[], Model]:
    return lambda: (loss, WEIGHTS)


def fp8_readout(p: Any, x: jax.Array) -> jax.Array:
    """A model with dithered gradients of logits and dithered cotangents of a matmul."""
    h = ops.dense(x, p["c"], config=quant.MatmulConfig(dither=True))
    return ops.readout_cross_entropy(h, p["b"].T, IDS % 6, config=quant.MatmulConfig())


def module(make: Callable[[nnx.Rngs], Any]) -> Callable[[], Model]:
    def model() -> Model:
        graphdef, params, rest = nnx.split(make(nnx.Rngs(3)), nnx.Param, ...)

        def loss(params, x):
            return loss_of(nnx.merge(graphdef, params, rest, copy=True)(x[None]))

        return loss, params

    return model


def stack(policy: str, **options: Any) -> Callable[[], Model]:
    return module(lambda rngs: nn.TransformerStack(1, 4, 2, 6, policy=policy, rngs=rngs, **options))


def penalized(p, x):
    h = ops.dense(x, p["c"])
    return ops.mse_loss(h, jnp.ones(h.shape)) + jnp.mean(h.value**4)


def dense(constraint):
    return lambda p, h: ops.dense(h, p["d"], constraint=constraint)


VALID: dict[str, Callable[[], Model]] = {
    "chain without constraint": functional(chain(dense(None))),
    "dense": functional(beside(dense("to_output_scale"))),
    "residual": functional(chain(residual())),
    "broadcast": functional(beside(lambda p, h: ops.add(h, jnp.mean(h.data, 0, keepdims=True)))),
    "scan": functional(scanned(ops.gelu)),
    "recurrent": functional(recurrent(ops.gelu)),
    "tied": functional(tied(ops.readout)),
    "loss of two": functional(
        lambda p, x: ops.mse_loss(ops.dense(x, p["c"]), ops.tanh(ops.dense(x, p["c"])))
    ),
    "stack fp8": stack("fp8", activation="silu_glu"),
    "stack fp8_dynamic": stack("fp8_dynamic", rotary_base=50.0, num_kv_heads=1, remat="layer"),
    "dithered fp8": functional(fp8_readout),
    "mixture of experts": module(lambda rngs: nn.MoE(4, 6, experts=3, rngs=rngs)),
}
BROKEN: dict[str, tuple[set[str], Callable[[], Model]]] = {
    "dense": ({"dense"}, functional(beside(dense(None)))),
    "hidden readout": ({"readout"}, functional(beside(lambda p, h: ops.readout(h, p["d"])))),
    "loss and penalty": ({"mse_loss"}, functional(penalized)),
    "residual without split": (
        {"residual_add"},
        functional(chain(lambda p, h: ops.residual_add(ops.tanh(h), h, 0.5))),
    ),
    "residual without sum": (
        {"residual_split"},
        functional(chain(lambda p, h: ops.tanh(ops.residual_split(h, 0.5)[0]).data + h.data)),
    ),
    "residual of two taus": (
        {"residual_split", "residual_add"},
        functional(chain(residual(split=0.5, add=0.7))),
    ),
    "inside of a residual": (
        {"gelu"},
        functional(chain(residual(inner=lambda y: ops.gelu(y, constraint=None)))),
    ),
    "scan": ({"gelu"}, functional(scanned(lambda y: ops.gelu(y, constraint=None)))),
    "recurrent": ({"silu"}, functional(recurrent(lambda y: ops.silu(y, constraint=None)))),
    "tied": ({"embed", "dense"}, functional(tied(ops.dense))),
    "scaled cotangent": ({"scale_bwd"}, functional(beside(lambda p, h: ops.scale_bwd(h, 3.0)))),
    "lost": ({"scale_bwd"}, functional(chain(lambda p, h: ops.scale_bwd(h, 0.0)))),
    "wrong rule": ({"bent"}, functional(chain(lambda p, h: bent(h.data)))),
}
