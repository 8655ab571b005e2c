"""Runs beside one of them: how much higher loss or score is, how surely, and whether as asked.

What is compared is listed in `losses.yaml`. Seed by seed, because a seed decides more of a loss
than a number format does: a difference is the mean over seeds, its standard error that of the mean.
"""

import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import jax
import yaml
from pydantic import Field
from rich.console import Console

from ..config import Count, Positive, RunConfig, Section
from ..errors import RecipeError
from ..registry import CONFIGS, RECIPES
from ..run.pool import each, message_of
from ._runs import Told, digest_of, loss_of, trained, variant
from ._table import Table

Run = Callable[[RunConfig, bool], Mapping[str, float]]
Words = Sequence[str] | Callable[[int], Sequence[str]]
"""Overrides of all runs of a variant, or those of each by its number."""
Bound = Positive | Literal["spread", "no worse"] | None


class Variant(Section):
    """One of the runs that are compared."""

    label: str | None = Field(default=None, description="what to call it; null for its name")
    settings: dict[str, Any] = Field(description="values by dotted key of the config")
    bound: Bound = Field(default=None, description="how far from the reference it may be")


class Comparison(Section):
    """An entry of `losses.yaml`."""

    title: str = Field(description="what is measured")
    config: str = Field(default="gpt/parity.yaml", description="the run, in configs/")
    recipe: str = Field(default="gpt", description="whose config it must be")
    metric: str = Field(default="loss", description="over all validation data, or of the scores")
    reference: str = Field(description="the variant that others are compared with")
    seeds: Count = Field(default=1, description="runs of each variant")
    variants: dict[str, Variant] = Field(description="by what a run's name ends with")

    def label(self, name: str) -> str:
        return self.variants[name].label or name

    def only(self, option: str, names: str, prefix: str = "") -> Self:
        """The reference, and the variants that an option of the command line lists."""
        known = {name.removeprefix(prefix) for name in self.variants if name != self.reference}
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        if unknown := [name for name in wanted if name not in known]:
            raise RecipeError(
                f"{option}: expected some of {', '.join(sorted(known))}; got {', '.join(unknown)}; "
                "correct the list"
            )
        return self.of([self.reference, *(f"{prefix}{name}" for name in wanted)])

    def of(self, names: Sequence[str]) -> Self:
        """These variants; the first is the reference, if its own is not among them."""
        reference = self.reference if self.reference in names else names[0]
        variants = {name: self.variants[name] for name in names}
        return self.model_copy(update={"variants": variants, "reference": reference})

    def at_rates(self, rates: Mapping[str, Sequence[float]]) -> Self:
        """The same at other learning rates: a variant named here has a run for each of its own."""
        found: dict[str, Variant] = {}
        for name, one in self.variants.items():
            own = one.settings.get("optimizer.learning_rate")
            for rate in rates.get(name, ()):
                settings = one.settings | {"optimizer.learning_rate": rate}
                update = {"label": f"{self.label(name)}, {rate:g}", "settings": settings}
                found[name if rate == own else f"{name}-{rate:g}"] = one.model_copy(update=update)
            if name not in rates:
                found[name] = one
        reference = self.reference if self.reference in found else next(iter(found))
        return self.model_copy(update={"variants": found, "reference": reference})

    def at_rate(self, rate: float | None) -> dict[str, list[str]]:
        """Overrides of each variant: of plain ones another learning rate, unless it is None."""
        words = [] if rate is None else [f"optimizer.learning_rate={rate}"]
        plain = {k for k, v in self.variants.items() if v.settings.get("model.library") == "plain"}
        return {name: [*words] if name in plain else [] for name in self.variants}


