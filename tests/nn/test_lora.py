import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.gradients import check
from tests.modules import FLOAT64, build, model_loss
from tests.nn.table import parameters
from unitscale import nn


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_the_layers_of_flax_over_the_roots_of_fan_in_and_rank() -> None:
    b = nnx.initializers.normal(1.0)
    ours, flax = (
        kind.LoRALinear(5, 4, lora_rank=3, b_initializer=b, rngs=nnx.Rngs(0)) for kind in (nn, nnx)
    )
    ours.bias.set_value(jnp.arange(4.0))
    flax.bias.set_value(ours.bias[...])
    flax.kernel.set_value(ours.kernel[...] / 5**0.5)
    for name, size in (("lora_a", 5), ("lora_b", 3)):
        own = getattr(ours.lora, name)
        assert (type(own), own.role, own.fan_in) == (nnx.LoRAParam, "weight", size)
        getattr(flax.lora, name).set_value(own[...] / size**0.5)
    x = normal(0, 2, 3, 5)
    np.testing.assert_allclose(ours(x).value, flax(x), rtol=1e-5, atol=1e-5)
    alone, base = nn.LoRA(5, 3, 4, rngs=nnx.Rngs(0)), nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    assert not np.any(alone(x).value)
    wrapped = nn.LoRA(5, 3, 4, base_module=base, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(wrapped(x).value, base(x))


@pytest.mark.parametrize("policy", ["float32", "float16", "fp8"])
def test_an_update_begins_as_the_layer_itself(policy) -> None:
    plain = nn.Dense(16, 32, policy=policy, rngs=nnx.Rngs(0))
    layer = nn.LoRALinear(16, 32, lora_rank=4, policy=policy, rngs=nnx.Rngs(0))
    names = parameters(plain).keys()
    assert parameters(layer).keys() == names | {"lora.lora_a", "lora.lora_b"}
    x = normal(0, 2, 16)
    assert layer(x).dtype == plain(x).dtype
    (y, vjp), (expected, expected_vjp) = (
        jax.vjp(lambda x, m=m: m(x).data, x) for m in (layer, plain)
    )
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(vjp(expected), expected_vjp(expected))
    wide = nn.LoRALinear(16, 32, lora_rank=4, lora_param_dtype="bfloat16", rngs=nnx.Rngs(0))
    assert (wide.lora.lora_a.dtype, wide.kernel.dtype) == (jnp.bfloat16, jnp.float32)


def test_the_update_alone_is_trained() -> None:
    layer = nn.LoRALinear(16, 32, lora_rank=4, rngs=nnx.Rngs(0))
    only = nnx.DiffState(0, nnx.LoRAParam)
    grads = nn.grad(lambda m: jnp.sum(jnp.sin(m(normal(0, 2, 16)).value)), argnums=only)(layer)
    assert set(parameters(nnx.merge(*nnx.split(layer))).keys()) > {"lora.lora_a"}
    found = {path[-1]: g[...] for path, g in nnx.to_flat_state(grads)}
    assert found.keys() == {"lora_a", "lora_b"}
    assert not np.any(found["lora_a"])
    assert np.all(found["lora_b"] != 0)


@pytest.mark.parametrize("constraint", ["to_output_scale", "gmean"])
def test_gradients_are_positive_constants_times_the_truth(constraint) -> None:
    """With a path beside the layer, so that its input is no cut edge."""
    with jax.enable_x64(True):

        class Parallel(nnx.Module):
            def __init__(self):
                self.before = nn.Dense(3, 4, policy=FLOAT64, rngs=nnx.Rngs(1))
                self.layer = nn.LoRALinear(
                    4, 6, lora_rank=2, constraint=constraint, policy=FLOAT64, rngs=nnx.Rngs(0)
                )

            def __call__(self, x):
                h = self.before(x)
                y = self.layer(h).value
                return jnp.sum(jnp.sin(y + 0.3)) + jnp.sum(jnp.cos(h.value))

        model = build(Parallel)
        x = np.random.default_rng(3).normal(size=(5, 3))
        constants = check(*model_loss(model, lambda m: m(jnp.asarray(x))), directions=2)
    if constraint == "to_output_scale":
        # The product's own factors, over those of the value: 4^-1/2, and 2^-1/2 of the rank.
        expected = {"lora_a": (4 * 2 / (6 * 5)) ** 0.5, "lora_b": (2 / 5) ** 0.5}
        for name, constant in expected.items():
            assert constants[f"layer.lora.{name}"] == pytest.approx(constant, rel=1e-6)


def test_scale(assert_rms) -> None:
    """Beside a layer of the same size: two independent unit outputs, and as many gradients."""
    options = {"lora_rank": 16, "b_initializer": nnx.initializers.normal(1.0)}
    assert_rms(
        lambda rngs: nn.LoRALinear(64, 64, **options, rngs=rngs), (32, 64), out=2**0.5, grad=2**0.5
    )
