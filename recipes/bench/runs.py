"""Train the runs that a benchmark compares, and publish its tables.

Losses differ more between seeds than between number formats, so runs are compared in pairs of the
same seed and text: a difference is the mean over pairs, with a standard error. Finished runs in
`train.runs_dir` are reused, and stopped runs resumed.
"""

import datetime
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from ..config import RunConfig
from ..errors import RecipeError
from ..recipe import recipe_of
from ..registry import CONFIGS, load_config
from ..run.pool import each, message_of
from ..run.state import load_trained
from ..run.step import make_evaluation, mean_loss
from ..train import train

PARITY = "gpt/parity.yaml"
PLAIN_RATE = 0.004  # for `parity.yaml`, the best of 0.002, 0.004 and 0.008 (bench libraries)

# Options that several benchmarks have.
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]
ConfigPath = Annotated[str | None, typer.Option("--config", help="YAML file of the runs")]
DataPaths = Annotated[list[str] | None, typer.Option("--data", help="a text; repeat for more")]
Seeds = Annotated[int, typer.Option(min=1, help="number of seeds per variant")]
Jobs = Annotated[int, typer.Option(min=1, help="runs trained at the same time")]
Fresh = Annotated[bool, typer.Option("--fresh", help="train finished runs again")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="also write the tables to this file")]

# Overrides by variant; the first variant is the reference. Bounds limit the relative difference
# from it in either direction; 0 means "no worse".
Variants = Mapping[str, Sequence[str]]
Bounds = Mapping[str, float]

_SCORES = ("above reference", "error above")


def plain_words(rate: float = PLAIN_RATE, *more: str) -> tuple[str, ...]:
    """Return overrides for a plain `flax.nnx` model, without u-muP."""
    words = ("model.library=plain", "precision.policy=float32", "optimizer.umup=false")
    words += ("optimizer.multipliers={}", "optimizer.weight_decay=0.0")
    return (*words, f"optimizer.learning_rate={rate}", *more)


class Told(NamedTuple):
    """Options of the runs."""

    config: str | None = None
    overrides: list[str] | None = None
    seeds: int = 1
    fresh: bool = False
    data: Sequence[str] | None = None
    jobs: int = 1

    def texts(self) -> dict[str, list[str]]:
        """Map the suffix of each text's run names to its config overrides."""
        found = {f"-{Path(path).stem}": [f"data.path={path}"] for path in self.data or ()}
        if len(found) < len(self.data or ()):
            raise RecipeError("--data: expected files of different names; rename one")
        return found or {"": []}


class Table(NamedTuple):
    """Rows of values by column; columns of lists are written to JSON, but not printed."""

    title: str
    rows: Sequence[Mapping[str, Any]]


class Compared(NamedTuple):
    """Losses or scores by variant, ordered by text and then by seed."""

    configs: dict[str, list[RunConfig]]
    values: dict[str, list[float]]
    texts: list[str]
    metric: str
    rates: list[dict[str, Any]]

    def tables(self, title: str, bounds: Bounds | None = None) -> list[Table]:
        """Compare the variants with the reference, on each text and on all, and by rate."""
        first = next(iter(self.configs.values()))
        seeds = len(first) // len(self.texts)
        parts = {text: slice(i * seeds, (i + 1) * seeds) for i, text in enumerate(self.texts)}
        if len(parts) > 1:
            parts[" and ".join(self.texts)] = slice(None)
        found = []
        for text, part in parts.items():
            values = {name: values[part] for name, values in self.values.items()}
            rows = differences(values, bounds or {}, self.metric)
            about = [f"{first[0].train.steps} steps", f"{seeds} seed{'s' * (seeds > 1)}", text]
            found.append(Table(f"{title}: {', '.join(filter(None, about))}", rows))
        return [*found, Table("... at each learning rate", self.rates)] if self.rates else found


def compare(
    variants: Variants,
    told: Told,
    *,
    config: str = PARITY,
    metric: str = "loss",
    rates: Mapping[str, Sequence[float]] | None = None,
    own: Callable[[str, int], Sequence[str]] = lambda name, number: (),
) -> Compared:
    """Train every variant on every text with every seed, and keep the best of its `rates`.

    The metric is a score, or the loss over all validation data. `own` returns further overrides for
    a variant and the number of the seed.
    """
    tried = {name: (rates or {}).get(name) or (None,) for name in variants}
    base, configs = told.config or str(CONFIGS / config), {}
    for name, rate in [(key, rate) for key in variants for rate in tried[key]]:
        label = name if rate is None else f"{name}-{rate:g}"
        words = [*(told.overrides or ()), *variants[name]]
        words += [] if rate is None else [f"optimizer.learning_rate={rate}"]
        configs[name, rate] = []
        for text, data in told.texts().items():
            for number in range(told.seeds):
                more = [*words, *data, *own(name, number), "train.sample_tokens=0"]
                one = load_config(base, more)
                end = f"{label}{text}" + (f"-seed{number}" if number else "")
                more += [f"name={one.name}-{end}", f"seed={one.seed + number}"]
                configs[name, rate].append(load_config(base, more))
    found = _measured(configs.values(), told, metric)
    values = {key: [found[one.name] for one in same] for key, same in configs.items()}
    best, rows, choose = {}, [], min if metric == "loss" else max
    for name in variants:
        of_rate = {rate: statistics.fmean(values[name, rate]) for rate in tried[name]}
        best[name] = choose(of_rate, key=lambda rate: of_rate[rate])
        if rates and name in rates:
            rows += [{"variant": name, "rate": r, metric: x} for r, x in of_rate.items()]
    return Compared(
        {name: configs[name, best[name]] for name in variants},
        {name: values[name, best[name]] for name in variants},
        [text.removeprefix("-") for text in told.texts()],
        metric,
        rows,
    )


