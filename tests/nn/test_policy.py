"""Policies, the parameters that they store, and rules that set them for single layers."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from tests.nn.table import LAYERS, make, parameters
from tests.optimizers import scaled
from tests.refusals import refuses
from unitscale import nn, parallel, to_array
from unitscale.core import ScaledArray, as_scaled, is_scaled
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


def test_activation_casts_floats_and_leaves_the_rest() -> None:
    policy = nn.Policy(compute_dtype="float16")
    assert policy.activation(jnp.ones(2)).dtype == jnp.float16
    assert policy.activation(jnp.arange(2)).dtype == jnp.int32
    scaled = policy.activation(ScaledArray(jnp.ones(2), 4.0))
    assert (scaled.dtype, float(scaled.scale)) == (jnp.float16, 4.0)


@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp8"])
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


@pytest.mark.parametrize(("name", "tied"), [("fp8", False), ("mxfp8", True)])
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


def test_fp8_weights_are_quantized_from_the_parameter_itself() -> None:
    """Rounding float32 to bfloat16 first would round twice."""
    layer = nn.Dense(1, 1, use_bias=False, policy="fp8", rngs=nnx.Rngs(0))
    # Just above the midpoint of 1 and 1.125: bfloat16 would make it the midpoint, rounded to 1.
    layer.kernel.set_value(jnp.full((1, 1), 1.0625 + 2**-12, jnp.float32))
    assert float(layer(jnp.ones((1, 1))).data[0, 0]) == 1.125
    layer.kernel.set_value(jnp.full((1, 1), 1.0625, jnp.float32))
    assert float(layer(jnp.ones((1, 1))).data[0, 0]) == 1.0


@pytest.mark.parametrize("policy", ["float16", "fp8"])
def test_large_inputs_are_finite_and_infinite_ones_are_not_hidden(policy: str) -> None:
    layer = nn.Dense(4, 3, policy=policy, rngs=nnx.Rngs(0))
    x = jnp.zeros((3, 4)).at[:, 0].set(jnp.asarray([1e5, jnp.inf, jnp.nan]))
    finite = np.isfinite(np.asarray(nnx.jit(lambda layer, x: layer(x))(layer, x).value, np.float32))
    np.testing.assert_array_equal(finite.all(1), [True, False, False])


def test_repr_is_a_name_or_what_differs() -> None:
    for name, policy in nn.POLICIES.items():
        assert repr(policy) == f"as_policy({name!r})"
    own = nn.Policy(compute_dtype="float16", exempt=frozenset())
    assert repr(own) == "Policy(compute_dtype='float16', exempt=frozenset())"
    layer = nn.Dense(2, 2, policy="fp8_delayed", rngs=nnx.Rngs(0))
    assert "policy=as_policy('fp8_delayed')" in repr(layer)


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)


def test_the_first_pattern_counts_and_the_state_stays() -> None:
    model = nn.TransformerLayer(16, 2, policy="fp8", rngs=nnx.Rngs(0))
    before = nnx.state(model)
    found = nn.set_policies(model, {"*.query": "bfloat16", "attention.*": "mxfp8"})
    assert found == {
        "attention.query": "*.query",
        **{f"attention.{name}": "attention.*" for name in ("key", "value", "out")},
    }
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    assert (model.attention.key.policy, model.mlp.up.policy) == (
        nn.as_policy("mxfp8"),
        nn.as_policy("fp8"),
    )


def test_embeddings_have_the_role_of_a_readout() -> None:
    model = nn.Embed(16, 8, policy="fp8", rngs=nnx.Rngs(0))
    # Its exempt product keeps no scales, so that the policy is one that can be set.
    assert nn.set_policies(model, {"*": "fp8_delayed"}) == {"": "*"}


def test_a_model_of_the_other_kind_is_told_apart() -> None:
    ours, plain = nn.MLP(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"no layers of plain Flax .*or use nn.set_policies"):
        nn.convert(ours, "fp8_dynamic")
    with pytest.raises(ValueError, match=r"no layers of unitscale.nn. Use nn.convert"):
        nn.set_policies(plain, {"*": "fp8"})
    with pytest.raises(ValueError, match=r"cannot be stored in FP8"):
        nn.to_static(ours)


# Per layer: parameter -> (role, fan_in, fan_out, depth).
METADATA = {
    "dense": {"kernel": ("weight", 8, 6, 1), "bias": ("bias", 1, 6, 1)},
    "readout": {"kernel": ("readout", 8, 6, 1), "bias": ("bias", 1, 6, 1)},
    "conv": {"kernel": ("weight", 12, 18, 1), "bias": ("bias", 1, 6, 1)},
    "layer_norm": {"gain": ("norm", 1, 8, 1), "bias": ("norm", 1, 8, 1)},
    "group_norm": {"gain": ("norm", 1, 8, 1), "bias": ("norm", 1, 8, 1)},
    "positions": {"embedding": ("embedding", 6, 8, 1)},
    "residual": {"branch.kernel": ("weight", 8, 8, 6), "branch.bias": ("bias", 1, 8, 6)},
    "mlp": {
        "up.kernel": ("weight", 8, 12, 1),
        "up.bias": ("bias", 1, 12, 1),
        "down.kernel": ("weight", 12, 8, 1),
        "down.bias": ("bias", 1, 8, 1),
    },
}


def metadata(parameter: nnx.Param) -> tuple:
    return (parameter.role, parameter.fan_in, parameter.fan_out, parameter.depth)


def test_depth_is_on_every_parameter_of_a_stack_and_on_none_outside() -> None:
    for placement in ("pre", "post"):
        stack = nn.TransformerStack(3, 8, 2, norm_placement=placement, rngs=nnx.Rngs(0))
        roles = {(p.role, p.depth) for p in parameters(stack).values()}
        assert roles == {("weight", 6), ("bias", 6), ("norm", 6)}
    for name in set(LAYERS) - {"residual", "layer", "stack"}:
        assert {p.depth for p in parameters(make(name)[0]).values()} == {1}


# Layers with each of their initializers' arguments, and the parameters that these fill.
FILLED = {
    "dense": (nn.Dense, (4, 6), {"kernel": "kernel", "bias": "bias"}),
    "readout": (
        lambda *a, **k: nn.Readout(*a, use_bias=True, pad_to_multiple_of=4, **k),
        (4, 6),
        {"kernel": "kernel", "bias": "bias"},
    ),
    "conv": (nn.Conv, (4, 6, (3,)), {"kernel": "kernel", "bias": "bias"}),
    "positions": (nn.PositionalEmbed, (4, 6), {"embedding": "embedding"}),
    "layer norm": (nn.LayerNorm, (4,), {"bias": "bias", "scale": "gain"}),
    "attention": (
        nn.MultiHeadAttention,
        (2, 4),
        {
            "kernel": ("query.kernel", "key.kernel", "value.kernel"),
            "out_kernel": "out.kernel",
            "bias": ("query.bias", "key.bias", "value.bias"),
            "out_bias": "out.bias",
        },
    ),
    "gru": (
        nn.GRUCell,
        (4, 6),
        {
            "kernel": "dense_i.kernel",
            "recurrent_kernel": "dense_h.0.kernel",
            "bias": "dense_i.bias",
        },
    ),
}


@pytest.mark.parametrize("name", FILLED)
def test_initializers_and_metadata_reach_their_parameters(name) -> None:
    kind, args, fills = FILLED[name]
    fills = {k: (v,) if isinstance(v, str) else v for k, v in fills.items()}
    numbers = {k: i + 3.0 for i, k in enumerate(fills)}
    options = {f"{k}_init": nnx.initializers.constant(numbers[k]) for k in fills}
    options |= {f"{k}_metadata": {"note": k} for k in fills}
    layer = kind(*args, **options, param_dtype="float16", dtype="bfloat16", rngs=nnx.Rngs(0))
    found = parameters(layer)
    assert {path for paths in fills.values() for path in paths} == found.keys()
    for k, paths in fills.items():
        for path in paths:
            assert (found[path].note, found[path].dtype) == (k, jnp.float16), path
            np.testing.assert_array_equal(nn.unpadded(found[path]), numbers[k])
    assert layer.policy == nn.Policy(param_dtype="float16", compute_dtype="bfloat16")


def test_an_initializer_with_metadata_shards_its_parameter() -> None:
    """By flax's own convention, with roles beside it and through a step of a scaled optimizer."""
    mesh = parallel.make_mesh({"data": 4, "model": 2})
    init = nnx.with_partitioning(nnx.initializers.normal(1.0), (None, "model"))
    with jax.set_mesh(mesh):
        layer = nn.Dense(
            4, 6, kernel_init=init, bias_metadata={"out_sharding": ("model",)}, rngs=nnx.Rngs(0)
        )
        specs = {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec("model")}
        plain = nn.Dense(4, 6, rngs=nnx.Rngs(0))
        np.testing.assert_array_equal(plain.kernel[...], layer.kernel[...])
        assert layer.kernel.role == "weight"
        optimizer = nn.Optimizer(layer, scaled(optax.adam(0.1)), wrt=nnx.Param)
        grads = nnx.jit(nn.grad(lambda m: jnp.sum(m(jnp.ones((2, 4))).value)))(layer)
        optimizer.update(layer, grads)
        for key, spec in specs.items():
            stored = getattr(layer, key).get_value()
            assert isinstance(stored, ScaledArray)
            assert stored.data.sharding.spec == spec
            assert nnx.get_partition_spec(nnx.state(layer))[key].get_value() == spec