class Compared(NamedTuple):
    """Values of every run by variant, text by text and in each seed by seed, and their configs."""

    entry: Comparison
    configs: dict[str, list[RunConfig]]
    values: dict[str, list[float]]
    texts: list[str]

    def best(self, prefix: str = "") -> str:
        """The variant, of those whose names begin so, of the least mean loss or greatest score."""
        names = [name for name in self.values if name.startswith(prefix)]
        choose = min if self.entry.metric == "loss" else max
        return choose(names, key=lambda name: statistics.fmean(self.values[name]))

    def runs(self, texts: list[str]) -> str:
        """What a title says of seeds, and of those of the texts that it is about."""
        configs = self.configs[self.entry.reference]
        seeds = len(self.values[self.entry.reference]) // len(self.texts)
        which = f"seed {configs[0].seed} alone" if seeds == 1 else f"mean of {seeds} seeds"
        return f"{which}, {' and '.join(texts)}" if any(texts) else which

    def table(self) -> Table:
        """Every variant beside the reference, over all runs."""
        return self._table(slice(None), self.texts)

    def tables(self) -> list[Table]:
        """The same on each text, and over all of them."""
        seeds = len(self.values[self.entry.reference]) // len(self.texts)
        parts = [slice(i * seeds, (i + 1) * seeds) for i in range(len(self.texts))]
        each = [self._table(part, [text]) for part, text in zip(parts, self.texts, strict=True)]
        return [*each, self.table()] if len(each) > 1 else each

    def _table(self, part: slice, texts: list[str]) -> Table:
        entry, (config, *_) = self.entry, self.configs[self.entry.reference]
        values = {name: found[part] for name, found in self.values.items()}
        bounds: dict[str, Bound] = {name: one.bound for name, one in entry.variants.items()}
        rows = judged(values, entry.reference, bounds, entry.metric)
        title = f"{entry.title}: {config.train.steps} steps, {self.runs(texts)}"
        rows = [row | {"variant": entry.label(row["variant"])} for row in rows]
        configs = [one for found in self.configs.values() for one in found[part]]
        return Table(title, rows, digest_of(configs))


@functools.cache
def comparison(name: str) -> Comparison:
    """An entry of `losses.yaml`."""
    text = Path(__file__).with_name("losses.yaml").read_text(encoding="utf-8")
    return Comparison.model_validate(yaml.safe_load(text)["comparisons"][name])


def compare(
    entry: Comparison,
    told: Told,
    own: Mapping[str, Words] | None = None,
    run: Run | None = None,
) -> Compared:
    """Trains, resumes or reads every run of a comparison, and measures it."""
    own, run = own or {}, run or trained
    configs = {name: configs_of(entry, told, name, own.get(name, ())) for name in entry.variants}
    if told.jobs > 1:
        values = _side_by_side(entry, told, configs, run)
    else:
        values = {name: [] for name in configs}
        for name, found in values.items():
            found += [_measured(config, told.fresh, entry.metric, run) for config in configs[name]]
            jax.clear_caches()
    return Compared(entry, configs, values, [text.removeprefix("-") for text in told.texts])


def _measured(config: RunConfig, fresh: bool, metric: str, run: Run) -> float:
    scores = run(config, fresh)
    return loss_of(config) if metric == "loss" else scores[metric]


def _side_by_side(
    entry: Comparison, told: Told, configs: Mapping[str, list[RunConfig]], run: Run
) -> dict[str, list[float]]:
    """The values of all runs, each measured in one of several processes."""
    say = functools.partial(Console().print, markup=False, highlight=False, soft_wrap=True)
    values = {name: [math.nan] * len(found) for name, found in configs.items()}
    places = [(name, i) for name, found in configs.items() for i in range(len(found))]
    tasks = [
        (place, configs[place[0]][place[1]], told.fresh, entry.metric, run) for place in places
    ]
    failed = []
    for done, (((name, i), config, *_), value) in enumerate(each(tasks, told.jobs, _apart), 1):
        if isinstance(value, str):
            failed.append(f"{config.name}: {value}")
        else:
            values[name][i] = value
        say(f"{done}/{len(tasks)}  {config.name}  {value}")
    if failed:
        raise RecipeError(
            f"{len(failed)} of {len(tasks)} runs failed: {failed[0]}; the others are kept: run the "
            "same command to try these again",
            exit_code=1,
        )
    return values


