"""The drop-ins for `lax.dot_general` and `jnp.einsum`, inside and outside of layers."""

from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

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
    contract_for_hook,
    dot_general,
    einsum,
    einsum_contraction,
    einsum_problem,
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
    quantized = dot_general(MatmulConfig(strategy=strategy))

    @jax.jit
    def run(lhs, rhs):
        results = []
        for dot in (lax.dot_general, quantized):
            y, vjp = jax.vjp(lambda *a, dot=dot: dot(*a, numbers), lhs, rhs)
            results.append((y, *vjp(whole(2, y.shape))))
        return results

    for wanted, got in zip(*run(lhs, rhs), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_dtypes() -> None:
    numbers = (((1,), (0,)), ((), ()))
    dot = dot_general(MatmulConfig())
    x, w = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 3))
    assert dot(x, w, numbers).dtype == jnp.float32
    assert dot(x, w.astype(jnp.bfloat16), numbers).dtype == jnp.bfloat16
    assert dot(x, w, numbers, None, jnp.float16).dtype == jnp.float16
    assert dot(x, w, numbers, precision="highest", preferred_element_type=None).dtype == jnp.float32
    op = einsum(MatmulConfig())
    assert op("bk,kn->bn", x, w, preferred_element_type=jnp.float16).dtype == jnp.float16
    counts = dot(jnp.arange(4)[None], jnp.arange(4)[:, None], numbers)
    assert (counts.dtype, int(counts[0, 0])) == (jnp.int32, 14)
    config = MatmulConfig(strategy=Delayed())
    x, state = jnp.full((2, 2), 3.0), QuantState.create(Delayed())
    np.testing.assert_array_equal(dot_general(config, state)(x, x, numbers), 18)


LAYERS: dict[str, Any] = {
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
    y = quantized(x)
    # Two operands with relative error 2**-4, eight terms.
    np.testing.assert_allclose(y, plain(x), atol=2 * 2**-4 * 4)
    assert not np.array_equal(y, plain(x))
    grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(quantized)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


def test_drops_into_linen() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 8))
    layer = flax.linen.Dense(4, dot_general=dot_general(MatmulConfig(strategy=Dynamic())))
    params = layer.init(jax.random.key(1), x)
    y, plain = layer.apply(params, x), flax.linen.Dense(4).apply(params, x)
    np.testing.assert_allclose(y, plain, atol=2 * 2**-4 * 4)
    assert not np.array_equal(y, plain)


@pytest.mark.parametrize(
    "config", [MatmulConfig(lhs="e5m2"), MatmulConfig(strategy=Static((1.0, 2.0, 1.0)))], ids=str
)
def test_einsum_keeps_the_order_of_its_operands(config) -> None:
    """jnp.einsum would multiply the smaller operand from the left."""
    lhs, rhs = whole(0, (9, 4)) * 300, whole(1, (4, 2))
    wanted = contract(lhs, rhs, Contraction("ij", "jk", "ki"), config=config)
    np.testing.assert_array_equal(einsum(config)("ij, jk -> ki", lhs, rhs), wanted)


@pytest.mark.parametrize("strategy", [Unit(), Dynamic(), Block()], ids=str)
def test_gradients_of_a_product_of_vectors(strategy: Any) -> None:
    x = jnp.arange(1.0, 65.0)
    op = einsum(MatmulConfig(strategy=strategy))
    for grad in jax.jit(jax.grad(lambda a, b: op("i,i->", a, b), (0, 1)))(x, x):
        np.testing.assert_allclose(grad, x, rtol=2**-4)


def test_out_sharding_is_obeyed() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    dot, op = dot_general(MatmulConfig()), einsum(MatmulConfig())
    for f in (
        lambda x: dot(x, x.T, (((1,), (0,)), ((), ())), out_sharding=sharding),
        lambda x: op("ij,kj->ik", x, x, out_sharding=sharding),
        lambda x: contract_for_hook(
            x, x, Contraction("ij", "kj", "ik"), MatmulConfig(), out_sharding=sharding
        ),
    ):
        assert jax.jit(f)(jnp.ones((8, 4))).sharding.is_equivalent_to(sharding, 2)


@pytest.mark.parametrize(
    ("subscripts", "rank", "wanted"),
    [
        ("b t k, k h d -> b t h d", 3, Contraction("btk", "khd", "bthd")),
        ("...k,kn->...n", 3, Contraction("ABk", "kn", "ABn")),
        ("...k,kn->...n", 1, Contraction("k", "kn", "n")),
        ("A...k,kn->A...n", 4, Contraction("ABCk", "kn", "ABCn")),
        ("bk,bkn->nb", 2, Contraction("bk", "bkn", "nb")),
    ],
)
def test_contractions_of_einsums(subscripts: str, rank: int, wanted: Contraction) -> None:
    assert einsum_problem(subscripts) == ""
    assert einsum_contraction(subscripts, rank) == wanted
    assert (wanted.grad_lhs.out, wanted.grad_rhs.out) == (wanted.lhs, wanted.rhs)


@pytest.mark.parametrize(
    ("subscripts", "problem"),
    [
        ("ab,bc", "no ->"),
        ("ab,...bc->...ac", "an ellipsis"),
        ("...ab,bc->ac", "an ellipsis"),
        ("aab,bc->ac", "repeats a label"),
        ("ab,bc->a", "'c' in one term only"),
        ("abd,bc->ac", "'d' in one term only"),
    ],
)
def test_einsums_that_are_not_one_matmul(subscripts: str, problem: str) -> None:
    assert problem in einsum_problem(subscripts)
