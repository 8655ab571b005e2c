"""Figures that were measured, from the files of `notebooks/results`.

    python -m recipes bench results > notebooks/docs/results.md
    python -m recipes bench results --readme

Every other benchmark writes such a file with `--json notebooks/results/NAME.json`; a file's stem
may say more, as `quant-text.json`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..errors import RecipeError
from ._table import Table

RESULTS = Path(__file__).parents[2] / "notebooks" / "results"
MISSED = (("within", False), ("verdict", "outside"))
OPEN = (*MISSED, ("verdict", "not resolved"))

HEAD = """# Results

Each table is what its command printed, read from a file in `notebooks/results`. Files that a
command was given are named without their folder. Times are of the machine that is named.
Where the machine is a GPU, runs in float32 had `JAX_DEFAULT_MATMUL_PRECISION=highest`: no TF32.
In `gpu`, products, attention and the step of qwix are of 2026-11-26. The first two are projected by
the speeds that were assumed before they were measured, all else by those that were.
`bench lms` has BERTs in `fp8` with gradients of the readout in FP8, not yet dithered, and tasks
tuned from the first pretrained model of each policy; `lms-pairs` has the defaults of now, one
pretrained model of each policy and three seeds of each task. `lms` has the character study without
`optimizer.skip_nonfinite`, `charlm` with it, as its config says now.
"""


class Figure(NamedTuple):
    """A line of README's table.

    Attributes:
      what: Was measured.
      file: In `RESULTS`.
      row: Values that tell the row from others, or the column whose largest value counts.
      show: A format of the row's columns.
      table: Of the file; -1 for the last.
    """

    what: str
    file: str
    row: Mapping[str, str] | str
    show: str
    table: int = 0


FIGURES = (
    Figure(
        "validation loss, unit scaling over plain Flax, each at its best rate, mean and standard "
        "error of 5 seeds on 2 texts",
        "libraries.json",
        {"variant": "unit scaling"},
        "{over reference:+.2%}, {standard error:.2%}",
        table=-1,
    ),
    Figure(
        "validation loss, FP8 over float32, mean and standard error of 5 seeds on 2 texts",
        "parity.json",
        {"variant": "fp8"},
        "{over reference:+.2%}, {standard error:.2%}",
        table=2,
    ),
    Figure(
        "... float16 over float32",
        "parity.json",
        {"variant": "float16"},
        "{over reference:+.3%}, {standard error:.3%}",
        table=2,
    ),
    Figure(
        "... FP8 over float32 after 10,000 steps, 3 seeds, a smaller model",
        "parity-drift.json",
        {"variant": "fp8"},
        "{over reference:+.2%}, {standard error:.2%}",
    ),
    Figure(
        "gradient entries that float16 makes zero, at first: how many times fewer than plain Flax",
        "parity-gradients.json",
        {"when": "at first", "library": "unitscale"},
        "{times smaller:,.0f} ({lost} of {entries:,})",
        table=1,
    ),
    Figure(
        "... after training",
        "parity-gradients.json",
        {"when": "at the end", "library": "unitscale"},
        "{times smaller:.0f} ({lost} of {entries:,})",
        table=1,
    ),
    Figure(
        "step of GPT-2 small on an H200, FP8 and scaled optimizer, over plain bfloat16",
        "gpu.json",
        {"figure": "measured step over plain-bfloat16"},
        "{value:.2f}",
        table=-1,
    ),
    Figure(
        "... over qwix in FP8",
        "gpu.json",
        {"figure": "measured step over qwix"},
        "{value:.2f}",
        table=-1,
    ),
    Figure(
        "its peak of memory over plain bfloat16",
        "gpu.json",
        {"figure": "measured peak of memory over plain-bfloat16"},
        "{value:.2f}",
        table=-1,
    ),
    Figure(
        "masked-LM loss of a small BERT, FP8 (the readout's gradients too, as was default) over "
        "float32, mean and standard error of 3 seeds",
        "lms.json",
        {"variant": "fp8"},
        "{over reference:+.2%}, {standard error:.2%}",
    ),
    Figure(
        "logits of imported weights against `transformers`, ten families",
        "lms.json",
        "difference",
        "{difference:.1e}",
        table=4,
    ),
)


def main(
    readme: Annotated[bool, typer.Option("--readme", help="the table of README.md alone")] = False,
) -> None:
    """Prints every result as a page, or the few that README.md shows."""
    print("\n".join(figures() if readme else page()))


def page() -> Iterator[str]:
    """The lines of `notebooks/docs/results.md`: what was missed, then everything."""
    documents = {path.stem: read(path) for path in sorted(RESULTS.glob("*.json"))}
    yield from HEAD.splitlines()
    missed = [
        (stem, table.title, "; ".join(_said(table, row)))
        for stem, document in documents.items()
        for table in tables(document)
        for row in table.rows
        if _is_any(row, OPEN)
    ]
    if missed:
        yield from ("", "## Missed, or not resolved", "", "| table | row | file |")
        yield "|---|---|---|"
        yield from (f"| {title} | {row} | [{stem}](#{stem}) |" for stem, title, row in missed)
    for stem, document in documents.items():
        versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
        yield from ("", f"## {stem}", "", f"`{document['command']}`", "")
        yield f"{document['date']}, {document['machine']}, {versions}."
        for table in tables(document):
            yield from ("", f"### {table.title}", "")
            yield from markdown(table)
        for note in document["notes"]:
            yield from ("", note)


def figures() -> Iterator[str]:
    """The lines of README's table; the same command as in the line above is `same`."""
    yield from ("| figure | asked | measured | command |", "|---|---|---|---|")
    before = ""
    for figure in FIGURES:
        document = read(RESULTS / figure.file)
        row = _row_of(figure, tables(document)[figure.table])
        open_ = "not resolved: " if _is_any(row, OPEN) else ""
        said = ("**missed**: " if _is_any(row, MISSED) else open_) + figure.show.format_map(row)
        asked = row.get("asked", "")
        command = f"`{document['command']}`"
        shown = "same" if command == before else command
        before = command
        yield f"| {figure.what} | {asked} | {said} | {shown} |"


