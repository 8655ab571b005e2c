"""Plain models, in no library's terms but JAX's and Flax's, and the loop that trains them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Task(NamedTuple):
    """A loss of parameters and a batch, and where training starts."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any


def mlp() -> Task:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {
        "hidden": {"kernel": normal(16, 32) / 4, "bias": jnp.zeros(32)},
        "out": {"kernel": normal(32, 4) / 6, "bias": jnp.zeros(4)},
    }
    x = normal(64, 16)

    def loss(params: Any, batch: Any) -> jax.Array:
        x, target = batch
        hidden = jax.nn.gelu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - target) ** 2)

    return Task(loss, params, (x, jnp.tanh(x @ normal(16, 4))))


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    def __init__(self, vocab: int, width: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x, mask = self.embed(ids), nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def transformer() -> Task:
    model = Transformer(11, 16, 1, nnx.Rngs(0))
    graph, params = nnx.split(model)
    ids = jnp.asarray(np.cumsum(np.random.default_rng(1).integers(1, 3, (8, 13)), axis=1) % 11)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(graph, params)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return Task(loss, nnx.to_pure_dict(params), ids)


def step_of(task: Task, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the whole train step: gradients, optimizer and update."""

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(task.loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step
