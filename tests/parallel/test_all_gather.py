"""`all_gather` against a cast of the whole array at the shared scale, and FSDP made of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from recipes.bench.wire import bytes_on_wire, collectives
from tests.parallel.devices import mesh_of, on_each
from unitscale import ScaledArray, cast
from unitscale.core import format_of, to_array
from unitscale.parallel import all_gather, reduce_scatter

DEVICES = 4


def gathered(rows: Any, dtype: Any = "float8_e4m3fn", **settings: Any) -> Any:
    return on_each(lambda w: all_gather(w, "data", dtype, **settings), DEVICES, P())(rows)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_is_a_cast_of_the_whole(dtype: str, axis: int) -> None:
    rows = np.random.default_rng(0).normal(size=(DEVICES, 3, 6)).astype(np.float32)
    rows[2, 1, 1] = 5.5  # the largest of all
    got = gathered(rows, dtype, axis=axis)
    fmt = format_of(dtype)
    scale = 1.0 if dtype == "bfloat16" else 2.0 ** np.ceil(np.log2(5.5 / fmt.max))
    whole = np.concatenate(rows, axis)
    assert float(got.scale) == scale
    assert got.dtype == fmt.dtype
    np.testing.assert_array_equal(got.value, np.float32(cast(whole / scale, dtype)) * scale)


def test_what_is_in_the_format_already_arrives_as_it_was() -> None:
    data = np.random.default_rng(0).normal(size=(DEVICES, 16)).astype(np.float32)
    stored = ScaledArray(cast(data, "float8_e4m3fn"), jnp.full((DEVICES, 1), 2.0**-5))
    np.testing.assert_array_equal(gathered(stored).value, stored.value.reshape(-1))


def test_bytes() -> None:
    f = on_each(lambda w: all_gather(w, "data"), DEVICES, P())
    program = f.lower(np.zeros((DEVICES, 1024), np.float32)).compile()
    assert bytes_on_wire(program) == (4096 + 2 * 4) * (DEVICES - 1) / DEVICES
    assert {c.dtype for c in collectives(program)} == {"u8", "s32"}


def test_what_is_not_finite_is_not_hidden() -> None:
    rows = np.ones((DEVICES, 8), np.float32)
    rows[1, 5] = np.nan
    assert np.isnan(gathered({"w": rows})["w"].value).all()


def test_zeros() -> None:
    np.testing.assert_array_equal(gathered(np.zeros((DEVICES, 3), np.float32)).value, 0)


def test_stochastic_rounding_is_unbiased() -> None:
    rows = np.full((DEVICES, 4096), 1.03, np.float32)
    got = gathered(rows, rounding="stochastic", key=jax.random.key(1)).value
    share = (1.03 - 1) / 0.125
    spread = 0.125 * np.sqrt(share * (1 - share) / got.size)
    assert abs(float(jnp.mean(got)) - 1.03) < 5 * spread


def test_fsdp() -> None:
    """Parts of weights in, parts of gradients out, both in FP8, near those of whole weights."""
    random = np.random.default_rng(0)
    w = random.normal(size=(16, 8)).astype(np.float32)
    x = random.normal(size=(32, 16)).astype(np.float32)

    def loss(w, x):
        return jnp.mean(jnp.square(x @ w))

    def local(part, x):
        whole = to_array(all_gather(part, "fsdp"))
        return reduce_scatter(jax.grad(loss)(whole, x), "fsdp")

    mesh = mesh_of(fsdp=DEVICES)
    each = P("fsdp")
    # all_gather gives the same on all devices, of which shard_map's checks would sum gradients.
    f = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(each, each), out_specs=each, check_vma=False)
    )
    exact = np.asarray(jax.grad(loss)(w, x))
    error = np.linalg.norm(f(w, x) - exact) / np.linalg.norm(exact)
    assert error < 2.0**-4  # half a step of e4m3fn, at most, for weights and for gradients


def test_refusals() -> None:
    ones = np.ones((DEVICES, 8), np.float32)
    with pytest.raises(ValueError, match=r"must have at most 16 bits; got float32\. Use jax\.lax"):
        gathered(ones, "float32")
    with pytest.raises(TypeError, match=r"weights\['n'\] must be floating"):
        gathered({"n": np.ones((DEVICES, 8), np.int32)})
    with pytest.raises(ValueError, match=r"weights must have axis 1; got shape \(8,\)"):
        gathered(ones, axis=1)
    with pytest.raises(ValueError, match=r"all_gather: rounding='stochastic' needs key="):
        gathered(ones, rounding="stochastic")
    with pytest.raises(ValueError, match=r"all_gather: rounding must be 'nearest' or .*; got 'up'"):
        gathered(ones, rounding="up")
    with pytest.raises(ValueError, match="Call it inside shard_map"):
        all_gather(ones, "data")
    with pytest.raises(TypeError, match="an exchange has no derivative"):
        on_each(jax.grad(lambda w: jnp.sum(all_gather(w, "data").value)), DEVICES)(ones)
