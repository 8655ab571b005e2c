"""Cut edges of programs against hand-made results."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.batching import entry
from unitscale import as_scaled, nn, ops
from unitscale.analysis import cut_edges

W = jnp.ones((2, 2))


def tanh_dense(x, w):
    return ops.tanh(ops.dense(x, w)).data


def scanned(x, w):
    return jax.lax.scan(lambda c, w: (tanh_dense(c, w), None), x, jnp.stack([w, w]))[0]


def recurrent(x, w):
    return jax.lax.scan(lambda c, _: (tanh_dense(c, w), None), x, length=3)[0]


def chosen(x, w):
    return jax.lax.cond(True, tanh_dense, lambda x, w: x, x, w)


# Program of x and w; which of the two inputs are cut, and which of the results of named ops.
PROGRAMS = {
    "chain": (tanh_dense, [True, True], {"dense": [True], "tanh": [True]}),
    "jit": (jax.jit(tanh_dense), [True, True], {"dense": [True], "tanh": [True]}),
    "remat": (jax.checkpoint(tanh_dense), [True, True], {"dense": [True]}),
    "custom_jvp": (lambda x, w: jax.nn.relu(x) @ w, [True, True], {"max": [True]}),
    "skip": (lambda x, w: x + tanh_dense(x, w), [False, True], {"dense": [False], "add": [True]}),
    "tied": (lambda x, w: tanh_dense(tanh_dense(x, w), w), [True, False], {"dense": [False, True]}),
    "stopped": (lambda x, w: x + jax.lax.stop_gradient(tanh_dense(x, w)), [True], {"add": [True]}),
    "scan": (scanned, [True, False], {"dense": [False]}),
    "recurrent": (recurrent, [True, True], {"dense": [False], "tanh": [False]}),
    "cond": (chosen, [False, True], {"dense": [False], "cond": [True]}),
    "two_results": (lambda x, w: (x, tanh_dense(x, w)), [False, True], {"dense": [False]}),
    "unused": (lambda x, w: x * 2, [True], {"mul": [True]}),
    "square": (lambda x, w: x * x + w, [False, True], {"mul": [True]}),
}


def test_programs() -> None:
    for name, (fn, inputs, values) in PROGRAMS.items():
        with entry(name):
            found = cut_edges(fn, W, W)
            assert [i.cut for i in found.inputs if i.uses] == inputs
            for op, cut in values.items():
                assert [v.cut for v in found.intermediates if v.source.op == op] == cut


def test_text_lists_both_kinds_and_layers() -> None:
    layer = nn.Residual(nn.MLP(2, 4, rngs=nnx.Rngs(0)), tau=0.5, depth=1)
    found = cut_edges(lambda x, w: layer(tanh_dense(x, w)).data + x, W, W)
    text = str(found)
    assert text.index("cut edges") < text.index("input [1]") < text.index("not cut")
    assert "input [0] float32[2,2], uses 2" in text
    sources = [v.source for v in found.intermediates]
    assert ("dense", "Residual/MLP/Dense") in [(s.op, s.layer) for s in sources]
    assert all(s.line.startswith(__file__) for s in sources)


def test_scaled_arrays_and_dead_ends() -> None:
    """Only data of a ScaledArray has a gradient; values without a gradient are not analyzed."""
    w = as_scaled(jnp.full((2, 2), 8.0))
    found = cut_edges(lambda w, x: ops.dense(x, w["k"]).value, {"k": w}, W)
    assert [i.name for i in found.inputs] == ["[0]['k'].data", "[1]"]
    for fn in (jax.lax.stop_gradient, jnp.sign, jnp.argmax, lambda x: x.astype(int), lambda x: 1.0):
        with pytest.raises(ValueError, match=r"cut_edges: expected a floating input that reaches"):
            cut_edges(fn, W)
    rounds = jax.custom_vjp(lambda x: jnp.round(x))
    rounds.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    assert cut_edges(rounds, W).inputs[0].cut


def test_arguments_are_numbered_as_jax_does() -> None:
    def loss(x, w):
        return jnp.sum(x @ w)

    def tied(w, x):
        return jnp.sum(tanh_dense(x, w) * x)

    # An input that is not differentiated closes no cycle.
    for argnums, cut in ((None, False), (0, True)):
        found = cut_edges(tied, W, W, argnums=argnums)
        assert [v.cut for v in found.intermediates if v.source.op == "dense"] == [cut]
        assert len(found.inputs) == 2 - cut
    x, w = jnp.ones((2, 4)), jnp.ones((4, 4))
    last = cut_edges(loss, x, w, argnums=-1)
    assert last == cut_edges(loss, x, w, argnums=1) != cut_edges(loss, x, w)
    with pytest.raises(ValueError, match=r"must number the 2 arguments; got 2, -3"):
        cut_edges(loss, x, w, argnums=(0, 2, -3))
