"""Simulated factors against the closed forms of `rules`, and examples of ops without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import rules
from unitscale.analysis import fit_factors


def zeros(*shape):
    return np.zeros(shape, np.float32)


LINEAR = [zeros(96, 64), zeros(64, 48)]
PAIR = [zeros(128, 128), zeros(128, 128)]
free = {"constraint": None}
# Function, example, and its rule.
CLOSED = {
    "matmul": (jnp.matmul, LINEAR, rules.matmul(96, 64, 48, **free)),
    "softmax": (jax.nn.softmax, [zeros(256, 128)], rules.softmax(128, **free)),
    "add": (jnp.add, PAIR, rules.add(**free)),
    "mse": (lambda p, t: jnp.sum((p - t) ** 2), PAIR, rules.mse_loss()),
    "gelu": (jax.nn.gelu, [zeros(256, 256)], rules.elementwise(jax.nn.gelu, **free)),
}


@pytest.mark.parametrize("name", CLOSED)
def test_every_closed_form_is_met_within_one_percent(name) -> None:
    fn, example, rule = CLOSED[name]
    found = fit_factors(fn, example, seeds=24)
    np.testing.assert_allclose(found.factors.fwd, rule.fwd, rtol=0.01)
    np.testing.assert_allclose(found.factors.bwd, rule.bwd, rtol=0.01)
    low, high = found.fwd_interval
    assert low <= found.factors.fwd <= high


@pytest.mark.slow
def test_the_closed_form_is_given_where_it_is_recognized() -> None:
    for name in ("matmul", "softmax", "add", "gelu"):
        fn, example, rule = CLOSED[name]
        found = fit_factors(fn, [x[:4] for x in example] if name == "gelu" else example, seeds=2)
        assert found.closed_form is not None
        np.testing.assert_allclose(found.closed_form.bwd, rule.bwd, rtol=1e-6)
        assert "exact" in str(found)
    found = fit_factors(lambda x: jnp.cumsum(x), [zeros(64)], seeds=2)
    assert found.closed_form is None
    assert "exact" not in str(found)