def _row_of(figure: Figure, table: Table) -> Mapping[str, Any]:
    if isinstance(column := figure.row, str):
        return max(table.rows, key=lambda row: row[column])
    wanted = figure.row.items()
    found = [row for row in table.rows if all(str(row.get(name)) == x for name, x in wanted)]
    if len(found) != 1:
        raise RecipeError(
            f"{figure.file}: expected one row with {dict(wanted)}; got {len(found)}; correct "
            "FIGURES, or measure it again"
        )
    return found[0]


def read(path: Path) -> dict[str, Any]:
    """A file that a benchmark wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def tables(document: Mapping[str, Any]) -> list[Table]:
    """The tables of such a file; infinity and NaN, which JSON lacks, are text there."""
    return [Table(table["title"], table["rows"]) for table in document["tables"]]


def markdown(table: Table) -> Iterator[str]:
    """A table's lines in Markdown."""
    yield f"| {' | '.join(table.columns)} |"
    yield "|" + "---|" * len(table.columns)
    for row in table.rows:
        yield f"| {' | '.join(table.text(row))} |"


def _is_any(row: Mapping[str, Any], marks: Iterable[tuple[str, object]]) -> bool:
    """Whether a row has one of some values, each of a column."""
    return any(row.get(column) == value for column, value in marks)


def _said(table: Table, row: Mapping[str, Any]) -> Iterator[str]:
    """What a row says, column by column; a bar would end a cell."""
    for column, text in zip(table.columns, table.text(row), strict=True):
        if text and column not in ("within", "verdict"):
            yield f"{column} {text}"
