import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops, rules
from unitscale.analysis._ratios import Ratio, local_ratios

A = np.array([1.0, -2.0, 2.0])


@pytest.mark.parametrize(
    ("given", "true", "constant", "spread"),
    [
        (2 * A, A, 2.0, 0.0),
        (-A, A, -1.0, 0.0),
        (0 * A, A, np.nan, 1.0),
        (0 * A, 0 * A, np.nan, 0.0),
    ],
)
def test_ratio_of_arrays(given, true, constant, spread) -> None:
    found = Ratio.of(given, true)
    assert found.constant == pytest.approx(constant, nan_ok=True)
    assert found.spread == pytest.approx(spread, abs=1e-15)


def test_spread_is_the_share_that_is_no_multiple() -> None:
    orthogonal = np.array([2.0, 1.0, 0.0])
    found = Ratio.of(A + orthogonal, A)
    assert found.constant == pytest.approx(1.0)
    assert found.spread == pytest.approx((5 / 14) ** 0.5)


def test_ratios_of_ops_are_those_of_the_rules() -> None:
    def fn(x, w):
        return jnp.sum(ops.gelu(ops.dense(x, w, constraint=None), constraint=None).data)

    args = [np.ones((3, 4), np.float32), np.eye(4, 6, dtype=np.float32)]
    closed = jax.make_jaxpr(fn)(*args)
    with jax.enable_x64(True):
        found = local_ratios(closed, args, lambda f, *xs: f(*xs))
    dense, gelu = found.values()
    factors = rules.dense(4, 6, 3, constraint=None)
    constants = [ratio.constant for ratio in dense if ratio is not None]
    assert constants == pytest.approx([b / factors.fwd for b in factors.bwd[:2]], rel=1e-6)
    factors = rules.elementwise(jax.nn.gelu, constraint=None)
    assert gelu[0] is not None
    assert gelu[0].constant == pytest.approx(factors.bwd[0] / factors.fwd, rel=1e-3)
    assert gelu[0].spread < 1e-6
