"""Statistics of a program's values against NumPy, and the plot of these."""

import io
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from rich.console import Console

from tests.parallel.devices import explicit_mesh
from unitscale import ops
from unitscale.analysis import FormatShares, ScaleRecord, ScaleTrace, Source, trace_scales
from unitscale.core import format_of


def check(record, values, formats=("float16", "float8_e4m3fn", "float8_e5m2"), rtol=1e-5) -> None:
    size = np.abs(np.asarray(values, np.float64))
    np.testing.assert_allclose(record.rms, np.sqrt(np.mean(size**2)), rtol=rtol)
    np.testing.assert_allclose(record.amax, size.max(initial=0.0), rtol=1e-6)
    assert record.zeros == pytest.approx(np.mean(size == 0))
    assert set(record.formats) == set(formats)
    for name, shares in record.formats.items():
        f = format_of(name)
        lost = size <= f.smallest_subnormal / 2
        assert shares.zero == pytest.approx(np.mean(lost))
        assert shares.subnormal == pytest.approx(np.mean((size < f.smallest_normal) & ~lost))
        assert shares.saturated == pytest.approx(np.mean(size > f.max))


def named(trace, primitive, backward=False):
    return [r for r in trace if r.primitive == primitive and r.backward is backward]


RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
W = RNG.normal(size=(4, 4)).astype(np.float32)


def test_statistics_at_every_scale() -> None:
    tracer = trace_scales(lambda x: x + 0)
    for scale in (1.0, 1e-30, 1e30, 2e4, 0.0, np.inf, np.nan):
        x = X.copy() if not np.isfinite(scale) else (X * scale).astype(np.float32)
        x[0, 0] = 0 if np.isfinite(scale) else scale
        record, copy = tracer(x)
        if np.isfinite(scale):
            check(record, x)
            check(copy, x)
        else:
            np.testing.assert_array_equal([record.rms, copy.amax], scale)
        assert (record.name, copy.name) == ("[0]", "result")
        assert (record.shape, record.dtype, record.executions) == ((8, 4), "float32", 1)
    x = jnp.asarray(RNG.normal(size=64) * 2.0 ** RNG.integers(-30, 15, size=64), "bfloat16")
    check(tracer(x)[0], x.astype(jnp.float32))


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


def on_cpu(x):
    return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)


def test_only_the_branch_that_was_taken_was_executed() -> None:
    trace = trace_scales(lambda x: jax.lax.cond(x[0, 0] > 100, jnp.sin, jnp.cos, x))(X)
    assert [r.executions for r in named(trace, "sin")] == [0]
    (cos,) = named(trace, "cos")
    check(cos, np.cos(X))
    once = np.sin(X)
    loop = lambda x: jax.lax.scan(lambda c, _: (on_cpu(c), None), x, length=2)[0]  # noqa: E731
    for fn, values in ((on_cpu, once), (loop, np.stack([once, np.sin(once)]))):
        trace = trace_scales(fn)(X)
        assert [r.primitive for r in trace] == ["input", "sin"]
        check(trace[1], values)


def test_the_name_of_a_value_that_is_gone_is_no_other_value_s() -> None:
    def fn(x):
        return jnp.reshape(jnp.sin(jnp.cos(x)), -1)  # a view, which has no record of its own

    for _ in range(20):
        assert [r.name for r in trace_scales(fn)(X)] == ["[0]", "", ""]


def test_what_devices_do_together_is_executed_whole() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    total = jax.shard_map(
        lambda part: jax.lax.psum(part, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
    )
    (record,) = named(trace_scales(lambda x: jnp.tanh(total(x)))(X), "tanh")
    check(record, np.tanh(X[:4] + X[4:]))


@pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b"))])
def test_values_that_explicit_axes_shard(spec: P) -> None:
    mesh = explicit_mesh(a=2, b=2)
    x = RNG.normal(size=(8, 256)).astype(np.float32)

    def fn(x):
        def body(c, _):
            c = jnp.sin(c)
            return c, None

        return jax.lax.scan(body, 2 * x, None, length=2)[0]

    with jax.set_mesh(mesh):
        trace = trace_scales(fn, sample=None)(jax.device_put(x, NamedSharding(mesh, spec)))
    doubled, (sine,) = named(trace, "mul")[0], named(trace, "sin")
    rtol = x.size * float(np.finfo(np.float32).eps)  # of a sum of as many
    check(doubled, 2 * x, rtol=rtol)
    once = np.sin(2 * x)
    check(sine, np.stack([once, np.sin(once)]), rtol=rtol)


def test_table() -> None:
    trace = trace_scales(lambda x: {"y": 3 * jnp.sin(x)})(jnp.ones(4))
    console = Console(width=200, file=io.StringIO())
    console.print(trace.table())
    rows = [line for line in console.file.getvalue().splitlines() if "float32[4]" in line]
    assert len(rows) == 3
    for part in ("result['y']", "forward", "2.52", "mul"):
        assert part in rows[-1]


def record(i: int, rms: float, backward: bool = False) -> ScaleRecord:
    kind, none = ("mul", "", backward, (2,), "float32", 1), FormatShares(0.0, 0.0, 0.0)
    shares = {"float16": none, "float8_e4m3fn": none}
    return ScaleRecord(f"value {i}", Source("dense", ""), *kind, rms, 4 * rms, 0.0, shares)


def test_plot_shows_each_value_and_the_ranges_of_formats() -> None:
    sizes = (0.125, 8.0, 0.0, math.inf, math.nan)
    records = [record(i, rms, i == 1) for i, rms in enumerate(sizes)]
    (axes,) = ScaleTrace(tuple(records), None).plot().axes
    drawn = {x.get_label(): (list(x.get_xdata()), list(x.get_ydata())) for x in axes.get_lines()}
    assert drawn["forward RMS"] == ([0], [0.125])
    assert drawn["backward RMS"] == ([1], [8.0])
    assert drawn["backward amax"] == ([1], [32.0])
    assert [2, 3, 4] in [x for x, _ in drawn.values()]  # zero or not finite
    assert [t.get_text() for t in axes.get_xticklabels()] == [f"value {i}" for i in range(5)]
    wide = ScaleTrace(tuple(record(i, 2.0 ** (30 * (-1) ** i)) for i in range(61)), None).plot()
    assert "value 1" not in [t.get_text() for t in wide.axes[0].get_xticklabels()]
    shades = {p.get_label(): p for p in wide.axes[0].patches}
    to_data = wide.axes[0].transData.inverted()
    low, high = shades["float16"].get_extents().transformed(to_data).intervaly
    assert (low, high) == (pytest.approx(2.0**-14), pytest.approx(65504))
    assert ScaleTrace((), None).plot().axes


def test_a_missing_dependency_says_how_to_get_it(monkeypatch) -> None:
    trace = trace_scales(jnp.sin)(1.0)
    assert (len(trace), trace[0], trace[1:]) == (2, trace.records[0], trace.records[1:])
    for name in ("matplotlib.figure", "matplotlib", "rich.table", "rich"):
        monkeypatch.setitem(sys.modules, name, None)
    for call, name in ((trace.plot, "matplotlib"), (trace.table, "rich")):
        with pytest.raises(ImportError, match=rf"{name}.*unitscale\[recipes\]"):
            call()
