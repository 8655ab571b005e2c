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
from unitscale import nn, parallel
from unitscale.core import ScaledArray, as_scaled, is_scaled
from unitscale.nn._params import ones, read, set_depth, unpadded, vector, weight

# Per layer: parameter -> (role, fan_in, fan_out, depth).
METADATA = {
    "dense": {"kernel": ("weight", 8, 6, 1), "bias": ("bias", 1, 6, 1)},
    "readout": {"kernel": ("readout", 8, 6, 1), "bias": ("bias", 1, 6, 1)},
    "conv": {"kernel": ("weight", 12, 18, 1), "bias": ("bias", 1, 6, 1)},
    "layer_norm": {"gain": ("norm", 1, 8, 1), "bias": ("norm", 1, 8, 1)},
    "rms_norm": {"gain": ("norm", 1, 8, 1)},
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


@pytest.mark.parametrize("name", METADATA)
def test_metadata(name) -> None:
    found = {path: metadata(p) for path, p in parameters(make(name)[0]).items()}
    assert found == METADATA[name]


def test_groups_divide_the_fans_of_a_convolution() -> None:
    layer = nn.Conv(4, 8, (3, 2), feature_group_count=2, rngs=nnx.Rngs(0))
    assert metadata(layer.kernel) == ("weight", 12, 24, 1)
    assert layer.kernel.shape == (3, 2, 2, 8)


def test_a_table_of_embeddings_has_its_role() -> None:
    assert metadata(nn.Embed(10, 4, rngs=nnx.Rngs(0)).embedding) == ("embedding", 10, 4, 1)


def test_depth_is_on_every_parameter_of_a_stack_and_on_none_outside() -> None:
    for placement in ("pre", "post"):
        stack = nn.TransformerStack(3, 8, 2, norm_placement=placement, rngs=nnx.Rngs(0))
        roles = {(p.role, p.depth) for p in parameters(stack).values()}
        assert roles == {("weight", 6), ("bias", 6), ("norm", 6)}
    for name in set(LAYERS) - {"residual", "layer", "stack"}:
        assert {p.depth for p in parameters(make(name)[0]).values()} == {1}


def test_metadata_outlives_split_merge_and_update() -> None:
    model, _ = make("residual")
    graphdef, state = nnx.split(model)
    again = nnx.merge(graphdef, state)
    nnx.update(again, nnx.state(model))
    assert {p: metadata(v) for p, v in parameters(again).items()} == METADATA["residual"]


def test_weights_are_standard_normal_in_the_dtype_of_the_policy() -> None:
    policy = nn.Policy(param_dtype="bfloat16")
    p = weight(nnx.Rngs(0), (200, 300), policy, fan_in=200, fan_out=300)
    values = np.asarray(p.get_value(), np.float64)
    assert p.dtype == jnp.bfloat16
    # Five standard errors of the mean, the variance and the fourth moment of 60,000 normals.
    n = values.size
    assert abs(values.mean()) < 5 / n**0.5
    assert abs((values**2).mean() - 1) < 5 * (2 / n) ** 0.5 + 2**-8
    assert abs((values**4).mean() - 3) < 5 * (96 / n) ** 0.5 + 3 * 2**-7
    other = weight(nnx.Rngs(1), (200, 300), policy, fan_in=200, fan_out=300)
    assert not np.array_equal(values, np.asarray(other.get_value(), np.float64))


def test_constants_hold_their_value() -> None:
    p = vector(
        nnx.initializers.constant(0.5),
        nnx.Rngs(0),
        (3,),
        nn.Policy(param_dtype="float16"),
        role="norm",
    )
    np.testing.assert_array_equal(p.get_value(), np.full(3, 0.5, np.float16))


# Layers with each of their initializers' arguments, and the parameters that these fill.
FILLED = {
    "dense": (nn.Dense, (4, 6), {"kernel": "kernel", "bias": "bias"}),
    "readout": (
        lambda *a, **k: nn.Readout(*a, use_bias=True, pad_to_multiple_of=4, **k),
        (4, 6),
        {"kernel": "kernel", "bias": "bias"},
    ),
    "conv": (nn.Conv, (4, 6, (3,)), {"kernel": "kernel", "bias": "bias"}),
    "embed": (nn.Embed, (4, 6), {"embedding": "embedding"}),
    "positions": (nn.PositionalEmbed, (4, 6), {"embedding": "embedding"}),
    "layer norm": (nn.LayerNorm, (4,), {"bias": "bias", "scale": "gain"}),
    "rms norm": (nn.RMSNorm, (4,), {"scale": "gain"}),
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
            np.testing.assert_array_equal(unpadded(found[path]), numbers[k])
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


def test_an_initializer_that_draws_needs_keys() -> None:
    layer = nn.LayerNorm(4, scale_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0))
    assert len(np.unique(layer.gain.get_value())) == 4
    with pytest.raises(ValueError, match="other than zeros and ones needs rngs="):
        nn.LayerNorm(4, scale_init=nnx.initializers.normal(1.0))


def test_unknown_roles_are_internal_errors() -> None:
    with pytest.raises(AssertionError, match="unknown role gain"):
        vector(ones, None, (3,), nn.Policy(), role="gain")
    with pytest.raises(AssertionError, match="unknown role kernel"):
        weight(nnx.Rngs(0), (3, 3), nn.Policy(), role="kernel", fan_in=3, fan_out=3)


def test_set_depth_reaches_nested_modules() -> None:
    model = nnx.List([nn.MLP(4, 8, rngs=nnx.Rngs(0)), nn.RMSNorm(4)])
    set_depth(model, 12)
    assert {p.depth for p in parameters(model).values()} == {12}


def test_read() -> None:
    assert read(None) is None
    scaled = ScaledArray(jnp.ones(3), 2.0)
    assert float(read(nnx.Param(scaled)).scale) == 2.0


def test_stacked_parameters_map_with_their_scales() -> None:
    """nnx.scan and nnx.vmap over layers made by nnx.vmap, whose parameters are ScaledArrays."""
    plain = nnx.vmap(lambda rngs: nn.Dense(6, 6, rngs=rngs))(nnx.Rngs(0).split(3))
    layers, moved = nnx.clone(plain), nnx.clone(plain)
    sizes = jnp.float32([1, 16, 2.0**-6])
    for model in (plain, layers):
        model.kernel[...] = model.kernel[...] * sizes[:, None, None]
    nnx.update(layers, as_scaled(nnx.state(layers, nnx.Param), stack_axes=1))
    # One scale for all, as an optimizer may have made it, is repeated for each item.
    nnx.update(moved, as_scaled(as_scaled(nnx.state(plain, nnx.Param)), stack_axes=1))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6)), jnp.float32)

    @nnx.jit
    def run(layers):
        scan = nnx.scan(lambda h, layer: layer(h).value, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        each = nnx.vmap(lambda x, layer: layer(x), in_axes=(None, 0))(x, layers)
        return scan(x, layers), each.value

    def loss(layers):
        return sum(jnp.sum(y) for y in run(layers))

    assert layers.kernel.get_value().scale.shape == (3, 1, 1)
    assert layers.bias.get_value().scale.shape == (3, 1)
    expected = run(plain)
    gradient = nnx.grad(loss)(plain)
    for model in (layers, moved):
        for got, want in zip(run(model), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
        found = nnx.grad(loss)(model)
        for name in ("kernel", "bias"):
            # In data space.
            want = gradient[name].get_value() * getattr(model, name).get_value().scale
            np.testing.assert_allclose(found[name].get_value().data, want, rtol=1e-5)


@pytest.mark.parametrize("symbol", ["add", "sub", "mul", "truediv", "gt", "matmul"])
def test_a_parameter_meets_a_scaled_array_as_its_array_does(symbol: str) -> None:
    operation = getattr(operator, symbol)
    x = as_scaled(jnp.arange(1.0, 10).reshape(3, 3), dtype=jnp.float16)
    w = nnx.Param(jnp.full((3, 3), 2.0))
    for found, expected in (
        (operation(x, w), operation(x, w[...])),
        (operation(w, x), operation(w[...], x)),
    ):
        assert is_scaled(found) == is_scaled(expected) == (symbol != "gt")
        assert jnp.array_equal(jnp.asarray(found), jnp.asarray(expected))


def test_a_parameter_that_holds_a_scaled_array_meets_another() -> None:
    x = as_scaled(jnp.ones(3), dtype=jnp.float16)
    found = nnx.Param(x) * x
    assert is_scaled(found)
    assert is_scaled(x * nnx.Param(x))