def mlp(policy: str = "fp8") -> nn.MLP:
    return nn.MLP(16, 32, policy=policy, rngs=nnx.Rngs(0))


def test_a_layer_computes_as_one_that_was_made_with_the_policy() -> None:
    mixed, fp8, wide = mlp("fp8_delayed"), mlp(), mlp("bfloat16")
    assert nn.set_policies(mixed, {"u*": "bfloat16", "down": "fp8"}) == {"up": "u*", "down": "down"}
    # Scales that are no longer read go.
    assert not list(nn.amax_states(mixed))
    ups = [to_array(model.up(normal(4, 16))) for model in (mixed, fp8, wide)]
    downs = [to_array(model.down(normal(4, 32))) for model in (mixed, fp8, wide)]
    np.testing.assert_array_equal(ups[0], ups[2])
    np.testing.assert_array_equal(downs[0], downs[1])
    assert not np.array_equal(ups[0], ups[1])
    assert not np.array_equal(downs[0], downs[2])


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"gate": "bfloat16"}, "no layer matches 'gate'"),
        ({"up": "bfloat16", "u*": "fp8"}, r"every layer that 'u\*' matches is taken"),
        ({"up": "fp8_delayed"}, "'up' must keep no scales"),
        ({"up": nn.Policy(param_dtype="bfloat16")}, "must store parameters in float32"),
        ({"up": "fp9"}, "policy must be one of .* got 'fp9'"),
    ],
)
def test_what_cannot_be_set_changes_nothing(rules: dict, words: str) -> None:
    model = mlp()
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=words):
        nn.set_policies(model, {"down": "bfloat16"} | rules)
    assert nnx.graphdef(model) == before


