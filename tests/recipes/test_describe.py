"""`describe` counts from shapes, and agrees with the arrays that training allocates."""

import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from recipes.cli import main
from recipes.describe import Bytes, bytes_of, describe, program_flops
from recipes.gpt.config import GPTConfig
from recipes.hf import Frozen
from recipes.registry import load_config
from recipes.run.state import init_state
from unitscale.core import is_scaled

from .conftest import MakeConfig
from .pretrained import FIXTURES
from .support import CONFIGS

SLOW = pytest.mark.slow
UNITSCALE = ("model.library=unitscale", "optimizer.umup=true")
# Matrices of 4,096 numbers and more, which can be cut.
WIDE = ("model.width=64", "data.batch_size=8")
NARROW = (*UNITSCALE, "precision={weights: float16, moments: [float8_e4m3fn, float16]}")


def product_flops(config: GPTConfig) -> float:
    """Count the matmul FLOPs: 6 per weight and token, plus those of attention."""
    shape, length = config.model, config.data.sequence_length
    attention = shape.layers * 2 * length * shape.width
    kv = shape.head_dim * (shape.kv_heads or shape.heads)
    mlp = (3 if shape.mlp == "gated" else 2) * shape.width * shape.hidden
    layer = 2 * shape.width * (shape.width + kv) + mlp
    weights = shape.layers * layer + shape.width * shape.vocab
    return 6.0 * (weights + attention) * config.data.batch_size * length


@SLOW
@pytest.mark.parametrize(
    "words",
    [
        NARROW,
        (*NARROW, "precision.gradients=float8_e4m3fn"),
        ("precision=scalify_float16",),
        ("model.layers=4", "model.scan=true", *NARROW),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_arrays(make_config: MakeConfig, words: tuple[str, ...]) -> None:
    config = make_config(*WIDE, *words)
    facts, (_, _, state) = describe(config), init_state(config)
    gradients = state.params
    if not config.precision.scalify:
        leaves = jax.tree.leaves(state.params, is_leaf=is_scaled)
        narrow = config.precision.gradients or "float32"
        dtypes = [narrow if leaf.ndim > 1 else "float32" for leaf in leaves]
        gradients = list(map(jax.ShapeDtypeStruct, (leaf.shape for leaf in leaves), dtypes))
    assert facts.total == Bytes(
        frozen=0,
        weights=bytes_of(state.params),
        gradients=bytes_of(gradients),
        optimizer=bytes_of(state.opt_state),
        activations=facts.total.activations,
    )
    assert facts.parameters["embed"] == 256 * 64
    assert facts.trained == sum(facts.parameters.values())


@SLOW
def test_frozen_weights_are_counted(tmp_path: Path) -> None:
    """Trained and frozen bytes, and saved activations, from a config.json without weights."""
    words = ["data.sequence_length=16", "lora.rank=2", f"init={FIXTURES / 'llama3'}"]
    lora = CONFIGS / "llama" / "lora.yaml"
    _, _, state = init_state(load_config(lora, words))
    shutil.copy(FIXTURES / "llama3" / "config.json", tmp_path)
    words[-1] = f"init={tmp_path}"
    facts = describe(load_config(lora, words))
    assert (facts.trained, facts.total.weights) == (272, 4 * 272)
    frozen, _ = nnx.split_state(state.rest, Frozen, ...)
    assert (facts.total.weights, facts.total.frozen) == (bytes_of(state.params), bytes_of(frozen))
    kernels = 2 * (16 * 24 + 2 * 16 * 12 + 24 * 16 + 3 * 16 * 24)
    assert facts.parameters["layers"] > kernels + facts.trained
    other = describe(load_config(lora, [*words, "precision.frozen=null", "model.remat=none"]))
    assert kernels / 2 < other.total.frozen - facts.total.frozen < kernels
    assert other.total.activations > 2 * facts.total.activations
    half = describe(load_config(lora, [*words, "precision.frozen=float4_e2m1fn"]))
    assert half.total.frozen < facts.total.frozen
    assert bytes_of([jnp.ones(6, jnp.float4_e2m1fn), jnp.ones(2, jnp.float8_e4m3fn)]) == 3 + 2


def test_every_turn_of_a_loop_counts() -> None:
    """Iterations of nested loops count, too."""

    def inner(x, _):
        return x @ x, None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=3)[0] @ x, None

    def program(x):
        return jax.jit(lambda x: jax.lax.scan(outer, x, None, length=5)[0])(x) @ x

    flops = program_flops(jax.make_jaxpr(program)(jax.ShapeDtypeStruct((32, 32), "float32")))
    assert flops == pytest.approx((5 * (3 + 1) + 1) * 2 * 32**3, rel=1e-3)


def test_the_command_prints_it(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", str(config_file), "data.batch_size=64"]) == 0
    printed = capsys.readouterr().out
    assert not (config_file.parent / "runs").exists()
    assert printed.startswith("tiny: recipe gpt, policy float32\nparameters")
    assert "1,024 tokens in 64 examples" in printed
    table = printed.partition("\nbytes of a step")[2].splitlines()[1:]
    rows = [line.split()[0] for line in table]
    assert rows == ["weights", "gradients", "optimizer", "activations", "in"]
    *parts, total = [int(re.findall(r"[\d,]{3,}", line)[0].replace(",", "")) for line in table]
    assert sum(parts) == total


# Parameters of the models that the shapes are of; GPT-2's have biases, which these have not.
LARGE = {
    "gpt/gpt2-medium": 354.8e6,
    "gpt/llama-1b": 1100.0e6,
    "gpt/llama-7b": 6738.4e6,
    "bert/base": 110.1e6,
    "bert/large": 336.2e6,
}


@SLOW
@pytest.mark.parametrize("name", LARGE)
def test_large_configs_lower(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    facts = describe(config)
    assert sum(facts.parameters.values()) == pytest.approx(LARGE[name], rel=0.002)
    if isinstance(config, GPTConfig):
        products = product_flops(config)
        assert products < facts.flops < 1.2 * products
