"""Training a BERT with `recipes.train`: it learns, resumes exactly, and prints its guesses."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from recipes.bert.config import BertConfig
from recipes.bert.task import abstract_batch, build, closing, load_data
from recipes.cli import main
from recipes.train import train

from ..configs import refuses_configs
from ..masked import bert_config, write_bert
from ..runs import resumes_bit_for_bit


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


WORDS = [
    "data.pairs=sentence_order",
    # A smaller program than adam's, and what 60 steps learn first: how often each token is hidden.
    "optimizer={name: sgd, b1: 0.0, learning_rate: 0.1, multipliers: {bias: 1.0, norm: 1.0}}",
    "train={steps: 60, eval_every: 100, checkpoint_every: 100, log_every: 1}",
]


@pytest.mark.slow
def test_it_learns_and_stopped_and_resumed_does_so_bit_for_bit(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = (bert_config(path, *WORDS, f"name={name}") for name in ("whole", "stopped"))
    expected = resumes_bit_for_bit(whole, stopped)
    assert expected.validation_loss is not None
    assert expected.validation_loss < 0.8 * np.log(whole.model.vocab) + np.log(2)
    capsys.readouterr()
    assert main(["evaluate", str(path), *WORDS, "name=whole"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("step 60  validation loss ")
    assert said.endswith(" nats per hidden token plus nats per pair\n")
    loss = train(plain(tmp_path, "train.steps=8")).validation_loss
    assert loss is not None
    assert loss < np.log(120)


def test_abstract_batches_are_like_those_of_the_data(path: Path) -> None:
    for pairs in ("none", "next_sentence"):
        config = bert_config(path, f"data.pairs={pairs}")
        expected = [(part.shape, part.dtype) for part in next(load_data(config).training(0))]
        assert [(part.shape, part.dtype) for part in abstract_batch(config)] == expected


class Sure:
    """A model that predicts token 7 everywhere."""

    def encoder(self, ids: Any, segments: Any) -> Any:
        return ids

    def predict(self, x: Any, positions: Any) -> Any:
        return np.broadcast_to(np.arange(20) == 7, (*positions.shape, 20)).astype(np.float32)


def test_closing_shows_guesses_beside_the_truth(path: Path, tmp_path: Path) -> None:
    config = bert_config(path, "train.sample_tokens=1")
    data = load_data(config)
    (line,) = closing(config, data, Sure(), tmp_path)
    assert line.startswith(f"guesses (truth): {data.tokenizer.decode([7])} (")
    assert line.count("(") == config.data.predictions + 1
    assert not list(closing(bert_config(path), data, Sure(), tmp_path))


PLAIN = (
    "model.library=plain",
    "model.norm_placement=pre",
    "optimizer.umup=false",
    "optimizer.learning_rate=1e-2",
    "model.dropout=0.0",
)


def plain(folder: Path, *words: str) -> BertConfig:
    return bert_config(write_bert(folder), *PLAIN, *words)


def test_parameters_are_those_of_the_unitscale_model(tmp_path: Path) -> None:
    for word in ("model.positions=rope", "model.tied_readout=false"):
        sizes = []
        for words in ((), ("model.library=unitscale", "optimizer.umup=true")):
            config = plain(tmp_path, word, *words)
            model = nnx.eval_shape(lambda config=config: build(config))
            sizes.append(sorted(p.shape for p in jax.tree.leaves(nnx.state(model, nnx.Param))))
        assert sizes[0] == sizes[1]


def test_the_loss_is_the_mean_over_hidden_tokens_that_count(tmp_path: Path) -> None:
    config = plain(tmp_path)
    batch = next(load_data(config).validation(4))
    ids, segments, positions, targets, _ = map(jnp.asarray, batch)
    counts = jnp.asarray(np.arange(positions.size).reshape(positions.shape) % 3 > 0)

    @jax.jit
    def outputs() -> Any:
        model: Any = build(config)
        logits = model.predict(model.encoder(ids, segments), positions)
        return logits, model.loss(ids, segments, positions, targets, counts)

    logits, loss = outputs()
    logits = np.asarray(logits, np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    taken = np.take_along_axis(shares, np.asarray(targets)[..., None], -1)[..., 0]
    expected = -np.log(taken)[np.asarray(counts)].mean()
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(expected, np.log(120), rtol=0.05)


@pytest.mark.parametrize("positions", ["learned", pytest.param("rope", marks=pytest.mark.slow)])
def test_a_token_sees_both_sides_and_where_they_are(tmp_path: Path, positions: str) -> None:
    config = plain(tmp_path, f"model.positions={positions}")
    segments = jnp.zeros((1, 16), jnp.int32)
    outputs = jax.jit(lambda ids: build(config).encoder(ids, segments))
    ids = jnp.arange(10, 26)[None]
    before = outputs(ids)
    for place in (0, 15):
        after = outputs(ids.at[0, place].set(5))
        assert np.abs(np.asarray(after - before)).max(-1).min() > 1e-6
    moved = outputs(ids[:, ::-1])
    assert np.abs(np.asarray(moved[:, ::-1] - before)).max() > 1e-4


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_bert(tmp_path)


def test_the_config_of_an_earlier_version_is_read(config_file: Path) -> None:
    config = bert_config(config_file, "model.residual={scheme: depth}")
    old = config.model_dump(mode="json")
    old["data"]["masking"] |= {"masked": 0.8, "random": 0.1}
    old["model"]["residual"]["tau"] = None
    assert BertConfig.model_validate(BertConfig.upgraded(old)) == config
    old["data"]["masking"]["masked"] = 0.9
    with pytest.raises(ValidationError, match=r"masking\.masked"):
        BertConfig.model_validate(BertConfig.upgraded(old))


test_what_cannot_be_is_refused = refuses_configs(
    [
        ("data.masking.masked=0.95", r"masking\.masked is no longer a key"),
        ("data.tokenizer={kind: byte, vocab: null, lowercase: false}", "wordpiece or file"),
        ("data.sequence_length=4", "sequence_length must be at least 5"),
        ("model.heads=3", "heads must divide width"),
        ("model={positions: rope, heads: 16}", "rope needs an even head size"),
        ("model.vocab=100", "model.vocab must be at least"),
        ("model.context=8", "model.context must be at least data.sequence_length"),
        ("precision=scalify_float16", "precision"),
        ("data.pairs=next_sentences", r"data\.pairs .*next_sentence"),
        # Keys that only unitscale has.
        ([*PLAIN, "precision.policy=fp8"], r"precision\.policy|policy in FP8"),
        ([*PLAIN, "data.pairs=next_sentence"], r"data\.pairs"),
        ([*PLAIN, "model.norm_placement=post"], "norm_placement"),
        ([*PLAIN, "model.scan=true"], "scan"),
    ]
)
