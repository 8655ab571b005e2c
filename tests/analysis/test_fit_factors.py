"""Simulated factors against the closed forms of `rules`, and examples of ops without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops, rules
from unitscale.analysis import fit_factors


def zeros(*shape):
    return np.zeros(shape, np.float32)


def conv(x, k):
    layout = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, k, (1,), "VALID", dimension_numbers=layout)


def attention(q, k, v):
    # Products of many features: the rule takes logits to be normal.
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * rules.logit_factor(256, 16.0)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)


LINEAR = [zeros(96, 64), zeros(64, 48)]
PAIR = [zeros(128, 128), zeros(128, 128)]
dense, norm = rules.dense(64, 48, 96, constraint=None), rules.norm(512, 128 * 512)
convolution = rules.conv((2, 8, 16), 8, 399, constraint=None)


def of(rule):
    return rule.fwd, rule.bwd


# Function, example, and the exact factors in the order of its arguments.
CLOSED = {
    "matmul": (jnp.matmul, LINEAR, of(rules.matmul(96, 64, 48, constraint=None))),
    "dense": (lambda x, w: x @ w, LINEAR, (dense.fwd, dense.bwd[:2])),
    "conv": (conv, [zeros(8, 400, 8), zeros(2, 8, 16)], (convolution.fwd, convolution.bwd[:2])),
    # A bias from N(0, 1) doubles the variance of the sum.
    "norm": (
        lambda x, bias: ops.layer_norm(x).data + bias,
        [zeros(128, 512), zeros(512)],
        (norm.fwd * rules.add(constraint=None).fwd, (norm.bwd[0], norm.bwd[2])),
    ),
    "softmax": (jax.nn.softmax, [zeros(256, 128)], of(rules.softmax(128, constraint=None))),
    "add": (jnp.add, PAIR, of(rules.add(constraint=None))),
    "glu": (
        lambda x, g: x * jax.nn.silu(g),
        [zeros(256, 256), zeros(256, 256)],
        of(rules.glu(jax.nn.silu, constraint=None)),
    ),
    "attention": (
        attention,
        [zeros(4, 32, 2, 256)] * 3,
        of(rules.dot_product_attention(256, 32, is_causal=False, mult=16.0, constraint=None)),
    ),
    "mse": (lambda p, t: jnp.sum((p - t) ** 2), PAIR, of(rules.mse_loss())),
    "gelu": (jax.nn.gelu, [zeros(256, 256)], of(rules.elementwise(jax.nn.gelu, constraint=None))),
}


QUICK = ("dense", "softmax", "gelu", "mse")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CLOSED]
)
def test_every_closed_form_is_met_within_one_percent(name) -> None:
    fn, example, (forward, backward) = CLOSED[name]
    found = fit_factors(fn, example, seeds=24)
    np.testing.assert_allclose(found.factors.fwd, forward, rtol=0.01)
    np.testing.assert_allclose(found.factors.bwd, backward, rtol=0.01)
    low, high = found.fwd_interval
    assert low <= found.factors.fwd <= high


def test_the_closed_form_is_given_where_it_is_recognized() -> None:
    for name in ("matmul", "softmax", "add", "gelu"):
        fn, example, (_, backward) = CLOSED[name]
        found = fit_factors(fn, [x[:4] for x in example] if name == "gelu" else example, seeds=2)
        assert found.closed_form is not None
        np.testing.assert_allclose(found.closed_form.bwd, backward, rtol=1e-6)
        assert "exact" in str(found)
    found = fit_factors(lambda x: jnp.cumsum(x), [zeros(64)], seeds=2)
    assert found.closed_form is None
    assert "exact" not in str(found)
