"""Parts of a product add up to the whole, and the right operand is seen once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.parallel.devices import mesh_of
from tests.products import conversions
from unitscale.core import is_scaled
from unitscale.quant import Block, Contraction, Delayed, Dynamic, MatmulConfig, Multiplier, Unit

from .products import state_of, three_products

SPEC = Contraction("tk", "kn", "tn")
FACTORS = (0.5, 0.25, 2.0)


@pytest.mark.parametrize(
    "strategy", [None, Unit(), Dynamic("channel"), Delayed(), Block(4)], ids=str
)
def test_parts_are_the_whole(strategy) -> None:
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in [(6, 8), (8, 5), (6, 5)]
    )
    config = None if strategy is None else MatmulConfig(strategy=strategy)
    state = None if strategy is None else state_of(strategy)

    def parts(x, w, dy):
        times = Multiplier(w, SPEC, FACTORS, config, jnp.float32, 2, state)
        found = []
        for rows in (slice(0, 2), slice(2, 6)):
            y, part = times(x[rows])
            found.append((y, *times.gradients(part, dy[rows])))
        y, dx, dw, seen = zip(*found, strict=True)
        total = jax.tree.map(lambda *a: sum(a), times.shared_gradient, *seen)
        return jnp.concatenate(y), jnp.concatenate(dx), sum(dw), total

    def whole(x, w, dy):
        y, dx, dw, seen = three_products(config, SPEC)(x, w, dy, state)
        return y * FACTORS[0], dx * FACTORS[1], dw * FACTORS[2], seen

    (*found, seen), (*expected, whole_seen) = jax.jit(lambda *args: (parts(*args), whole(*args)))(
        x, w, dy
    )
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    if state is not None:
        ours, theirs = (state.advance(gradient) for gradient in (seen, whole_seen))
        np.testing.assert_array_equal(ours.history, theirs.history)
        np.testing.assert_array_equal(ours.counts, theirs.counts)


def test_the_right_operand_is_quantized_once_and_its_gradient_is_wide() -> None:
    config = MatmulConfig()
    times = Multiplier(jnp.ones((8, 5), jnp.bfloat16), SPEC, FACTORS, config, jnp.bfloat16, 3)
    y, part = times(jnp.ones((2, 8), jnp.bfloat16))
    assert is_scaled(part.lhs)
    dx, dw, seen = times.gradients(part, y)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert seen is times.shared_gradient is None
    single = Multiplier(jnp.ones((8, 5), jnp.bfloat16), SPEC, FACTORS, config, jnp.bfloat16, 1)
    assert single.gradients(part, y)[1].dtype == jnp.bfloat16

    def casts(x, w):
        times = Multiplier(w, SPEC, FACTORS, config, jnp.bfloat16, 3)
        return [times(rows)[0] for rows in x]

    jaxpr = jax.make_jaxpr(casts)(jnp.ones((3, 2, 8)), jnp.ones((8, 5)))
    assert sorted(conversions(jaxpr, "float8_e4m3fn")) == [*3 * [(2, 8)], (8, 5)]


def test_a_strategy_needs_its_own_state() -> None:
    config = MatmulConfig(strategy=Delayed())
    with pytest.raises(ValueError, match="keeps its scales in a state"):
        Multiplier(jnp.ones((8, 5)), SPEC, FACTORS, config, jnp.float32, 1)
    other = state_of(Delayed(margin=1))
    with pytest.raises(ValueError, match="but the strategy is"):
        Multiplier(jnp.ones((8, 5)), SPEC, FACTORS, config, jnp.float32, 1, other)


@pytest.mark.parametrize("config", [None, MatmulConfig()], ids=["none", "fp8"])
def test_the_right_operand_comes_to_where_it_is_asked(config: MatmulConfig | None) -> None:
    """In few bits, from devices that each have a part of it."""
    mesh = mesh_of(fsdp=4)
    w = jnp.arange(32.0).reshape(8, 4) / 32

    def run(x: Any, w: Any) -> Any:
        places = {"k": (), "n": ()}
        return Multiplier(w, SPEC, FACTORS, config, jnp.float32, 1, places=places)(x)[0]

    expected = run(jnp.ones((4, 8)), w)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("fsdp")))
        parts = jax.device_put(w, NamedSharding(mesh, P("fsdp")))
        program = jax.jit(run)
        found = collectives(program.lower(x, parts).compile())
        np.testing.assert_allclose(program(x, parts), expected, rtol=1e-6)
    assert {c.kind for c in found} == {"all-gather"}
