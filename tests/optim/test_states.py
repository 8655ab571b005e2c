"""States of optax: which arrays are moments, their formats, and results of training."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from tests.batching import chunks, compute, entry
from tests.optimizers import PARAMS, RUNS, STEPS, Run, loss, scaled
from unitscale import optim
from unitscale.core import to_array
from unitscale.optim import Moment, SquareRoot
from unitscale.optim._roles import _ROLES, _TINY_STEPS, path_name
from unitscale.optim._storage import is_stored, load

# Their gradients do not have the structure or the shapes of the parameters.
REFUSED: dict[str, tuple[Any, Any, Any]] = {
    "lookahead": (
        optax.lookahead(optax.sgd(0.1), 5, 0.5),
        optax.LookaheadParams.init_synced,
        lambda g: g,
    ),
    "differentially_private_aggregate": (
        contrib.differentially_private_aggregate(1.0, 0.1, key=0),
        lambda params: params,
        lambda g: g[None],
    ),
}
# States whose arrays have the shapes of parameters but are stored unchanged; see `_roles`.
KEPT = """
    COCOBState EmaState GaLoreState MadgradState SAMState ScaleByLBFGSState
    ScaleByOptimisticGradientState ScaleByRStdDevState ScaleByRpropState ScaleByRssState
    ScaleByZoomLinesearchState ScheduleFreeState
