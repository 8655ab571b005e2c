"""What a config amounts to is counted from shapes, and agrees with what is allocated."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from recipes.bert.config import BertConfig
from recipes.cli import main
from recipes.describe import Description, Share, describe, program_flops
from recipes.gpt.config import GPTConfig
from recipes.hf import Frozen
from recipes.registry import load_config
from recipes.run.placement import open_mesh, place
from recipes.run.state import init_state
from unitscale.core import is_scaled

from .configs import CONFIGS
from .pretrained import FIXTURES

UNITSCALE = "model.library=unitscale"


def product_flops(config: GPTConfig | BertConfig) -> float:
    """FLOPs of all products, forward and backward: 6 a weight and token, and attention's own."""
    shape, length = config.model, config.data.sequence_length
    attention = shape.layers * 2 * length * shape.width
    if isinstance(config, BertConfig):
        layer = 4 * shape.width**2 + 2 * shape.width * shape.hidden
        head = shape.width * (shape.width + shape.vocab) * config.data.predictions
        return 6.0 * ((shape.layers * layer + attention) * length + head) * config.data.batch_size
    kv = shape.head_dim * (shape.kv_heads or shape.heads)
    mlp = (3 if shape.mlp == "gated" else 2) * shape.width * shape.hidden
    layer = 2 * shape.width * (shape.width + kv) + mlp
    weights = shape.layers * layer + shape.width * shape.vocab
    return 6.0 * (weights + attention) * config.data.batch_size * length


def bytes_of(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.umup=false"],
        [UNITSCALE, "optimizer={umup: true, weights: float16, moments: [float8_e4m3fn, float16]}"],
    ],
    ids=["float32", "few bits"],
)
def test_bytes_are_those_of_the_arrays(
    make_config: Callable[..., GPTConfig], overrides: list[str]
) -> None:
    config = make_config(*overrides)
    _, _, state = init_state(config)
    facts = describe(config)
    assert facts.weights == bytes_of(state.params)
    assert facts.optimizer == bytes_of(state.opt_state)
    assert facts.size == 64
    total = sum(facts.parameters.values())
    assert facts.parameters["embed"] == 256 * 16
    assert facts.weights == pytest.approx(total * (2 if len(overrides) > 1 else 4), rel=0.05)


def test_frozen_weights_are_counted(tmp_path: Path) -> None:
    """From a config.json alone: trained and frozen bytes, and what is saved without remat."""
    words = ["data.sequence_length=16", "lora.rank=2", f"init={FIXTURES / 'llama3'}"]
    lora = CONFIGS / "llama" / "lora.yaml"
    _, _, state = init_state(load_config(lora, words))
    shutil.copy(FIXTURES / "llama3" / "config.json", tmp_path)
    words[-1] = f"init={tmp_path}"
    facts = describe(load_config(lora, words))
    assert (facts.trained, facts.weights) == (272, 4 * 272)
    frozen, _ = nnx.split_state(state.rest, Frozen, ...)
    assert (facts.weights, facts.frozen) == (bytes_of(state.params), bytes_of(frozen))
    kernels = 2 * (16 * 24 + 2 * 16 * 12 + 24 * 16 + 3 * 16 * 24)
    assert facts.parameters["layers"] > kernels + facts.trained
    other = describe(load_config(lora, [*words, "precision.frozen=null", "model.remat=none"]))
    assert kernels / 2 < other.frozen - facts.frozen < kernels
    assert other.activations > 2 * facts.activations


