"""Requirements of every layer: transformations, ScaledArray parameters, formats, JAX settings."""

import copy
import inspect
import pickle
from typing import Any, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.gradients import jit
from tests.nn.table import LAYERS, Decoder, functional, make, parameters, value_of
from tests.optimizers import scaled
from tests.products import products
from unitscale import nn
from unitscale.core import ScaledArray, is_scaled

EPS = float(jnp.finfo(jnp.float32).eps)


def loss_of(apply):
    return lambda params, x: jnp.sum(jnp.sin(apply(params, x).astype(jnp.float32)))


def assert_close(tree: Any, expected: Any, ulps: float = 256) -> None:
    """Check equality up to `ulps` epsilons of the array's largest entry."""
    leaves, references = jax.tree.leaves(tree), jax.tree.leaves(expected)
    assert len(leaves) == len(references)
    for leaf, reference in zip(leaves, references, strict=True):
        leaf, reference = np.asarray(leaf, np.float64), np.asarray(reference, np.float64)
        assert leaf.shape == reference.shape
        error = np.max(np.abs(leaf - reference), initial=0.0)
        assert error <= ulps * EPS * max(np.max(np.abs(reference), initial=0.0), 1.0), error


def some(*names: str) -> Any:
    """Parametrize over all layers; those not named are marked slow."""
    slow = pytest.mark.slow
    cases = [n if n in names else pytest.param(n, marks=slow) for n in LAYERS]
    return pytest.mark.parametrize("name", cases)


@some("lora", "conv", "group_norm")  # a state, a window, groups
def test_jit_vmap_scan_and_remat(name) -> None:
    model, layer = make(name)
    x = layer.input(2)
    apply, params = functional(model)
    again, _ = functional(model, nnx.remat(value_of))
    _, second = functional(make(name, seed=1)[0])

    def scanned(stacked, x):
        def step(carry, p):
            y = apply(p, x)
            return carry + jnp.sum(jnp.sin(y)), y

        return jax.lax.scan(step, 0.0, stacked)

    @jit
    def everything(params, second, x):
        stacked = jax.tree.map(lambda *p: jnp.stack(p), params, second)
        stacked_grads, outputs = jax.grad(scanned, has_aux=True)(stacked, x)
        return {
            "value": apply(params, x),
            "second": apply(second, x),
            # Under vmap each example is a batch of its own.
            "vmap": jax.vmap(apply, (None, 0))(params, x[:, None])[:, 0],
            "grads": jax.grad(loss_of(apply), (0, 1))(params, x),
            "remat": jax.grad(loss_of(again), (0, 1))(params, x),
            "scan": outputs,
            "scan grads": stacked_grads,
        }

    found = everything(params, second, x)
    assert_close(found["vmap"], found["value"])
    assert_close(found["remat"], found["grads"])
    # Two layers of the same structure, their states stacked and scanned.
    assert_close(found["scan"], np.stack([found["value"], found["second"]]))
    assert_close(jax.tree.map(lambda g: np.asarray(g)[0], found["scan grads"]), found["grads"][0])
    assert isinstance(nnx.eval_shape(lambda m, x: m(x), model, x), ScaledArray)


@some("einsum", "lora", "conv", "layer_norm", "positions")
def test_parameters_may_be_scaled_arrays(name) -> None:
    model, layer = make(name)
    apply, params = functional(model)
    params = jax.tree_util.tree_map_with_path(
        lambda path, p: np.zeros_like(p) if "bias" in jax.tree_util.keystr(path) else p, params
    )
    case = scaled(optax.sgd(0.1), weights="float32").scale_params(params)
    case = jax.tree.map(lambda w: ScaledArray(w.data * 4, w.scale / 4), case, is_leaf=is_scaled)
    run = jax.value_and_grad(loss_of(apply))
    (loss, grads), (scaled_loss, scaled_grads) = jit(lambda x, *cases: [run(c, x) for c in cases])(
        layer.input(), params, case
    )
    assert_close(scaled_loss, loss)
    arrays, cotangents = (jax.tree.leaves(t, is_leaf=is_scaled) for t in (case, scaled_grads))
    for g, p, c in zip(jax.tree.leaves(grads), arrays, cotangents, strict=True):
        # In data space: d/d data = scale * d/d value.
        assert_close(c.data, g * p.scale)


