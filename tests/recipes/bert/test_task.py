"""A BERT trains through `recipes.train`: it learns, resumes bit for bit, and shows its guesses."""

import io
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from recipes import train as train_module
from recipes.bert.config import BertConfig
from recipes.bert.task import abstract_batch, build, closing, load_data
from recipes.cli import main
from recipes.run.metrics import Metrics
from recipes.run.state import load_trained
from recipes.train import Outcome, train

from ..masked import bert_config, write_bert


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "plot_run", lambda run: None)


def run(config: BertConfig) -> Outcome:
    return train(config, console=Console(file=io.StringIO()))


class StopAfter(Metrics):
    """Sends SIGTERM to this process when step 3 has been logged."""

    def write(self, step: int, **values: float) -> None:
        super().write(step, **values)
        if step == 3 and "loss" in values:
            signal.raise_signal(signal.SIGTERM)


WORDS = [
    "data.pairs=sentence_order",
    "optimizer={name: sgd, b1: 0.0, learning_rate: 0.1}",  # a smaller program than adam's
    "train={steps: 60, eval_every: 100, checkpoint_every: 100, log_every: 1}",
]


@pytest.mark.slow
def test_it_learns_and_stopped_and_resumed_does_so_bit_for_bit(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = (bert_config(path, *WORDS, f"name={name}") for name in ("whole", "stopped"))
    expected = run(whole)
    assert expected.validation_loss is not None
    assert expected.validation_loss < 0.8 * np.log(whole.model.vocab) + np.log(2)
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "open_metrics", lambda folder, _: StopAfter(folder))
        assert run(stopped).step == 4
    assert run(stopped).validation_loss == expected.validation_loss
    ends = [jax.tree.leaves(load_trained(one, print)[1].params) for one in (whole, stopped)]
    for one, other in zip(*ends, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
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