def _apart(
    place: tuple[str, int], config: RunConfig, fresh: bool, metric: str, run: Run
) -> float | str:
    """A run's value, or the message of what went wrong."""
    try:
        return _measured(config, fresh, metric, run)
    except Exception as error:  # whatever it is, the other runs go on
        return message_of(error)


def configs_of(entry: Comparison, told: Told, name: str, words: Words = ()) -> list[RunConfig]:
    """The runs of a variant, on each text with each seed; another than the first is named."""
    path = told.config or CONFIGS / entry.config
    settings = entry.variants[name].settings.items()
    kind, found = RECIPES[entry.recipe], []

    def own(number: int) -> list[str]:
        each = words(number) if callable(words) else words
        return [*(f"{key}={json.dumps(value)}" for key, value in settings), *each]

    for text, data in told.texts.items():
        first = variant(path, told.words, f"{name}{text}", *data, *own(0), kind=kind)
        found.append(first)
        for i in range(1, told.seeds or entry.seeds):
            seed = first.seed + i
            suffix, given = f"{name}{text}-seed{seed}", (*data, *own(i), f"seed={seed}")
            found.append(variant(path, told.words, suffix, *given, kind=kind))
    return found


def judged(
    values: Mapping[str, Sequence[float]],
    reference: str,
    bounds: Mapping[str, Bound],
    metric: str = "loss",
) -> list[dict[str, Any]]:
    """A row for each variant: its mean, and its mean difference to the reference, seed by seed.

    Args:
      values: Of every seed, in the same order, by variant.
      reference: The variant that others are compared with.
      bounds: How far each may be from it.
      metric: A loss, whose differences are shares of the reference's, or a score.
    """
    is_loss, rows = metric == "loss", []
    for name, found in values.items():
        row: dict[str, Any] = {"variant": name}
        row["validation loss" if is_loss else metric] = statistics.fmean(found)
        if len(found) > 1:
            row["standard deviation"] = statistics.stdev(found)
        rows.append(row)
        if name == reference:
            continue
        pairs = list(zip(found, values[reference], strict=True))
        over = [(a / b - 1 if is_loss else a - b) for a, b in pairs]
        mean, error = statistics.fmean(over), 0.0
        row["over reference" if is_loss else "above reference"] = mean
        if len(over) > 1:
            error = statistics.stdev(over) / math.sqrt(len(over))
            row["standard error" if is_loss else "standard error above"] = error
        bound = bounds.get(name)
        if bound == "spread" and len(found) > 1:
            spread = spread_of(found, values[reference])
            row["asked"] = f"within the seeds' {spread:.3g}"
            row["verdict"] = verdict(abs(mean), 0.0, spread)
        elif bound == "no worse":
            row |= {"asked": bound, "verdict": verdict(mean, error, 0.0)}
        elif isinstance(bound, float):
            row["asked"] = f"within {bound:.1%}" if is_loss else f"within {bound:g}"
            row["verdict"] = verdict(abs(mean), error, bound)
    return rows


def spread_of(*runs: Sequence[float]) -> float:
    """The standard deviation of the losses of seeds, that of several variants together."""
    return math.sqrt(statistics.fmean(map(statistics.variance, runs)))


def verdict(distance: float, error: float, bound: float) -> str:
    """Whether a distance is at most a bound, two standard errors being in doubt.

    Example:
      >>> [verdict(x, 0.001, 0.005) for x in (0.002, 0.004, 0.008)]
      ['within', 'not resolved', 'outside']
    """
    if distance + 2 * error <= bound:
        return "within"
    return "not resolved" if distance - 2 * error <= bound else "outside"
