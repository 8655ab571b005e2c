"""Whether one learning rate serves every width: u-muP beside the plain parametrization.

    python -m recipes bench transfer --data TEXT

Trains short runs of the GPT of `configs/gpt/parity.yaml`, one layer deep, at every width and
learning rate, with unitscale and u-muP and in plain `flax.nnx` with Adam. Every finished run is a
line of `transfer.jsonl` in `train.runs_dir`; the same command goes on after the last one, and
measures nothing twice. The curves are drawn beside it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from matplotlib.figure import Figure
from rich.console import Console

from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..run.evaluate import make_evaluation, mean_loss
from ..run.metrics import read_metrics
from ..run.state import TrainState, init_state
from ..text import ByteTokenizer, Corpus, load_corpus
from ..train import make_train_step
from ._runs import PARITY, ConfigPath, DataPath, Fresh, Overrides, variant
from ._table import JsonPath, Table, publish, within

WIDTHS = (64, 256, 1024)
RATES = tuple(2.0**power for power in range(-3, 4))
PLAIN_RATES = tuple(2.0**power for power in range(-12, -4))
HEAD = 32  # entries of an attention head, at every width
SHORT = (
    "model.layers=1",
    "data.sequence_length=64",
    "data.batch_size=8",
    "train.steps=150",
    "optimizer.warmup_steps=15",
)
PLAIN = ("model.library=plain", "optimizer.umup=false")
UMUP_NAME, PLAIN_NAME = "u-muP", "plain"
MOST_RATIO = 2.0

Losses = dict[str, dict[int, dict[float, float]]]
"""Validation loss by library, width and learning rate; infinite where it was not finite."""


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    data: DataPath = None,
    width: Annotated[
        list[int] | None, typer.Option(help="a width; give several; by default 64, 256, 1024")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="a learning rate under u-muP; by default 1/8 to 8")
    ] = None,
    plain_rate: Annotated[
        list[float] | None,
        typer.Option(help="a learning rate of the plain model; by default 2^-12 to 2^-5"),
    ] = None,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints the best learning rate at each width, and draws the loss over learning rates."""
    path = config or str(PARITY)
    words = [*SHORT, *(overrides or ()), *([] if data is None else [f"data.path={data}"])]
    widths = sorted(set(width or WIDTHS))
    rates = {
        UMUP_NAME: sorted(set(rate or RATES)),
        PLAIN_NAME: sorted(set(plain_rate or PLAIN_RATES)),
    }
    _check(widths, rates)
    configs = {
        (library, size): variant(
            path, words, f"transfer-{library}-{size}", *settings, *_shape(size)
        )
        for library, settings in ((UMUP_NAME, ()), (PLAIN_NAME, PLAIN))
        for size in widths
    }
    first = configs[UMUP_NAME, widths[0]]
    folder = Path(first.train.runs_dir)
    rows = Rows(folder / "transfer.jsonl", fresh)
    corpus, console = load_corpus(first.data, ByteTokenizer()), Console()
    losses: Losses = {UMUP_NAME: {}, PLAIN_NAME: {}}
    for (library, size), one in configs.items():
        label = f"{library}, {size}"
        losses[library][size] = measure(one, corpus, rates[library], rows, console, label)
    picture = plot(folder / "transfer.png", losses)
    notes = [
        f"{first.train.steps} steps of {Path(path).name} with {first.model.layers} layer(s), "
        f"{first.data.batch_size} x {first.data.sequence_length} tokens each, seed {first.seed}, "
        f"heads of {HEAD}; loss over {first.train.eval_batches} validation batches.",
        "best: of the rates tried; vertex: of the parabola through it and its neighbours, in the "
        "logarithm of the rate. Cost: what the smallest width's best rate loses at this width.",
        f"curves in {picture}",
    ]
    publish("transfer", [best_rates(losses)], json, notes)


def _shape(width: int) -> tuple[str, str]:
    return f"model.width={width}", f"model.heads={max(1, width // HEAD)}"


def _check(widths: Sequence[int], rates: Mapping[str, Sequence[float]]) -> None:
    wrong = [width for width in widths if width % HEAD]
    if wrong:
        raise RecipeError(
            f"--width: expected multiples of {HEAD}, the size of a head; got {wrong}; round them"
        )
    for library, values in rates.items():
        if len(values) < 3 or not all(0 < value < math.inf for value in values):
            option = "--rate" if library == UMUP_NAME else "--plain-rate"
            raise RecipeError(
                f"{option}: expected at least 3 different positive rates, so that the best one has "
                f"neighbours; got {values}; add some"
            )


class Rows:
    """Finished runs, one JSON line each, found again by all that decides their loss.

    Args:
      path: The file; made when the first run is finished.
      fresh: Starts an empty file.

    Raises:
      RecipeError: The file cannot be read or written.
    """

    def __init__(self, path: Path, fresh: bool = False):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                path.unlink(missing_ok=True)
            self._known = {row["run"]: row["loss"] for row in read_metrics(path)}
        except OSError as error:
            raise self._error(error) from error

    def find(self, config: GPTConfig, corpus: Corpus, rate: float) -> float | None:
        """The loss of a run, or None where it is not finished; infinite where it diverged."""
        loss = self._known.get(_identity(config, corpus, rate))
        return None if loss is None else float(loss)

    def add(self, config: GPTConfig, corpus: Corpus, rate: float, loss: float) -> None:
        """Keeps the loss of a run."""
        run = _identity(config, corpus, rate)
        self._known[run] = loss
        # JSON has no infinity.
        row = {"name": config.name, "rate": rate, "loss": loss if loss < math.inf else "inf"}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "run": run}) + "\n")
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> RecipeError:
        return RecipeError(
            f"train.runs_dir: cannot use {self.path}: {error.strerror}; set it to another folder"
        )