def _measured(configs: Iterable[Any], told: Told, metric: str) -> dict[str, float]:
    """Train and evaluate all runs, in one or several processes; return results by name."""
    tasks = [(one, told.fresh, metric) for same in configs for one in same]
    found: dict[str, Any] = {}
    console = Console(stderr=True)
    for (config, *_), value in each(tasks, told.jobs, _value):
        found[config.name] = value
        console.print(f"{len(found)}/{len(tasks)}  {config.name}  {value}", markup=False)
    if failed := [f"{name}: {value}" for name, value in found.items() if isinstance(value, str)]:
        what = f"{len(failed)} of {len(tasks)} runs failed: {failed[0]}; the others are kept"
        raise RecipeError(f"{what}: run the same command to try these again", exit_code=1)
    return found


def _value(config: RunConfig, fresh: bool, metric: str) -> float | str:
    """Return the loss or score of a run, or the message of its error."""
    try:
        scores = trained(config, fresh)
        return float(loss_of(config) if metric == "loss" else scores[metric])
    except Exception as error:
        if getattr(error, "exit_code", 1) > 128:  # a signal stopped it
            raise
        return message_of(error)  # other runs continue
    finally:
        jax.clear_caches()


def trained(config: RunConfig, fresh: bool) -> dict[str, float]:
    """Train or resume a run unless it is finished; return its scores."""
    outcome = train(config, fresh=fresh, console=Console())
    if outcome.signal is not None:
        todo = f"stopped by signal {outcome.signal}; run the same command to resume"
        raise RecipeError(todo, exit_code=128 + outcome.signal)
    return outcome.scores


def loss_of(config: RunConfig) -> float:
    graphdef, state = load_trained(config, print)
    batches = recipe_of(config).load_data(config).validation()
    return mean_loss(make_evaluation(graphdef, config.precision), state.params, state.rest, batches)


def differences(
    values: Mapping[str, Sequence[float]], bounds: Bounds, metric: str = "loss"
) -> list[dict[str, Any]]:
    """Compare variants with the first one in pairs: losses by ratio, scores by difference."""
    is_loss = metric == "loss"
    above, spread = ("over reference", "standard error") if is_loss else _SCORES
    reference, rows = next(iter(values.values())), []
    for index, (name, found) in enumerate(values.items()):
        row: dict[str, Any] = {"variant": name, metric: statistics.fmean(found)}
        if index:
            pairs = zip(found, reference, strict=True)
            over = [(a / b - 1 if is_loss else a - b) for a, b in pairs]
            row[above], error = statistics.fmean(over), 0.0
            if len(over) > 1:
                row[spread] = error = statistics.stdev(over) / math.sqrt(len(over))
            if (bound := bounds.get(name)) is not None:
                row["asked"] = f"within {bound:.1%}" if bound else "no worse"
                row["verdict"] = verdict(abs(row[above]) if bound else row[above], error, bound)
        rows.append(row | {"values": list(found)})
    return rows


def verdict(distance: float, error: float, bound: float) -> str:
    """Compare a distance with a bound; "not resolved" within two standard errors."""
    if distance + 2 * error <= bound:
        return "within"
    return "not resolved" if distance - 2 * error <= bound else "outside"


def asked(value: float, most: float) -> dict[str, Any]:
    """Return columns with the goal for a value, and whether the value reaches it."""
    return {"asked": f"<= {most:g}", "within": value <= most}


def listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def chosen(option: str, names: str, known: Mapping[str, Any]) -> list[str]:
    """Parse a list of names; raise an error for unknown ones."""
    wanted = listed(names)
    if unknown := [name for name in wanted if name not in known]:
        raise RecipeError(f"{option}: expected some of {', '.join(known)}; got {unknown[0]}")
    return wanted


def publish(
    name: str, tables: Sequence[Table], path: Path | None = None, notes: Sequence[str] = ()
) -> None:
    """Print tables and notes, and write them to a file with command, versions, device and commit.

    If the output is not a terminal, tables are printed as Markdown for the results page.
    """
    terminal = Console().is_terminal
    console = Console(width=None if terminal else 1000, highlight=False)
    for table in tables:
        shown = RichTable(box=box.HEAVY_HEAD if terminal else box.MARKDOWN)
        columns = dict.fromkeys(name for row in table.rows for name in row)
        columns = [c for c in columns if not any(isinstance(r.get(c), list) for r in table.rows)]
        for column in columns:
            shown.add_column(column)
        for row in table.rows:
            shown.add_row(*(text_of(column, row.get(column)) for column in columns))
        console.print(f"\n### {table.title}\n", markup=False)
        console.print(shown)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    if path is None:
        return
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=CONFIGS.parent, capture_output=True, check=False)
    # Without folders, which are specific to this machine.
    words = shlex.join(re.sub(r"(^|=)/(.*/)?", r"\1", word) for word in sys.argv[1:])
    document = {
        "benchmark": name,
        "command": f"python -m recipes {words}",
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.decode().strip(),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("jax", "jaxlib", "flax", "optax")},
        "machine": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "tables": [{"title": t.title, "rows": [_finite(row) for row in t.rows]} for t in tables],
        "notes": list(notes),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert infinity and NaN, which JSON does not have, to text."""
    odd = {k: str(v) for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**row, **odd}


def text_of(column: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str({None: "", True: "yes", False: "no"}.get(value, value))
    if column in ("over reference", "standard error"):
        return f"{value:+.3%}"
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.5g}"
