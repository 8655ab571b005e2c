"""Mixtures of experts against dense NumPy, in which every expert processes every token."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import unitscale
from tests.gradients import jit
from tests.parallel.devices import mesh_of
from unitscale import ops, rules
from unitscale.core import ScaledArray

from .conformance import assert_close, case, in_every_dtype, normal, pulled, slow

TOKENS, WIDTH, HIDDEN = 6, 4, 3
# experts, top_k, mult, renormalize
ROUTES = {
    "two": (4, 2, 1.5, True),
    "all": (3, 3, 1.0, True),
    "one of the probabilities": (4, 1, 2.0, False),
    "three of the probabilities": (5, 3, 1.0, False),
}
SLACK = {"float32": 4, "float16": 8, "bfloat16": 8}
TANH = rules.elementwise(jnp.tanh).fwd


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gates_of(x, kernel, top_k, mult, renormalize):
    """Return gates (tokens, experts), zero for experts that are not chosen."""
    z = mult * WIDTH**-0.5 * x.reshape(-1, WIDTH) @ kernel
    mask = z >= -np.sort(-z, axis=-1)[:, top_k - 1 : top_k]
    return softmax(np.where(mask, z, -np.inf) if renormalize else z) * mask


def dense(x, kernel, up, down, route):
    experts, top_k, mult, renormalize = route
    gates = gates_of(x, kernel, *route[1:])
    hidden = TANH * np.tanh(WIDTH**-0.5 * np.einsum("td,edh->teh", x.reshape(-1, WIDTH), up))
    outputs = HIDDEN**-0.5 * np.einsum("teh,eho->teo", hidden, down)
    c = rules.mixture(experts, top_k, mult=mult, renormalize=renormalize).fwd
    return c * np.einsum("te,teo->to", gates, outputs).reshape(*x.shape[:-1], -1)


def apply(rows, params, groups):
    up, down = params
    return ops.grouped_dense(ops.tanh(ops.grouped_dense(rows, up, groups)), down, groups)


def mixture(x, kernel, up, down, route, **options):
    _, top_k, mult, renormalize = route
    out_features = down.shape[-1]
    routing = ops.route(
        x, kernel, top_k, mult=mult, renormalize=renormalize, out_features=out_features
    )
    return ops.mixture(apply, x, routing, (up, down), **options)


def shapes(experts):
    return (2, 3, WIDTH), (WIDTH, experts), (experts, WIDTH, HIDDEN), (experts, HIDDEN, 5)


def router_factor(route):
    """Return the gradient of the router's kernel over its true derivative."""
    experts, top_k, mult, renormalize = route
    options = {"top_k": top_k, "mult": mult, "renormalize": renormalize, "out_features": 5}
    factors = rules.router(WIDTH, experts, TOKENS, **options)
    return factors.bwd[1] / factors.fwd


def factors_of(route):
    experts, top_k, *_ = route
    # Each gradient inside is times top_k^1/2, and a kernel's over the root of its mean rows.
    inside = top_k**0.5 * (experts / (TOKENS * top_k)) ** 0.5
    kernels = inside * WIDTH**0.5, inside * HIDDEN**0.5
    return 1.0, router_factor(route), *kernels


def balancing(x, kernel, top_k, mult, renormalize):
    gates = gates_of(x, kernel, top_k, mult, renormalize)
    p = softmax(mult * WIDTH**-0.5 * x.reshape(-1, WIDTH) @ kernel)
    return np.asarray(p.shape[1] * np.sum((gates > 0).mean(0) / top_k * p.mean(0)))


def z_loss(x, kernel, top_k, mult, renormalize):
    z = mult * WIDTH**-0.5 * x.reshape(-1, WIDTH) @ kernel
    return np.mean(np.log(np.exp(z).sum(-1)) ** 2)


def loss_case(name, reference):
    route = ROUTES["two"]
    _, top_k, mult, renormalize = route

    def op(x, kernel):
        routing = ops.route(x, kernel, top_k, mult=mult, renormalize=renormalize, out_features=5)
        return getattr(routing, name)()

    return case(
        op,
        functools.partial(reference, top_k=top_k, mult=mult, renormalize=renormalize),
        normal(f"{name} of uneven choices", *shapes(route[0])[:2]),
        fwd=1.0,
        bwd=(TOKENS, TOKENS * router_factor(route)),
        slack=SLACK,
    )


CASES = {
    name: case(
        functools.partial(mixture, route=route),
        functools.partial(dense, route=route),
        normal(name, *shapes(route[0])),
        fwd=1.0,
        bwd=factors_of(route),
        slack=SLACK,
    )
    for name, route in ROUTES.items()
}
CASES |= {
    "load_balancing_loss": loss_case("load_balancing_loss", balancing),
    "z_loss": loss_case("z_loss", z_loss),
}
test_value_and_gradients = in_every_dtype(
    {name: CASES[name] for name in ("two", "load_balancing_loss", "z_loss")},
    mapped=("z_loss", "two"),
)


