import jax
import jax.numpy as jnp
import pytest

from unitscale import ops
from unitscale.analysis._cut_edges import Graph


def graph_of(fn, *args):
    return Graph(jax.make_jaxpr(fn)(*args), [True] * len(args))


X = jnp.ones((2, 2))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.lax.stop_gradient(x),
        lambda x: jnp.sign(x) * 2,
        lambda x: (x > 0).astype(jnp.float32),
        lambda x: jnp.argmax(x),
        lambda x: 1.0,
    ],
)
def test_nothing_is_alive_where_no_gradient_flows(fn) -> None:
    assert graph_of(fn, X).live() == []


def test_dead_code_is_left_out() -> None:
    def fn(x):
        jnp.sin(x)
        return jnp.cos(x)

    graph = graph_of(fn, X)
    assert [eqns[0].primitive.name for eqns, _ in graph.values.values()] == ["sin", "cos"]
    # Input to cos, cos to its value, and that to the output.
    assert len(graph.live()) == 3


def test_calls_are_found_once_and_carry_their_operands() -> None:
    graph = graph_of(lambda x, w: jax.jit(ops.dense)(x, w).data, X, X)
    assert len(graph.ops) == 1
    entered = [(e.op, e.operand) for e in graph.live() if e.op is not None]
    assert entered == [(0, 0), (0, 1)]


def test_a_function_that_rounds_is_alive_by_its_own_rule() -> None:
    @jax.custom_vjp
    def straight(x):
        return jnp.round(x)

    straight.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    assert graph_of(straight, X).live()


def test_a_loop_closes_a_cycle_through_its_carry() -> None:
    def fn(x, w):
        return jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c) * w, x)

    graph = graph_of(fn, X, X)
    edges = graph.live()
    assert any(e.end < e.start and e.end != 0 for e in edges)
