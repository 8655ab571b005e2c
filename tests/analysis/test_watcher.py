"""Loops, branches and kernels of programs whose equations are executed one by one."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.analysis.records import check, named
from tests.parallel.devices import explicit_mesh
from unitscale.analysis import trace_scales
from unitscale.analysis._trace_scales import Watcher

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
W = RNG.normal(size=(4, 4)).astype(np.float32)


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


def compiled(memory):
    return [x for x in memory.values() if isinstance(x, jax.stages.Compiled)]


def watched(fn, *args, memory=None):
    """The results of a function, and what executed it."""
    closed = jax.make_jaxpr(fn)(*args)
    watcher = Watcher((), None, {} if memory is None else memory)
    return watcher.run(closed, args), watcher


def test_loops_of_one_text_are_compiled_once() -> None:
    def layers(x, w):
        with jax.named_scope("first"):
            x = scanned(x, w)
        with jax.named_scope("second"):
            return scanned(x, w)

    (result,), watcher = watched(layers, jnp.asarray(X), jnp.asarray(W))
    assert len(compiled(watcher.memory)) == 1
    assert [site.primitive for site in watcher.sites] == ["mul", "tanh"] * 2
    assert [site.scope.split("/")[0] for site in watcher.sites] == ["first"] * 2 + ["second"] * 2
    np.testing.assert_allclose(result, scanned(scanned(X, W), W), rtol=1e-6)
    rows = np.concatenate(jax.device_get(watcher.rows))
    assert len(rows) == 4
    assert rows[3, -1] == np.abs(result).max()


def test_a_program_that_is_executed_again_is_not_compiled_again() -> None:
    closed = jax.make_jaxpr(jax.jit(scanned))(X, W)
    memory = {}
    for factor in (1, 2):
        watcher = Watcher((), None, memory)
        (result,) = watcher.run(closed, [factor * X, W])
        np.testing.assert_allclose(result, scanned(factor * X, W), rtol=1e-6)
        assert [site.primitive for site in watcher.sites] == ["mul", "tanh"]
        if factor == 1:
            found = dict(memory)
    assert memory == found
    assert len(compiled(memory)) == 1


def test_a_value_is_gone_when_nothing_reads_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = [], []
    measure = Watcher.note

    def note(self, eqn, results):
        alive.extend(map(weakref.ref, results))
        gc.collect()
        most.append(sum(ref() is not None for ref in alive))
        measure(self, eqn, results)

    monkeypatch.setattr(Watcher, "note", note)

    def chain(x):
        for _ in range(9):
            x = jnp.sin(x)
        return x

    watched(jax.jit(chain), jnp.asarray(X))
    assert len(most) == 9
    assert max(most) == 2, "a value and the one made of it"


def test_the_name_of_a_value_that_is_gone_is_no_other_value_s() -> None:
    def fn(x):
        return jnp.reshape(jnp.sin(jnp.cos(x)), -1)  # a view, which has no record of its own

    for _ in range(20):
        assert [r.name for r in trace_scales(fn)(X)] == ["[0]", "", ""]


def test_what_devices_do_together_is_executed_whole() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def fn(x):
        total = jax.shard_map(
            lambda part: jax.lax.psum(part, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
        )(x)
        return jnp.tanh(total)

    trace = trace_scales(fn)(X)
    (record,) = named(trace, "tanh")
    check(record, np.tanh(X[:4] + X[4:]))


def on_cpu(x):
    return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)


def test_of_what_depends_on_the_platform_only_its_own_is_executed() -> None:
    trace = trace_scales(on_cpu)(X)
    assert [r.primitive for r in trace] == ["input", "sin"]
    assert trace[1].name == "result"
    check(trace[1], np.sin(X))
    trace = trace_scales(lambda x: jax.lax.scan(lambda c, _: (on_cpu(c), None), x, length=2)[0])(X)
    assert [r.primitive for r in trace] == ["input", "sin"]
    check(trace[1], np.stack([np.sin(X), np.sin(np.sin(X))]))


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P(("a", "b"))])
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