COMPUTE = {"float16": "float16", "fp8_delayed": "bfloat16"}
FP8_LAYERS = ("lora", "conv", "attention")


@pytest.mark.filterwarnings("ignore::unitscale.quant.StaleScalesWarning")
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(n, policy, marks=() if n in quick else pytest.mark.slow)
        for policy, quick in (
            ("float16", LAYERS.keys() - {"simple", "lstm", "rhn", "stack"}),
            ("fp8_delayed", FP8_LAYERS),
        )
        for n in LAYERS
    ],
)
def test_dtypes_of_parameters_activations_and_cotangents(name, policy) -> None:
    """Check dtypes under strict promotion, and in FP8 with x64 enabled."""
    rules = ("standard", "allow") if policy == "fp8_delayed" else ("strict", "raise")
    promotion, rank = jax.numpy_dtype_promotion(rules[0]), jax.numpy_rank_promotion(rules[1])
    with promotion, rank, jax.enable_x64(policy == "fp8_delayed"):
        model, layer = make(name, policy)
        apply, params = functional(model)

        def run(p, x, wide):
            y, pull = jax.vjp(apply, p, x)
            # A float32 input is cast on the way in, and its cotangent back on the way out; a
            # residual stream of its own keeps its dtype.
            of_wide, pull_wide = jax.vjp(lambda x: apply(p, x), wide)
            return y, pull(y), of_wide, pull_wide(of_wide)[0]

        x = layer.input(dtype=COMPUTE[policy])
        out, grads, wide, by_wide = jax.eval_shape(run, params, x, layer.input())
    assert out.dtype == grads[1].dtype == COMPUTE[policy]
    assert {p.dtype.name for p in jax.tree.leaves((params, grads[0]))} <= {"float32"}
    assert wide.dtype == ("float32" if name == "residual" else COMPUTE[policy])
    assert by_wide.dtype == jnp.float32


def test_every_dot_of_a_layer_runs_in_the_formats_of_its_policy() -> None:
    """Check the operands of all forward and backward matmuls in the jaxpr.

    With FP8 there is one more matmul, of recomputed hidden units, which XLA drops.
    """
    for policy, dtype, count in (("float16", "float16", 9), ("fp8", "float8_e4m3fn", 10)):
        model, layer = make("gated", policy)
        apply, params = functional(model)
        jaxpr = jax.make_jaxpr(jax.grad(loss_of(apply), (0, 1)))(params, layer.input())
        assert products(jaxpr.jaxpr) == [("dot_general", dtype, dtype)] * count


def test_initial_parameters_are_unit() -> None:
    """Matrices and tables come from N(0, 1), gains are 1, and biases and LoRA's updates 0."""
    for name, layer in LAYERS.items():
        found = parameters(layer.make(rngs=nnx.Rngs(0)))
        for path, parameter in found.items():
            kind, value = path.rpartition(".")[2], np.asarray(parameter[...])
            if kind in ("gain", "bias", "lora_b"):
                np.testing.assert_array_equal(value, float(kind == "gain"), f"{name}: {path}")
            else:
                off = abs(np.mean(value**2) - 1) / (2 / value.size) ** 0.5
                assert off < 5, (name, path)  # standard deviations of a mean of squares


def test_a_table_of_a_model() -> None:
    """`nnx.tabulate` shows the arguments of every layer, also ScaledArrays."""
    model, layer = make("layer", "bfloat16")
    calls = {type(one): type(one).__call__ for _, one in nnx.iter_modules(model)}
    table = nnx.tabulate(model, layer.input(), console_kwargs={"width": 200})
    for path, _ in nnx.iter_modules(model):
        assert "/".join(map(str, path)) in table
    assert all(kind.__call__ is call for kind, call in calls.items())


IDS = np.arange(12).reshape(2, 6) % 11


def step(model: Decoder, optimizer: nn.Optimizer) -> jax.Array:
    value, grads = nn.value_and_grad(lambda m: m.loss(jnp.asarray(IDS), jnp.asarray(IDS)))(model)
    optimizer.update(model, grads)
    return value


