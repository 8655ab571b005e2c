"""Drop-in replacements of `lax.dot_general` and `jnp.einsum`, in layers and outside."""

from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
DENSE = (((1,), (0,)), ((), ()))


def whole(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw small whole numbers, which are exact in every 8-bit format with scales near 1."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def test_is_lax_dot_general_where_nothing_rounds() -> None:
    cases = [*((name, Unit()) for name in NUMBERS), *(("batch", s) for s in STRATEGIES)]
    # Batches and sums of two dimensions are what a single one is not.
    cases = cases[2:]
    args = {name: [whole(i, s) for i, s in enumerate(NUMBERS[name][1:])] for name in NUMBERS}

    @jax.jit
    def run(args):
        results = []
        for name, strategy in cases:
            for dot in (lax.dot_general, dot_general(MatmulConfig(strategy=strategy))):
                y, vjp = jax.vjp(lambda *a, d=dot, n=name: d(*a, NUMBERS[n][0]), *args[name])
                results.append((y, *vjp(whole(2, y.shape))))
        return results

    found = run(args)
    for case, wanted, got in zip(cases, found[::2], found[1::2], strict=True):
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(case))


def test_dtypes() -> None:
    dot, op = dot_general(MatmulConfig()), einsum(MatmulConfig())
    x, w, whole = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 3)), jnp.arange(4)

    def run() -> Any:
        return (
            dot(x, w, DENSE),
            dot(x, w.astype(jnp.bfloat16), DENSE),
            dot(x, w, DENSE, None, jnp.float16),
            dot(x, w, DENSE, precision="highest", preferred_element_type=None),
            op("bk,kn->bn", x, w, preferred_element_type=jnp.float16),
            dot(whole[None], whole[:, None], DENSE),
        )

    found = [y.dtype.name for y in jax.eval_shape(run)]
    assert found == ["float32", "bfloat16", "float16", "float32", "float16", "int32"]
    assert int(dot(whole[None], whole[:, None], DENSE)[0, 0]) == 14
    x, state = jnp.full((2, 2), 3.0), QuantState.create(Delayed())
    dot = jax.jit(dot_general(MatmulConfig(strategy=Delayed()), state), static_argnums=2)
    np.testing.assert_array_equal(dot(x, x, DENSE), 18)


def test_drops_into_a_layer_of_linen() -> None:
    """`nn.convert` puts the same functions into layers of NNX."""
    x, dot = whole(0, (2, 3, 8)), dot_general(MatmulConfig(strategy=Dynamic()))
    dense = flax.linen.Dense(4, dot_general=dot)
    params = {"params": {"kernel": whole(1, (8, 4)), "bias": np.ones(4, np.float32)}}
    expected = x @ params["params"]["kernel"] + 1
    np.testing.assert_array_equal(jax.jit(dense.apply)(params, x), expected)
    assert "f8_e4m3fn" in str(jax.make_jaxpr(dense.apply)(params, x))


@pytest.mark.parametrize(
    "config", [MatmulConfig(lhs="e5m2"), MatmulConfig(strategy=Static((1.0, 2.0, 1.0)))], ids=str
)
def test_einsum_keeps_the_order_of_its_operands(config) -> None:
    """jnp.einsum itself would put the smaller operand on the left."""
    lhs, rhs = whole(0, (9, 4)) * 300, whole(1, (4, 2))

    @jax.jit
    def both(lhs, rhs):
        wanted = contract(lhs, rhs, Contraction("ij", "jk", "ki"), config=config)
        return einsum(config)("ij, jk -> ki", lhs, rhs), wanted

    np.testing.assert_array_equal(*both(lhs, rhs))


def test_gradients_of_a_product_of_vectors() -> None:
    x, ops = jnp.arange(1.0, 65.0), [einsum(MatmulConfig(strategy=s)) for s in (Unit(), Block())]
    grads = [jax.grad(lambda a, b, op=op: op("i,i->", a, b), (0, 1)) for op in ops]
    for found in jax.tree.leaves(jax.jit(lambda x: [grad(x, x) for grad in grads])(x)):
        np.testing.assert_allclose(found, x, rtol=2**-4)


def test_out_sharding_is_obeyed() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    own: Any = {
        "out_sharding": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    }
    config, spec = MatmulConfig(), Contraction("ij", "kj", "ik")
    for f in (
        lambda x: dot_general(config)(x, x.T, DENSE, **own),
        lambda x: einsum(config)("ij,kj->ik", x, x, **own),
        lambda x: contract_for_hook(x, x, spec, config, **own),
    ):
        y = jax.jit(f)(jnp.ones((8, 4)))
        assert y.sharding.is_equivalent_to(own["out_sharding"], 2)


def test_contractions_of_einsums() -> None:
    for subscripts, rank, labels in (
        ("b t k, k h d -> b t h d", 3, ("btk", "khd", "bthd")),
        ("...k,kn->...n", 3, ("ABk", "kn", "ABn")),
        ("...k,kn->...n", 1, ("k", "kn", "n")),
        ("A...k,kn->A...n", 4, ("ABCk", "kn", "ABCn")),
        ("bk,bkn->nb", 2, ("bk", "bkn", "nb")),
    ):
        assert einsum_problem(subscripts) == ""
        assert einsum_contraction(subscripts, rank) == (wanted := Contraction(*labels))
        assert (wanted.grad_lhs.out, wanted.grad_rhs.out) == (wanted.lhs, wanted.rhs)
    for subscripts, problem in (
        ("ab,...bc->...ac", "an ellipsis"),
        ("...ab,bc->ac", "an ellipsis"),
    ):
        assert problem in einsum_problem(subscripts)


def test_negative_dimensions_and_empty_operands() -> None:
    dot, x = dot_general(MatmulConfig()), jnp.ones((2, 3))
    np.testing.assert_array_equal(
        dot(x, jnp.ones((4, 3)), (((-1,), (-1,)), ((), ()))), np.full((2, 4), 3.0)
    )

    def summed(w):
        return dot(jnp.ones((2, 3, 0)), w, (((2,), (0,)), ((), ()))).sum()

    assert jax.grad(summed)(jnp.ones((0, 4))).shape == (0, 4)
