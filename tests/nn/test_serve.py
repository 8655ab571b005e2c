"""Weights stored in FP8: the same products, a quarter of the bytes, and back from a checkpoint."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from recipes.bench.aot import compile_h200
from unitscale.nn import StaticWeight, amax_states, calibrate, convert, restore, to_static
from unitscale.quant import MatmulConfig, Static, check_fp8

WIDTH = 64
LAYERS = ("attend", "mix", "up")


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype=None) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, dtype=dtype, rngs=rngs)
        self.mix = nnx.Einsum("...k,kn->...n", (2 * WIDTH, WIDTH), (WIDTH,), dtype=dtype, rngs=rngs)
        self.attend = nnx.LinearGeneral(WIDTH, (4, 16), use_bias=False, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = self.attend(self.mix(jax.nn.relu(self.up(x))))
        return self.head(x.reshape(*x.shape[:-2], WIDTH))


RULES = {"head": None, "*": "fp8_static"}


def inputs(seed: int = 1) -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(seed), (8, WIDTH))


def calibrated(dtype=None) -> Model:
    model = Model(nnx.Rngs(0), dtype)
    convert(model, RULES)
    calibrate(model, [inputs(seed) for seed in range(3)])
    return model


def served() -> Model:
    model = Model(nnx.Rngs(0))
    convert(model, RULES)
    to_static(model)
    return model


run = nnx.jit(lambda model, x: model(x))


def nbytes(model: nnx.Module, *filters) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, *filters)))


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_a_calibrated_model_computes_the_same(dtype) -> None:
    """The scales are those of training, and powers of two, so that not one bit differs."""
    model, x = calibrated(dtype), inputs()
    wanted = run(model, x)
    assert to_static(model) == LAYERS
    got = run(model, x)
    assert got.dtype == wanted.dtype == (dtype or jnp.float32)
    np.testing.assert_array_equal(got, wanted)
    assert not list(amax_states(model))


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ("fp8_dynamic", True),
        (MatmulConfig(strategy=Static((2.0**-4, 2.0**-10, 1.0))), True),
        ("fp8", False),
        ("fp8_delayed", False),
    ],
)
def test_other_strategies(config, same: bool) -> None:
    """Unit and delayed scales of weights round more of the small ones than the best scale does."""
    model, x = Model(nnx.Rngs(0)), inputs()
    exact = run(model, x)
    convert(model, {"head": None, "*": config})
    wanted = run(model, x)
    to_static(model)
    got = run(model, x)
    if same:
        np.testing.assert_array_equal(got, wanted)
    # Three products in a row, both operands of each with a relative error of 2**-4 at most.
    error = float(jnp.sqrt(jnp.mean((got - exact) ** 2) / jnp.mean(exact**2)))
    assert error < 3 * 2 * 2**-4
    assert error <= 1.1 * float(jnp.sqrt(jnp.mean((wanted - exact) ** 2) / jnp.mean(exact**2)))


def test_weights_take_a_quarter_of_the_bytes() -> None:
    model = calibrated()
    before = nbytes(model, nnx.Param)
    biases = nbytes(model, lambda path, _: "bias" in path or "head" in path)
    to_static(model)
    after = nbytes(model)
    # What was float32 weights, and two scales for each of the three layers.
    assert after == (before - biases) / 4 + biases + 3 * 2 * 4
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model, StaticWeight))} == {
        "float8_e4m3fn",
        "float32",
    }
    # No optimizer sees them.
    kept = {path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert kept == {("up", "bias"), ("mix", "bias"), ("head", "kernel"), ("head", "bias")}


def test_given_scales_are_those_of_the_inputs() -> None:
    model = Model(nnx.Rngs(0))
    convert(model, RULES)
    to_static(model, {"u*": 4.0, "mix": 2.0**-3})
    found = {name: getattr(model, name) for name in LAYERS}
    scales = {
        name: float(
            (getattr(layer, "einsum_op", None) or layer.dot_general).input_scale.get_value()
        )
        for name, layer in found.items()
    }
    assert scales == {"up": 4.0, "mix": 0.125, "attend": 1.0}


def test_stacked_layers_have_a_scale_each() -> None:
    @nnx.vmap(in_axes=0)
    def make(key):
        return nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    kernel = stack.kernel.get_value() * jnp.asarray([1.0, 64.0, 2.0**-6])[:, None, None]
    stack.kernel.set_value(kernel)
    convert(stack, "fp8_dynamic")

    @nnx.jit
    @nnx.scan(in_axes=(0, None), out_axes=0)
    def apply(layer, x):
        return layer(x)

    x = inputs()[:, :16]
    wanted = apply(stack, x)
    to_static(stack)
    assert stack.dot_general.weight_scale.get_value().shape == (3,)
    np.testing.assert_array_equal(apply(stack, x), wanted)


def test_a_checkpoint_brings_it_back(tmp_path: Path) -> None:
    model, x = calibrated(), inputs()
    to_static(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "served", nnx.to_pure_dict(nnx.state(model)))
        checkpointer.wait_until_finished()
        other = nnx.eval_shape(served)
        read = checkpointer.restore(
            tmp_path / "served", jax.tree.map(_here, nnx.to_pure_dict(nnx.state(other)))
        )
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, read)
    nnx.update(other, state)
    assert other.up.kernel.get_value().dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(run(other, x), run(model, x))


def _here(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


@pytest.mark.parametrize(
    ("rules", "scales", "message"),
    [
        (None, {}, "no converted layers; call convert first"),
        ({"mix": "mxfp8", "up": "fp8"}, {}, "mix has Block.*another strategy"),
        (RULES, {"ups": 1.0}, "to_static: no layer matches 'ups'; nearest are up"),
        (RULES, {"head": 1.0}, "to_static: no layer matches 'head'"),
        (RULES, {"up": 0.0}, "a scale must be positive and finite; got 0.0 for 'up'"),
        (RULES, {"up": float("inf")}, "must be positive and finite; got inf"),
    ],
)
def test_mistakes_change_nothing(rules, scales, message: str) -> None:
    model = Model(nnx.Rngs(0))
    if rules is not None:
        convert(model, rules)
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=message):
        to_static(model, scales)
    assert nnx.graphdef(model) == before


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
        model = Model(nnx.Rngs(0), jnp.bfloat16)
        convert(model, RULES)
        to_static(model)
        return model

    graphdef, state = nnx.split(nnx.eval_shape(make))
    x = jax.ShapeDtypeStruct((256, WIDTH), jnp.bfloat16)
    report = check_fp8(compile_h200(lambda state, x: nnx.merge(graphdef, state)(x), state, x))
    assert report, report
    assert [len(report.fp8), len(report.wide)] == [3, 1]
    # Inputs are cast, weights are not.
    assert (report.casts, report.amax_reductions) == (3, 0)
