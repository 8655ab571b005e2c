"""The file of a sweep's results: one JSON line a run, appended whole, never written over."""

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import RecipeError
from ..run.folder import ROWS


class Row(NamedTuple):
    """One run: a point of the grid, its learning rate and seed, and how it ended.

    `loss` is infinite for a run that diverged, and None for one that could not be run, whose
    `error` says why.
    """

    point: dict[str, Any]
    learning_rate: float
    seed: int
    loss: float | None
    error: str | None = None


_ROW = TypeAdapter(Row, config=ConfigDict(strict=True, extra="forbid"))


def append_row(folder: Path, row: Row) -> None:
    """Appends a row in one write, which processes beside this one cannot split."""
    loss = "inf" if row.loss == math.inf else row.loss  # JSON has no infinity
    line = json.dumps(row._asdict() | {"loss": loss}) + "\n"
    file = os.open(folder / ROWS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read_rows(folder: Path) -> list[Row]:
    """All rows of a folder; a line that a crash cut short is left out, and closed."""
    path = folder / ROWS
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(fields, dict) and fields.get("loss") == "inf":
            fields["loss"] = math.inf
        try:
            rows.append(_ROW.validate_python(fields))
        except ValidationError as error:
            raise RecipeError(
                f"{path} line {number}: expected a row of a sweep with {', '.join(Row._fields)}; "
                f"got {line[:60]!r}; move the file away, or change name"
            ) from error
    return rows