def trained(policy: str = "float16", **options: Any) -> tuple[Decoder, nn.Optimizer]:
    model = Decoder(8, policy=policy, layers=1, **options)
    tx = scaled(optax.sgd(0.1, momentum=0.9))
    return model, nn.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.slow
def test_strict_promotion_of_a_step() -> None:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert nnx.eval_shape(step, *trained("bfloat16", tied=True)).dtype == jnp.float32


@pytest.mark.slow
def test_a_step_under_debug_nans_makes_none_and_copies_go_on_alike() -> None:
    model, optimizer = trained("fp8_delayed", learned=True)
    run = nnx.jit(step)
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"):
        assert np.isfinite(run(model, optimizer))
        other = copy.deepcopy((model, optimizer))
        # The state alone of an optimizer: functions of optax transformations cannot be pickled.
        kept = model, nnx.state(model), nnx.state(optimizer)
        again, *states = pickle.loads(pickle.dumps(kept))
        assert nnx.graphdef(again) == nnx.graphdef(model)
        chex.assert_trees_all_equal((nnx.state(again), *states), (kept[1], *kept[1:]))
        assert run(*other) == run(model, optimizer)
    chex.assert_trees_all_equal(nnx.state(other), nnx.state((model, optimizer)))


def test_views_are_as_those_of_flax() -> None:
    model = nnx.Sequential(nn.Dropout(0.5, rngs=nnx.Rngs(0)), nn.BatchNorm(4, rngs=nnx.Rngs(0)))
    quiet = nnx.view(model, deterministic=True, use_running_average=True)
    assert (quiet.layers[0].deterministic, quiet.layers[1].use_running_average) == (True, True)
    assert (model.layers[0].deterministic, model.layers[1].use_running_average) == (False, False)
    with pytest.raises(ValueError, match="Unused keys"):
        nnx.view(model, determinstic=True)
    shown = nnx.view_info(model)
    assert "dropout is off" in shown
    assert "running averages" in shown


NAMES = "Einsum LoRA LoRALinear Conv ConvTranspose Embed LayerNorm RMSNorm GroupNorm BatchNorm"
NAMES += " Dropout MultiHeadAttention SimpleCell GRUCell OptimizedLSTMCell RNN Optimizer"
TWINS = {nn.Dense: nnx.Linear} | {getattr(nn, n): getattr(nnx, n) for n in NAMES.split()}
OURS = {"policy", "constraint", "pad_to_multiple_of", "is_causal", "max_length", "rotary_base"}
OURS |= {"mult", "implementation", "stack_axes", "kernel_metadata", "recurrent_kernel_metadata"}
OURS |= {"bias_metadata", "dtype", "param_dtype", "local_window_size"}


def arguments(cls: type) -> tuple[list[str], set[str]]:
    """Return positional arguments in order, and keywords, including those of a base class."""
    positional, keywords = [], set()
    for name, argument in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if argument.kind is argument.POSITIONAL_OR_KEYWORD:
            positional.append(name)
        elif argument.kind is not argument.VAR_KEYWORD:
            keywords.add(name)
        elif options := get_args(argument.annotation):
            keywords |= options[0].__annotations__.keys()
        else:
            keywords |= arguments(cls.__bases__[0])[1]
    return positional, keywords


# Defaults that differ from Flax's: layers keep the dtype of their policy, and dropout masks are
# drawn for every head.
DEFAULTS = dict.fromkeys(("param_dtype", "lora_param_dtype"))
DEFAULTS |= dict.fromkeys(("broadcast_dropout", "deterministic", "decode"), False)
PLAIN = bool | int | float | str | tuple | None  # defaults that are compared


def test_arguments_are_those_of_flax() -> None:
    for cls, twin in TWINS.items():
        (positional, keywords), (wanted, others) = arguments(cls), arguments(twin)
        assert positional == wanted, cls
        assert keywords - others <= OURS, cls
        ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (cls, twin))
        for name in ours.keys() & theirs.keys():
            default, other = ours[name].default, theirs[name].default
            if isinstance(default, PLAIN) and other not in (inspect.Parameter.empty, default):
                assert default is DEFAULTS[name], (cls, name)
    signature, other = (inspect.signature(kind.RNN.__call__).parameters for kind in (nn, nnx))
    assert [(k, p.kind) for k, p in signature.items()] == [(k, p.kind) for k, p in other.items()]
