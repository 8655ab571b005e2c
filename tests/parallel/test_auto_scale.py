"""AutoScale against its rule, one device's overflow counting for all."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.parallel.devices import mesh_of
from unitscale.parallel import AutoScale, all_reduce

DEVICES = 4


def stepper(**settings: Any):
    def local(auto, rows):
        grads = jax.tree.map(lambda x: x[0], rows)
        return auto.all_reduce(grads, "data", **{"small": 0} | settings)

    mesh = mesh_of(data=DEVICES)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))


default_stepper = functools.cache(stepper)


def followed(recovery: int, steps: int) -> list[float]:
    """mu after each step on ones, which take 256 of the range up to 448 at mu = 1."""
    rows = {"w": np.ones((DEVICES, 64), np.float32)}
    auto, step, found = AutoScale.create({"w": 0.0}, recovery=recovery), default_stepper(), []
    for _ in range(steps):
        means, auto = step(auto, rows)
        found.append(float(auto.mu["w"]))
        assert float(means["w"][0]) in (1.0, 448 / 512)
    return found


def test_halves_on_overflow() -> None:
    assert followed(recovery=1, steps=5) == [2, 1, 2, 1, 2]


def test_recovers_slowly() -> None:
    """It doubles in `recovery` steps; as long as it is below 2 it is 1 in use."""
    np.testing.assert_allclose(followed(5, 4), 2.0 ** (np.arange(1, 5) / 5), rtol=1e-6)


def test_one_device_overflows_for_all() -> None:
    rows = np.full((DEVICES, 100), 1.0, np.float32)
    rows[:, 0] = 256.0
    rows[2, 1] = 256.0
    auto = AutoScale(mu=jnp.float32(2), threshold=4.5 / 400)  # 5 of 400 saturate at mu = 2
    means, after = default_stepper()(auto, rows)
    assert float(after.mu) == 1.0
    assert (
        float(default_stepper()(AutoScale(mu=jnp.float32(2), threshold=5.5 / 400), rows)[1].mu) > 2
    )
    assert float(means[0]) == 224.0  # 448 / 2


def test_tensors_have_their_own() -> None:
    rows = {"a": np.ones((DEVICES, 8), np.float32), "b": np.ones((DEVICES, 8), np.float32)}
    rows["b"][1, 1] = np.inf
    means, auto = default_stepper()(AutoScale.create({"a": 0, "b": 0}), rows)
    np.testing.assert_allclose(auto.mu["a"], 2.0**0.001, rtol=1e-6)
    assert float(auto.mu["b"]) == 0.5
    assert np.isnan(means["b"]).all()


def test_bounds() -> None:
    auto = AutoScale.create(0.0, largest=4.0, recovery=1)
    for _ in range(5):
        auto = auto.updated(0.0)
    assert float(auto.mu) == 4.0
    for _ in range(50):
        auto = auto.updated(1.0)
    assert float(auto.mu) == 2.0**-8
    assert float(auto.updated(0.0).mu) == 2.0**-7


def test_is_all_reduce_with_its_mu() -> None:
    rows = np.random.default_rng(0).normal(size=(DEVICES, 32)).astype(np.float32)
    key = jax.random.key(0)
    settings: dict[str, Any] = {"rounding": "stochastic", "key": key, "dtype": "float8_e5m2"}
    got, _ = stepper(**settings)(AutoScale(mu=jnp.float32(4)), rows)
    f = jax.shard_map(
        lambda g: all_reduce(g[0], "data", mu=4.0, small=0, **settings),
        mesh=mesh_of(data=DEVICES),
        in_specs=P("data"),
        out_specs=P(),
    )
    np.testing.assert_array_equal(got, jax.jit(f)(rows))


@pytest.mark.parametrize("wrong", [{"threshold": 1.0}, {"recovery": 0}, {"largest": 0.5}])
def test_refusals(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"AutoScale\.create: expected 0 <= threshold < 1"):
        AutoScale.create(0.0, **wrong)
