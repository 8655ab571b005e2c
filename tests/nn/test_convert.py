"""Quantized matmuls in plain NNX models, and FP8 weights to serve them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from recipes.bench.aot import compile_h200
from unitscale.nn import (
    StaticWeight,
    amax_states,
    as_policy,
    calibrate,
    convert,
    restore,
    to_static,
    value_and_grad,
)
from unitscale.quant import PRESETS, MatmulConfig, Static, check_fp8

WIDTH = 32


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x))) + self.attention(x)


class Model(nnx.Module):
    """The order of its names is not the order of its layers."""

    def __init__(self, rngs: nnx.Rngs, blocks: int = 2) -> None:
        self.stem = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.mix = nnx.Einsum("...tk,kgn->...tgn", (WIDTH, 2, 16), rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.mix(x)
        return self.head(self.conv(x.reshape(*x.shape[:-2], WIDTH)))


ATTENTION = tuple(f"attention.{name}" for name in ("key", "out", "query", "value"))


BLOCKS = tuple(f"blocks.{i}.{name}" for i in (0, 1) for name in (*ATTENTION, "down", "up"))


@pytest.fixture
def model() -> Model:
    return Model(nnx.Rngs(0))


def inputs(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def rounded(x) -> np.ndarray:
    """Nearest E4M3 number, by ml_dtypes; nothing here is large enough to saturate."""
    return np.asarray(x, np.float32).astype(jnp.float8_e4m3fn).astype(np.float64)


LAYERS = {
    "Linear": (lambda r: nnx.Linear(32, 48, rngs=r), "btk,kn->btn"),
    "LinearGeneral": (lambda r: nnx.LinearGeneral(32, (3, 16), rngs=r), "btk,khn->bthn"),
    "LinearGeneral, batched": (
        lambda r: nnx.LinearGeneral(32, 16, axis=2, batch_axis={0: 2}, use_bias=False, rngs=r),
        "btk,bkn->btn",
    ),
    "Einsum": (lambda r: nnx.Einsum("...k,kgn->...gn", (32, 2, 16), rngs=r), "btk,kgn->btgn"),
    "Einsum, batched": (lambda r: nnx.Einsum("btk,bkn->btn", (2, 32, 16), rngs=r), "btk,bkn->btn"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_kind_multiplies_rounded_operands(name: str) -> None:
    make, subscripts = LAYERS[name]
    layer, x = make(nnx.Rngs(0)), inputs(2, 3, 32)
    bias = 0 if layer.bias is None else np.asarray(layer.bias.get_value())
    assert convert(layer, "fp8").converted == ("",)
    kernel = rounded(layer.kernel.get_value())
    wanted = np.einsum(subscripts, rounded(x), kernel) + bias
    magnitude = np.einsum(subscripts, abs(rounded(x)), abs(kernel))
    got = np.asarray(jax.jit(lambda x: layer(x))(x))
    # Float32 sums of 32 terms.
    assert np.all(abs(got - wanted) <= 33 * 2.0**-24 * magnitude + 2.0**-22)
    graphdef, params = nnx.split(layer)
    gradient = jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(x)))
    assert "f8_e5m2" not in str(jax.make_jaxpr(gradient)(params))


def test_rules_choose_layers(model: Model) -> None:
    e4m3 = MatmulConfig()
    report = convert(model, {"*.0.up": e4m3, "blocks.*": "fp8_dynamic", "conv": "fp8"})
    assert report.converted == BLOCKS
    assert report.skipped == {
        "conv": "XLA has no FP8 kernel for convolutions",
        "head": "no rule matches it",
        "mix": "no rule matches it",
        "stem": "no rule matches it",
    }
    for name, config in PRESETS.items():
        assert as_policy(name).matmul == config
    configs = {layer.path: layer.config for layer in report.layers}
    assert configs["blocks.0.up"] is e4m3
    head, columns, *_, last = str(report).splitlines()
    assert head == "12 of 16 layers converted"
    assert columns.split("  ")[0] == "layer"
    assert last.split() == ["stem", "Linear", "32x32", "no", "rule", "matches", "it"]
    assert "e4m3fn x e4m3fn, cotangent e5m2, Dynamic(" in str(report)
    restore(model)
    assert convert(model, {"conv": None, "*": "fp8"}).skipped == {
        "conv": "its rule is None",
        "head": "32 to 10 features are not multiples of 16",
    }
    small = convert(model, "fp8", min_size=33).skipped
    assert small["blocks.0.up"] == "32 to 64 features is below min_size=33"
    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    twice = nnx.Sequential(layer, layer)
    assert convert(twice, "fp8").converted == restore(twice) == ("layers.0",)


def test_an_equation_of_a_call_is_one_product_too() -> None:
    layer, x = nnx.Einsum("bti,io->bto", (16, 32), rngs=nnx.Rngs(0)), jnp.ones((4, 6, 16))
    expected = layer(x, "tbi,io->bto")
    convert(layer, "fp8_dynamic")
    np.testing.assert_allclose(layer(x, "tbi,io->bto"), expected, atol=0.2)
    with pytest.raises(ValueError, match=r"'bti,io->bo' is not a matmul .*'t' in one term only"):
        layer(x, "bti,io->bo")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rules": {"*.pu": "fp8"}}, ValueError, r"no layer matches '\*.pu'; nearest are"),
        ({"rules": {"*": "fp8", "x": None}}, ValueError, "no layer matches 'x'"),
        ({"rules": "fp8_dynamc"}, ValueError, "Did you mean 'fp8_dynamic'"),
        ({"rules": "fp8_unit"}, ValueError, "is called 'fp8_e5m2' now"),
        ({"rules": ["*"]}, TypeError, "rules must map patterns"),
        ({"rules": {1: "fp8"}}, TypeError, "rules must map patterns"),
        ({"rules": {"*": 3}}, TypeError, "a rule must give a MatmulConfig.*got 3"),
    ],
)
def test_mistakes_change_nothing(model: Model, arguments, error, message: str) -> None:
    before = nnx.graphdef(model)
    with pytest.raises(error, match=message):
        convert(model, **arguments)
    assert nnx.graphdef(model) == before


@pytest.mark.parametrize("preset", ["fp8_delayed", "mxfp8"])
def test_there_and_back_is_the_identity(preset: str) -> None:
    model = Model(nnx.Rngs(0), blocks=1)
    x = inputs(2, 4, WIDTH)
    run = nnx.jit(lambda model, x: model(x))
    graph, parameters = nnx.graphdef(model), nnx.to_flat_state(nnx.state(model))
    wanted = run(model, x)
    converted = convert(model, preset).converted
    assert len(converted) == 8
    assert nnx.graphdef(model) != graph
    assert not np.array_equal(run(model, x), wanted)
    # Converted again, the hooks still know what stood there first.
    convert(model, {"*.up": "fp8"})
    assert restore(model) == converted
    assert nnx.graphdef(model) == graph
    assert [p for p, _ in nnx.to_flat_state(nnx.state(model))] == [p for p, _ in parameters]
    np.testing.assert_array_equal(run(model, x), wanted)
    assert restore(model) == ()
    # A loaded model that is converted alike does not compile again.
    other = Model(nnx.Rngs(1), blocks=1)
    convert(model, preset)
    convert(other, preset)
    assert nnx.graphdef(model) == nnx.graphdef(other)
    assert hash(nnx.graphdef(model)) == hash(nnx.graphdef(other))


def test_stacked_layers_keep_a_scale_each() -> None:
    @nnx.vmap(in_axes=0)
    def make(key):
        return nnx.Linear(16, 16, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    kernel = stack.kernel.get_value()
    stack.kernel.set_value(kernel * jnp.asarray([1.0, 2.0, 1024.0])[:, None, None])
    convert(stack, "fp8_delayed")

    def loss(stack):
        @nnx.scan(in_axes=(0, None), out_axes=0)
        def apply(layer, x):
            return layer(x)

        return jnp.sum(apply(stack, inputs(4, 16)))

    nnx.jit(value_and_grad(loss))(stack)
    amax = np.max(np.abs(np.asarray(stack.kernel.get_value())), axis=(1, 2))
    wanted = 2.0 ** np.ceil(np.log2(amax / 448))
    ((path, variable),) = amax_states(stack)
    assert path == "dot_general.state"
    np.testing.assert_array_equal(variable.get_value().scale[:, 1], wanted)


@pytest.mark.h200
@pytest.mark.parametrize("preset", ["fp8", "fp8_dynamic"])
def test_converted_layers_are_fp8_kernels(preset: str) -> None:
    def make():
        rngs, bf16 = nnx.Rngs(0), jnp.bfloat16
        up = nnx.Linear(256, 512, use_bias=False, dtype=bf16, rngs=rngs)
        mix = nnx.Einsum("btk,kn->btn", (512, 256), dtype=bf16, rngs=rngs)
        model = nnx.Sequential(up, jax.nn.gelu, mix)
        convert(model, preset)
        return model

    graphdef, params = nnx.split(nnx.eval_shape(make))

    def gradient(params, x):
        def loss(params, x):
            return jnp.sum(nnx.merge(graphdef, params)(x).astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(params, x)

    x = jax.ShapeDtypeStruct((4, 128, 256), jnp.bfloat16)
    report = check_fp8(compile_h200(gradient, params, x))
    assert report, report
    assert (len(report.fp8), len(report.wide)) == (6, 0)
    # Activations, weight and cotangent of two layers; unit scaling needs none.
    assert report.amax_reductions == (6 if preset == "fp8_dynamic" else 0)


RNGS = nnx.Rngs(0)


class Nested(nnx.Module):
    def __init__(self) -> None:
        layer = nnx.Linear(4, 4, rngs=RNGS)
        self.z = nnx.List([layer, *(nnx.Linear(4, 4, rngs=RNGS) for _ in range(11))])
        self.a = nnx.Dict(deep=nnx.Dict(conv=nnx.Conv(4, 4, (1,), rngs=RNGS)), again=layer)
        self.norm = nnx.LayerNorm(4, rngs=RNGS)


@pytest.mark.parametrize("merged", [False, True])
def test_layers_have_one_order(merged: bool) -> None:
    model = Nested()
    model = nnx.merge(*nnx.split(model)) if merged else model
    paths = [layer.path for layer in convert(model, "fp8").layers]
    # The layer that is in two places is found in the first.
    assert paths == ["a.again", "a.deep.conv", *(f"z.{i}" for i in range(1, 12))]


def test_layers_may_be_stacked_along_another_axis_than_the_first() -> None:
    """There is no place for a scale of each then."""
    axes = nnx.StateAxes({nnx.Param: 1, ...: 0})
    make = nnx.vmap(lambda key: nnx.Linear(16, 32, rngs=nnx.Rngs(key)), out_axes=axes)
    model = make(jax.random.split(jax.random.key(0), 3))
    assert convert(model, "fp8_dynamic").converted == ("",)
    restore(model)
    assert convert(model, "fp8_delayed").skipped == {
        "": "nnx.vmap has stacked it along an axis that is not the first"
    }


SIZE = 64


CONVERTED = ("attend", "mix", "up")


class Served(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype=None) -> None:
        self.up = nnx.Linear(SIZE, 2 * SIZE, dtype=dtype, rngs=rngs)
        self.mix = nnx.Einsum("...k,kn->...n", (2 * SIZE, SIZE), (SIZE,), dtype=dtype, rngs=rngs)
        self.attend = nnx.LinearGeneral(SIZE, (4, 16), use_bias=False, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(SIZE, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = self.attend(self.mix(jax.nn.relu(self.up(x))))
        return self.head(x.reshape(*x.shape[:-2], SIZE))


RULES = {"head": None, "*": "fp8_static"}


def samples(seed: int = 1) -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(seed), (8, SIZE))


def calibrated(dtype=None) -> Served:
    model = Served(nnx.Rngs(0), dtype)
    convert(model, RULES)
    calibrate(model, [samples(seed) for seed in range(3)])
    return model


def served() -> Served:
    model = Served(nnx.Rngs(0))
    convert(model, RULES)
    to_static(model)
    return model


run = nnx.jit(lambda model, x: model(x))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_calibrated_model_computes_the_same(dtype) -> None:
    """The scales are those of training, and powers of two, so that not one bit differs."""
    model, x = calibrated(dtype), samples()
    wanted = run(model, x)
    assert to_static(model) == CONVERTED
    got = run(model, x)
    assert got.dtype == wanted.dtype == (dtype or jnp.float32)
    np.testing.assert_array_equal(got, wanted)
    assert not list(amax_states(model))
    # A quarter of the bytes, and no optimizer sees them.
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, StaticWeight))} == {
        "float8_e4m3fn",
        "float32",
    }
    kept = {path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert kept == {("up", "bias"), ("mix", "bias"), ("head", "kernel"), ("head", "bias")}


def test_scales_of_the_inputs_of_a_served_model() -> None:
    """Given in the call, by the strategy, or 1 for delayed scales without a step."""
    model, x = Served(nnx.Rngs(0)), samples()
    convert(model, {"up": MatmulConfig(strategy=Static((0.5, 2.0**-10, 1.0))), **RULES})
    wanted = run(model, x)
    to_static(model, {"mix": 2.0**-3})
    hooks = model.up.dot_general, model.mix.einsum_op, model.attend.dot_general
    assert [float(hook.input_scale.get_value()) for hook in hooks] == [0.5, 0.125, 1.0]
    # Three matmuls in a row, both operands of each with a relative error of 2**-4 at most.
    error = float(jnp.sqrt(jnp.mean((run(model, x) - wanted) ** 2) / jnp.mean(wanted**2)))
    assert error < 3 * 2 * 2**-4


def test_a_kernel_that_is_set_in_each_call_is_not_stored() -> None:
    linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    model = nnx.List(
        [nnx.WeightNorm(linear, rngs=nnx.Rngs(1)), nnx.Linear(16, 16, rngs=nnx.Rngs(0))]
    )
    convert(model, "fp8_dynamic")
    with pytest.raises(ValueError, match=r"kernel of 0\.layer_instance is set by nnx.WeightNorm"):
        to_static(model)
    restore(model)
    convert(model, {"0.*": None, "*": "fp8_dynamic"})
    assert to_static(model) == ("1",)


def test_what_is_static_stays_so() -> None:
    model = served()
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match="the weight of attend is stored in FP8"):
        restore(model)
    with pytest.raises(ValueError, match="no converted layers"):
        to_static(model)
    assert convert(model, "fp8").skipped["up"] == "its weight is stored in FP8"
    assert nnx.graphdef(model) == before


@pytest.mark.h200
def test_a_served_model_runs_fp8_kernels() -> None:
    def make():
        model = Served(nnx.Rngs(0), jnp.bfloat16)
        convert(model, RULES)
        to_static(model)
        return model

    graphdef, state = nnx.split(nnx.eval_shape(make))
    x = jax.ShapeDtypeStruct((256, SIZE), jnp.bfloat16)
    report = check_fp8(compile_h200(lambda state, x: nnx.merge(graphdef, state)(x), state, x))
    assert report, report
    assert [len(report.fp8), len(report.wide)] == [3, 1]
    # Inputs are cast, weights are not.
    assert (report.casts, report.amax_reductions) == (3, 0)


def own(*args, **kwargs):
    return lax.dot_general(*args, **kwargs)


def test_layers_that_cannot_be_converted() -> None:
    r = nnx.Rngs(0)
    for layer, reason in (
        (nnx.Linear(16, 16, dot_general=own, rngs=r), "its own dot_general"),
        (nnx.LinearGeneral(16, 16, dot_general_cls=lambda: own, rngs=r), "its own dot_general_cls"),
        (nnx.Einsum("ab,bc->ac", (16, 16), einsum_op=np.einsum, rngs=r), "its own einsum_op"),
        (nnx.Einsum("ab,bc->a", (16, 16), rngs=r), "'c' in one term only"),
        (nnx.Einsum("aab,bc->ac", (16, 16), rngs=r), "repeats a label"),
        (nnx.ConvTranspose(16, 16, (3,), rngs=r), "no FP8 kernel for convolutions"),
    ):
        before = nnx.graphdef(layer)
        (found,) = convert(layer, "fp8").skipped.values()
        assert reason in found
        assert nnx.graphdef(layer) == before


def test_stacked_layers_are_served_with_a_scale_each() -> None:
    @nnx.vmap(in_axes=0)
    def make(key):
        return nnx.Linear(16, 16, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    sizes = jnp.asarray([1.0, 64.0, 2.0**-6])
    stack.kernel.set_value(stack.kernel.get_value() * sizes[:, None, None])
    x = inputs(4, 16)

    @nnx.jit
    @nnx.scan(in_axes=(0, None), out_axes=0)
    def apply(layer, x):
        return layer(x)

    def multiplied(kernels):
        return np.stack([rounded(x) @ kernel for kernel in kernels])

    assert convert(stack, "fp8").converted == ("",)
    expected = multiplied(rounded(stack.kernel.get_value()))
    np.testing.assert_allclose(apply(stack, x), expected, rtol=1e-5, atol=1e-5)
    convert(stack, "fp8_dynamic")
    wanted = apply(stack, x)
    to_static(stack)
    assert stack.dot_general.weight_scale.get_value().shape == (3,)
    np.testing.assert_array_equal(apply(stack, x), wanted)


@pytest.mark.parametrize(
    ("rules", "scales", "message"),
    [
        (None, {}, "no converted layers; call convert first"),
        ({"mix": "mxfp8", "up": "fp8"}, {}, "mix has Block.*another strategy"),
        (RULES, {"ups": 1.0}, "no layer matches 'ups'; nearest are up"),
        (RULES, {"head": 1.0}, "no layer matches 'head'"),
        (RULES, {"up": 0.0}, "a scale must be positive and finite; got 0.0 for 'up'"),
        (RULES, {"up": float("inf")}, "must be positive and finite; got inf"),
    ],
)
def test_mistakes_in_serving_change_nothing(rules, scales, message: str) -> None:
    model = Served(nnx.Rngs(0))
    if rules is not None:
        convert(model, rules)
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=message):
        to_static(model, scales)
    assert nnx.graphdef(model) == before
