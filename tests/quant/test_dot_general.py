"""The drop-in for `lax.dot_general`, inside and outside of layers, against float64 references."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from unitscale.nn import EinsumOp
from unitscale.quant import (
    Block,
    Contraction,
    Delayed,
    Dynamic,
    MatmulConfig,
    QuantState,
    Static,
    Unit,
    contract,
    dot_general,
    einsum,
)

NUMBERS = {
    "dense": ((((2,), (0,)), ((), ())), (2, 3, 8), (8, 4)),
    "batch": ((((2,), (1,)), ((0,), (0,))), (2, 3, 8), (2, 8, 4)),
    "two batches, two sums": ((((1, 4), (3, 1)), ((2, 0), (0, 2))), (2, 3, 4, 5, 6), (4, 6, 2, 3)),
    "outer": ((((), ()), ((), ())), (3,), (4,)),
}
STRATEGIES = [Dynamic(), Dynamic("channel", 1), Static((4.0, 0.5, 2.0)), Block(4)]


def whole(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Small whole numbers, which every 8-bit format and every scale near 1 holds."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, Unit()) for name in NUMBERS), *(("batch", s) for s in STRATEGIES)],
    ids=str,
)
def test_is_lax_dot_general_where_nothing_rounds(name: str, strategy) -> None:
    numbers, *shapes = NUMBERS[name]
    lhs, rhs = (whole(i, shape) for i, shape in enumerate(shapes))
    wanted, wanted_vjp = jax.vjp(lambda *a: lax.dot_general(*a, numbers), lhs, rhs)
    got, vjp = jax.vjp(
        lambda *a: dot_general(MatmulConfig(strategy=strategy))(*a, numbers), lhs, rhs
    )
    np.testing.assert_array_equal(got, wanted)
    dy = whole(2, wanted.shape)
    # Channel scales go into the cotangent, whose products are powers of two times small numbers.
    for a, b in zip(vjp(dy), wanted_vjp(dy), strict=True):
        np.testing.assert_array_equal(a, b)


def test_dtypes() -> None:
    numbers = (((1,), (0,)), ((), ()))
    dot = dot_general(MatmulConfig())
    x, w = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 3))
    assert dot(x, w, numbers).dtype == jnp.float32
    assert dot(x, w.astype(jnp.bfloat16), numbers).dtype == jnp.bfloat16
    assert dot(x, w, numbers, None, jnp.float16).dtype == jnp.float16
    assert dot(x, w, numbers, precision="highest", preferred_element_type=None).dtype == jnp.float32
    counts = dot(jnp.arange(4)[None], jnp.arange(4)[:, None], numbers)
    assert (counts.dtype, int(counts[0, 0])) == (jnp.int32, 14)


LAYERS = {
    "nnx.Linear": lambda dot: nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0)),
    "nnx.LinearGeneral": lambda dot: nnx.LinearGeneral(
        (8,), (2, 2), dot_general=dot, rngs=nnx.Rngs(0)
    ),
    "nnx.Einsum": lambda dot: nnx.Einsum(
        "btk,kn->btn", (8, 4), (4,), einsum_op=dot, rngs=nnx.Rngs(0)
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_drops_into_nnx_layers(name: str) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    make, config = LAYERS[name], MatmulConfig()
    is_einsum = name == "nnx.Einsum"
    plain = make(jnp.einsum if is_einsum else lax.dot_general)
    quantized = make(einsum(config) if is_einsum else dot_general(config))
    text = str(jax.make_jaxpr(lambda x: quantized(x))(x))
    assert "f8_e4m3fn" in text
    # Two operands with relative error 2**-4, eight terms.
    np.testing.assert_allclose(quantized(x), plain(x), atol=2 * 2**-4 * 4)
    assert not np.array_equal(quantized(x), plain(x))
    grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(quantized)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


def test_drops_into_linen() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 8))
    layer = flax.linen.Dense(4, dot_general=dot_general(MatmulConfig(strategy=Dynamic())))
    params = layer.init(jax.random.key(1), x)
    assert "f8_e4m3fn" in str(jax.make_jaxpr(layer.apply)(params, x))
    np.testing.assert_allclose(
        layer.apply(params, x), flax.linen.Dense(4).apply(params, x), atol=2 * 2**-4 * 4
    )


def test_einsum() -> None:
    lhs, rhs = whole(0, (2, 3, 4)), whole(1, (4, 2, 5))
    got = einsum(MatmulConfig(strategy=Dynamic()))("abk,kac->cab", lhs, rhs)
    np.testing.assert_array_equal(got, np.einsum("abk,kac->cab", lhs, rhs))


@pytest.mark.parametrize(
    "config", [MatmulConfig(lhs="e5m2"), MatmulConfig(strategy=Static((1.0, 2.0, 1.0)))], ids=str
)
def test_einsum_exchanges_its_operands_only_where_that_changes_nothing(config) -> None:
    """jnp.einsum would multiply the smaller operand from the left."""
    lhs, rhs = whole(0, (9, 4)) * 300, whole(1, (4, 2))
    spec = Contraction("ij", "jk", "ki")
    wanted = contract(lhs, rhs, spec, config=config)
    for op in (einsum(config), EinsumOp(config)):
        np.testing.assert_array_equal(op("ij, jk -> ki", lhs, rhs), wanted)
        for subscripts, operands in (("ij,jk", (lhs, rhs)), ("ij,jk,k->i", (lhs, rhs, rhs[0]))):
            with pytest.raises(ValueError, match=f"einsum: both operands of '{subscripts}', which"):
                op(subscripts, *operands)
    third = einsum(MatmulConfig(strategy=Dynamic()))("ij,jk,k->i", lhs, rhs, rhs[0])
    np.testing.assert_array_equal(third, lhs @ (rhs @ rhs[0]))


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """What JAX traces or compiles meanwhile."""
    found: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event.endswith(("trace_duration", "compile_duration")):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("strategy", [Unit(), Delayed()], ids=str)
@pytest.mark.parametrize("subscripts", ["ij,jk->ik", "ij,jk", "ij,jk,k->i"])
def test_an_eager_einsum_compiles_once_and_keeps_nothing(subscripts: str, strategy) -> None:
    config = MatmulConfig(strategy=strategy)
    operands = [jnp.ones((2, 8)), jnp.ones((8, 3)), jnp.ones(3)][: subscripts.count(",") + 1]
    gone = []

    def call() -> None:
        op = EinsumOp(config)
        state = None if op.state is None else op.state.get_value()
        op(subscripts, *operands)
        op(subscripts, *operands)
        functions = [op if state is None else leaf for leaf in jax.tree.leaves(state) or [op]]
        gone.extend(weakref.ref(held) for held in functions)

    call()
    with compilations() as found:
        call()
        einsum(config, QuantState.create(strategy) if isinstance(strategy, Delayed) else None)(
            subscripts, *operands
        )
    assert not found
    gc.collect()
    assert gone
    assert [held() for held in gone] == [None] * len(gone)


def test_an_einsum_of_three_operands_under_transformations() -> None:
    lhs, rhs, last = whole(0, (2, 9, 4)), whole(1, (4, 2)), whole(2, (2,))
    op = einsum(MatmulConfig(strategy=Dynamic()))

    def total(f, x):
        return jnp.sum(f("ij,jk,k->i", x, rhs, last) * jnp.arange(9.0))

    for transform in (jax.vmap, lambda f: lambda x: jax.lax.map(jax.jit(f), x)):
        value, grad = transform(jax.value_and_grad(partial(total, op)))(lhs)
        wanted = jax.vmap(jax.value_and_grad(partial(total, jnp.einsum)))(lhs)
        np.testing.assert_array_equal(value, wanted[0])
        # The cotangents are small whole numbers times rhs @ last, of which E4M3 keeps four bits.
        np.testing.assert_allclose(grad, wanted[1], rtol=2**-4)


def test_out_sharding_is_obeyed() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    dot = dot_general(MatmulConfig())
    y = jax.jit(lambda x: dot(x, x.T, (((1,), (0,)), ((), ())), out_sharding=sharding))(
        jnp.ones((8, 4))
    )
    assert y.sharding.is_equivalent_to(sharding, 2)


def test_a_name_is_no_config() -> None:
    with pytest.raises(TypeError, match=r"config must be a quant.MatmulConfig, .*; got 'fp8'"):
        dot_general("fp8")  # type: ignore[arg-type]


def test_a_strategy_with_a_state_needs_it() -> None:
    config = MatmulConfig(strategy=Delayed())
    with pytest.raises(ValueError, match=r"dot_general: Delayed.* give state=QuantState.create"):
        dot_general(config)
    with pytest.raises(ValueError, match=r"state is one of Static.*but the strategy is Delayed"):
        dot_general(config, QuantState.create(Static()))
    with pytest.raises(ValueError, match=r"state is one of Delayed.*but the strategy is Unit"):
        dot_general(MatmulConfig(), QuantState.create(Delayed()))
    x = jnp.full((2, 2), 3.0)
    y = dot_general(config, QuantState.create(Delayed()))(x, x, (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(y, 18)


def test_einsum_of_a_batch_of_one_is_broadcast() -> None:
    x, y = jnp.ones((1, 3, 4)), jnp.ones((6, 4, 2))
    found = einsum(MatmulConfig())("bij,bjk->bik", x, y)
    np.testing.assert_array_equal(found, jnp.einsum("bij,bjk->bik", x, y))


@pytest.mark.parametrize("strategy", [Unit(), Dynamic(), Block()])
def test_gradients_of_a_product_of_vectors(strategy: Any) -> None:
    x = jnp.arange(1.0, 65.0)
    op = einsum(MatmulConfig(strategy=strategy))
    found = jax.grad(lambda a, b: op("i,i->", a, b), (0, 1))(x, x)
    for grad in found:
        np.testing.assert_allclose(grad, x, rtol=2**-4)
