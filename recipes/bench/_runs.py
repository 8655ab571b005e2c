"""Whole training runs that a benchmark compares: trained, resumed, or found finished."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from rich.console import Console

from ..config import RunConfig
from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..registry import load_kind
from ..run.evaluate import make_evaluation, mean_loss
from ..run.recipe import recipe_of
from ..run.state import TrainState, load_trained
from ..train import train

# What every benchmark of training runs can be told.
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="such as train.steps=100"),
]
ConfigPath = Annotated[
    str | None, typer.Option("--config", help="the run to compare; by default that of the figures")
]
DataPath = Annotated[str | None, typer.Option("--data", help="text; by default Python's library")]
DataPaths = Annotated[
    list[str] | None,
    typer.Option("--data", help="text, once or more; by default Python's library"),
]
PlainRate = Annotated[
    float | None,
    typer.Option(help="peak learning rate of plain models, which have no u-muP; else their best"),
]
Seeds = Annotated[
    int | None, typer.Option(min=1, help="runs of each variant, with seeds in a row; 1 or 3")
]
Jobs = Annotated[int, typer.Option(min=1, help="runs trained at the same time")]
Fresh = Annotated[bool, typer.Option("--fresh", help="train again what is there already")]

Kind = TypeVar("Kind", bound=RunConfig)


class Told(NamedTuple):
    """What the command line says of the runs: config file, overrides, seeds, texts, processes."""

    config: str | None = None
    overrides: list[str] | None = None
    seeds: int | None = None
    fresh: bool = False
    data: Sequence[str] | None = None
    jobs: int = 1

    @property
    def words(self) -> list[str]:
        """Overrides for every run."""
        return list(self.overrides or ())

    @property
    def texts(self) -> dict[str, list[str]]:
        """Overrides for the runs on each text, by what ends their names; "" on the config's own."""
        if not self.data:
            return {"": []}
        found = {f"-{Path(path).stem}": [f"data.path={path}"] for path in self.data}
        if len(found) < len(self.data):
            raise RecipeError(
                f"--data: expected files of different names; got {', '.join(self.data)}; "
                "the runs are named after them: rename one"
            )
        return found


def digest_of(configs: Iterable[RunConfig]) -> str:
    """The same for the same runs, wherever they and their texts lie."""
    trees = [_unplaced(config.model_dump(mode="json")) for config in configs]
    for tree in trees:
        del tree["train"]["runs_dir"]
        tree["data"].pop("cache_dir", None)
    return hashlib.sha256(json.dumps(trees, sort_keys=True).encode()).hexdigest()[:16]


def _unplaced(tree: Any) -> Any:
    """Absolute paths by their names alone."""
    if isinstance(tree, dict):
        return {_unplaced(key): _unplaced(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_unplaced(value) for value in tree]
    return Path(tree).name if isinstance(tree, str) and Path(tree).is_absolute() else tree


def variant(
    path: str | Path,
    words: Iterable[str],
    suffix: str,
    *settings: str,
    kind: type[Kind] = GPTConfig,
) -> Kind:
    """A config with settings of its own, named after them, that prints no sample."""
    words = [*words, *settings]
    name = f"name={load_kind(kind, path, words).name}-{suffix}"
    return load_kind(kind, path, [*words, name, "train.sample_tokens=0"])


def trained(config: RunConfig, fresh: bool) -> dict[str, float]:
    """Trains or resumes a run, if it is not finished; its scores."""
    outcome = train(config, fresh=fresh, console=Console())
    if outcome.signal is not None:
        raise RecipeError(
            f"stopped by signal {outcome.signal}; run the same command to resume",
            exit_code=128 + outcome.signal,
        )
    return outcome.scores


def last_state(config: RunConfig) -> TrainState:
    """What a trained run ended with."""
    return load_trained(config, lambda line: Console().print(line, markup=False))[1]


def loss_of(config: RunConfig) -> float:
    """The loss of a trained run over all validation data."""
    graphdef, state = load_trained(config, lambda line: Console().print(line, markup=False))
    batches = recipe_of(config).load_data(config).validation()
    return mean_loss(make_evaluation(graphdef, config.scalify), state.params, state.rest, batches)
