"""`check_gradients` on correct and broken models: no false alarms, and the guilty op is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.analysis.models import BROKEN, VALID, WEIGHTS, X, beside
from unitscale import as_scaled, batch_size, ops
from unitscale.analysis import check_gradients

EXPENSIVE = {
    *("mixture of experts", "stack fp8_dynamic", "dithered fp8"),
    *("tied", "recurrent", "scan", "residual of two taus"),
    "inside of a residual",
}


def cases(names):
    return [pytest.param(n, marks=[pytest.mark.slow] if n in EXPENSIVE else []) for n in names]


@pytest.mark.parametrize("name", cases(VALID))
def test_valid_models_raise_no_alarm(name) -> None:
    loss, params = VALID[name]()
    report = check_gradients(loss, params, X)
    assert report, report
    assert report.guilty == ()
    assert any(p.verdict == "right" for p in report.parameters)


@pytest.mark.parametrize("name", cases(BROKEN))
def test_broken_models_are_caught_and_the_op_is_named(name) -> None:
    expected, make = BROKEN[name]
    report = check_gradients(*make(), X)
    assert not report, report
    assert {op.source.op for op in report.guilty} == expected, report


def test_the_text_names_parameter_op_line_and_constraint() -> None:
    def layer(p, h):
        return ops.dense(h, p["d"], constraint=None)

    report = check_gradients(beside(layer), WEIGHTS, X)
    wrong = [p.name for p in report.parameters if p.verdict == "wrong direction"]
    assert wrong == ["c"]
    line = layer.__code__.co_firstlineno + 1
    for part in (f"dense at {__file__}:{line} (", "constraint='to_output_scale'"):
        assert part in str(report)
    assert "by ops.scale_bwd" in str(check_gradients(*BROKEN["loss and penalty"][1](), X))
    # 7^-1/2 over 4^-1/2: what rules.dense would have, had it no constraint.
    assert report.guilty[0].ratios == pytest.approx([(4 / 7) ** 0.5], rel=1e-6)


def test_constants_are_those_of_the_rules() -> None:
    def loss(p, x):
        return jnp.sum(ops.dense(x, p["c"]).value)

    report = check_gradients(loss, WEIGHTS, X)
    constants = {p.name: p.constant for p in report.parameters}
    # The kernel's gradient has batch^-1/2 where the forward has in^-1/2.
    assert constants["c"] == pytest.approx((4 / 5) ** 0.5, rel=1e-6)
    assert np.isnan(constants["a"])
    assert {p.verdict for p in report.parameters if p.name != "c"} == {"no gradient"}


def test_the_data_of_scaled_parameters_is_checked() -> None:
    params = as_scaled({"w": 8 * WEIGHTS["c"]}, dtype=jnp.float16)
    report = check_gradients(lambda p, x: jnp.sum(ops.tanh(ops.dense(x, p["w"])).value), params, X)
    assert report
    assert [p.name for p in report.parameters] == ["w"]


def summed(function, slope):
    """A sum of a function whose custom rule gives all numbers the same slope."""
    own = jax.custom_vjp(function)
    own.defvjp(lambda x: (function(x), None), lambda _, g: (g * slope,))
    return lambda x: jnp.sum(own(x))


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        (summed(jnp.sin, jnp.nan), "not finite"),
        (jnp.linalg.norm, "truth not finite"),
        (summed(jnp.sqrt, 0.0), "truth not finite"),
    ],
)
def test_what_is_not_finite_is_told_and_hides_nothing(first, verdict) -> None:
    """At zero, norms and roots have no derivative."""
    params = {"a": jnp.zeros(3), "b": WEIGHTS["c"], "c": WEIGHTS["c"], "d": WEIGHTS["d"]}

    def loss(p, x):
        return jnp.sum(ops.scale_bwd(p["b"], -1.0) * x[:4]) + jnp.sum(p["c"]) + first(p["a"])

    report = check_gradients(loss, params, X)
    assert not report
    assert [p.verdict for p in report.parameters] == [verdict, "negative", "right", "no gradient"]
    own = {"scale_bwd", "sin"} if verdict == "not finite" else {"scale_bwd"}
    assert {op.source.op for op in report.guilty} == own
    assert ("use other values" in str(report)) == (verdict == "truth not finite")


def test_weights_on_inputs_of_several_sizes() -> None:
    """For example an encoder for queries and documents: each call would have its own constant."""

    def loss(p, x):
        return jnp.sum(jnp.prod(jnp.stack([encode(p, y) for y in (x[:2], x)]), 0))

    def encode(p, x):
        return jnp.sum(ops.tanh(ops.dense(x, p["c"])).value, 0)

    def named(p, x):
        with batch_size(len(x)):
            return loss(p, x)

    weights = {"c": WEIGHTS["c"]}
    report = check_gradients(loss, weights, X)
    assert [p.verdict for p in report.parameters] == ["wrong direction"]
    assert "batch_size" in str(report)
    assert check_gradients(named, weights, X)