@pytest.mark.parametrize("cotangent", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_operands_are_saved_in_fp8_and_nothing_wider(cotangent) -> None:
    policy = nn.Policy(compute_dtype="bfloat16", matmul=MatmulConfig(cotangent=cotangent))
    graphdef, params = nnx.split(nn.Dense(16, 24, policy=policy, rngs=nnx.Rngs(0)))
    x = jnp.ones((32, 16), jnp.bfloat16)
    y, vjp = jax.vjp(lambda p, x: nnx.merge(graphdef, p)(x).data, params, x)
    saved = [(a.shape, a.dtype.name) for a in jax.tree.leaves(vjp) if len(a.shape) == 2]
    assert sorted(saved) == [((16, 24), "float8_e4m3fn"), ((32, 16), "float8_e4m3fn")]
    assert ("f8_e5m2" in str(jax.make_jaxpr(vjp)(y))) == (cotangent == "float8_e5m2")


def test_exempt_roles_compute_in_16_bits() -> None:
    x, fp8 = jnp.ones((2, 8), jnp.bfloat16), nn.as_policy("fp8")
    embed = nn.Embed(6, 8, policy="fp8", rngs=nnx.Rngs(0))
    none_exempt = dataclasses.replace(fp8, exempt=frozenset())
    dense_exempt = dataclasses.replace(fp8, exempt=frozenset({"weight"}))
    for call, quantized in (
        (make("dense", fp8)[0], True),
        (make("dense", dense_exempt)[0], False),
        (make("readout", fp8)[0], False),
        (make("readout", none_exempt)[0], True),
        (embed.attend, False),
    ):
        assert ("f8_e4m3fn" in str(jax.make_jaxpr(lambda x, f=call: f(x).data)(x))) == quantized


test_errors = refuses(
    [
        (ValueError, lambda: nn.as_policy("fp16"), "one of float32, .*'fp16'.*mean 'float16'"),
        (ValueError, lambda: nn.as_policy("bf16"), "Did you mean 'bfloat16'"),
        (TypeError, lambda: nn.as_policy(None), "got None"),
        (ValueError, lambda: nn.Policy(param_dtype="int32"), "floating-point format; got int32"),
        (ValueError, lambda: nn.Policy(compute_dtype="float8_e4m3fn"), "compute_dtype must have"),
        (ValueError, lambda: nn.Policy(param_dtype="E5M7"), "param_dtype must have 16 bits"),
        (ValueError, lambda: nn.Policy(exempt=frozenset({"head"})), "exempt must be among"),
        (ValueError, lambda: nn.as_policy("bfloat16").with_quantized_readout(), "matmul must be"),
        (
            ValueError,
            lambda: nn.as_policy("fp8_delayed").with_quantized_readout(gradients_only=True),
            "got Delayed",
        ),
        (
            ValueError,
            lambda: nn.LayerNorm(4, scale_init=nnx.initializers.normal(1.0)),
            "needs rngs=",
        ),
    ]
)


def test_metadata() -> None:
    for name, expected in METADATA.items():
        assert {path: metadata(p) for path, p in parameters(make(name)[0]).items()} == expected
    layer = nn.Conv(4, 8, (3, 2), feature_group_count=2, rngs=nnx.Rngs(0))
    assert metadata(layer.kernel) == ("weight", 12, 24, 1)
    # Learning rates go by one expert's fan-in, whatever the number of experts.
    experts = {path: metadata(p) for path, p in parameters(make("moe")[0]).items()}
    assert experts["router"] == ("weight", 8, 3, 1)
    assert experts["experts.down.kernel"] == ("weight", 12, 8, 1)


def test_weights_are_standard_normal_in_the_dtype_of_the_policy() -> None:
    policy = nn.Policy(param_dtype="bfloat16")
    kernel, other = (nn.Dense(200, 300, policy=policy, rngs=nnx.Rngs(i)).kernel for i in range(2))
    values = np.asarray(kernel.get_value(), np.float64)
    assert kernel.dtype == jnp.bfloat16
    # Five standard errors of the mean, the variance and the fourth moment of 60,000 normals.
    n = values.size
    assert abs(values.mean()) < 5 / n**0.5
    assert abs((values**2).mean() - 1) < 5 * (2 / n) ** 0.5 + 2**-8
    assert abs((values**4).mean() - 3) < 5 * (96 / n) ** 0.5 + 3 * 2**-7
    assert not np.array_equal(values, np.asarray(other.get_value(), np.float64))


def test_a_parameter_meets_a_scaled_array_as_its_array_does() -> None:
    x = as_scaled(jnp.arange(1.0, 10).reshape(3, 3), dtype=jnp.float16)
    w = nnx.Param(jnp.full((3, 3), 2.0))
    for symbol in ("add", "sub", "mul", "truediv", "gt", "matmul"):
        operation = getattr(operator, symbol)
        for found, expected in (
            (operation(x, w), operation(x, w[...])),
            (operation(w, x), operation(w[...], x)),
        ):
            assert is_scaled(found) == is_scaled(expected) == (symbol != "gt")
            assert jnp.array_equal(jnp.asarray(found), jnp.asarray(expected))
    assert is_scaled(nnx.Param(x) * x)
    assert is_scaled(x * nnx.Param(x))
