"""Values across a boundary of arrays: the formulas of their scales survive."""

import jax
import jax.numpy as jnp
import numpy as np

from unitscale.transforms._doubt import Doubt
from unitscale.transforms._interpreter import Settings
from unitscale.transforms._lazy_scale import LazyScale
from unitscale.transforms._packing import pack, trace, unpack
from unitscale.transforms._values import Value


def test_pack_and_unpack() -> None:
    s = LazyScale.of(jnp.float32(8))
    values = [
        Value(jnp.ones(2), s.shift(1), drift=0.25, doubt=Doubt(2.0, above=5.0)),
        Value(jnp.ones(2), s * s),
        Value(jnp.zeros(()), const=float("nan")),
    ]
    packed = pack(values)
    assert len(packed.arrays) == 4, "one atom, however many scales are made of it"
    (x, y, z), atoms = unpack(packed.specs, packed.arrays)
    assert len(atoms) == 1
    assert x.scale is not None
    assert y.scale == (x.scale.shift(-1)) ** 2
    assert (x.drift, x.doubt) == (0.25, Doubt(2.0, above=5.0))
    assert z.const is not None
    assert np.isnan(z.const)
    assert hash(packed.specs) == hash(pack(values).specs)


def test_an_inner_program_is_traced_once_for_what_is_known() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
    settings = Settings(lambda p, n: 0.0)
    first, second = (Value(jnp.float32(1), LazyScale.of(jnp.float32(n))) for n in (2, 4))
    assert trace(settings, closed, pack([first])) is trace(settings, closed, pack([second]))
    static = Value(jnp.float32(1), LazyScale(1))
    assert trace(settings, closed, pack([first])) is not trace(settings, closed, pack([static]))
