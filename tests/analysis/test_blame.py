import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from unitscale import ops
from unitscale.analysis import Guilty, Source
from unitscale.analysis._cut_edges import Graph
from unitscale.analysis._gradients import Ratio, blame


def graph_of(fn, *args):
    return Graph(jax.make_jaxpr(fn)(*args), [True] * len(args))


def blamed(fn, constants, *args):
    """The ops blamed when the calls of a program have these ratios, whatever their own are."""
    graph = graph_of(fn, *args)
    ratios = {call: [Ratio(c, 0.0, c, 1.0) for c in given] for call, given in enumerate(constants)}
    return [(op.source.op, op.ratios) for op in blame(graph, ratios)]


X = jnp.ones((2, 2))


def branch(x):
    return x + ops.tanh(ops.gelu(x)).data


@pytest.mark.parametrize(
    ("constants", "expected"),
    [
        ([(1.0,), (1.0,)], []),
        ([(2.0,), (1.0,)], [("gelu", (2.0,))]),
        ([(1.0,), (3.0,)], [("tanh", (3.0,))]),
        ([(2.0,), (3.0,)], [("gelu", (2.0,)), ("tanh", (3.0,))]),
        ([(2.0,), (0.5,)], []),
        ([(-1.0,), (1.0,)], [("gelu", (-1.0,))]),
        ([(math.nan,), (1.0,)], [("gelu", (math.nan,))]),
    ],
)
def test_ops_that_do_not_cancel_are_blamed(constants, expected) -> None:
    found = blamed(branch, constants, X)
    assert [op for op, _ in found] == [op for op, _ in expected]
    for (_, a), (_, b) in zip(found, expected, strict=True):
        assert a == pytest.approx(b, nan_ok=True)


def test_a_cut_edge_is_never_blamed() -> None:
    assert blamed(lambda x: ops.tanh(ops.gelu(x)).data, [(2.0,), (3.0,)], X) == []


@pytest.mark.parametrize("wrong", range(4))
def test_many_residuals_cancel_and_one_does_not(wrong) -> None:
    """Each of four residual connections is a split and a sum whose ratios cancel, but for one."""

    def fn(x):
        for _ in range(4):
            x = ops.residual(lambda y: ops.tanh(y), x, 0.5).data
        return x

    b, s = 0.2**0.5, 0.8**0.5
    one = [(b,), (s,), (1.0,), (1 / b, 1 / s)]
    constants = [*itertools.chain(*([one] * 4))]
    assert blamed(fn, constants, X) == []
    constants[4 * wrong + 2] = (1.3,)
    assert blamed(fn, constants, X) == [("tanh", (1.3,))]


def test_advice_knows_the_op() -> None:
    assert "constraint='to_output_scale'" in blame_text(
        lambda x: branch(jnp.sin(x)), [(2.0,), (1.0,)]
    )
    tied = blame_text(lambda w: ops.matmul(w, w).data, [(1.0, 2.0)])
    assert "used several times" in tied
    two = blame_text(lambda w: ops.matmul(jnp.sin(w), jnp.cos(w)).data, [(1.5, 2.0)])
    assert "to_left_grad_scale" in two


def blame_text(fn, constants) -> str:
    graph = graph_of(fn, X)
    ratios = {call: [Ratio(c, 0.0, c, 1.0) for c in given] for call, given in enumerate(constants)}
    (guilty,) = blame(graph, ratios)
    return str(guilty)


def test_text() -> None:
    text = str(Guilty(Source("dense", "m.py:1 (f)"), (0.5, 2.0), "mend it"))
    assert text == "dense at m.py:1 (f): backward over forward factor 0.5, 2 off cut edges; mend it"