def _identity(config: GPTConfig, corpus: Corpus, rate: float) -> str:
    settings = config.model_dump(mode="json")
    del settings["train"]["runs_dir"], settings["name"], settings["data"]["path"]
    text = json.dumps([settings, corpus.digest, rate], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measure(
    config: GPTConfig,
    corpus: Corpus,
    rates: Sequence[float],
    rows: Rows,
    console: Console,
    label: str = "",
) -> dict[float, float]:
    """Validation loss by learning rate; one compiled step serves all of them.

    Args:
      config: The run; its own learning rate is not used.
      corpus: Its text.
      rates: Learning rates, in the order of training.
      rows: What is known; every new loss is added.
      console: Where to report.
      label: What to call the run there.
    """
    train = functools.cache(lambda: _trainer(config, corpus))  # compiles only what is needed
    found = {}
    for rate in rates:
        loss = rows.find(config, corpus, rate)
        if loss is None:
            loss = train()(rate)
            rows.add(config, corpus, rate, loss)
            console.print(f"{label}: rate {rate:g}  loss {loss:.4f}", highlight=False)
        found[rate] = loss
    return found


def _trainer(config: GPTConfig, corpus: Corpus) -> Callable[[float], float]:
    """A function that trains with a learning rate and gives the validation loss."""
    settings = config.optimizer.model_copy(update={"learning_rate": 1.0})
    config = config.model_copy(update={"optimizer": settings})
    graphdef, optimizer, first = init_state(config)
    # The rate multiplies the update of the schedule with peak 1, as a number in the state.
    factor = optax.inject_hyperparams(optax.scale)(step_size=1.0)
    step = make_train_step(graphdef, optax.chain(optimizer, factor))
    evaluate = make_evaluation(graphdef)

    def train(rate: float) -> float:
        scale: Any = factor.init(first.params)
        scale.hyperparams["step_size"] = jnp.float32(rate)
        # A copy: the step reuses the memory of what it is given.
        copy = jax.tree.map(jnp.copy, first)
        state = TrainState(copy.params, copy.rest, (copy.opt_state, scale), copy.step)
        batches = corpus.training(config.seed)
        for index in range(config.train.steps):
            state, _ = step(state, next(batches), np.int32(index))
        if int(state.step) < config.train.steps:
            return math.inf
        batches = corpus.validation(config.train.eval_batches)
        loss = mean_loss(evaluate, state.params, state.rest, batches)
        return loss if math.isfinite(loss) else math.inf

    return train


def vertex(losses: Mapping[float, float]) -> float:
    """The rate of least loss: of the parabola through the best rate and its neighbours.

    In the logarithm of the rate; the best rate itself where it is the first or last one, or a
    neighbour's loss is not finite.

    Example:
      >>> vertex({0.5: 2.0, 1.0: 1.0, 2.0: 2.0, 4.0: 9.0})
      1.0
    """
    rates = sorted(losses)
    at = min(range(len(rates)), key=lambda i: losses[rates[i]])
    near = rates[max(at - 1, 0) : at + 2]
    if len(near) < 3 or not all(math.isfinite(losses[rate]) for rate in near):
        return rates[at]
    left, middle, right = np.log2(near)
    below, lowest, above = (losses[rate] for rate in near)
    one, two = (middle - left) * (lowest - above), (middle - right) * (lowest - below)
    if one == two:  # three equal losses
        return rates[at]
    moved = ((middle - left) * one - (middle - right) * two) / (one - two) / 2
    return float(2.0 ** (middle - moved))


def best_rates(losses: Losses) -> Table:
    """The best rate at each width, how far they lie apart, and what one rate for all costs."""
    rows = []
    for library, by_width in losses.items():
        best = {size: min(found, key=found.__getitem__) for size, found in by_width.items()}
        lowest = {size: vertex(found) for size, found in by_width.items()}
        apart = max(lowest.values()) / min(lowest.values())
        smallest = best[min(best)]
        for size, found in by_width.items():
            at_edge = best[size] in (min(found), max(found))
            row: dict[str, Any] = {
                "parametrization": library,
                "width": size,
                "loss": found[best[size]],
                "best": best[size],
                "vertex": lowest[size],
                "cost": found[smallest] / found[best[size]] - 1,
                "at edge": at_edge,
            }
            if size == max(by_width):
                row["apart"] = apart
                if library == UMUP_NAME:
                    row["asked"] = f"vertices at most {MOST_RATIO:g} apart, none at an edge"
                    edges = any(best[s] in (min(f), max(f)) for s, f in by_width.items())
                    row["within"] = within(apart, (None, MOST_RATIO)) and not edges
            rows.append(row)
    return Table("Learning rate of least validation loss, by width", rows)


def plot(path: Path, losses: Losses) -> Path:
    """Draws validation loss over learning rates: a curve for each width, its least loss marked."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(losses), sharey=True)
    for axes, (library, by_width) in zip(panels, losses.items(), strict=True):
        for index, (size, found) in enumerate(by_width.items()):
            rates = [rate for rate in sorted(found) if math.isfinite(found[rate])]
            values = [found[rate] for rate in rates]
            if not values:
                continue
            axes.plot(rates, values, "o-", color=f"C{index}", label=f"width {size}", markersize=4)
            least = int(np.argmin(values))
            axes.plot(rates[least], values[least], "*", color=f"C{index}", markersize=14)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="learning rate", title=library)
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("validation loss (nats per byte)")
    figure.savefig(path, dpi=120)
    return path
