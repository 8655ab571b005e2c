"""Readout in chunks of tokens: memory of logits, and sums that devices keep until the end."""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.parallel.devices import explicit_mesh, mesh_of
from unitscale import ops
from unitscale.ops import _readout_cross_entropy as readout
from unitscale.quant import Delayed, MatmulConfig, QuantState

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
WIDTH, VOCAB, CHUNK = 8, 4096, 32
entropy = functools.partial(ops.readout_cross_entropy, transposed=True)


@pytest.fixture
def optimized() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def compiled(tokens: int, chunk: int | None, config: MatmulConfig | None = None) -> Any:
    f = functools.partial(entropy, chunk_size=chunk, config=config)
    shapes = (
        jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    return jax.jit(jax.value_and_grad(f, (0, 1))).lower(*shapes).compile()


def largest(program: Any) -> int:
    """Return the size of the largest array in an optimized program."""
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\w*\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("config", [None, slow(MatmulConfig())], ids=["float32", "fp8"])
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


@pytest.mark.usefixtures("optimized")
def test_large_logits_are_cut_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 64 * VOCAB
    monkeypatch.setattr(readout, "MOST_LOGITS", limit)
    monkeypatch.setattr(readout, "LEAST_TOKENS", (1, 1))
    assert largest(compiled(1024, None)) == limit


@pytest.mark.parametrize(
    ("explicit", "spec", "count"),
    # Axes that are left to the compiler say no more than what they are called.
    [slow(False, P("data"), 2), (True, P("data", "context"), 4)],
    ids=str,
)
def test_every_device_has_as_many_logits_as_one_would(
    monkeypatch: pytest.MonkeyPatch, explicit: bool, spec: P, count: int
) -> None:
    """Chunks are fewer on several devices, because each adds to a sum over all devices."""
    monkeypatch.setattr(readout, "MOST_LOGITS", 8 * VOCAB)
    monkeypatch.setattr(readout, "LEAST_TOKENS", (1, 1))
    x, table, labels = jnp.ones((8, 8, WIDTH)), jnp.ones((VOCAB, WIDTH)), jnp.zeros((8, 8), int)
    grad = jax.grad(functools.partial(entropy, labels=labels), argnums=(0, 1))

    def chunks(*args: Any) -> int:
        # Functions are traced once; a new one each time.
        text = str(jax.make_jaxpr(lambda *args: grad(*args))(*args))
        return 1 + int((re.findall(r"length=(\d+)", text) or ["0"])[0])

    assert chunks(x, table) == 8
    mesh = (explicit_mesh if explicit else mesh_of)(data=2, context=2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec)), jax.device_put(table, P())
        assert chunks(*placed) == count
        found = jax.jit(grad)(*placed)
    for a, e in zip(found, jax.jit(grad)(x, table), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "reduction", "axes", "spec"),
    [
        slow("none", "mean", {"data": 4}, P("data")),
        ("none", "none", {"context": 8}, P()),  # which does not divide 6 tokens
        slow("e5m2", "none", {"fsdp": 2, "context": 2}, P("fsdp", "context")),
        ("delayed", "mean", {"data": 2, "context": 2}, P("data")),
    ],
    ids=str,
)
def test_chunks_of_every_device_give_what_one_device_gives(
    name: str, reduction: Any, axes: dict[str, int], spec: P
) -> None:
    """Devices keep their sums, and the amax of delayed scaling, until the end."""
    strategy = Delayed()
    config = {
        "none": None,
        "e5m2": MatmulConfig(cotangent="float8_e5m2"),
        "delayed": MatmulConfig(strategy=strategy),
    }[name]
    state = QuantState.create(strategy) if name == "delayed" else None
    rng = np.random.default_rng(0)
    x, table = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 6, 16), (64, 16)))
    labels = rng.integers(0, 64, (8, 6))

    @jax.jit
    def gradients(x: Any, table: Any, state: Any) -> Any:
        def loss(x: Any, table: Any, state: Any) -> jax.Array:
            how: dict[str, Any] = {"config": config, "state": state, "reduction": reduction}
            losses = entropy(x, table, labels, chunk_size=16, **how)
            return jnp.sum(losses * jnp.arange(1.0, 7.0) if reduction == "none" else losses)

        value, (*grads, seen) = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, table, state)
        return value, grads, None if state is None else state.advance(seen)

    expected = gradients(x, table, state)
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        found = gradients(jax.device_put(x, NamedSharding(mesh, spec)), table, state)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        most = np.max(np.abs(e), where=np.isfinite(e), initial=0)
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4 * most)


@pytest.mark.usefixtures("optimized")
def test_devices_are_added_once() -> None:
    """The loop's body has no sum over devices."""
    mesh = mesh_of(data=4)
    x, labels = jnp.ones((8, 6, WIDTH)), jnp.zeros((8, 6), int)
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, P("data")))
        grad = jax.jit(jax.grad(functools.partial(entropy, labels=labels, chunk_size=16), (0, 1)))
        compiled = grad.lower(rows, jnp.ones((64, WIDTH))).compile()
    assert "all-reduce" in {c.kind for c in collectives(compiled)}
    parts = compiled.as_text().split("\n\n")
    assert any("while(" in part for part in parts)
    assert not any("all-reduce(" in part for part in parts if "ENTRY" not in part)
