"""The plain BERT: the unitscale one's shape, and its loss by NumPy."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.bert.config import BertConfig
from recipes.bert.task import build, load_data
from recipes.errors import RecipeError
from recipes.registry import load_config

from ..masked import bert_config, write_bert
from ..runs import resumes_bit_for_bit

PLAIN = (
    "model.library=plain",
    "model.norm_placement=pre",
    "optimizer.umup=false",
    "optimizer.learning_rate=1e-2",
    "model.dropout=0.0",
)


def config(folder: Path, *words: str) -> BertConfig:
    return bert_config(write_bert(folder), *PLAIN, *words)


def sizes(model: nnx.Module) -> list[tuple[int, ...]]:
    return sorted(leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("words", [("model.positions=rope",), ("model.tied_readout=false",)])
def test_parameters_are_those_of_the_unitscale_model(tmp_path: Path, words: Any) -> None:
    ours = ("model.library=unitscale", "optimizer.umup=true")
    plain, unit = (build(config(tmp_path, *words, *more)) for more in ((), ours))
    assert sizes(plain) == sizes(unit)


def test_the_loss_is_the_mean_over_hidden_tokens_that_count(tmp_path: Path) -> None:
    model: Any = build(config(tmp_path))
    batch = [jnp.asarray(part) for part in next(load_data(config(tmp_path)).validation(4))]
    ids, segments, positions, targets, _ = batch
    counts = jnp.asarray(np.arange(positions.size).reshape(positions.shape) % 3 > 0)
    logits = np.asarray(model.predict(model.encoder(ids, segments), positions), np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    taken = np.take_along_axis(shares, np.asarray(targets)[..., None], -1)[..., 0]
    expected = -np.log(taken)[np.asarray(counts)].mean()
    loss = model.loss(ids, segments, positions, targets, counts)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(expected, np.log(120), rtol=0.05)


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_token_sees_both_sides_and_where_they_are(tmp_path: Path, positions: str) -> None:
    encoder = build(config(tmp_path, f"model.positions={positions}")).encoder
    ids, segments = jnp.arange(10, 26)[None], jnp.zeros((1, 16), jnp.int32)
    before: Any = encoder(ids, segments)
    for place in (0, 15):
        after: Any = encoder(ids.at[0, place].set(5), segments)
        assert np.abs(np.asarray(after - before)).max(-1).min() > 1e-6
    moved: Any = encoder(ids[:, ::-1], segments)
    assert np.abs(np.asarray(moved[:, ::-1] - before)).max() > 1e-4


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    whole = config(tmp_path, "name=whole", "train.steps=8", "train.checkpoint_every=4")
    outcome = resumes_bit_for_bit(whole, whole.model_copy(update={"name": "stopped"}))
    assert outcome.validation_loss is not None
    assert outcome.validation_loss < np.log(120)


def test_what_only_unitscale_has_is_refused(tmp_path: Path) -> None:
    path = write_bert(tmp_path)
    for word, message in {
        "precision.policy=fp8": "policy in FP8 and optimizer.umup need model.library unitscale",
        "data.pairs=next_sentence": "data.pairs next_sentence needs .* set data.pairs none",
        "model.norm_placement=post": "norm_placement post needs library .* set norm_placement pre",
        "model.scan=true": "model: scan true needs library unitscale; .* set scan false",
    }.items():
        with pytest.raises(RecipeError, match=message):
            load_config(path, [*PLAIN, word])
