"""Every optimizer's moments are known by the type of their state, and nothing else is stored."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.optimizers import scaled
from unitscale import nn
from unitscale.core import ScaledArray, is_scaled
from unitscale.optim import Moment, SquareRoot
from unitscale.optim._roles import path_name
from unitscale.optim._storage import is_stored

PARAMS = {"a": np.ones((4, 6), np.float32), "b": {"c": np.ones(6, np.float32)}}
LABELS = {"a": "matrix", "b": {"c": "vector"}}
MASK = {"a": True, "b": {"c": False}}


def found(inner, params=PARAMS, **kwargs) -> dict[str, str]:
    """Path of every stored array -> its dtype, with a star where the root is stored."""
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
    "adam": (optax.adam(0.1), ADAM),
    "adamw": (optax.adamw(0.1), ADAM),
    "amsgrad": (optax.amsgrad(0.1), ADAM | both("0.nu_max", SECOND)),
    "lion": (optax.lion(0.1), both("0.mu", TRACE)),
    "momentum": (optax.sgd(0.1, momentum=0.9), both("0.trace", TRACE)),
    "sgd": (optax.sgd(0.1), {}),
    "rmsprop": (optax.rmsprop(0.1), both("0.nu", SECOND)),
    "adagrad": (optax.adagrad(0.1), {}),  # a sum that only grows
    "average": (optax.ema(0.9), {}),  # of anything, parameters too
    "centred": (optax.rmsprop(0.1, centered=True), {}),  # a difference of its moments
    "belief": (optax.adabelief(0.1), both("0.nu", SECOND)),
    "sm3": (optax.sm3(0.1), both("0.nu", TRACE)),  # mu sums, and nu is no square
    "chain": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        both("1.0.mu", FIRST) | both("1.0.nu", SECOND),
    ),
    "multi steps": (
        optax.MultiSteps(optax.lion(0.1), 2),
        both("inner_opt_state.0.mu", TRACE),  # accumulated gradients stay float32
    ),
    "hyperparams": (
        optax.inject_hyperparams(optax.lion)(learning_rate=0.1),
        both("inner_state.0.mu", TRACE),
    ),
    "masked": (
        optax.masked(optax.trace(0.9), MASK),
        {"inner_state.trace.a": TRACE},
    ),
    "partition": (
        optax.partition({"matrix": optax.lion(0.1), "vector": optax.adam(0.1)}, LABELS),
        {
            "inner_states.matrix.inner_state.0.mu.a": TRACE,
            "inner_states.vector.inner_state.0.mu.b.c": FIRST,
            "inner_states.vector.inner_state.0.nu.b.c": SECOND,
        },
    ),
    "muon": (
        optax.contrib.muon(0.1),
        {
            "inner_states.muon.inner_state.0.mu.a": TRACE,
            "inner_states.adam.inner_state.0.mu.b.c": FIRST,
            "inner_states.adam.inner_state.0.nu.b.c": SECOND,
        },
    ),
    "adafactor": (optax.adafactor(0.1), both("0.v", SECOND)),  # too small to factor
    "finite": (optax.apply_if_finite(optax.lion(0.1), 3), both("inner_state.0.mu", TRACE)),
}


@pytest.mark.parametrize("name", TABLE)
def test_moments_of(name: str) -> None:
    inner, expected = TABLE[name]
    assert found(inner) == expected


def test_factored_moments_of_adafactor_stay_as_they_are() -> None:
    inner = optax.adafactor(0.1, min_dim_size_to_factor=2)
    assert found(inner) == {"0.v.b.c": SECOND}


def test_one_array_as_params() -> None:
    assert found(optax.adam(0.1), jnp.ones(5)) == {"0.mu": FIRST, "0.nu": SECOND}
    # Numbers stay: nothing is saved by 8 bits of one.
    assert found(optax.adam(0.1), jnp.ones(())) == {}


def test_variables_of_a_module() -> None:
    params = nnx.state(nnx.eval_shape(lambda: nn.Dense(4, 3, rngs=nnx.Rngs(0))), nnx.Param)
    assert set(found(optax.lion(0.1), params)) == {"0.mu.bias.value", "0.mu.kernel.value"}


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


def test_none_keeps_a_moment() -> None:
    assert found(optax.adam(0.1), moments=(None, "float16")) == both("0.nu", "float16*")
    assert found(optax.adam(0.1), moments=(None, None)) == {}


def test_blocks_are_of_the_moments() -> None:
    tx = scaled(optax.adam(0.1), block=4)
    params, state = jax.eval_shape(lambda p: (p := tx.scale_params(p), tx.init(p).inner[0]), PARAMS)
    assert state.mu["a"].block_shape == (1, 4)
    assert state.nu["b"]["c"].root.scale.shape == (2,)
    assert params["a"].block_shape is None


class OwnState(NamedTuple):
    mu: Any
    nu: Any


def own() -> optax.GradientTransformation:
    """Not of optax, and so nothing is known of its fields."""
    return optax.GradientTransformation(lambda p: OwnState(p, p), lambda u, s, p: (u, s))


def test_names_are_not_enough() -> None:
    assert found(own()) == {}
    assert found(optax.chain(own(), optax.adam(0.1))) == {f"1.{k}": v for k, v in ADAM.items()}


def test_what_own_states_hold_is_said_by_the_user() -> None:
    def moments(path: str, role: str | None) -> Any:
        assert role is None
        if path.startswith("mu"):
            return "float8_e4m3fn"
        return Moment("float16", root=True)

    assert found(own(), moments=moments) == both("mu", FIRST) | both("nu", SECOND)


TRACES = [  # first, second, and what momentum that is the step itself takes of them
    ("float8_e4m3fn", "float16", "float16"),
    ("float16", "float8_e4m3fn", "float16"),
    ("bfloat16", Moment("float16", root=True), "float16"),
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn"),
    ("float32", "float16", "float32"),
    (None, "float16", None),
    ("float8_e4m3fn", None, None),
]


@pytest.mark.parametrize(("first", "second", "expected"), TRACES)
def test_a_trace_takes_the_finer_format(first: Any, second: Any, expected: str | None) -> None:
    formats = found(optax.trace(0.9), moments=(first, second))
    assert formats == ({} if expected is None else both("trace", expected))


def test_errors() -> None:
    adam = optax.adam(0.1)
    with pytest.raises(TypeError, match=r"moments must be \(first, second\), two formats"):
        scaled(adam, moments="float16")
    with pytest.raises(TypeError, match=r"moments must be \(first, second\), two formats"):
        scaled(adam, moments=("float16",))
    with pytest.raises(ValueError, match=r"second moment must hold squares; got float8_e4m3fn"):
        scaled(adam, moments=("float16", Moment("float8_e4m3fn")))
    tx = scaled(adam, weights=None, moments=lambda path, role: Moment("float8_e5m2"))
    with pytest.raises(ValueError, match=r"moments of 0\.nu\.a must hold squares; got float8_e5m2"):
        jax.eval_shape(tx.init, PARAMS)
    scaled(adam, moments=("float16", Moment("float16")))  # 40 binades are enough

    inner = optax.GradientTransformation(lambda params: {"note": "text"}, adam.update)
    tx = scaled(inner, weights=None)
    with pytest.raises(TypeError, match=r"must be a tree of arrays; got str at note\. Register"):
        tx.init(PARAMS)


def test_what_is_stored_holds_what_inner_began_with() -> None:
    tx = scaled(optax.scale_by_rms(initial_scale=0.1), weights=None)
    state = jax.jit(tx.init)(PARAMS).inner
    root = state.nu["a"].root
    assert isinstance(root, ScaledArray)
    np.testing.assert_allclose((np.float32(root.data) * root.scale) ** 2, 0.1, rtol=2**-10)
    assert not any(map(is_scaled, jax.tree.leaves(PARAMS, is_leaf=is_scaled)))


TINY = [
    optax.contrib.dog(1.0),
    optax.contrib.dowg(1.0),
    optax.contrib.prodigy(),
    optax.contrib.dadapt_adamw(),
    optax.contrib.mechanize(optax.sgd(0.1)),
    optax.chain(optax.clip(1.0), optax.scale_by_distance_over_gradients()),
]


@pytest.mark.parametrize("inner", TINY)
def test_steps_that_rounded_weights_lose(inner: optax.GradientTransformation) -> None:
    """1e-6 of a weight is less than half the distance of its neighbours in 16 bits."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    for weights in ("float16", "bfloat16", "float8_e4m3fn"):
        tx = scaled(inner, weights=weights)
        with pytest.raises(ValueError, match=rf"begin near 1e-6 .* weights in {weights} lose"):
            tx.init(tx.scale_params(params))
    for weights in (None, "float32"):
        tx = scaled(inner, weights=weights)
        jax.eval_shape(tx.init, jax.eval_shape(tx.scale_params, params))
