"""Bytes that eight H200s send, by the programs that XLA compiles for them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from recipes.bench.aot import compile_h200, h200_topology
from recipes.bench.wire import bytes_on_wire, collectives
from unitscale.parallel import all_reduce

pytestmark = pytest.mark.h200
OPTIMIZED = True

DEVICES, SIZE = 8, 65536
PART = (DEVICES - 1) / DEVICES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_is_half_of_bfloat16(dtype: str) -> None:
    mesh = Mesh(h200_topology(DEVICES).devices, ("data",))
    each = NamedSharding(mesh, P("data"))
    argument = jax.ShapeDtypeStruct((DEVICES * SIZE,), jnp.dtype(dtype), sharding=each)
    mean = lambda g: all_reduce(g, "data")  # noqa: E731
    mapped = jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P())
    program = compile_h200(mapped, argument)
    assert bytes_on_wire(program) == 2 * SIZE * PART + 2 * 4 * PART  # and one scale
    assert [c.dtype for c in collectives(program)] == ["s32", "u8", "u8"]
