"""What every benchmark prints: tables on the terminal, and the same numbers as JSON."""

import datetime
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table as RichTable

from ..errors import refused

WIDTH = 160  # of what is not printed to a terminal
PACKAGES = "jax", "jaxlib", "flax", "optax"

_NAMES = {
    "d": "width, count, of, outside",
    "+d": "reductions",
    ",d": "parameters, ours, scalars, arrays, entries, lost, not finite, numbers kept, sequences, "
    "tokens each, products, FP8 kernels, lost products, amax, casts, kernels",
    ".5f": "validation loss",
    ".4f": "gradient error, accuracy, loss, bytes per entry, over float32, over plain",
    ".3f": "f1, ratio, ratio of medians, lower quartile, upper quartile, CPU time ratio, "
    "over bfloat16, arrays over plain, weights, state, together, least, greatest, "
    "time over plain-bfloat16, time over qwix, value, over projected",
    ".2f": "largest logit, apart, projected ms, measured ms, 16-bit ms, FP8 ms, attention ms, "
    "memory-bound ms, arithmetic ms, projected optimizer ms, measured FP8 products ms, "
    "measured 16-bit products ms, measured attention ms, measured transposes ms, "
    "measured small kernels ms, measured other kernels ms",
    ".1f": "times smaller, without absent times smaller, traced, plain, scaled ms, optax ms, "
    "scalify ms, "
    "unitscale ms, plain ms, peer ms, times ahead, optimizer B/param",
    ".4g": "best, vertex, standard deviation",
    "+.4g": "above reference",
    ".2g": "standard error above",
    ".1e": "difference",
    ".5e": "with factors, without",
    ",.0f": "temporaries MiB, tokens per second, projected tokens per second, GB/s, TFLOP/s, "
    "produced, consumed, MiB, peak MiB, kernels run",
    "+.3%": "over reference, FLOPs",
    "+.2%": "cost",
    ".4%": "share lost, without absent, share subnormal, lost at first, without absent at first, "
    "lost at the end, without absent at the end, added",
    ".3%": "standard error",
    ".2%": "plain float16, scalify float16, heavy-tailed nearest, heavy-tailed stochastic, "
    "normal nearest, normal stochastic",
    ".1%": "share, of all FLOPs, Dense FP8, FP8 of Dense, FP8 of readout",
}
FORMATS = {name: form for form, names in _NAMES.items() for name in names.split(", ")}
"""How numbers of a column are shown, by its name; those of other columns are shown as they are."""
LAST = ("asked", "within", "verdict")
"""Columns that stand behind all others."""

JsonPath = Annotated[
    Path | None, typer.Option("--json", help="also write the tables to this file, as JSON")
]


@dataclass(frozen=True)
class Table:
    """Rows of unrounded values, shown by the names of their columns.

    Attributes:
      title: What it is of.
      rows: Values by column.
      configs: Of rows that were trained, what tells their configs from others.
    """

    title: str
    rows: Sequence[Mapping[str, Any]] = field(default_factory=list)
    configs: str | None = None

    @property
    def columns(self) -> list[str]:
        """Names in the order in which rows have them."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        return sorted(names, key=lambda name: LAST.index(name) + 1 if name in LAST else 0)

    def text(self, row: Mapping[str, Any]) -> list[str]:
        """One row as it is shown: yes or no for booleans, nothing for a missing value."""
        return [_text(row.get(name), FORMATS.get(name, "")) for name in self.columns]


def publish(
    name: str,
    tables: Sequence[Table],
    path: Path | None = None,
    notes: Sequence[str] = (),
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Prints tables and notes, and writes them to `path` if there is one.

    The file also says with which command, versions and machine they were measured, and when: in
    this process, now, but for what `measured` knows better.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in tables:
        shown = RichTable(title=table.title, title_justify="left")
        for column in table.columns:
            shown.add_column(column, justify="right" if column in FORMATS else "left")
        for row in table.rows:
            shown.add_row(*table.text(row))
        console.print(shown)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    if path is None:
        return
    document = {
        "benchmark": name,
        "command": command_line(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | {n: version(n) for n in PACKAGES},
        "machine": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        **(measured or {}),
        "tables": [_written(table) for table in tables],
        "notes": list(notes),
    }
    with refused(f"--json: cannot write {path}", "give a path that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    console.print(f"written to {path}", markup=False, highlight=False)


def _written(table: Table) -> dict[str, Any]:
    configs = {} if table.configs is None else {"configs": table.configs}
    return {"title": table.title, **configs, "rows": [plain(row) for row in table.rows]}


_WRITTEN = ("--json", "--dump")


def command_line(words: Sequence[str]) -> str:
    """The command that was given, files by their names, without where it writes.

    Example:
      >>> command_line(["bench", "parity", "--data", "/texts/a.txt", "--json", "out.json"])
      'python -m recipes bench parity --data a.txt'
    """
    kept = ["python", "-m", "recipes"]
    for before, word in zip(["", *words], words, strict=False):
        if before in _WRITTEN or word.startswith((*_WRITTEN, "train.runs_dir=", "data.cache_dir=")):
            continue
        key, equals, value = word.rpartition("=")
        kept.append(key + equals + (Path(value).name if Path(value).is_absolute() else value))
    return shlex.join(kept)


def within(value: float, bounds: tuple[float | None, float | None]) -> bool:
    """Whether a value lies in a closed range; None is no bound, and NaN lies in no range."""
    low, high = bounds
    return (low is None or value >= low) and (high is None or value <= high) and value == value


def asked(
    value: float, *, least: float | None = None, most: float | None = None, form: str = "g"
) -> dict[str, Any]:
    """The columns that say what was asked of a row's value, and whether it is so.

    Example:
      >>> asked(0.84, most=1.05)
      {'asked': '<= 1.05', 'within': True}
    """
    bounds = {">=": least, "<=": most}
    said = [f"{sign} {bound:{form}}" for sign, bound in bounds.items() if bound is not None]
    return {"asked": ", ".join(said), "within": within(value, (least, most))}


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row that JSON can hold: infinity and NaN, which it has no numbers for, as text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _text(value: Any, form: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, form) if isinstance(value, (int, float)) else str(value)
