"""Whole training runs that a benchmark compares: trained, resumed, or found finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import typer
from rich.console import Console

from ..config import RunConfig
from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..registry import load_config, load_run_config
from ..run.evaluate import make_evaluation, mean_loss
from ..run.recipe import Data
from ..run.state import load_trained
from ..train import Outcome, train

PARITY = Path(__file__).parents[2] / "configs" / "gpt" / "parity.yaml"

# Overrides that make a config one of the plain model, which has no u-muP.
PLAIN = ("model.library=plain", "optimizer.umup=false", "optimizer.weight_decay=0.0")

# What every benchmark of training runs can be told.
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="such as train.steps=100"),
]
ConfigPath = Annotated[str, typer.Option("--config", help="the run to compare")]
DataPath = Annotated[str | None, typer.Option("--data", help="text; by default Python's library")]
PlainRate = Annotated[
    float, typer.Option(help="peak learning rate of the plain model, which has no u-muP")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="train again what is there already")]


Kind = TypeVar("Kind", bound=RunConfig)


class Run(NamedTuple, Generic[Kind]):
    """A trained model, its config and its loss over all validation text."""

    config: Kind
    params: Any
    rest: Any
    loss: float


def variant(path: str, words: Iterable[str], suffix: str, *settings: str) -> GPTConfig:
    """A GPT's config with settings of its own, named after them, that prints no sample.

    Args:
      path: The YAML file.
      words: The user's overrides, for all variants.
      suffix: What to append to the run's name.
      *settings: Further overrides, of this variant.
    """
    return _named(load_config, path, [*words, *settings], suffix)


def run_variant(path: str, words: Iterable[str], suffix: str, *settings: str) -> RunConfig:
    """As `variant`, of any recipe."""
    return _named(load_run_config, path, [*words, *settings], suffix)


def _named(
    load: Callable[[str, list[str]], Kind], path: str, words: list[str], suffix: str
) -> Kind:
    name = f"name={load(path, words).name}-{suffix}"
    return load(path, [*words, name, "train.sample_tokens=0"])


def trained(config: Kind, corpus: Data, fresh: bool, console: Console) -> Run[Kind]:
    """Trains, resumes, or reads a finished run; measures the loss over all validation text.

    Raises:
      RecipeError: A signal stopped the run.
    """
    finished(config, fresh, console)
    return measured(config, corpus, console)


def finished(config: RunConfig, fresh: bool, console: Console) -> Outcome:
    """Trains or resumes a run, if it is not finished.

    Raises:
      RecipeError: A signal stopped the run.
    """
    outcome = train(config, fresh=fresh, console=console)
    if outcome.signal is not None:
        raise RecipeError(
            f"stopped by signal {outcome.signal}; run the same command to resume",
            exit_code=128 + outcome.signal,
        )
    return outcome


def measured(config: Kind, corpus: Data, console: Console) -> Run[Kind]:
    """Reads a trained run; measures the loss over all validation text."""
    graphdef, state = load_trained(config, lambda message: console.print(message, markup=False))
    evaluation = make_evaluation(graphdef, config.scalify)
    loss = mean_loss(evaluation, state.params, state.rest, corpus.validation())
    return Run(config, state.params, state.rest, loss)
