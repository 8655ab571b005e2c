"""Policies, formats of stored parameters, and rules for policies of single layers."""

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

RNGS = nnx.Rngs(0)


def test_presets() -> None:
    for name in ("float32", "bfloat16", "float16"):
        policy = nn.as_policy(name)
        assert (policy.param_dtype, policy.compute_dtype) == ("float32", name)
        assert policy.matmul is None
    fp8 = nn.as_policy("fp8")
    assert (fp8.param_dtype, fp8.compute_dtype, fp8.loss) == ("float32", "bfloat16", None)
    assert (fp8.matmul, fp8.exempt) == (MatmulConfig(), {"readout"})
    strategies = {"e5m2": Unit(), "dynamic": Dynamic(), "delayed": Delayed(), "static": Static()}
    for name, strategy in strategies.items():
        config = MatmulConfig(cotangent="float8_e5m2", strategy=strategy)
        assert nn.as_policy(f"fp8_{name}") == dataclasses.replace(fp8, matmul=config)
    config = MatmulConfig(strategy=Block(32, 1, "float8_e8m0fnu"))
    assert nn.as_policy("mxfp8") == dataclasses.replace(fp8, matmul=config)
    fp4 = nn.as_policy("nvfp4").matmul
    assert (fp4.lhs, fp4.strategy) == ("float4_e2m1fn", Block(16, 1, "e4m3fn", adaptive=True))
    assert (fp4.dither, fp4.hadamard) == (True, True)
    assert nn.as_policy("nvfp4_dynamic").matmul.strategy.tensor_scale
    assert nn.as_policy("fp8_block").matmul.strategy == Block(128, (1, 2, 1), "float32")
    assert nn.as_policy("fp8_channel").matmul.wide_weight_gradient
    assert len(nn.POLICIES) == 13
    for name, policy in nn.POLICIES.items():
        assert repr(policy) == f"as_policy({name!r})"
    assert "policy=as_policy('fp8')" in repr(nn.Dense(2, 2, policy="fp8", rngs=RNGS))


def test_activation_casts_floats_and_leaves_the_rest() -> None:
    policy = nn.Policy(compute_dtype="float16")
    assert policy.activation(jnp.ones(2)).dtype == jnp.float16
    assert policy.activation(jnp.arange(2)).dtype == jnp.int32
    scaled = policy.activation(ScaledArray(jnp.ones(2), 4.0))
    assert (scaled.dtype, float(scaled.scale)) == (jnp.float16, 4.0)