def own_bytes(tree: Any) -> int:
    """Bytes of arrays on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


# Matrices of 4,096 numbers and more, which can be cut.
WIDE = ("model.width=64", "data.batch_size=8", "model.dropout=0.0")
NARROW = (UNITSCALE, "optimizer={weights: float16, moments: [float8_e4m3fn, float16]}")


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        (8, ["mesh={fsdp: 8}"]),
        (8, ["mesh={data: 8}"]),
        (1, ["mesh={tensor: 8}"]),
        (8, ["mesh={context: 8}"]),
        (4, ["mesh={data: 2, fsdp: 2, tensor: 2}", *NARROW]),
        (8, ["mesh={fsdp: 8}", "model.layers=4", "model.scan=true", *NARROW]),
    ],
    ids=str,
)
def test_bytes_of_a_device_are_those_that_it_holds(
    make_config: Callable[..., GPTConfig], ways: int, words: list[str]
) -> None:
    config = make_config(*WIDE, *words)
    one, many = describe(make_config(*WIDE, *words, "mesh=null")), describe(config)
    assert many._replace(share=None) == one
    state = place(init_state(config)[2], open_mesh(config))
    weights = [
        leaf.data if is_scaled(leaf) else leaf
        for leaf in jax.tree.leaves(state.params, is_leaf=is_scaled)
    ]
    assert many.share == Share(
        weights=own_bytes(state.params),
        frozen=0,
        gradients=own_bytes([leaf.astype("float32") for leaf in weights]),
        optimizer=own_bytes(state.opt_state),
        activations=8 * one.activations // ways,
    )


def test_what_meshes_divide(make_config: Callable[..., GPTConfig]) -> None:
    """Also where there are more devices than here: matrices, by those of fsdp and tensor."""
    one = describe(make_config(*WIDE))
    matrices = 4 * (2 * 256 * 64 + 4 * 64 * 64 + 2 * 64 * 256)
    shares = {
        mesh: describe(make_config(*WIDE, f"mesh={{{mesh}}}")).share
        for mesh in ("data: 8", "fsdp: 8", "fsdp: 8, tensor: 8")
    }
    assert {mesh: share and share.weights for mesh, share in shares.items()} == {
        "data: 8": one.weights,
        "fsdp: 8": one.weights - matrices * 7 // 8,
        "fsdp: 8, tensor: 8": one.weights - matrices * 63 // 64,
    }


def test_the_command_prints_what_a_device_holds(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", str(config_file)]) == 0
    alone = capsys.readouterr().out
    many = ["data.batch_size=64", "model.width=64", "mesh={fsdp: 8, tensor: 8}"]
    assert main(["describe", str(config_file), *many]) == 0
    printed = capsys.readouterr().out
    assert "devices" not in alone
    head, _, device = printed.partition("\non each of 64 devices, mesh fsdp 8, tensor 8\n")
    rows = [line.split() for line in device.splitlines()]
    assert [row[0] for row in rows] == ["weights", "gradients", "optimizer", "activations", "in"]
    *parts, total = [int(number.replace(",", "")) for number in re.findall(r"[\d,]{3,}", device)]
    assert sum(parts) == total
    assert "at most: tensor divides hidden units and heads too" in device
    assert main(["describe", str(config_file), *many[:2], "mesh=null"]) == 0
    assert capsys.readouterr().out == f"{head}\n"


def test_activations_grow_with_the_sequence_and_not_with_the_batch(
    make_config: Callable[..., GPTConfig],
) -> None:
    short = describe(make_config()).activations
    assert describe(make_config("data.batch_size=8")).activations == short
    assert describe(make_config("data.sequence_length=32")).activations > 2 * short


def test_flops_are_products_and_a_little_more(make_config: Callable[..., GPTConfig]) -> None:
    config = make_config(
        "model={library: plain, width: 512, layers: 2, heads: 4, mlp: gated, kv_heads: 2}",
        "data.batch_size=32",
        "data.sequence_length=128",
    )
    products = product_flops(config)
    # Element-wise work is some hundred operations for each of the width's features and layers.
    assert products < describe(config).flops < 1.2 * products


@pytest.mark.parametrize("scan", ["true", "false"])
def test_attention_is_named_with_its_reason(
    make_config: Callable[..., GPTConfig], scan: str
) -> None:
    unit = [UNITSCALE, "optimizer={umup: true}", f"model.scan={scan}"]
    (line,) = describe(make_config(*unit)).attention
    assert line.startswith("plain: dropout needs all weights at once; no cuDNN: ")
    unit.append("model.dropout=0.0")
    (line,) = describe(make_config(*unit)).attention
    assert line.startswith("plain: 16 x 16 weights of a head are few; no cuDNN: ")
    chunked = "model.attention_implementation=chunked"
    assert describe(make_config(*unit, chunked)).attention == ("chunked: asked for",)
    assert describe(make_config()).attention == ()  # plain models call jax.nn themselves


def test_flops_are_those_of_all_weights(make_config: Callable[..., GPTConfig]) -> None:
    """Also where a loop over chunks has them, of which XLA counts one turn."""
    unit = [UNITSCALE, "optimizer={umup: true}", "data.sequence_length=256", "model.dropout=0.0"]
    auto, plain = (
        describe(make_config(*unit, f"model.attention_implementation={implementation}"))
        for implementation in ("auto", "plain")
    )
    assert auto.attention[0].startswith("chunked: 256 x 256")
    assert auto.flops == plain.flops
    assert auto.activations < plain.activations


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt/parity.yaml", ["model.remat=layer", "model.scan=true"]),
        *(
            pytest.param(name, words, marks=pytest.mark.slow)
            for name, words in (
                ("gpt/parity.yaml", ["precision.policy=fp8_delayed", "model.dropout=0.1"]),
                (
                    "gpt/parity.yaml",
                    ["model.remat=dots", "precision.moments=[float8_e4m3fn, float16]"],
                ),
                (
                    "gpt/parity.yaml",
                    ["model.library=plain", "optimizer.umup=false", "precision.policy=float16"],
                ),
                ("bert/large.yaml", []),
            )
        ),
    ],
)
def test_layers_that_are_alike_are_counted_by_two(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["model.width=16", "model.heads=2", "model.layers=4", "data.sequence_length=16"]
    config = load_config(CONFIGS / name, [*small, *words])
    facts = describe(config)
    monkeypatch.setattr("recipes.describe._over_layers", lambda config, count: count(config))
    # Where a factor is 1 XLA leaves out a multiplication.
    whole = describe(config)
    assert facts == whole._replace(flops=pytest.approx(whole.flops, rel=1e-4))


def test_every_turn_of_a_loop_counts() -> None:
    """Also of a loop in a loop; XLA counts one."""

    def inner(x, _):
        return x @ x, None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=3)[0] @ x, None

    def program(x):
        return jax.jit(lambda x: jax.lax.scan(outer, x, None, length=5)[0])(x) @ x

    flops = program_flops(jax.make_jaxpr(program)(jax.ShapeDtypeStruct((32, 32), "float32")))
    assert flops == pytest.approx((5 * (3 + 1) + 1) * 2 * 32**3, rel=1e-3)


def test_flops_do_not_depend_on_how_logits_are_cut(
    make_config: Callable[..., GPTConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(UNITSCALE, "model.width=128", "model.heads=2")
    whole = describe(config).flops
    monkeypatch.setattr("unitscale.ops._readout_cross_entropy.MOST_LOGITS", 4096)
    # Four chunks add up the gradient of the readout, and split a batch: no products.
    assert describe(config).flops == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("overrides", [[], [UNITSCALE, "optimizer.umup=false"]], ids=str)
def test_the_command_prints_it(
    config_file: Path, capsys: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    assert main(["describe", str(config_file), *overrides]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("tiny: recipe gpt, policy float32\nparameters")
    assert "64 tokens in 4 examples" in printed
    assert ("\nattention     plain: dropout needs" in printed) == bool(overrides)
    assert not (config_file.parent / "runs").exists()
    rows = re.findall(r"model.remat=(\w+) +([\d,]+) bytes .* ([\d.]+) times", printed)
    assert [mode for mode, _, _ in rows] == (["none", "dots", "layer"] if overrides else [])
    activations = [int(number.replace(",", "")) for _, number, _ in rows]
    flops = [float(times) for _, _, times in rows]
    assert activations == sorted(set(activations), reverse=True)
    assert flops == sorted(flops)


# Parameters of the models that the shapes are of; GPT-2's have biases, which these have not.
LARGE = {
    "gpt/gpt2-medium": 354.8e6,
    "gpt/llama-1b": 1100.0e6,
    "gpt/llama-7b": 6738.4e6,
    "bert/base": 110.1e6,
    "bert/large": 336.2e6,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_configs_lower(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    assert isinstance(config, (GPTConfig, BertConfig))
    facts: Description = describe(config)
    assert sum(facts.parameters.values()) == pytest.approx(LARGE[name], rel=0.002)
    products = product_flops(config)
    assert products < facts.flops < 1.2 * products
