"""What every benchmark prints: tables on the terminal, and the same numbers as JSON."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table as RichTable

from ..errors import RecipeError

WIDTH = 160  # of what is not printed to a terminal

JsonPath = Annotated[
    Path | None, typer.Option("--json", help="also write the tables to this file, as JSON")
]


@dataclass(frozen=True)
class Table:
    """Rows of unrounded values, and how to show them.

    Args:
      title: Says what was measured, on what.
      columns: Name to format specification, such as ".3f"; "" shows a value as it is.
      rows: One mapping from column name to value per row; a column may be missing.
    """

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def text(self, row: Mapping[str, Any]) -> list[str]:
        """One row as it is shown: yes or no for booleans, nothing for a missing value."""
        return [_text(row.get(name), form) for name, form in self.columns.items()]


def publish(
    name: str, tables: Sequence[Table], path: Path | None = None, notes: Sequence[str] = ()
) -> None:
    """Prints tables and notes, and writes them to `path` if there is one.

    Raises:
      RecipeError: The file cannot be written.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in tables:
        shown = RichTable(title=table.title, title_justify="left")
        for column, form in table.columns.items():
            shown.add_column(column, justify="right" if form else "left")
        for row in table.rows:
            shown.add_row(*table.text(row))
        console.print(shown)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    if path is None:
        return
    device = jax.devices()[0].device_kind
    document = {
        "benchmark": name,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": device,
        "tables": [{"title": t.title, "rows": [_plain(row) for row in t.rows]} for t in tables],
        "notes": list(notes),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"--json: cannot write {path}: {error.strerror}; give a path that can be written"
        ) from error
    console.print(f"written to {path}", markup=False, highlight=False)


def within(value: float, bounds: tuple[float | None, float | None] | None) -> bool:
    """Whether a value lies in a closed range; None is no bound, and NaN lies in no range."""
    low, high = bounds or (None, None)
    return (low is None or value >= low) and (high is None or value <= high) and value == value


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
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
