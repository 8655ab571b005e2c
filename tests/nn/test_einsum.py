import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn

CASES = {
    "dense": ("...a,ab->...b", (5, 4), (4,), (2, 3, 5), (5, 4)),
    "turned": ("nta, hab -> nthb", (2, 5, 4), (2, 4), (2, 3, 5), (5, 8)),
    "merge": ("bthk,hkd->btd", (2, 4, 5), None, (2, 3, 2, 4), (8, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_layer_of_flax_over_the_root_of_its_fan_in(name) -> None:
    *args, shape, fans = CASES[name]
    ours, flax = (kind.Einsum(*args, rngs=nnx.Rngs(0)) for kind in (nn, nnx))
    assert (ours.kernel.fan_in, ours.kernel.fan_out) == fans
    flax.kernel.set_value(ours.kernel[...] / fans[0] ** 0.5)
    if ours.bias is not None:
        ours.bias.set_value(jnp.arange(float(ours.bias.size)).reshape(ours.bias.shape))
        flax.bias.set_value(ours.bias[...])
    x = jax.random.normal(jax.random.key(0), shape)
    np.testing.assert_allclose(ours(x).value, flax(x), rtol=1e-5, atol=1e-5)


def test_scale(assert_rms) -> None:
    def make(rngs):
        return nn.Einsum("btd,dhk->bthk", (64, 8, 8), (8, 8), rngs=rngs)

    assert_rms(make, (4, 8, 64))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"nn\.Einsum: einsum_str must be .* has no ->"):
        nn.Einsum("ab,bc", (4, 4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"got 'ab,bc->ac': the kernel is \(4, 4, 4\)"):
        nn.Einsum("ab,bc->ac", (4, 4, 4), rngs=nnx.Rngs(0))
