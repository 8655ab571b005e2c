"""Logits are never whole: no array of the compiled program has tokens times classes elements."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.parallel.devices import explicit_mesh, mesh_of
from unitscale import ops
from unitscale.quant import Delayed, MatmulConfig, QuantState

OPTIMIZED = True
WIDTH, VOCAB, CHUNK = 8, 4096, 32


def compiled(tokens: int, chunk: int | None, config: MatmulConfig | None = None) -> Any:
    def loss(x, table, labels):
        return ops.readout_cross_entropy(
            x, table, labels, transposed=True, chunk_size=chunk, config=config
        )

    shapes = (
        jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()


def largest(program: Any) -> int:
    """Elements of the largest array that an optimized program names."""
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\w*\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize("config", [None, MatmulConfig()], ids=["float32", "fp8"])
def test_memory_does_not_grow_with_the_logits(config: MatmulConfig | None) -> None:
    few, many = (compiled(n * CHUNK, CHUNK, config) for n in (4, 64))
    bytes_of = [program.memory_analysis().temp_size_in_bytes for program in (few, many)]
    # What does grow is what there is of each token: x, dx and a number or two, in chunks and not.
    own = 60 * CHUNK * (4 * WIDTH + 4) * 4
    assert bytes_of[1] <= bytes_of[0] + own
    assert own < 60 * CHUNK * VOCAB  # a byte of each logit
    assert largest(many) < CHUNK * VOCAB * 2
    whole = compiled(64 * CHUNK, 64 * CHUNK, config)
    assert largest(whole) >= 64 * CHUNK * VOCAB
    assert whole.memory_analysis().temp_size_in_bytes > 10 * bytes_of[1]


def test_large_logits_are_cut_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 64 * VOCAB
    monkeypatch.setattr("unitscale.ops._readout_cross_entropy.MOST_LOGITS", limit)
    assert largest(compiled(64, None)) == limit
    assert largest(compiled(1024, None)) == limit


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("spec", [P("data"), P("data", "context")], ids=str)
def test_every_device_has_as_many_logits_as_one_would(
    monkeypatch: pytest.MonkeyPatch, spec: P, explicit: bool
) -> None:
    """Fewer chunks: each of them adds to a sum over all devices."""
    monkeypatch.setattr("unitscale.ops._readout_cross_entropy.MOST_LOGITS", 8 * VOCAB)
    mesh = (explicit_mesh if explicit else mesh_of)(data=2, context=2)
    x, table = jnp.ones((8, 8, WIDTH)), jnp.ones((VOCAB, WIDTH))

    def loss(x, table):
        return ops.readout_cross_entropy(x, table, jnp.zeros((8, 8), jnp.int32), transposed=True)

    def chunks(*args: Any) -> int:
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=1))(*args))
        return 1 + int((re.findall(r"length=(\d+)", text) or ["0"])[0])

    assert chunks(x, table) == 8
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec)), jax.device_put(table, P())
        # Axes that are left to the compiler say no more than what they are called.
        assert chunks(*placed) == (4 if explicit else 2)
        found = jax.jit(jax.grad(loss, argnums=(0, 1)))(*placed)
    for a, e in zip(found, jax.grad(loss, argnums=(0, 1))(x, table), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("axes", [{"data": 4}, {"context": 2}, {"data": 2, "context": 2}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["none", "e4m3", "e5m2", "delayed"])
def test_chunks_of_every_device_give_what_one_device_gives(
    name: str, reduction: Any, axes: dict[str, int]
) -> None:
    """Sums that devices keep until the end; what delayed scaling has seen, too."""
    strategy = Delayed()
    config = {
        "none": None,
        "e4m3": MatmulConfig(),
        "e5m2": MatmulConfig(cotangent="float8_e5m2"),
        "delayed": MatmulConfig(strategy=strategy),
    }[name]
    state = QuantState.create(strategy) if name == "delayed" else None
    keys = jax.random.split(jax.random.key(0), 3)
    x, table = jax.random.normal(keys[0], (8, 6, 16)), jax.random.normal(keys[1], (64, 16))
    labels = jax.random.randint(keys[2], (8, 6), 0, 64)

    @jax.jit
    def gradients(x: Any, table: Any, state: Any) -> Any:
        def loss(x: Any, table: Any, state: Any) -> jax.Array:
            options: dict[str, Any] = {"config": config, "state": state, "reduction": reduction}
            losses = ops.readout_cross_entropy(
                x, table, labels, transposed=True, chunk_size=16, **options
            )
            return jnp.sum(losses * jnp.arange(1.0, 7.0) if reduction == "none" else losses)

        value, (*grads, seen) = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, table, state)
        return value, grads, None if state is None else state.advance(seen)

    expected = gradients(x, table, state)
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, P("data" if "data" in axes else None))
        found = gradients(jax.device_put(x, place), table, state)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = np.max(np.abs(e), where=np.isfinite(e), initial=0)
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4 * largest)
