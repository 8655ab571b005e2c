"""A BERT trains through `recipes.train`: it learns, resumes bit for bit, and shows its guesses."""

from pathlib import Path

import numpy as np
import pytest

from recipes.bert.task import abstract_batch, build, closing, load_data
from recipes.cli import main

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
    path: Path, capsys: pytest.CaptureFixture[str]
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


@pytest.mark.parametrize("pairs", ["none", "next_sentence"])
def test_abstract_batches_are_like_those_of_the_data(path: Path, pairs: str) -> None:
    config = bert_config(path, f"data.pairs={pairs}")
    expected = [(part.shape, part.dtype) for part in next(load_data(config).training(0))]
    assert [(part.shape, part.dtype) for part in abstract_batch(config)] == expected


def test_closing_shows_guesses_beside_the_truth(path: Path, tmp_path: Path) -> None:
    config = bert_config(path, "train.sample_tokens=1")
    data = load_data(config)
    (line,) = closing(config, data, build(config), tmp_path)
    assert line.startswith("guesses (truth): ")
    assert line.count("(") == config.data.predictions + 1
    assert not list(closing(bert_config(path), data, build(config), tmp_path))