def readout_program(policy: nn.Policy, tied: bool):
    """Return loss and logits of a readout, and the jaxpr of its gradient."""
    kind = nn.Embed(6, 32, policy=policy, rngs=nnx.Rngs(0))
    layer = kind if tied else nn.Readout(32, 6, policy=policy, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    x = jnp.ones((2, 32), jnp.bfloat16) * jnp.linspace(-1, 1, 32, dtype=jnp.bfloat16)

    def loss(state):
        return nnx.merge(graphdef, state).cross_entropy(x, jnp.array([3, 5]))

    def both(state):
        own = nnx.merge(graphdef, state)
        return loss(state), (own.attend(x) if tied else own(x)).data

    return *jax.jit(both)(state), str(jax.make_jaxpr(jax.grad(loss))(state))


@pytest.mark.parametrize(("name", "tied"), [("fp8_delayed", True), ("mxfp8", True), ("fp8", False)])
def test_a_quantized_readout(name: str, tied: bool) -> None:
    """Gradients use E5M2 or block scales; the rest of the policy does not change."""
    was = nn.as_policy(name)
    own = was.with_quantized_readout()
    assert (own.matmul_for("weight"), was.matmul_for("readout")) == (was.matmul, None)
    config, cotangent = own.matmul_for("readout"), "e4m3fn" if name == "mxfp8" else "e5m2"
    expected = MatmulConfig(cotangent=cotangent, strategy=was.matmul.strategy)
    assert config == expected
    text = readout_program(own, tied)[2]
    assert "f8_e4m3fn[6,32]" in text or "f8_e4m3fn[32,6]" in text
    assert ("f8_e5m2[2,6]" in text) == (name != "mxfp8")
    if name == "fp8_delayed":
        return
    # With gradients_only, logits and loss are those of the policy as it was.
    gradients = was.with_quantized_readout(gradients_only=True)
    assert gradients.matmul_for("readout") is None
    loss, logits, text = readout_program(gradients, tied)
    expected, wanted, plain = readout_program(was, tied)
    assert loss == expected
    np.testing.assert_array_equal(logits, wanted)
    assert "f8_" not in plain
    assert f"f8_{cotangent}[2,6]" in text


def test_fp8_weights_are_quantized_from_the_parameter_itself() -> None:
    """Rounding to bfloat16 first would round twice."""
    layer = nn.Dense(1, 1, use_bias=False, policy="fp8", rngs=nnx.Rngs(0))
    # Just above the midpoint of 1 and 1.125: bfloat16 would make it the midpoint, rounded to 1.
    for kernel, rounded in ((1.0625 + 2**-12, 1.125), (1.0625, 1.0)):
        layer.kernel.set_value(jnp.full((1, 1), kernel, jnp.float32))
        assert float(layer(jnp.ones((1, 1))).data[0, 0]) == rounded


@pytest.mark.parametrize("policy", ["float16", "fp8"])
def test_large_inputs_are_finite_and_infinite_ones_are_not_hidden(policy: str) -> None:
    layer = nn.Dense(4, 3, policy=policy, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.ones((4, 3)))
    x = jnp.zeros((3, 4)).at[:, 0].set(jnp.asarray([1e5, jnp.inf, jnp.nan]))
    finite = np.isfinite(np.asarray(nnx.jit(lambda layer, x: layer(x))(layer, x).value, np.float32))
    np.testing.assert_array_equal(finite.all(1), [True, False, False])


@pytest.mark.parametrize("policy", ["fp8", "fp8_dynamic", "fp8_delayed", "mxfp8"])
def test_the_backward_of_layers_keeps_less_than_in_bfloat16(policy: str) -> None:
    """Count the bytes that an MLP saves per token, in bfloat16 and in FP8."""

    def kept(policy: str) -> int:
        make = lambda: nn.MLP(256, 1024, use_bias=False, policy=policy, rngs=nnx.Rngs(0))  # noqa: E731
        graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

        def loss(params, rest, x):
            y = nnx.merge(graphdef, params, rest)(x)
            return jnp.mean(y.value.astype(jnp.float32) ** 2)

        x = jax.ShapeDtypeStruct((8192, 256), jnp.bfloat16)
        vjp = jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], params, rest, x)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp))

    activations, weights, factors = 8192 * 256 * (1 + 4), 2 * 256 * 1024, 2 * 2 * 4
    saved = kept("bfloat16") - kept(policy)
    assert saved >= (activations + weights) * (1 - 1 / 32) - factors


def test_exempt_roles_compute_in_16_bits() -> None:
    x, fp8 = jnp.ones((2, 8), jnp.bfloat16), nn.as_policy("fp8")
    none_exempt = dataclasses.replace(fp8, exempt=frozenset())
    dense_exempt = dataclasses.replace(fp8, exempt=frozenset({"weight"}))
    for call, quantized in (
        (make("dense", fp8)[0], True),
        (make("dense", dense_exempt)[0], False),
        (make("readout", fp8)[0], False),
        (make("readout", none_exempt)[0], True),
        (nn.Embed(6, 8, policy="fp8", rngs=RNGS).attend, False),
    ):
        assert ("f8_e4m3fn" in str(jax.make_jaxpr(lambda x, f=call: f(x).data)(x))) == quantized


def mlp(policy: str = "fp8") -> nn.MLP:
    return nn.MLP(16, 32, policy=policy, rngs=nnx.Rngs(0))


