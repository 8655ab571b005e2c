"""Converting plain NNX models, and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from recipes.bench.aot import compile_h200
from unitscale.nn import amax_states, as_policy, convert, restore, value_and_grad
from unitscale.quant import PRESETS, Delayed, MatmulConfig, check_fp8

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


def test_presets_are_those_of_policies() -> None:
    for name, config in PRESETS.items():
        assert as_policy(name).matmul == config
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    assert convert(model, {"*": "mxfp8"}).layers[0].config == PRESETS["mxfp8"]


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
    configs = {layer.path: layer.config for layer in report.layers}
    assert configs["blocks.0.up"] is e4m3
    head, columns, *_, last = str(report).splitlines()
    assert head == "12 of 16 layers converted"
    assert columns.split("  ")[0] == "layer"
    assert last.split() == ["stem", "Linear", "32x32", "no", "rule", "matches", "it"]
    assert "e4m3fn x e4m3fn, cotangent e5m2, Dynamic(" in str(report)


def test_layers_left_out(model: Model) -> None:
    everything = convert(model, {"conv": None, "*": "fp8"})
    assert everything.skipped == {
        "conv": "its rule is None",
        "head": "32 to 10 features are not multiples of 16",
    }
    restore(model)
    small = convert(model, "fp8", min_size=33).skipped
    assert small["blocks.0.up"] == "32 to 64 features is below min_size=33"


def test_an_equation_of_a_call_is_one_product_too() -> None:
    layer, x = nnx.Einsum("bti,io->bto", (16, 32), rngs=nnx.Rngs(0)), jnp.ones((4, 6, 16))
    expected = layer(x, "tbi,io->bto")
    convert(layer, "fp8_dynamic")
    np.testing.assert_allclose(layer(x, "tbi,io->bto"), expected, atol=0.2)
    with pytest.raises(ValueError, match=r"'bti,io->bo' is not a matmul .*'t' in one term only"):
        layer(x, "bti,io->bo")


class Own:
    def __call__(self, *args, **kwargs):
        return lax.dot_general(*args, **kwargs)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda r: nnx.Linear(16, 16, dot_general=Own(), rngs=r), "its own dot_general"),
        (
            lambda r: nnx.LinearGeneral(16, 16, dot_general_cls=Own, rngs=r),
            "its own dot_general_cls",
        ),
        (
            lambda r: nnx.Einsum("ab,bc->ac", (16, 16), einsum_op=np.einsum, rngs=r),
            "its own einsum_op",
        ),
        (lambda r: nnx.Einsum("ab,bc->a", (16, 16), rngs=r), "'c' in one term only"),
        (lambda r: nnx.Einsum("aab,bc->ac", (16, 16), rngs=r), "repeats a label"),
        (lambda r: nnx.Einsum("ab,...bc->...ac", (16, 16), rngs=r), "an ellipsis"),
        (lambda r: nnx.ConvTranspose(16, 16, (3,), rngs=r), "no FP8 kernel for convolutions"),
    ],
)
def test_layers_that_cannot_be_converted(layer, reason: str) -> None:
    layer = layer(nnx.Rngs(0))
    before = nnx.graphdef(layer)
    (found,) = convert(layer, "fp8").skipped.values()
    assert reason in found
    assert nnx.graphdef(layer) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rules": {"*.pu": "fp8"}}, ValueError, r"no layer matches '\*.pu'; nearest are"),
        ({"rules": {"*": "fp8", "x": None}}, ValueError, "no layer matches 'x'"),
        ({"rules": "fp8_dynamc"}, ValueError, "Did you mean 'fp8_dynamic'"),
        ({"rules": "fp8_unit"}, ValueError, "is called 'fp8_e5m2' now"),
        ({"rules": 8}, TypeError, "rules must map patterns"),
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


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        (MatmulConfig(strategy=Delayed(history=4)), r"state is one of Delayed\(history=4, .* but"),
        ("fp8_static", r"state is one of Static\(.* but the strategy is Delayed\(history=16"),
        ("fp8_dynamic", "Incorrect number of leaves"),  # as Flax says it
    ],
    ids=str,
)
def test_the_state_of_another_conversion_is_refused(preset, message: str) -> None:
    def parts(preset):
        layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        convert(layer, preset)
        return nnx.split(layer)

    graphdef, own = parts("fp8_delayed")
    x = jnp.ones((2, 16))
    assert nnx.merge(graphdef, own)(x).shape == (2, 16)
    with pytest.raises(ValueError, match=message):
        nnx.merge(graphdef, parts(preset)[1])(x)


@pytest.mark.parametrize("preset", PRESETS)
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


def test_equal_conversions_are_equal() -> None:
    """So that a loaded model does not compile again."""
    graphs = []
    for seed in (0, 1):
        model = Model(nnx.Rngs(seed))
        convert(model, "fp8_dynamic")
        graphs.append(nnx.graphdef(model))
    assert graphs[0] == graphs[1]
    assert hash(graphs[0]) == hash(graphs[1])


def test_a_shared_layer_is_converted_once() -> None:
    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    twice = nnx.Sequential(layer, layer)
    assert convert(twice, "fp8").converted == ("layers.0",)
    assert restore(twice) == ("layers.0",)


@functools.cache
def trained(preset: str | None) -> tuple[float, float]:
    """First and last loss of an easy task, under jit, with the plain optimizer."""
    x = inputs(16, 8, WIDTH)
    target = jnp.roll(x, 1, axis=-1)
    model = Block(nnx.Rngs(0))
    if preset is not None:
        convert(model, preset)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = value_and_grad(lambda m: jnp.mean((m(x) - target) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(30)]
    return losses[0], losses[-1]


# "fp8" rounds cotangents to E4M3 unscaled, which those of a mean are too small for.
@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"fp8"}))
def test_a_converted_model_trains(preset: str) -> None:
    """The loss falls as it does in float32."""
    first, last = trained(preset)
    assert last < 0.5 * first
    assert last < 1.5 * trained(None)[1]


def test_stacked_layers_under_scan() -> None:
    @nnx.vmap(in_axes=0)
    def make(key):
        return nnx.Linear(16, 16, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    x = inputs(4, 16)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def apply(layer, x):
        return layer(x)

    wanted = x
    for i in range(3):
        kernel = rounded(stack.kernel.get_value()[i])
        wanted = rounded(wanted) @ kernel + np.asarray(stack.bias.get_value()[i])
    assert convert(stack, "fp8").converted == ("",)
    # A sum that float32 rounds otherwise can fall to the other side of a tie of the next layer.
    np.testing.assert_allclose(apply(stack, x), wanted, atol=2**-4)


def test_each_layer_keeps_its_own_scales() -> None:
    model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)))
    convert(model, {"layers.0": "fp8_dynamic", "*": MatmulConfig(strategy=Delayed(history=2))})
    ((path, variable),) = amax_states(model)
    assert path == "layers.1.dot_general.state"
    assert variable.get_value().history.shape == (3, 2)
    loss = value_and_grad(lambda model: jnp.sum(model.layers[1](jnp.full((2, 16), 1000.0))))
    nnx.jit(loss)(model)
    kernel = np.abs(np.asarray(model.layers[1].kernel.get_value())).max()
    # The least powers of two that bring these to 448 or below.
    wanted = 2.0 ** np.ceil(np.log2(np.asarray([1000.0, kernel]) / 448))
    np.testing.assert_array_equal(variable.get_value().scale[:2], wanted)


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
    np.testing.assert_array_equal(stack.dot_general.state.get_value().scale[:, 1], wanted)


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
