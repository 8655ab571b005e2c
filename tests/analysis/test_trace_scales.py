"""The statistics of a program against those of its values, taken one by one in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.analysis.records import check
from unitscale import ops
from unitscale.analysis import trace_scales

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
W = RNG.normal(size=(4, 4)).astype(np.float32)


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


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_one_element_that_is_not_finite_among_many(wrong: float) -> None:
    records = trace_scales(lambda x: x * 2)(jnp.ones(2**16).at[3].set(wrong))
    for record in records:
        np.testing.assert_array_equal([record.rms, record.amax], wrong)


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


def test_it_is_traced_once_for_arguments_of_one_type() -> None:
    calls = []

    def fn(x):
        calls.append(x)
        return jnp.tanh(x)

    tracer = trace_scales(fn)
    first, again = tracer(X), tracer(2 * X)
    assert len(calls) == 1
    check(again[-1], np.tanh(2 * X))
    assert [r.source for r in again] == [r.source for r in first]
    check(tracer(X[:2])[-1], np.tanh(X[:2]))
    assert len(calls) == 2


def test_a_sample_stands_for_all_but_amax_is_that_of_all() -> None:
    x = RNG.normal(size=4096).astype(np.float32)
    x[1] = 100  # not in the sample
    record = trace_scales(lambda x: x + 0, sample=64)(x)[0]
    part = np.asarray(x[::63], np.float64)
    np.testing.assert_allclose(record.rms, np.sqrt(np.mean(part**2)), rtol=1e-5)
    assert (record.amax, record.executions) == (100, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_values(dtype) -> None:
    x = jnp.asarray(RNG.normal(size=64) * 2.0 ** RNG.integers(-30, 15, size=64), dtype)
    check(trace_scales(lambda x: x + 0)(x)[0], x.astype(jnp.float32))


def test_an_infinity_is_seen() -> None:
    record = trace_scales(lambda x: 1 / x)(jnp.zeros(3))[-1]
    assert not np.isfinite(record.rms)
    assert not np.isfinite(record.amax)


def test_a_format_that_is_none() -> None:
    with pytest.raises(ValueError, match="floating-point format; got float7"):
        trace_scales(jnp.sin, formats=["float7"])
