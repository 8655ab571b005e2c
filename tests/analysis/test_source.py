import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from unitscale import nn, ops
from unitscale.analysis._program import Source, source_of


def last(fn, *args):
    return jax.make_jaxpr(fn)(*args).eqns[-1]


X = jnp.ones((2, 2))


@jax.custom_vjp
def straight(x):
    return jnp.round(x)


straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g,))
LAYER = nn.Dense(2, 2, use_bias=False, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda x: jnp.sin(x), "sin"),
        (lambda x: straight(x), "straight"),
        (lambda x: ops.dense(x, X).data, "dense"),
        (lambda x: ops.gelu(x).data, "gelu"),
        (lambda x: ops.residual(lambda y: y, x, 0.5).data, "residual"),
        (lambda x: LAYER(x).data, "dense"),
    ],
)
def test_the_op_that_was_called_and_the_line_that_called_it(fn, op) -> None:
    found = source_of(last(fn, X))
    assert found.op == op
    assert found.line.startswith(f"{__file__}:{fn.__code__.co_firstlineno} (")


def test_what_jax_makes_inside_gets_the_line_of_the_call() -> None:
    def fn(x):
        return jnp.take(x, jnp.array([0, 1]), axis=0)

    call = last(fn, X)
    inner = call.params["jaxpr"].eqns[-1]
    assert source_of(inner, call).line.startswith(__file__)
    assert source_of(inner, call).op == inner.primitive.name


def test_layers_are_named_and_hide_the_ops_around_them() -> None:
    layer = nn.Residual(nn.MLP(2, 4, rngs=nnx.Rngs(0)), tau=0.5, depth=1)
    eqns = jax.make_jaxpr(lambda x: layer(x).data)(X).eqns
    found = [source_of(eqn) for eqn in eqns if eqn.primitive.name == "custom_vjp_call"]
    assert ("dense", "Residual/MLP/Dense") in [(s.op, s.layer) for s in found]
    assert found[-1].op == "residual"
    assert found[-1].layer == "Residual"


def test_text() -> None:
    assert str(Source("dense", "")) == "dense"
    assert str(Source("dense", "", "MLP")) == "dense of MLP"