def test_a_layer_computes_as_one_that_was_made_with_the_policy() -> None:
    mixed, fp8, wide = mlp("fp8_delayed"), mlp(), mlp("bfloat16")
    before = nnx.state(mixed, nnx.Param)
    # The first pattern that matches counts.
    rules = {"u*": "bfloat16", "*": "fp8"}
    assert nn.set_policies(mixed, rules) == {"up": "u*", "down": "*"}
    jax.tree.map(np.testing.assert_array_equal, nnx.state(mixed, nnx.Param), before)
    # Scales that are no longer read go.
    assert not list(nn.amax_states(mixed))

    @nnx.jit
    def run(model):
        inputs = (jnp.linspace(-1, 1, 4 * n, dtype=jnp.bfloat16).reshape(4, n) for n in (16, 32))
        layers = model.up, model.down
        return [to_array(layer(x)) for layer, x in zip(layers, inputs, strict=True)]

    (up, down), (up_8, down_8), (up_16, down_16) = map(run, (mixed, fp8, wide))
    np.testing.assert_array_equal(up, up_16)
    np.testing.assert_array_equal(down, down_8)
    assert not np.array_equal(up, up_8)
    assert not np.array_equal(down, down_16)
    # The exempt matmul of an embedding keeps no scales, so that the policy is one that can be set.
    embed = nn.Embed(16, 8, policy="fp8", rngs=RNGS)
    assert nn.set_policies(embed, {"*": "fp8_delayed"}) == {"": "*"}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"gate": "bfloat16"}, "no layer matches 'gate'"),
        ({"up": "bfloat16", "u*": "fp8"}, r"an earlier rule matches every layer that 'u\*' does"),
        ({"up": "fp8_delayed"}, "'up' must not store scales"),
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


# Per layer: parameter -> (role, fan_in, fan_out, depth).
METADATA = {
    "dense": {"kernel": ("weight", 8, 6, 1), "bias": ("bias", 1, 6, 1)},
    "readout": {"kernel": ("readout", 8, 6, 1), "bias": ("bias", 1, 6, 1)},
    "einsum": {"kernel": ("weight", 8, 6, 1), "bias": ("bias", 1, 3, 1)},
    "conv": {"kernel": ("weight", 12, 18, 1), "bias": ("bias", 1, 6, 1)},
    "layer_norm": {"gain": ("norm", 1, 8, 1), "bias": ("norm", 1, 8, 1)},
    "group_norm": {"gain": ("norm", 1, 8, 1), "bias": ("norm", 1, 8, 1)},
    "positions": {"embedding": ("embedding", 6, 8, 1)},
    "residual": {"branch.kernel": ("weight", 8, 8, 6), "branch.bias": ("bias", 1, 8, 6)},
    # Learning rates go by one expert's fan-in, whatever the number of experts.
    "moe": {
        "router": ("weight", 8, 3, 1),
        "experts.up.kernel": ("weight", 8, 12, 1),
        "experts.up.bias": ("bias", 1, 12, 1),
        "experts.down.kernel": ("weight", 12, 8, 1),
        "experts.down.bias": ("bias", 1, 8, 1),
    },
}


def metadata(parameter: nnx.Param) -> tuple:
    return (parameter.role, parameter.fan_in, parameter.fan_out, parameter.depth)


def test_metadata() -> None:
    for name, expected in METADATA.items():
        assert {path: metadata(p) for path, p in parameters(make(name)[0]).items()} == expected
    layer = nn.Conv(4, 8, (3, 2), feature_group_count=2, rngs=nnx.Rngs(0))
    assert metadata(layer.kernel) == ("weight", 12, 24, 1)
    for placement in ("pre", "post"):
        stack = nnx.eval_shape(
            lambda p=placement: nn.TransformerStack(3, 8, 2, norm_placement=p, rngs=nnx.Rngs(0))
        )
        roles = {(p.role, p.depth) for p in parameters(stack).values()}
        assert roles == {("weight", 6), ("bias", 6), ("norm", 6)}
    for name in set(LAYERS) - {"residual", "layer", "stack"}:
        layer = nnx.eval_shape(lambda n=name: LAYERS[n].make(rngs=nnx.Rngs(0)))
        assert {p.depth for p in parameters(layer).values()} == {1}


