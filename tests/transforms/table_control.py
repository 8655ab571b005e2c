"""The second half of the table: control flow, custom derivatives and whole little programs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from .table import IDS, KEY, A, B, C, Entry, P, S, V, W, normal, parted

M = S / 4


@jax.custom_vjp
def clipped_gradient(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


clipped_gradient.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.5, 0.5),)
)


@jax.custom_jvp
def steep(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


steep.defjvp(lambda p, t: (jnp.tanh(p[0]), 3 * t[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def power_of(x: jax.Array, n: int) -> jax.Array:
    return x**n


power_of.defvjp(lambda x, n: (x**n, {"x": x}), lambda n, r, g: (n * g * r["x"] ** (n - 1),))


def straight_through(x: jax.Array) -> jax.Array:
    return x + lax.stop_gradient(jnp.round(x) - x)


def newton(a: Any) -> Any:
    return lax.while_loop(lambda s: s[1] < 6, lambda s: ((s[0] + a / s[0]) / 2, s[1] + 1), (a, 0))[
        0
    ]


def lstm(x: jax.Array, w: jax.Array) -> jax.Array:
    def cell(state: Any, x: Any) -> Any:
        h, c = state
        gates = jnp.concatenate([x, h]) @ w
        i, f, g, o = jnp.split(gates, 4)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(cell, (jnp.zeros(3), jnp.zeros(3)), x)[1]


def adam_steps(w: jax.Array, x: jax.Array) -> jax.Array:
    tx = optax.adamw(0.1)
    state = tx.init(w)

    def step(carry: Any, _: Any) -> Any:
        w, state = carry
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        updates, state = tx.update(g, state, w)
        return (optax.apply_updates(w, updates), state), loss

    return lax.scan(step, (w, state), None, length=4)[0][0]


def sgd_unrolled(w: jax.Array, x: jax.Array) -> jax.Array:
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    state = tx.init(w)
    for _ in range(3):
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        updates, state = tx.update(g, state, w)
        w = optax.apply_updates(w, updates)
    return w


CONTROL = [
    Entry("jit", jax.jit(lambda x, y: x * y + 1), (A, B)),
    Entry("jit nested", lambda x: jax.jit(lambda a: jax.jit(jnp.sin)(a) * a)(x), (A,)),
    Entry("jit twice", lambda x: (lambda f: f(x) + f(2 * x))(jax.jit(lambda a: a * a + 1)), (A,)),
    Entry(
        "scan carry",
        lambda x, m: lax.scan(lambda c, _: (jnp.tanh(c @ m), None), x, length=5)[0],
        (S, M),
    ),
    Entry("scan outputs", lambda x: lax.scan(lambda c, a: (c + a, c * a), x[0], x)[1], (A,)),
    Entry("scan from zeros", lambda x: lax.scan(lambda c, a: (c + a, c), jnp.zeros(6), x)[1], (A,)),
    Entry(
        "scan reverse",
        lambda x: lax.scan(lambda c, a: (c * 0.5 + a, c), x[0], x, reverse=True)[1],
        (A,),
    ),
    Entry(
        "scan of scan",
        lambda x: lax.scan(
            lambda c, a: (lax.scan(lambda d, _: (d * 0.9 + a, d), c, length=2)[0], c), x[0], x
        )[1],
        (A,),
    ),
    Entry(
        "scan integers",
        lambda x: lax.scan(lambda c, a: ((c[0] + 1, c[1] + a * c[0]), c[0]), (0, x[0]), x)[0][1],
        (A,),
    ),
    Entry(
        "scan checkpointed",
        lambda x, m: lax.scan(jax.checkpoint(lambda c, _: (jnp.tanh(c @ m), c)), x, length=4)[0],
        (S, M),
    ),
    Entry("scan grows", lambda x: lax.scan(lambda c, _: (c * 3, c), x, length=5)[1], (A,)),
    Entry(
        "scan unroll", lambda x: lax.scan(lambda c, a: (c + a * c, c), x[0], x, unroll=2)[0], (A,)
    ),
    Entry("lax.map", lambda x: lax.map(lambda a: a / jnp.sum(a**2), x), (A,)),
    Entry("fori_loop", lambda x: lax.fori_loop(0, 4, lambda i, c: c * 0.5 + i, x), (A,)),
    Entry(
        "fori_loop update",
        lambda x: lax.fori_loop(0, 4, lambda i, c: c.at[i].set(x[i] * 2), jnp.zeros((4, 6))),
        (A,),
    ),
    Entry("while_loop", newton, (P,), False),
    Entry(
        "while on value",
        lambda x: lax.while_loop(lambda c: jnp.sum(c) < 50, lambda c: c * 2, x),
        (P,),
        False,
    ),
    Entry(
        "vmap while",
        jax.vmap(lambda r: lax.while_loop(lambda s: jnp.max(s) < 9, lambda s: s * 2, r)),
        (P,),
        False,
    ),
    Entry(
        "vmap fori_loop",
        lambda x: jax.vmap(
            jax.vmap(lambda n, a: lax.fori_loop(0, n, lambda i, c: jnp.sin(c) + i * a, a))
        )(jnp.arange(24).reshape(4, 6) % 5, x),
        (A,),
        False,
    ),
    Entry("cond", lambda x: lax.cond(x[0, 0] > 0, lambda a: a * 3, lambda a: jnp.sin(a), x), (A,)),
    Entry(
        "cond constant", lambda x: lax.cond(x[0, 0] > 9, jnp.zeros_like, lambda a: a * a, x), (A,)
    ),
    Entry("switch", lambda x: lax.switch(IDS[1], [jnp.sin, jnp.exp, lambda a: a * a], x), (A,)),
    Entry(
        "switch traced",
        lambda x: lax.switch(
            (x[0, 0] > 0).astype(int) + 1, [jnp.sin, lambda a: 9 * a, lambda a: a * a], x
        ),
        (A,),
    ),
    Entry("checkpoint", jax.checkpoint(lambda x, m: jnp.sin(x @ m) @ m), (S, M)),
    Entry(
        "checkpoint policy",
        jax.checkpoint(
            lambda x, m: jnp.sin(x @ m) @ m, policy=jax.checkpoint_policies.dots_saveable
        ),
        (S, M),
    ),
    Entry("checkpoint_name", lambda x: checkpoint_name(x * 2, "h") ** 2, (A,)),
    Entry("custom_vjp", clipped_gradient, (A,)),
    Entry("custom_vjp static", lambda x: power_of(x, 3), (A,)),
    Entry("custom_jvp", steep, (A,)),
    Entry(
        "custom_jvp in scan", lambda x: lax.scan(lambda c, _: (steep(c), c), x, length=3)[0], (A,)
    ),
    Entry("stop_gradient", lambda x: x * lax.stop_gradient(x), (A,)),
    Entry("straight through", straight_through, (A,)),
    Entry("vmap", lambda x, y: jax.vmap(jnp.dot)(x, y), (A, B)),
    Entry("vmap of grad", lambda x: jax.vmap(jax.grad(lambda a: jnp.sum(a**3)))(x), (A,)),
    Entry(
        "vmap psum", lambda x: jax.vmap(lambda a: a / lax.psum(a**2, "i"), axis_name="i")(x), (A,)
    ),
    Entry(
        "vmap scan",
        lambda x: jax.vmap(lambda a: lax.scan(lambda c, b: (c + b, c * b), 0.0, a)[1])(x),
        (A,),
    ),
    Entry(
        "vmap cond", lambda x: jax.vmap(lambda a: lax.cond(a[0] > 0, jnp.sin, jnp.cos, a))(x), (A,)
    ),
    Entry("jvp", lambda x, y: jax.jvp(jnp.tanh, (x,), (y,))[1], (A, B)),
    Entry("vjp", lambda x, y: jax.vjp(jnp.tanh, x)[1](y)[0], (A, B)),
    Entry("jacobian", lambda v: jax.jacobian(lambda u: u**2 * u[0])(v), (V,)),
    Entry("hessian", lambda v: jax.hessian(lambda u: jnp.sum(u**4) + u[0] * u[1])(v), (V,)),
    Entry(
        "hessian vector",
        lambda v, w: jax.jvp(jax.grad(lambda u: jnp.sum(jnp.sin(u))), (v,), (w,))[1],
        (V, W),
    ),
    Entry(
        "pure_callback",
        lambda x: jax.pure_callback(
            np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
        ),
        (A,),
        False,
    ),
    Entry("debug.print", lambda x: (jax.debug.callback(lambda a: None, x), x * 2)[1], (A,)),
    Entry("optimization_barrier", lambda x: lax.optimization_barrier(x * 2) + 1, (A,)),
    Entry("linearize", lambda x, y: jax.linearize(jnp.sin, x)[1](y), (A, B)),
    Entry(
        "custom_root",
        lambda p: lax.custom_root(
            lambda z: z**2 - p[0, 0],
            p[0, 0],
            lambda f, z: newton(p[0, 0]),
            lambda g, y: y / g(jnp.ones(())),
        ),
        (P,),
        True,
        1024.0,
    ),
]

PROGRAMS = [
    Entry("mlp", lambda x, w: jnp.mean((nn.gelu(x @ w) @ w.T - x) ** 2), (A, C)),
    Entry(
        "cross entropy",
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, IDS).mean(),
        (A,),
    ),
    Entry("soft cross entropy", lambda x: optax.softmax_cross_entropy(x, nn.one_hot(IDS, 6)), (A,)),
    Entry("sigmoid cross entropy", lambda x: optax.sigmoid_binary_cross_entropy(x, 1.0), (A,)),
    Entry("huber", lambda x, y: optax.huber_loss(x, y), (A, B)),
    Entry("cosine similarity", lambda x, y: optax.cosine_similarity(x, y), (A, B)),
    Entry(
        "kl divergence", lambda x, y: optax.kl_divergence(nn.log_softmax(x), nn.softmax(y)), (A, B)
    ),
    Entry("lstm", lstm, (normal(5, 2), normal(5, 12))),
    Entry("adam", adam_steps, (C, A), True, 2048.0),
    Entry("sgd with clipping", sgd_unrolled, (C, A), True, 512.0),
    Entry("batch norm", lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5), (A,), True, 512.0),
    Entry(
        "rotary",
        lambda x: (
            x * jnp.cos(jnp.arange(4.0))[:, None]
            + jnp.roll(x, 3, -1) * jnp.sin(jnp.arange(4.0))[:, None]
        ),
        (A,),
    ),
    Entry(
        "max pool",
        lambda x: -lax.reduce_window(-x, jnp.inf, lax.min, (2, 2), (2, 2), "VALID"),
        (A,),
    ),
    Entry(
        "mixture of experts",
        lambda x, c: jnp.einsum("te,td->ted", nn.softmax(lax.top_k(x, 3)[0]), x @ c),
        (A, C),
    ),
    Entry(
        "gradient penalty",
        lambda x, w: jnp.sum(jax.grad(lambda a: jnp.sum(jnp.tanh(a @ w)))(x) ** 2),
        (A, C),
    ),
    Entry(
        "power iteration",
        lambda m: lax.fori_loop(
            0, 5, lambda i, v: (lambda u: u / jnp.linalg.norm(u))(m @ v), jnp.ones(4)
        ),
        (S,),
        True,
        512.0,
    ),
    Entry(
        "exponential average",
        lambda x: lax.scan(lambda m, a: (0.9 * m + 0.1 * a, m), jnp.zeros(6), x)[0] / (1 - 0.9**4),
        (A,),
    ),
    Entry(
        "noise schedule",
        lambda x: x * jnp.sqrt(0.3) + jax.random.normal(KEY, x.shape) * 0.7**0.5,
        (A,),
    ),
]

LOOPS, _REST = parted(CONTROL, "scan map fori while")
CONDS, _REST = parted(_REST, "cond switch")
CUSTOM, CALLS = parted(_REST, "custom straight")
