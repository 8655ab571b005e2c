"""Quantized matmuls in plain NNX models, and FP8 weights for inference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from tests.gradients import jit
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
from unitscale.quant import PRESETS, MatmulConfig, Static

SIZE = 64


class Served(nnx.Module):
    def __init__(self, dtype=None, seed: int = 0) -> None:
        how = {"dtype": dtype, "rngs": nnx.Rngs(seed)}
        self.up = nnx.Linear(SIZE, 2 * SIZE, **how)
        self.mix = nnx.Einsum("...k,kn->...n", (2 * SIZE, SIZE), (SIZE,), **how)
        self.attend = nnx.LinearGeneral(SIZE, (4, 16), use_bias=False, **how)
        self.head = nnx.Linear(SIZE, 8, **how)

    def __call__(self, x):
        x = self.attend(self.mix(jax.nn.relu(self.up(x))))
        return self.head(x.reshape(*x.shape[:-2], SIZE))


ATTENTION = tuple(f"attention.{name}" for name in ("key", "out", "query", "value"))
run = nnx.jit(lambda model, x: model(x))


def inputs(*shape: int, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def rounded(x) -> np.ndarray:
    """Round to E4M3 with ml_dtypes, for numbers that do not saturate."""
    return np.asarray(x, np.float32).astype(jnp.float8_e4m3fn).astype(np.float64)


def test_each_kind_multiplies_rounded_operands() -> None:
    r, x = nnx.Rngs(0), inputs(2, 3, 32)
    by_batch = {"axis": 2, "batch_axis": {0: 2}, "use_bias": False}
    layers = {
        "btk,kn->btn": nnx.Linear(32, 48, rngs=r),
        "btk,khn->bthn": nnx.LinearGeneral(32, (3, 16), rngs=r),
        "btk,bkn->btn": nnx.LinearGeneral(32, 16, **by_batch, rngs=r),
        "btk,kgn->btgn": nnx.Einsum("...k,kgn->...gn", (32, 2, 16), rngs=r),
        "btk, bkn -> btn": nnx.Einsum("btk,bkn->btn", (2, 32, 16), rngs=r),
    }
    for layer in layers.values():
        assert convert(layer, "fp8").converted == ("",)
    found = jit(lambda x: [layer(x) for layer in layers.values()])(x)
    for (subscripts, layer), got in zip(layers.items(), found, strict=True):
        bias = 0 if layer.bias is None else np.asarray(layer.bias.get_value())
        kernel = rounded(layer.kernel.get_value())
        wanted = np.einsum(subscripts, rounded(x), kernel) + bias
        magnitude = np.einsum(subscripts, abs(rounded(x)), abs(kernel))
        # Float32 sums of 32 terms.
        assert np.all(abs(got - wanted) <= 33 * 2.0**-24 * magnitude + 2.0**-22)
        graphdef, params = nnx.split(layer)
        gradient = jax.grad(lambda params, g=graphdef: jnp.sum(nnx.merge(g, params)(x)))
        assert "f8_e5m2" not in str(jax.make_jaxpr(gradient)(params))


def test_rules_choose_layers() -> None:
    r, e4m3 = nnx.Rngs(0), MatmulConfig()
    blocks = [
        nnx.Dict(
            up=nnx.Linear(32, 64, rngs=r),
            down=nnx.Linear(64, 32, use_bias=False, rngs=r),
            attention=nnx.MultiHeadAttention(2, 32, decode=False, rngs=r),
        )
        for _ in range(2)
    ]
    model = nnx.Dict(
        stem=nnx.Linear(32, 32, rngs=r),
        blocks=nnx.List(blocks),
        mix=nnx.Einsum("...tk,kgn->...tgn", (32, 2, 16), rngs=r),
        conv=nnx.Conv(32, 32, (3,), rngs=r),
        head=nnx.Linear(32, 10, rngs=r),
    )
    report = convert(model, {"*.0.up": e4m3, "blocks.*": "fp8_dynamic", "conv": "fp8"})
    paths = [f"blocks.{i}.{name}" for i in (0, 1) for name in (*ATTENTION, "down", "up")]
    assert report.converted == tuple(paths)
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


def test_layers_have_one_order() -> None:
    layer, *others = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(12))
    model = nnx.Dict(z=nnx.List([layer, *others]), a=nnx.Dict(deep=others[0], again=layer))
    for each in (model, nnx.merge(*nnx.split(model))):
        paths = [layer.path for layer in convert(each, "fp8").layers]
        # The layer that is in two places is found in the first.
        assert paths == ["a.again", "a.deep", *(f"z.{i}" for i in range(2, 12))]


def test_an_equation_of_a_call_is_one_matmul_too() -> None:
    layer, x = nnx.Einsum("bti,io->bto", (16, 32), rngs=nnx.Rngs(0)), inputs(4, 6, 16)
    convert(layer, "fp8")
    expected = np.einsum("tbi,io->bto", rounded(x), rounded(layer.kernel.get_value()))
    # Float32 sums of 16 terms; rounding to E4M3 changes the result by about 0.05.
    np.testing.assert_allclose(layer(x, "tbi,io->bto"), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"'bti,io->bo' is not a matmul .*'t' in one term only"):
        layer(x, "bti,io->bo")


def test_there_and_back_is_the_identity() -> None:
    model, x = Served(), inputs(2, 4, SIZE)
    graph, parameters = nnx.graphdef(model), nnx.to_flat_state(nnx.state(model))
    wanted = run(model, x)
    converted = convert(model, "fp8_delayed").converted
    assert converted == ("attend", "mix", "up")
    assert nnx.graphdef(model) != graph
    assert not np.array_equal(run(model, x), wanted)
    # Converted again, the hooks still know what stood there first.
    convert(model, {"up": "fp8"})
    assert restore(model) == converted
    assert nnx.graphdef(model) == graph
    assert [p for p, _ in nnx.to_flat_state(nnx.state(model))] == [p for p, _ in parameters]
    np.testing.assert_array_equal(run(model, x), wanted)
    assert restore(model) == ()
    # A loaded model that is converted alike does not compile again.
    other = Served(seed=1)
    convert(model, "mxfp8")
    convert(other, "mxfp8")
    assert nnx.graphdef(model) == nnx.graphdef(other)
    assert hash(nnx.graphdef(model)) == hash(nnx.graphdef(other))


RULES = {"head": None, "*": "fp8_static"}


def samples(seed: int = 1) -> jax.Array:
    return 3 * inputs(8, SIZE, seed=seed)


@pytest.mark.parametrize("dtype", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_calibrated_model_computes_the_same(dtype) -> None:
    """Scales are those of training, and powers of two, so that results are equal bit for bit."""
    model, x = Served(dtype), samples()
    convert(model, RULES)
    calibrate(model, [samples(seed) for seed in range(3)])
    wanted = run(model, x)
    assert to_static(model) == ("attend", "mix", "up")
    got = run(model, x)
    assert got.dtype == wanted.dtype == (dtype or jnp.float32)
    np.testing.assert_array_equal(got, wanted)
    assert not list(amax_states(model))
    # A quarter of the bytes, and no optimizer sees them.
    stored = {x.dtype.name for x in jax.tree.leaves(nnx.state(model, StaticWeight))}
    assert stored == {"float8_e4m3fn", "float32"}
    kept = {path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert kept == {("up", "bias"), ("mix", "bias"), ("head", "kernel"), ("head", "bias")}
    # Static attributes do not change.
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match="the weight of attend is stored in FP8"):
        restore(model)
    with pytest.raises(ValueError, match="no converted layers"):
        to_static(model)
    assert convert(model, "fp8").skipped["up"] == "its weight is stored in FP8"
    assert nnx.graphdef(model) == before


def test_scales_of_the_inputs_of_a_served_model() -> None:
    """Scales are given in the call, computed by the strategy, or 1 before the first step."""
    model, x = Served(), samples()
    convert(model, {"up": MatmulConfig(strategy=Static((0.5, 2.0**-10, 1.0))), **RULES})
    wanted = run(model, x)
    to_static(model, {"mix": 2.0**-3})
    hooks = model.up.dot_general, model.mix.einsum_op, model.attend.dot_general
    assert [float(hook.input_scale.get_value()) for hook in hooks] == [0.5, 0.125, 1.0]
    # Three matmuls in a row, both operands of each with a relative error of 2**-4 at most.
    error = float(jnp.sqrt(jnp.mean((run(model, x) - wanted) ** 2) / jnp.mean(wanted**2)))
    assert error < 3 * 2 * 2**-4


@pytest.mark.slow
def test_stacked_layers_have_a_scale_each() -> None:
    stack = nnx.vmap(lambda key: nnx.Linear(16, 16, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    sizes = jnp.asarray([1.0, 64.0, 2.0**-6])
    stack.kernel.set_value(stack.kernel.get_value() * sizes[:, None, None])
    kernels, x = np.asarray(stack.kernel.get_value()), inputs(4, 16)
    scanned = nnx.scan(lambda layer, x: layer(x), in_axes=(0, None), out_axes=0)
    apply = nnx.jit(scanned)
    assert convert(stack, "fp8").converted == ("",)
    expected = np.stack([rounded(x) @ kernel for kernel in rounded(kernels)])
    np.testing.assert_allclose(apply(stack, x), expected, rtol=1e-5, atol=1e-5)

    convert(stack, "fp8_delayed")
    nnx.jit(value_and_grad(lambda stack: jnp.sum(scanned(stack, x))))(stack)
    wanted = 2.0 ** np.ceil(np.log2(np.max(np.abs(kernels), axis=(1, 2)) / 448))
    ((path, variable),) = amax_states(stack)
    assert path == "dot_general.state"
    np.testing.assert_array_equal(variable.get_value().scale[:, 1], wanted)

    convert(stack, "fp8_dynamic")
    wanted = apply(stack, x)
    to_static(stack)
    assert stack.dot_general.weight_scale.get_value().shape == (3,)
    np.testing.assert_array_equal(apply(stack, x), wanted)
    # Along another axis than the first there is no place for a scale of each.
    axes = nnx.StateAxes({nnx.Param: 1, ...: 0})
    make = nnx.vmap(lambda key: nnx.Linear(16, 32, rngs=nnx.Rngs(key)), out_axes=axes)
    model = make(jax.random.split(jax.random.key(0), 3))
    assert convert(model, "fp8_dynamic").converted == ("",)
    restore(model)
    reason = "nnx.vmap has stacked it along an axis that is not the first"
    assert convert(model, "fp8_delayed").skipped == {"": reason}


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


@pytest.mark.parametrize(
    ("rules", "scales", "message"),
    [
        ({"*.pu": "fp8"}, None, r"no layer matches '\*.pu'; nearest are"),
        ("fp8_dynamc", None, "Did you mean 'fp8_dynamic'"),
        (["*"], None, "rules must map patterns"),
        ({"*": 3}, None, "a rule must give a MatmulConfig.*got 3"),
        (None, {}, "no converted layers; call convert first"),
        ({"mix": "mxfp8", "up": "fp8"}, {}, "mix has Block.*another strategy"),
        (RULES, {"ups": 1.0}, "no layer matches 'ups'; nearest are up"),
        (RULES, {"up": 0.0}, "a scale must be positive and finite; got 0.0 for 'up'"),
    ],
)
def test_mistakes_change_nothing(rules, scales, message: str) -> None:
    """Wrong rules, or rules for a model that is converted already."""
    model = Served()
    if scales is not None and rules is not None:
        convert(model, rules)
    before = nnx.graphdef(model)
    with pytest.raises((TypeError, ValueError), match=message):
        convert(model, rules) if scales is None else to_static(model, scales)
    assert nnx.graphdef(model) == before


def test_a_kernel_that_is_set_in_each_call_is_not_stored() -> None:
    linears = [nnx.Linear(16, 16, rngs=nnx.Rngs(0)) for _ in range(2)]
    model = nnx.List([nnx.WeightNorm(linears[0], rngs=nnx.Rngs(1)), linears[1]])
    convert(model, "fp8_dynamic")
    with pytest.raises(ValueError, match=r"kernel of 0\.layer_instance is set by nnx.WeightNorm"):
        to_static(model)
    restore(model)
    convert(model, {"0.*": None, "*": "fp8_dynamic"})
    assert to_static(model) == ("1",)
