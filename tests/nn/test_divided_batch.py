"""Layers that make arrays of their own (positions, first states) where a batch is divided."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.parallel.devices import explicit_mesh, mesh_of, relative_error
from unitscale import batch_over, nn, ops

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6, 8)).astype(np.float32)
LABELS = RNG.integers(0, 5, (8, 6))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.positions = nn.PositionalEmbed(6, 8, rngs=rngs)
        self.recurrent = nn.RNN(nn.GRUCell(8, 8, rngs=rngs))
        self.stack = nn.TransformerStack(2, 8, 2, 16, remat="layer", is_causal=True, rngs=rngs)
        self.readout = nn.Readout(8, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.readout(self.stack(self.recurrent(self.positions(x))))


@pytest.mark.parametrize("check", [True, False])
def test_gradients_of_a_model(check: bool) -> None:
    graphdef, params = nnx.split(Model(nnx.Rngs(0)))

    def loss(params, x, labels):
        return ops.softmax_cross_entropy(nnx.merge(graphdef, params)(x), labels)

    def checked(params, x, labels):
        return jax.grad(lambda p: lax.pmean(loss(p, x, labels), "data"))(params)

    def unchecked(params, x, labels):
        with batch_over("data"):
            return lax.pmean(jax.grad(loss)(params, x, labels), "data")

    mapped = jax.shard_map(
        checked if check else unchecked,
        mesh=mesh_of(data=4),
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check,
    )
    found = jax.tree_util.tree_leaves_with_path(jax.jit(mapped)(params, X, LABELS))
    whole = jax.tree.leaves(jax.jit(jax.grad(loss))(params, X, LABELS))
    for (path, ours), expected in zip(found, whole, strict=True):
        name = jax.tree_util.keystr(path)
        if "['key']['bias']" in name:  # adds the same to all logits of a query
            assert np.abs(ours).max() < 1e-5
        else:  # keys' gradients are what is left of larger ones: some 32 roundings of theirs
            assert relative_error(ours, expected) < 2**-18, name


def block(implementation: ops.Implementation, rate: float, policy: str) -> nnx.Module:
    attention = nn.MultiHeadAttention(
        2,
        8,
        is_causal=True,
        dropout_rate=rate,
        rotary_base=100.0,
        implementation=implementation,
        policy=policy,
        rngs=nnx.Rngs(0),
    )
    layers = nn.LayerNorm(8, policy=policy), nn.MLP(8, 16, policy=policy, rngs=nnx.Rngs(1))
    readout = nn.Readout(8, 5, policy=policy, rngs=nnx.Rngs(2))
    return nnx.Sequential(attention, nn.Dropout(rate, rngs=nnx.Rngs(3)), *layers, readout)


@pytest.mark.parametrize(
    ("implementation", "rate", "policy"),
    [
        ("plain", 0.0, "float32"),
        ("plain", 0.5, "float32"),
        ("chunked", 0.0, "float32"),
        ("chunked", 0.0, "fp8"),
    ],
)
def test_a_mesh_whose_axes_are_part_of_the_type(
    implementation: ops.Implementation, rate: float, policy: str
) -> None:
    @nnx.jit
    def gradients(model: Any, x: Any, labels: Any) -> Any:
        return nn.value_and_grad(lambda m: ops.softmax_cross_entropy(m(x), labels))(model)

    expected = jax.tree.leaves(gradients(block(implementation, rate, policy), X, LABELS))
    with jax.set_mesh(explicit_mesh(data=4)):
        x, labels = (jax.device_put(array, P("data")) for array in (X, LABELS))
        found = jax.tree.leaves(gradients(block(implementation, rate, policy), x, labels))
    # What was rounded the other way before a product in FP8 moves there by an ulp, 2^-3 of it.
    tolerance = 2**-16 if policy == "float32" else 2**-4
    for ours, whole in zip(found, expected, strict=True):
        assert np.linalg.norm(ours - whole) <= tolerance * np.linalg.norm(whole) + 1e-6


@pytest.mark.parametrize("policy", ["float32", "fp8_delayed"])
def test_a_language_model_on_such_a_mesh(policy: str) -> None:
    ids = RNG.integers(0, 16, (8, 7))

    def losses(ids: Any) -> list[float]:
        rngs = nnx.Rngs(0)
        embed = nn.Embed(16, 8, policy=policy, rngs=rngs)
        recurrent = nn.RNN(nn.OptimizedLSTMCell(8, 8, policy=policy, rngs=rngs))
        stack = nn.TransformerStack(2, 8, 2, 16, is_causal=True, policy=policy, rngs=rngs)
        model = nnx.Sequential(embed, recurrent, stack)
        optimizer = nn.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, ids: Any) -> Any:
            def loss(model: Any) -> Any:
                return model.layers[0].cross_entropy(model(ids[:, :-1]), ids[:, 1:])

            value, grads = nn.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        return [float(step(model, optimizer, ids)) for _ in range(3)]

    expected = losses(jnp.asarray(ids))
    assert expected[-1] < expected[0]
    with jax.set_mesh(explicit_mesh(data=4)):
        found = losses(jax.device_put(ids, P("data")))
    # In FP8 parameters that differ by 1e-6 move the second of these losses by 0.1%, the third by
    # 0.4%: what was rounded the other way does so by an eighth.
    tolerances = [1e-5] * 3 if policy == "float32" else [1e-5, 5e-3, 2e-2]
    for ours, whole, tolerance in zip(found, expected, tolerances, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=tolerance)
