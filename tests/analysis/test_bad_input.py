"""Errors of every analysis for functions that it cannot handle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from tests.refusals import refuses
from unitscale.analysis import check_gradients, cut_edges, fit_factors, trace_scales

X = np.ones((4, 3), np.float32)
IDS = np.arange(4)

ANALYSES = {
    "trace_scales": lambda fn, x: trace_scales(fn)(x),
    "cut_edges": cut_edges,
    "check_gradients": check_gradients,
    "fit_factors": lambda fn, x: fit_factors(fn, [x]),
}
every_analysis = pytest.mark.parametrize("name", ANALYSES)
calls: list[object] = []


def prints(x):
    jax.debug.print("{}", x)
    return jnp.sum(x)


def calls_back(x):
    io_callback(calls.append, None, x)
    return jnp.sum(x)


def writes(x):
    REF[...] = 0.0
    return jnp.sum(x)


REF = jax.new_ref(jnp.zeros(()))


@every_analysis
def test_side_effects_are_refused_and_do_not_happen(name, capfd) -> None:
    for fn in (prints, calls_back, writes):
        with pytest.raises(ValueError, match=rf"{name}: expected a function without side effects"):
            ANALYSES[name](fn, X)
    jax.effects_barrier()
    assert capfd.readouterr().out == ""
    assert not calls


@every_analysis
def test_integers(name) -> None:
    analysis, message = ANALYSES[name], rf"analysis\.{name}: expected"
    with pytest.raises(ValueError, match=message):
        analysis(lambda ids: jnp.sum(ids + 1), IDS)
    if name == "trace_scales":
        assert [r.primitive for r in analysis(jnp.argmax, X)] == ["input"]
    else:
        with pytest.raises((TypeError, ValueError), match=message):
            analysis(lambda x: jnp.argmax(x), X)


# Calls, and the argument or the result that their messages name.
WRONG = {
    r"batch\[0\]": lambda: check_gradients(lambda p, x: jnp.sum(p * x), X, X * np.nan),
    "finite loss": lambda: check_gradients(lambda p: jnp.sum(jnp.log(-p)), X),
    "scalar": lambda: check_gradients(lambda p: 2 * p, X),
    "parameters": lambda: check_gradients(lambda p, x: jnp.sum(x), {}, X),
    "of params": lambda: check_gradients(jnp.sum, X * np.inf),
    "fit_factors: its result": lambda: fit_factors(jnp.log, [X]),
    "float7": lambda: trace_scales(jnp.sin, formats=["float7"]),
    "sample": lambda: trace_scales(jnp.sin, sample=0),
}


test_refusals = refuses([(ValueError, call, match) for match, call in WRONG.items()])


def test_arguments_that_are_not_finite() -> None:
    x = X.copy()
    x[1, 2] = np.inf
    trace = trace_scales(lambda x: 2 * x)(x)
    assert not np.isfinite([[r.rms, r.amax] for r in trace]).any()
    assert [r.formats["float16"].saturated for r in trace] == [1 / 12] * 2
    assert trace.plot().axes
    assert trace.table().row_count == 2
    # Graphs and simulations have only the shapes of arguments.
    assert cut_edges(jnp.sin, x).inputs[0].cut
    assert fit_factors(jnp.sin, [x]).factors == fit_factors(jnp.sin, [X]).factors


@every_analysis
@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (3, "expected a function; got int"),
        (lambda x: x if x[0, 0] > 0 else -x, "needs the values of its arguments"),
    ],
)
def test_what_cannot_be_traced(name, fn, message) -> None:
    with pytest.raises(TypeError, match=rf"analysis\.{name}: .*{message}"):
        ANALYSES[name](fn, X)


def test_the_users_own_errors_are_shown_as_they_are() -> None:
    with pytest.raises(TypeError, match="dot_general requires contracting"):
        cut_edges(lambda x: x @ jnp.ones((7, 7)), X)
    with pytest.raises(TypeError, match="not a valid JAX type"):
        cut_edges(lambda x: "text", X)
