"""What every layer must do: transformations, ScaledArray parameters, formats."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import unitscale
from tests.gradients import jit
from tests.nn.table import LAYERS, make
from tests.optimizers import scaled
from tests.products import products
from unitscale.core import ScaledArray

EPS = float(jnp.finfo(jnp.float32).eps)


def _value(model: nnx.Module, x: jax.Array) -> jax.Array:
    return model(x).value


def functional(model: nnx.Module, call: Any = _value) -> tuple[Any, Any]:
    """``apply(params, x) -> call(model, x)`` and the parameters."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def apply(params, x):
        return call(nnx.merge(graphdef, params, rest, copy=True), x)

    return apply, params


def loss_of(apply):
    return lambda params, x: jnp.sum(jnp.sin(apply(params, x).astype(jnp.float32)))


def assert_close(tree: Any, expected: Any, ulps: float = 256) -> None:
    """Equal up to rounding: differences below ``ulps`` epsilons of the array's largest entry."""
    leaves, references = jax.tree.leaves(tree), jax.tree.leaves(expected)
    assert len(leaves) == len(references)
    for leaf, reference in zip(leaves, references, strict=True):
        leaf, reference = np.asarray(leaf, np.float64), np.asarray(reference, np.float64)
        assert leaf.shape == reference.shape
        error = np.max(np.abs(leaf - reference), initial=0.0)
        assert error <= ulps * EPS * max(np.max(np.abs(reference), initial=0.0), 1.0), error


@pytest.mark.parametrize("name", LAYERS)
def test_jit_vmap_scan_remat_and_checkpoint(name) -> None:
    model, layer = make(name)
    x = layer.input(2)
    apply, params = functional(model)
    second = functional(make(name, seed=1)[0])[1]
    loss = loss_of(apply)

    def scanned(stacked, x):
        def step(carry, p):
            y = apply(p, x)
            return carry + jnp.sum(jnp.sin(y)), y

        return jax.lax.scan(step, 0.0, stacked)

    @jit
    def everything(params, second, x):
        stacked = jax.tree.map(lambda *p: jnp.stack(p), params, second)
        stacked_grads, outputs = jax.grad(scanned, has_aux=True)(stacked, x)
        return {
            "value": apply(params, x),
            "second": apply(second, x),
            # Under vmap each example is a batch of its own.
            "vmap": jax.vmap(apply, (None, 0))(params, x[:, None])[:, 0],
            "grads": jax.grad(loss, (0, 1))(params, x),
            "checkpoint": jax.grad(jax.checkpoint(loss), (0, 1))(params, x),
            "remat": jax.grad(loss_of(functional(model, nnx.remat(_value))[0]), (0, 1))(params, x),
            "scan": outputs,
            "scan grads": stacked_grads,
        }

    found = everything(params, second, x)
    assert_close(found["vmap"], found["value"])
    assert_close(found["checkpoint"], found["grads"])
    assert_close(found["remat"], found["grads"])
    # Two layers of the same structure, their states stacked and scanned.
    assert_close(found["scan"], np.stack([found["value"], found["second"]]))
    assert_close(jax.tree.map(lambda g: np.asarray(g)[0], found["scan grads"]), found["grads"][0])
    assert isinstance(nnx.eval_shape(lambda m, x: m(x), model, x), ScaledArray)
    if name == "mlp":  # without a transformation, which its parts and others share
        assert_close(model(x).value, found["value"])


def _is_scaled(leaf: Any) -> bool:
    return isinstance(leaf, ScaledArray)


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_may_be_scaled_arrays(name) -> None:
    model, layer = make(name)
    x = layer.input()
    apply, params = functional(model)
    params = jax.tree_util.tree_map_with_path(
        lambda path, p: np.zeros_like(p) if "bias" in jax.tree_util.keystr(path) else p, params
    )
    cases = [unitscale.as_scaled(params), unitscale.as_scaled(params, 0.25)]
    cases.append(scaled(optax.sgd(0.1), weights="float32").scale_params(params))
    run = jax.value_and_grad(loss_of(apply))
    (loss, grads), *results = jit(lambda x, *cases: [run(c, x) for c in cases])(x, params, *cases)
    for case, (scaled_loss, scaled_grads) in zip(cases, results, strict=True):
        assert_close(scaled_loss, loss)
        arrays = jax.tree.leaves(case, is_leaf=_is_scaled)
        cotangents = jax.tree.leaves(scaled_grads, is_leaf=_is_scaled)
        for g, p, c in zip(jax.tree.leaves(grads), arrays, cotangents, strict=True):
            # In data space: d/d data = scale * d/d value.
            assert_close(c.data, g * p.scale)


DTYPES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("float32", "bfloat16"),
    "float16": ("float32", "float16"),
    "fp8": ("float32", "bfloat16"),
}


@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_dtypes_of_parameters_activations_and_cotangents(name, policy) -> None:
    param_dtype, compute_dtype = DTYPES[policy]
    model, layer = make(name, policy)
    apply, params = functional(model)
    x = layer.input(dtype=compute_dtype)
    out = jax.eval_shape(apply, params, x)
    assert out.dtype == compute_dtype
    assert {p.dtype.name for p in jax.tree.leaves(params)} <= {param_dtype}
    grads = jax.eval_shape(lambda p, x, y: jax.vjp(apply, p, x)[1](y), params, x, out)
    assert {g.dtype.name for g in jax.tree.leaves(grads[0])} <= {param_dtype}
    assert grads[1].dtype == compute_dtype
    # A float32 input is cast on the way in, and its cotangent back on the way out; a residual
    # stream of its own keeps its dtype.
    wide = layer.input()
    out = jax.eval_shape(apply, params, wide)
    assert out.dtype == ("float32" if name == "residual" else compute_dtype)
    assert jax.eval_shape(jax.grad(loss_of(apply), 1), params, wide).dtype == jnp.float32


def test_every_dot_of_a_layer_runs_in_the_formats_of_its_policy() -> None:
    """The operands of the products, forward and backward, as the jaxpr has them.

    With FP8 there is the product of hidden units that were computed again, which XLA drops.
    """
    for policy in DTYPES:
        model, layer = make("gated", policy)
        apply, params = functional(model)
        jaxpr = jax.make_jaxpr(jax.grad(loss_of(apply), (0, 1)))(params, layer.input())
        dtype = "float8_e4m3fn" if policy == "fp8" else policy
        again = policy == "fp8"
        assert products(jaxpr.jaxpr) == [("dot_general", dtype, dtype)] * (9 + again)


def test_a_layer_takes_a_scaled_array_and_keeps_it_in_range() -> None:
    """Data far outside float16 passes a linear layer by its scale alone."""
    model, layer = make("dense", "float16")
    model.bias = None
    x = layer.input(dtype=jnp.float16)
    huge = model(ScaledArray(x, 2.0**20))
    np.testing.assert_array_equal(huge.data, model(x).data)
    assert float(huge.scale) == 2.0**20


@pytest.mark.parametrize("name", LAYERS)
def test_unknown_policy(name) -> None:
    with pytest.raises(ValueError, match=r"unitscale.nn: policy must be .* Did you mean 'float16'"):
        make(name, "flaot16")
