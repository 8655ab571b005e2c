import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.table import make
from tests.refusals import refuses
from unitscale import nn
from unitscale.core import ScaledArray
from unitscale.quant import Block, Delayed, Dynamic, MatmulConfig, Static, Unit


def test_presets() -> None:
    expected = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
    for name, compute in expected.items():
        policy = nn.as_policy(name)
        assert (policy.param_dtype, policy.compute_dtype) == ("float32", compute)
        assert policy.matmul is None
    fp8 = nn.as_policy("fp8")
    assert (fp8.param_dtype, fp8.compute_dtype) == ("float32", "bfloat16")
    assert fp8.matmul == MatmulConfig()
    assert fp8.exempt == {"readout"}
    assert fp8.loss is None
    scaled = {
        "fp8_e5m2": (Unit(), "float8_e5m2"),
        "fp8_dynamic": (Dynamic(), "float8_e5m2"),
        "fp8_delayed": (Delayed(), "float8_e5m2"),
        "fp8_static": (Static(), "float8_e5m2"),
        "mxfp8": (Block(32, 1, "float8_e8m0fnu"), "float8_e4m3fn"),
    }
    for name, (strategy, cotangent) in scaled.items():
        config = MatmulConfig(cotangent=cotangent, strategy=strategy)
        assert nn.as_policy(name) == dataclasses.replace(fp8, matmul=config)
    assert set(nn.POLICIES) == {*expected, "fp8", *scaled}