"""


def is_state(x: Any) -> bool:
    return hasattr(x, "_fields") and type(x).__module__.startswith("optax")


def states_in(tree: Any) -> list[Any]:
    """Yield all states of optax in a state, also nested ones."""
    found = [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]
    return found + [x for state in found for x in states_in(tuple(state))]


def test_every_state_is_placed() -> None:
    makers = [run.make for run in RUNS.values()] + [optax.scale_by_distance_over_gradients]
    inits = [jax.eval_shape(make().init, PARAMS) for make in makers]
    states = {type(x).__name__: x for x in states_in(inits)}
    placed = _ROLES.keys() | _TINY_STEPS | set(KEPT.split())
    assert placed - states.keys() == set()
    shapes = {x.shape for x in PARAMS.values()}
    for name, state in states.items():
        assert set(_ROLES.get(name, ())) <= set(state._fields)
        own = [x for x in jax.tree.leaves(tuple(state), is_leaf=is_state) if not is_state(x)]
        if any(x.shape in shapes for x in own):
            assert name in placed, "say in unitscale.optim._roles what it holds, or keep it"


def train(run: Run, formats: bool) -> Callable[[Any], jax.Array]:
    inner = run.make()
    tx = scaled(inner, weights=run.weights) if formats else inner

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(to_array(params))
        extra = run.extra(value, grads, loss)
        if formats:
            return tx.step(params, state, grads, **extra), None
        updates, state = tx.update(grads, state, params, **extra)
        return (optax.apply_updates(params, updates), state), None

    def whole(params):
        params = tx.scale_params(params) if formats else params
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=STEPS)
        params = to_array(params, jnp.float32)
        return loss(params)

    return whole


QUICK = ("adafactor, factored", "adam", "lion", "muon", "prodigy", "sam", "sgd, momentum")
REST = chunks([name for name in RUNS if name not in QUICK], 8)


@pytest.mark.parametrize(
    "names", [*chunks(QUICK), *(pytest.param(*p.values, marks=pytest.mark.slow) for p in REST)]
)
def test_ends_where_the_same_optimizer_ends_in_float32(names: list[str]) -> None:
    """Compare final losses, relative to the initial loss.

    A first moment in E4M3 has a relative error of up to 2^-4, and so has a step. A loss that falls
    exponentially is then within what float32 reaches after 1/16 more or fewer of the 200 steps.
    Below 2^-10, rounding errors of the weights of 2^-12 per step dominate.
    """
    table = {(n, f): (train(RUNS[n], f), PARAMS) for n in names for f in (False, True)}
    results = compute(table | {"start": (loss, PARAMS)})
    start = results.pop("start")
    for name in names:
        with entry(name):
            plain, ours = (float(results[name, f] / start) for f in (False, True))
            assert plain < 0.5, plain
            assert plain ** (17 / 16) - 2**-10 < ours < plain ** (15 / 16) + 2**-10, (ours, plain)


def test_gradients_unlike_the_parameters_are_refused() -> None:
    tree = jax.tree.map(jnp.asarray, PARAMS)
    for tx, params, grads in REFUSED.values():
        tx, params = scaled(tx, weights=None), params(tree)
        with pytest.raises(ValueError, match="gradients"):
            tx.update(jax.tree.map(grads, tree), tx.init(params), params)


TREE = {"a": np.ones((4, 6), np.float32), "b": {"c": np.ones(6, np.float32)}}
MASK = {"a": True, "b": {"c": False}}


def found(inner, params=TREE, **kwargs) -> dict[str, str]:
    """Map the path of every stored array to its dtype, with a star if the root is stored."""
    tx = scaled(inner, weights=None, **kwargs)
    state = jax.eval_shape(tx.init, params).inner
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_stored)
    return {
        path_name(path): (x.root.dtype.name + "*" if isinstance(x, SquareRoot) else x.dtype.name)
        for path, x in leaves
        if is_stored(x)
    }


def both(field: str, kind: str) -> dict[str, str]:
    return {f"{field}.a": kind, f"{field}.b.c": kind}


FIRST, SECOND, TRACE = "float8_e4m3fn", "float16*", "float16"
ADAM = both("0.mu", FIRST) | both("0.nu", SECOND)


TABLE: dict[str, tuple[Any, dict[str, str]]] = {
    "adamw": (optax.adamw(0.1), ADAM),
    "amsgrad": (optax.amsgrad(0.1), ADAM | both("0.nu_max", SECOND)),
    "momentum": (optax.sgd(0.1, momentum=0.9), both("0.trace", TRACE)),
    "adagrad": (optax.adagrad(0.1), {}),  # a sum that only grows
    "average": (optax.ema(0.9), {}),  # of anything, parameters too
    "centered": (optax.rmsprop(0.1, centered=True), {}),  # a difference of its moments
    "belief": (optax.adabelief(0.1), both("0.nu", SECOND)),
    "sm3": (optax.sm3(0.1), both("0.nu", TRACE)),  # mu sums, and nu is no square
    # Accumulated gradients stay float32.
    "multi steps": (optax.MultiSteps(optax.lion(0.1), 2), both("inner_opt_state.0.mu", TRACE)),
    "hyperparams": (
        optax.inject_hyperparams(optax.lion)(learning_rate=0.1),
        both("inner_state.0.mu", TRACE),
    ),
    "masked": (optax.masked(optax.trace(0.9), MASK), {"inner_state.trace.a": TRACE}),
    "muon": (
        optax.contrib.muon(0.1),
        {
            "inner_states.muon.inner_state.0.mu.a": TRACE,
            "inner_states.adam.inner_state.0.mu.b.c": FIRST,
            "inner_states.adam.inner_state.0.nu.b.c": SECOND,
        },
    ),
    "adafactor": (optax.adafactor(0.1), both("0.v", SECOND)),  # too small to factor
    "factored": (optax.adafactor(0.1, min_dim_size_to_factor=2), {"0.v.b.c": SECOND}),
}
TRACES = [  # formats of first and second moments, and which of them a trace takes
    ("float16", "float8_e4m3fn", "float16"),
    ("bfloat16", Moment("float16", root=True), "float16"),
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn"),
    (None, "float16", None),
    ("float8_e4m3fn", None, None),
]


def test_formats_of_moments() -> None:
    for name, (inner, expected) in TABLE.items():
        with entry(name):
            assert found(inner) == expected
    for first, second, expected in TRACES:
        formats = found(optax.trace(0.9), moments=(first, second))
        assert formats == ({} if expected is None else both("trace", expected))
    assert found(optax.adam(0.1), moments=(None, "float16")) == both("0.nu", "float16*")
    assert found(optax.adam(0.1), jnp.ones(5)) == {"0.mu": FIRST, "0.nu": SECOND}
    # Numbers stay: nothing is saved by 8 bits of one.
    assert found(optax.adam(0.1), jnp.ones(())) == {}


def test_formats_by_a_function_of_path_and_role() -> None:
    asked = {}

    def moments(path: str, role: str | None) -> Any:
        asked[path] = role
        if path.endswith(".c"):
            return None
        return {"first": "bfloat16", "second": Moment("float8_e5m2", root=True)}.get(role)

    inner = optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()
    formats = found(inner, moments=moments)
    assert formats == {
        "inner_opt_state.0.mu.a": "bfloat16",
        "inner_opt_state.0.nu.a": "float8_e5m2*",
    }
    assert asked["acc_grads.a"] is None
    assert asked["inner_opt_state.0.nu.b.c"] == "second"


class OwnState(NamedTuple):
    mu: Any
    nu: Any


def own() -> optax.GradientTransformation:
    """A state that is not of optax, so that its fields are unknown."""
    return optax.GradientTransformation(lambda p: OwnState(p, p), lambda u, s, p: (u, s))


def test_names_are_not_enough() -> None:
    assert found(own()) == {}
    assert found(optax.chain(own(), optax.adam(0.1))) == {f"1.{k}": v for k, v in ADAM.items()}


INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.0, 9)))
FOUR = scaled(INNER, moments=("e4m3fn", "e4m3fn"), rounding="stochastic", key=5)
# Each with its largest relative error: of the square of a rounded root, or of a rounded mean.
TARGETS: dict[str, tuple[Any, float]] = {
    "plain": (INNER, 1e-6),
    "6 bytes": (scaled(INNER), 2**-4),
    "4 bytes": (FOUR, 2**-3),
    "blocks of large ones": (
        optim.scaled(INNER, moments=("e5m2", "bfloat16"), block=4, min_size=12),
        2**-3,
    ),
}


@pytest.mark.slow
def test_converted_numbers_are_those_of_the_source_rounded_once() -> None:
    """Convert between all pairs of formats, and continue training from each."""
    shapes = jax.tree.map(jnp.asarray, TREE)

    @jax.jit
    def run(grads):
        begun, results = {}, []
        for name, (tx, _) in TARGETS.items():
            params = shapes if tx is INNER else tx.scale_params(shapes)
            like = tx.init(params)
            begun[name] = tx, params, like, tx.update(grads, like, params)[1]
        for target, (tx, params, like, _) in begun.items():
            for source, (*_, state) in begun.items():
                converted = optim.convert_state(state, like)
                tx.update(grads, converted, params)
                assert jax.tree.structure(converted) == jax.tree.structure(like)
                kinds = [[x.dtype for x in jax.tree.leaves(s)] for s in (converted, like)]
                assert kinds[0] == kinds[1]
                pair = [
                    jax.tree.leaves(jax.tree.map(load, getattr(s, "inner", s), is_leaf=is_stored))
                    for s in (converted, state)
                ]
                keys = [getattr(s, "key", None) for s in (converted, state, like)]
                results.append(((target, source), pair, keys))
        names[:] = [name for name, *_ in results]
        return [row[1:] for row in results]

    names: list[Any] = []
    rows = run(jax.tree.map(np.cos, TREE))
    for (target, _), ((mine, theirs), (key, given, fresh)) in zip(names, rows, strict=True):
        for got, wanted in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1.05 * TARGETS[target][1])
        if key is not None:
            expected = fresh if given is None else given
            np.testing.assert_array_equal(*map(jax.random.key_data, (key, expected)))
    assert len(names) == len(TARGETS) ** 2


def test_moments_have_their_initial_values() -> None:
    params = {"w": jnp.ones(4)}
    tx = scaled(optax.scale_by_rms(initial_scale=0.1), weights=None)
    np.testing.assert_allclose(tx.init(params).inner.nu["w"].value, 0.1, rtol=2**-9)


def test_conversion_knows_its_key_by_its_place() -> None:
    params = {"key": jnp.ones((4, 4)), "w": jnp.ones((4, 4))}
    plain = optax.adam(1e-3)
    raw = scaled(plain, rounding="stochastic", key=jax.random.PRNGKey(0))
    found = optim.convert_state(plain.init(params), raw.init(raw.scale_params(params)))
    np.testing.assert_array_equal(to_array(found.inner[0].mu["key"]), 0.0)
    with pytest.raises(ValueError, match=r"only one of them has .*key"):
        optim.convert_state(plain.init({"w": params["w"]}), plain.init(params))