@pytest.mark.parametrize(
    "name", ["three of the probabilities", *map(slow, ("all", "one of the probabilities"))]
)
def test_other_choices(name: str) -> None:
    CASES[name]()


def test_scales() -> None:
    CASES["two"](scales=(2.0**3, 0.25, 0.5, 8.0))


def test_routing() -> None:
    x, kernel = (jnp.asarray(a, jnp.float16) for a in normal("routing", (2, 3, WIDTH), (WIDTH, 5)))
    routing = jax.jit(lambda x, kernel: ops.route(x, kernel, 2))(x, kernel)
    assert routing.top_k == 2
    assert {routing.logits.dtype.name, routing.gates.dtype.name} == {"float32"}
    expected = gates_of(*(np.asarray(a, np.float64) for a in (x, kernel)), 2, 1.0, True)
    found = np.zeros((TOKENS, 5))
    np.put_along_axis(found, np.asarray(routing.experts), np.asarray(routing.gates), axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(routing.gates.sum(-1), 1, rtol=1e-6)
    assert (np.diff(routing.gates) <= 0).all()
    np.testing.assert_allclose(routing.probabilities, softmax(np.asarray(routing.logits)), 1e-5)


@pytest.mark.parametrize("dtype", [slow("float32"), "float16"])
def test_all_tokens_to_one_expert(dtype: str) -> None:
    """No token is dropped, and experts without tokens have zero gradients."""
    experts, tokens = 4, 8
    x, up, down = (
        a.astype(dtype)
        for a in normal("one", (tokens, WIDTH), (experts, WIDTH, HIDDEN), (experts, HIDDEN, WIDTH))
    )
    x, kernel, route = abs(x), np.zeros((WIDTH, experts), dtype), (experts, 1, 1.0, False)
    kernel[:, 2] = 8
    y, grads = pulled(lambda *w: mixture(x, kernel, *w, route), up, down)
    expected = dense(*(np.asarray(a, np.float64) for a in (x, kernel, up, down)), route)
    # Four roundings of half a unit: of both matmuls, tanh and the gates.
    assert_close(y, expected, dtype, "value")
    assert (np.abs(expected) > 0.1).any(-1).all()
    for grad in map(np.asarray, grads):
        assert np.isfinite(grad).all()
        assert not grad[[0, 1, 3]].any()
        assert grad[2].any()


def test_attached_losses() -> None:
    """The gradient is that of the sum, the value that of the first loss."""

    def attached(w):
        return jnp.sum(ops.attach_loss(jnp.sin(w), jnp.sum(w**3), 0.5).value)

    w = jnp.arange(4.0)
    value, gradient = jax.jit(jax.value_and_grad(attached))(w)
    np.testing.assert_allclose(value, np.sin(w).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.cos(w) + 1.5 * w**2, rtol=1e-6)


# Scales of experts, as optimizers store kernels.
EACH = np.float32([1, 1, 4, 4]).reshape(4, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, EACH], ids=["plain", "scaled"])
def test_inside_of_shard_map_each_device_has_its_experts(scale) -> None:
    """Also with a sharded batch, gradients averaged over devices equal those of one device."""
    x, kernel, up, down = (jnp.asarray(a, jnp.float32) for a in normal("manual", *shapes(4)))

    def gradients(x, kernel, up, down, total=lambda loss: loss):
        def loss(*args):
            return total(jnp.sum(jnp.sin(mixture(*args, ROUTES["two"]).value)))

        return jax.value_and_grad(loss, (0, 1, 2, 3))(x, kernel, up, down)

    if scale is not None:
        up, down = (ScaledArray(a / scale, jnp.asarray(scale)) for a in (up, down))
    args, mesh = (x, kernel, up, down), mesh_of(data=2, expert=2)
    summed = functools.partial(gradients, total=lambda loss: jax.lax.psum(loss, "data"))
    specs = P("data"), P(), P("expert"), P("expert")
    run = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=(P(), specs)))
    expected = jit(gradients)(*args)
    with jax.set_mesh(mesh):
        by_compiler = jax.jit(gradients)(*args)
    for found in (run(*args), by_compiler):
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


def test_losses_follow_the_batch_size() -> None:
    x, kernel = (jax.random.normal(jax.random.key(n), (n, WIDTH)) for n in (TOKENS, 5))
    kernel = kernel.T

    def slope(tokens):
        with unitscale.batch_size(tokens):
            routing = ops.route(x, jnp.zeros((WIDTH, 5)), 2)

            def loss(logits):
                one = dataclasses.replace(routing, logits=logits)
                return one.z_loss() + one.load_balancing_loss()

            return jax.grad(loss)(x @ kernel)

    np.testing.assert_allclose(slope(4 * TOKENS), 4 * slope(TOKENS), rtol=1e-6)
    empty = ops.route(jnp.zeros((0, WIDTH)), kernel, 2)
    assert empty.z_loss() == empty.load_balancing_loss() == 0
