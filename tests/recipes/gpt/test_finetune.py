"""configs/llama/finetune.yaml: FP8 matmuls, 5 bytes per parameter, without scalify."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.config import RunConfig
from recipes.describe import describe
from recipes.errors import RecipeError
from recipes.gpt.task import build
from recipes.hf import load
from recipes.registry import load_config
from recipes.run.folder import read_metrics
from recipes.run.state import load_trained
from tests.products import conversions
from tests.recipes.pretrained import change_config, change_tensors, copied, one_layer
from unitscale.core import is_scaled

from ..configs import CONFIGS
from ..conftest import TEXT
from ..runs import resumes_bit_for_bit

LLAMA = CONFIGS / "llama" / "finetune.yaml"


# Sizes are multiples of 16, which FP8 kernels take: those of the shared folder, and of these.
SIZES = {16: 32, 24: 32, 12: 16}
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a random one-layer Llama with gains of 1, biases of 0 and small matrices."""
    draw = np.random.default_rng(0)

    def drawn(name: str, old: np.ndarray) -> np.ndarray:
        shape = tuple(SIZES.get(n, n) for n in old.shape)
        vector = np.full(shape, float("norm" in name), np.float32)
        return draw.normal(0, 0.1, shape).astype(np.float32) if old.ndim > 1 else vector

    path = one_layer(copied("llama3", tmp_path))
    change_config(path, **SHAPE)
    change_tensors(path, lambda tensors: {name: drawn(name, old) for name, old in tensors.items()})
    return path


def make(folder: Path, *words: str) -> Any:
    """Load configs/llama/finetune.yaml with a small text and the given folder."""
    (folder.parent / "text.txt").write_text(TEXT, "utf-8")
    small = [
        f"init={folder}",
        f"data.path={folder.parent / 'text.txt'}",
        "data.sequence_length=16",
        "data.batch_size=4",
        f"train.runs_dir={folder.parent / 'runs'}",
        "train={steps: 8, log_every: 1, eval_every: 4, eval_batches: 2, checkpoint_every: 4}",
        "train.sample_tokens=0",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=1.0e-2",
        "precision.min_size=0",
    ]
    return load_config(LLAMA, [*small, *words])


def test_all_matmuls_of_layers_are_in_fp8(folder: Path) -> None:
    model: Any = build(make(folder, "model.remat=none"))
    ids = jnp.zeros((1, 16), jnp.int32)
    # Both operands of query, key, value, out, gate, up and down; not of the readout.
    assert len(conversions(jax.make_jaxpr(model)(ids), "float8_e4m3fn")) == 14


@pytest.mark.slow
def test_it_learns_resumes_and_writes_a_folder(folder: Path) -> None:
    config: RunConfig = make(folder, "name=whole")
    outcome = resumes_bit_for_bit(config, make(folder, "name=stopped"))
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] == pytest.approx(math.log(300), rel=0.2)
    assert max(losses[-2:]) < losses[0] - 0.5
    _, state = load_trained(config, pytest.fail)
    kept = jax.tree.leaves(state.params, is_leaf=is_scaled)
    tuned = jax.tree.leaves(load(outcome.folder / "pretrained").params)
    assert {leaf.dtype.name for leaf in kept} == {"float16"}
    for own, written in zip(kept, tuned, strict=True):
        np.testing.assert_array_equal(own.value, written)


@pytest.mark.slow
def test_a_parameter_has_five_bytes(folder: Path) -> None:
    """A gradient takes 4 bytes; scales are per array. `describe` does not read the weights."""
    change_config(folder, hidden_size=512, intermediate_size=1536)
    facts = describe(make(folder))
    assert facts.trained == sum(facts.parameters.values())
    total = facts.total
    each = [bytes / facts.trained for bytes in (total.weights, total.optimizer, total.gradients)]
    assert each == pytest.approx([2, 3, 4], abs=1e-3)


WRONG = {
    "lora={}": r"precision\.matmuls .* needs lora null",
    "lora={} precision.matmuls=null": r"precision\.weights",
    "precision.matmuls=qwix": "qwix cannot be combined with init",
    "model.width=16": r"model\.width: expected 32, as in init",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_go_together(folder: Path, words: str) -> None:
    with pytest.raises(RecipeError, match=WRONG[words]):
        make(folder, *words.split())
