"""`reduce_scatter` against the mean in float64: each device keeps its part."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from recipes.bench.wire import bytes_on_wire
from tests.parallel.devices import heavy_tailed, on_each, relative_error
from unitscale import ScaledArray
from unitscale.core import format_of
from unitscale.parallel import all_reduce, reduce_scatter

DEVICES = 4


def scattered(rows: Any, dtype: str = "float8_e4m3fn", axis: int = 0, **settings: Any) -> Any:
    """The parts of all devices, side by side along `axis`."""
    settings = {"axis": axis, **settings}
    f = on_each(lambda g: reduce_scatter(g, "data", dtype, **settings), DEVICES)
    parts = f(rows)
    return jax.tree.map(lambda x: np.concatenate(np.asarray(x), axis), parts)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_mean(dtype: str, axis: int) -> None:
    rows = np.random.default_rng(1).normal(size=(DEVICES, 8, 12, 4)).astype(np.float32)
    got = scattered(rows, dtype, axis)
    exact = rows.astype(np.float64).mean(0)
    fmt = format_of(dtype)
    # One rounding of the terms: half a step each, below the normal numbers that of the smallest.
    bound = (fmt.eps / 2 + 1e-6) * np.abs(rows).mean(0)
    bound += 2 * np.abs(rows).max() / fmt.max * fmt.smallest_subnormal
    assert got.shape == exact.shape
    assert (np.abs(got - exact) <= bound).all()


def test_one_rounding_less_than_all_reduce() -> None:
    rows = heavy_tailed((DEVICES, 4096))
    exact = rows.astype(np.float64).mean(0)
    whole = on_each(lambda g: all_reduce(g, "data", small=0), DEVICES, P())(rows)
    assert relative_error(scattered(rows), exact) < relative_error(whole, exact)


def test_bytes() -> None:
    f = on_each(lambda g: reduce_scatter(g, "data"), DEVICES)
    sent = bytes_on_wire(f.lower(np.zeros((DEVICES, 4096), np.float32)).compile())
    assert sent == (4096 + 2 * 4) * (DEVICES - 1) / DEVICES


def test_stochastic_rounding_is_unbiased() -> None:
    rows = np.full((DEVICES, 4096), 1.03, np.float32)
    got = scattered(rows, rounding="stochastic", key=jax.random.key(0))
    share = (1.03 - 1) / 0.125
    spread = 0.125 * np.sqrt(share * (1 - share) / got.size / DEVICES)
    assert abs(got.mean() - 1.03) < 5 * spread


def test_what_is_not_finite_is_not_hidden() -> None:
    rows = np.ones((DEVICES, 8), np.float32)
    rows[1, 5] = np.inf
    assert np.isnan(scattered(rows)).all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"axis 0 of every leaf must be divisible by the 4 dev"):
        scattered(np.ones((DEVICES, 6), np.float32))
    with pytest.raises(ValueError, match="must be divisible"):
        scattered(np.ones((DEVICES,), np.float32))
    with pytest.raises(TypeError, match="grads must be plain arrays"):
        scattered(ScaledArray(jnp.ones((DEVICES, 8)), jnp.full((DEVICES, 1), 2.0)))
    with pytest.raises(ValueError, match=r"reduce_scatter: rounding='stochastic' needs key"):
        scattered(np.ones((DEVICES, 8), np.float32), rounding="stochastic")
