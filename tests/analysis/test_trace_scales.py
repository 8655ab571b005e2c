"""The statistics of a program against those of its values, taken one by one in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops
from unitscale.analysis import trace_scales
from unitscale.core import format_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
W = RNG.normal(size=(4, 4)).astype(np.float32)


def check(record, values, formats=("float16", "float8_e4m3fn", "float8_e5m2")) -> None:
    size = np.abs(np.asarray(values, np.float64))
    np.testing.assert_allclose(record.rms, np.sqrt(np.mean(size**2)), rtol=1e-5)
    np.testing.assert_allclose(record.amax, size.max(initial=0.0), rtol=1e-6)
    assert record.zeros == pytest.approx(np.mean(size == 0))
    assert set(record.formats) == set(formats)
    for name, shares in record.formats.items():
        f = format_of(name)
        lost = size <= f.smallest_subnormal / 2
        assert shares.zero == pytest.approx(np.mean(lost))
        assert shares.subnormal == pytest.approx(np.mean((size < f.smallest_normal) & ~lost))
        assert shares.saturated == pytest.approx(np.mean(size > f.max))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-30, 1e30, 1e-42, 2e4, 0.0])
def test_statistics_at_every_scale(scale) -> None:
    x = (X * scale).astype(np.float32)
    x[0, 0] = 0
    record, copy = trace_scales(lambda x: x + 0)(x)
    if scale != 1e-42:  # XLA counts numbers that are subnormal in float32 as zero
        check(record, x)
        check(copy, x)
    assert record.name == "[0]"
    assert copy.name == "result"
    assert (record.shape, record.dtype, record.executions) == ((8, 4), "float32", 1)


def named(trace, primitive, backward=False):
    return [r for r in trace if r.primitive == primitive and r.backward is backward]


def scanned(x, w):
    def body(c, r):
        c = jnp.tanh(c * r)
        return c, c

    return jax.lax.scan(body, w[0], x)[1]


def while_loop(x, w):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1]


def test_loops_count_every_iteration() -> None:
    trace = trace_scales(jax.jit(scanned))(X, W)
    (record,) = named(trace, "tanh")
    assert record.executions == 8
    check(record, scanned(X, W))
    (record,) = named(trace_scales(while_loop)(X, W), "tanh")
    assert record.executions == 3
    once, twice = np.tanh(X), np.tanh(np.tanh(X))
    check(record, np.stack([once, twice, np.tanh(twice)]))
    (record,) = named(trace_scales(lambda x, w: scanned(x[:0], w))(X, W), "tanh")
    assert (record.executions, record.rms, record.amax) == (0, 0.0, 0.0)


def test_only_the_branch_that_was_taken_was_executed() -> None:
    def fn(x):
        return jax.lax.cond(x[0, 0] > 100, jnp.sin, jnp.cos, x)

    trace = trace_scales(fn)(X)
    assert [r.executions for r in named(trace, "sin")] == [0]
    (cos,) = named(trace, "cos")
    check(cos, np.cos(X))


@jax.checkpoint
def layer(w, x):
    with jax.named_scope("layer"):
        return ops.gelu(ops.dense(x, w)).data


def test_forward_and_backward_of_a_step() -> None:
    def loss(w, x):
        return jnp.sum(layer(w, x) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    trace = trace_scales(step)(W, X)
    value, grad = step(W, X)
    np.testing.assert_allclose(trace.result[0], value, rtol=1e-6)
    np.testing.assert_allclose(trace.result[1], grad, rtol=1e-5)
    results = {r.name: r for r in trace if r.name.startswith("result")}
    assert set(results) == {"result[0]", "result[1]"}
    check(results["result[1]"], grad)
    assert results["result[1]"].backward
    assert results["result[1]"].source.op == "dense"
    dense = next(r for r in trace if r.primitive == "mul" and r.source.op == "dense")
    check(dense, X @ W / 2)
    assert "layer" in dense.scope
    assert dense.source.line.startswith(__file__)
    assert any(r.source.op == "gelu" and r.backward for r in trace)


def test_keywords_trees_and_formats() -> None:
    trace = trace_scales(lambda p, *, k: p["a"] * k, formats="E4M3")({"a": X}, k=W[:1])
    assert [r.name for r in trace] == ["[0]['a']", "['k']", "result"]
    check(trace[-1], X * W[:1], ("E4M3",))


def test_the_program_can_be_lowered_and_called() -> None:
    def loss(p, *, x):
        return {"loss": jnp.sum(jnp.tanh(x @ p["w"]) ** 2)}

    tracer, kwargs = trace_scales(loss, formats=()), {"x": X}
    trace = tracer({"w": W}, **kwargs)
    lowered = tracer.lower({"w": W}, **kwargs)
    cost = lowered.cost_analysis()
    assert cost is not None
    assert cost["flops"] > 2 * X.shape[0] * W.size
    (value,), rows = lowered.compile()({"w": W}, **kwargs)
    assert value == trace.result["loss"]
    assert rows[:, -1].tolist() == [r.amax for r in trace]


def test_an_infinity_is_seen() -> None:
    record = trace_scales(lambda x: 1 / x)(jnp.zeros(3))[-1]
    assert not np.isfinite(record.rms)
    assert not np.isfinite(record.amax)


def test_a_format_that_is_none() -> None:
    with pytest.raises(ValueError, match="'float7' is not a floating-point format"):
        trace_scales(jnp.sin, formats=["float7"])
