"""Where tokens and experts lie: on one device, and on axes that are part of types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.parallel.devices import explicit_mesh
from unitscale.ops._moe import ExpertDevices, reshard_like, token_rows

X = np.arange(48, dtype=np.float32).reshape(4, 4, 3)


def test_one_device() -> None:
    places = ExpertDevices.of(jnp.asarray(X), "expert", 4)
    assert (places.size, places.manual, places.tokens) == (1, False, ())
    chosen, count = places.own_experts(jnp.array([[0, 3]]))
    assert count == 4
    assert chosen.tolist() == [[0, 3]]
    np.testing.assert_array_equal(token_rows(jnp.asarray(X)), X.reshape(16, 3))
    np.testing.assert_array_equal(token_rows(jnp.asarray(X[0, 0])), X[0, :1])


@pytest.mark.parametrize(
    ("spec", "rows", "tokens"),
    [
        (P("data"), P("data"), ("data",)),
        (P(("data", "expert")), P(("data", "expert")), ("data",)),
        (P(None, "data"), P(), ()),
        (P("data", "expert"), P("data"), ("data",)),
    ],
)
def test_axes_that_are_part_of_the_type(spec: P, rows: P, tokens: tuple[str, ...]) -> None:
    with jax.set_mesh(explicit_mesh(data=2, expert=2)):
        x = jax.device_put(X, spec)
        places = ExpertDevices.of(x, "expert", 4)
        assert (places.size, places.tokens) == (2, tokens)
        found = jax.jit(token_rows)(x)
        assert found.sharding.is_equivalent_to(
            NamedSharding(explicit_mesh(data=2, expert=2), rows), 2
        )
        np.testing.assert_array_equal(found, X.reshape(16, 3))
        back = jax.jit(lambda y, x: reshard_like(y.reshape(x.shape), x))(found, x)
        assert back.sharding.is_equivalent_to(x.sharding, 3)
        np.testing.assert_array_equal(back, X)


def test_features_that_are_divided() -> None:
    """One token alone has none to divide."""
    with jax.set_mesh(explicit_mesh(data=2, expert=2)):
        x = jax.device_put(X[..., :2], P("data", None, "expert"))
        rows = token_rows(x)
        whole = NamedSharding(explicit_mesh(data=2, expert=2), P("data"))
        assert rows.sharding.is_equivalent_to(whole, 2)
        assert reshard_like(rows.reshape(4, 4, 2), x).sharding.is_equivalent_to(whole, 3)
        assert token_rows(jax.device_put(X[0, :2, 0], P("data"))).shape == (1, 2)