def test_a_policy_is_returned_as_it_is() -> None:
    policy = nn.Policy(compute_dtype="float16")
    assert nn.as_policy(policy) is policy
    assert hash(policy) == hash(nn.Policy(compute_dtype=jnp.float16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute_dtype = "float32"


test_errors = refuses(
    [
        (ValueError, lambda: nn.as_policy("fp16"), "one of float32, .*'fp16'.*mean 'float16'"),
        (ValueError, lambda: nn.as_policy("bf16"), "Did you mean 'bfloat16'"),
        (ValueError, lambda: nn.as_policy("bfloat"), "Did you mean 'bfloat16'"),
        (TypeError, lambda: nn.as_policy(None), "a Policy or a preset's name; got None"),
        (ValueError, lambda: nn.Policy(param_dtype="int32"), "floating-point format; got int32"),
        (
            ValueError,
            lambda: nn.Policy(compute_dtype="float8_e4m3fn"),
            "compute_dtype must have 16 bits or more; got 'float8_e4m3fn'. For FP8 give matmul=",
        ),
        (ValueError, lambda: nn.Policy(param_dtype="E5M7"), "param_dtype must have 16 bits"),
        (
            ValueError,
            lambda: nn.Policy(exempt=frozenset({"readout", "head"})),
            "exempt must be among weight, bias, norm, readout, embedding; got head",
        ),
    ]
)


def test_activation_casts_floats_and_leaves_the_rest() -> None:
    policy = nn.Policy(compute_dtype="float16")
    assert policy.activation(jnp.ones(2)).dtype == jnp.float16
    assert policy.activation(jnp.arange(2)).dtype == jnp.int32
    scaled = policy.activation(ScaledArray(jnp.ones(2), 4.0))
    assert (scaled.dtype, float(scaled.scale)) == (jnp.float16, 4.0)


def residuals(model: nnx.Module, x: jax.Array) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of what the backward pass keeps of one call."""
    graphdef, params = nnx.split(model)
    _, vjp = jax.vjp(lambda p, x: nnx.merge(graphdef, p)(x).data, params, x)
    return [(a.shape, a.dtype.name) for a in jax.tree.leaves(vjp)]


@pytest.mark.parametrize("cotangent", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_operands_are_saved_in_fp8_and_nothing_wider(cotangent) -> None:
    policy = nn.Policy(compute_dtype="bfloat16", matmul=MatmulConfig(cotangent=cotangent))
    layer = nn.Dense(16, 24, policy=policy, rngs=nnx.Rngs(0))
    saved = residuals(layer, jnp.ones((32, 16), jnp.bfloat16))
    large = sorted(entry for entry in saved if entry[0] != (0,) and len(entry[0]) == 2)
    assert large == [((16, 24), "float8_e4m3fn"), ((32, 16), "float8_e4m3fn")]


def test_in_16_bits_operands_are_saved_in_16_bits() -> None:
    for name in ("float16", "bfloat16"):
        layer = nn.Dense(16, 24, policy=name, rngs=nnx.Rngs(0))
        saved = residuals(layer, jnp.ones((32, 16)))
        assert {dtype for shape, dtype in saved if len(shape) == 2} == {name}


@pytest.mark.parametrize("cotangent", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cotangent_is_quantized_to_the_format_of_the_policy(cotangent) -> None:
    policy = nn.Policy(compute_dtype="bfloat16", matmul=MatmulConfig(cotangent=cotangent))
    layer = nn.Dense(16, 24, policy=policy, rngs=nnx.Rngs(0))
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(layer(x).data)))(jnp.ones((2, 16))))
    assert ("f8_e5m2" in text) == (cotangent == "float8_e5m2")


def products(layer: nnx.Module, x: jax.Array) -> str:
    return str(jax.make_jaxpr(lambda x: layer(x).data)(x))


def test_exempt_roles_compute_in_16_bits() -> None:
    x = jnp.ones((2, 8), jnp.bfloat16)
    dense, readout = make("dense", "fp8")[0], make("readout", "fp8")[0]
    embed = nn.Embed(6, 8, policy="fp8", rngs=nnx.Rngs(0))
    assert "f8_e4m3fn" in products(dense, x)
    assert "f8_e4m3fn" not in products(readout, x)
    assert "f8_e4m3fn" not in str(jax.make_jaxpr(lambda x: embed.attend(x).data)(x))
    none_exempt = dataclasses.replace(nn.as_policy("fp8"), exempt=frozenset())
    assert "f8_e4m3fn" in products(make("readout", none_exempt)[0], x)
    all_exempt = dataclasses.replace(nn.as_policy("fp8"), exempt=frozenset({"weight"}))
    assert "f8_e4m3fn" not in products(make("dense", all_exempt)[0], x)


@pytest.mark.parametrize("name", ["fp8", "fp8_dynamic", "fp8_delayed", "mxfp8"])
def test_a_quantized_readout(name: str) -> None:
    """Its gradient has the range of E5M2, or blocks; nothing else of the policy changes."""
    policy = nn.as_policy(name)
    own = policy.with_quantized_readout()
    assert own.matmul_for("weight") == policy.matmul
    config = own.matmul_for("readout")
    assert policy.matmul_for("readout") is None
    assert (config.lhs, config.rhs) == ("float8_e4m3fn",) * 2
    assert config.cotangent == ("float8_e4m3fn" if name == "mxfp8" else "float8_e5m2")
    assert config.strategy == policy.matmul.strategy
    embed = nn.Embed(6, 8, policy=own, rngs=nnx.Rngs(0))

    graphdef, state = nnx.split(embed)

    def loss(state):
        x = jnp.ones((2, 8), jnp.bfloat16)
        return nnx.merge(graphdef, state).cross_entropy(x, jnp.zeros(2, int))

    text = str(jax.make_jaxpr(jax.grad(loss))(state))
    assert "f8_e4m3fn[6,8]" in text
    assert ("f8_e5m2[2,6]" in text) == (name != "mxfp8")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8_dynamic", "mxfp8"])
def test_quantized_gradients_of_a_readout(name: str, tied: bool) -> None:
    """Its logits are those of the policy as it was, and so is its loss."""
    was = nn.as_policy(name)
    policy = was.with_quantized_readout(gradients_only=True)
    assert policy.matmul_for("readout") is None
    x = jax.random.normal(jax.random.key(0), (2, 32)).astype(jnp.bfloat16)

    def compute(policy: nn.Policy) -> tuple[jax.Array, jax.Array, str]:
        rngs = nnx.Rngs(0)
        layer = nn.Embed(6, 32, policy=policy, rngs=rngs)
        layer = layer if tied else nn.Readout(32, 6, policy=policy, rngs=rngs)
        graphdef, state = nnx.split(layer)

        def loss(state):
            return nnx.merge(graphdef, state).cross_entropy(x, jnp.array([3, 5]))

        logits = layer.attend(x) if tied else layer(x)
        return loss(state), logits.data, str(jax.make_jaxpr(jax.grad(loss))(state))

    (loss, logits, text), (expected, wanted, plain) = compute(policy), compute(was)
    assert loss == expected
    np.testing.assert_array_equal(logits, wanted)
    assert "f8_" not in plain
    cotangent = "f8_e4m3fn" if name == "mxfp8" else "f8_e5m2"
    assert f"{cotangent}[2,6]" in text


def test_only_a_policy_with_products_has_a_quantized_readout() -> None:
    with pytest.raises(ValueError, match="matmul must be a MatmulConfig; got None"):
        nn.as_policy("bfloat16").with_quantized_readout()
    with pytest.raises(ValueError, match=r"keeps no scales.* got Delayed"):
        nn.as_policy("fp8_delayed").with_quantized_readout(gradients_only=True)


def test_fp8_weights_are_quantized_from_the_parameter_itself() -> None:
    """Rounding float32 to bfloat16 first would round twice."""
    layer = nn.Dense(1, 1, use_bias=False, policy="fp8", rngs=nnx.Rngs(0))
    # Just above the midpoint of 1 and 1.125: bfloat16 would make it the midpoint, rounded to 1.
    layer.kernel.set_value(jnp.full((1, 1), 1.0625 + 2**-12, jnp.float32))
    assert float(layer(jnp.ones((1, 1))).data[0, 0]) == 1.125
    layer.kernel.set_value(jnp.full((1, 1), 1.0625, jnp.float32))
    assert float(layer(jnp.ones((1, 1))).data[0, 0]) == 1.0


@pytest.mark.parametrize("policy", ["float16", "fp8", "fp8_dynamic"])
def test_large_inputs_are_finite_and_infinite_ones_are_not_hidden(policy: str) -> None:
    layer = nn.Dense(4, 3, policy=policy, rngs=nnx.Rngs(0))
    x = jnp.zeros((3, 4)).at[:, 0].set(jnp.asarray([1e5, jnp.inf, jnp.nan]))
    finite = np.isfinite(np.asarray(nnx.jit(lambda layer, x: layer(x))(layer, x).value, np.float32))
    np.testing.assert_array_equal(finite.all(1), [True, False, False])


def test_cotangents_of_8_bit_inputs_saturate() -> None:
    layer = nn.Dense(4, 4, policy="bfloat16", rngs=nnx.Rngs(0))
    y, vjp = jax.vjp(lambda x: layer(x).value, jnp.ones((1, 4), jnp.float8_e4m3fn))
    (found,) = vjp(jnp.full_like(y, 3000))
    assert jnp.abs(found.astype(jnp.float32)).max() == 448


def test_repr_is_a_name_or_what_differs() -> None:
    for name, policy in nn.POLICIES.items():
        assert repr(policy) == f"as_policy({name!r})"
    own = nn.Policy(compute_dtype="float16", exempt=frozenset())
    assert repr(own) == "Policy(compute_dtype='float16', exempt=frozenset())"
    layer = nn.Dense(2, 2, policy="fp8_delayed", rngs=nnx.Rngs(0))
    assert "policy=as_policy('fp8_delayed')" in repr(layer)