# Layers with each of their initializers' arguments, and the parameters that these fill.
DENSE = {"kernel": "kernel", "bias": "bias"}
FILLED = {
    "dense": (nn.Dense, (4, 6), DENSE),
    "readout": (
        lambda *a, **k: nn.Readout(*a, use_bias=True, pad_to_multiple_of=4, **k),
        (4, 6),
        DENSE,
    ),
    "conv": (nn.Conv, (4, 6, (3,)), DENSE),
    "positions": (nn.PositionalEmbed, (4, 6), {"embedding": "embedding"}),
    "layer norm": (nn.LayerNorm, (4,), {"bias": "bias", "scale": "gain"}),
    "attention": (
        nn.MultiHeadAttention,
        (2, 4),
        {
            "kernel": "query.kernel key.kernel value.kernel",
            "out_kernel": "out.kernel",
            "bias": "query.bias key.bias value.bias",
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
    options = {f"{k}_init": nnx.initializers.constant(i + 3.0) for i, k in enumerate(fills)}
    options |= {f"{k}_metadata": {"note": k} for k in fills}
    layer = kind(*args, **options, param_dtype="float16", dtype="bfloat16", rngs=nnx.Rngs(0))
    found = parameters(layer)
    assert set(" ".join(fills.values()).split()) == found.keys()
    for i, (k, paths) in enumerate(fills.items()):
        for path in paths.split():
            assert (found[path].note, found[path].dtype) == (k, jnp.float16), path
            np.testing.assert_array_equal(nn.unpadded(found[path]), i + 3.0)
    assert layer.policy == nn.Policy(param_dtype="float16", compute_dtype="bfloat16")


def test_an_initializer_with_metadata_shards_its_parameter() -> None:
    """Flax's sharding metadata works with roles, and survives a step of a scaled optimizer."""
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
        optimizer = nn.Optimizer(layer, scaled(optax.sgd(0.1)), wrt=nnx.Param)

        @nnx.jit
        def step(layer, optimizer):
            grads = nn.grad(lambda m: jnp.sum(m(jnp.ones((2, 4))).value))(layer)
            optimizer.update(layer, grads)

        step(layer, optimizer)
        for key, spec in specs.items():
            stored = getattr(layer, key).get_value()
            assert isinstance(stored, ScaledArray)
            assert stored.data.sharding.spec == spec
            assert nnx.get_partition_spec(nnx.state(layer))[key].get_value() == spec


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


delayed, PLAIN = nn.as_policy("fp8_delayed"), nnx.Linear(4, 8, rngs=RNGS)
test_errors = refuses(
    [
        (ValueError, lambda: nn.as_policy("fp16"), "one of float32, .*'fp16'.*mean 'float16'"),
        (TypeError, lambda: nn.as_policy(None), "got None"),
        (ValueError, lambda: nn.Policy(param_dtype="int32"), "floating-point format; got int32"),
        (ValueError, lambda: nn.Policy(compute_dtype="float8_e4m3fn"), "compute_dtype must have"),
        (ValueError, lambda: nn.Policy(param_dtype="E5M7"), "param_dtype must have 16 bits"),
        (ValueError, lambda: nn.Policy(exempt=frozenset({"head"})), "exempt must be among"),
        (ValueError, lambda: nn.as_policy("bfloat16").with_quantized_readout(), "matmul must be"),
        (ValueError, lambda: delayed.with_quantized_readout(gradients_only=True), "got Delayed"),
        (ValueError, lambda: nn.LayerNorm(4, scale_init=nnx.initializers.normal()), "needs rngs="),
        (ValueError, lambda: nn.convert(mlp(), "fp8"), "no layers of plain Flax .*set_policies"),
        (ValueError, lambda: nn.to_static(mlp()), "cannot be stored in FP8"),
        (ValueError, lambda: nn.set_policies(PLAIN, {"*": "fp8"}), "Use nn.convert"),
    ]
)
