"""Flax's own documentation, run as it is and with the layers of `unitscale.nn`.

    git clone --depth 1 https://github.com/google/flax
    python -m recipes bench flax flax

A page is Markdown, reStructuredText, or a notebook that has no Markdown beside it. Its cells run in
turn in one process: once as they are, and once with ``nnx.NAME`` replaced by ``unitscale.nn.NAME``
for each name that both have. Cells that fail as they are are not counted: they ask for data,
packages or another version of Flax. Each run begins in an empty folder and has a time limit.
"""

import ast
import contextlib
import json as jsonlib
import linecache
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from flax import nnx

from unitscale import nn

from ..errors import RecipeError, json_lines, read_text
from ._table import JsonPath, Table, publish

REPLACED = sorted(name for name in dir(nn) if not name.startswith("_") and hasattr(nnx, name))
"""Names of `flax.nnx` that `unitscale.nn` has too."""

_NAME = re.compile(rf"\bnnx\.({'|'.join(REPLACED)})\b")
_FENCE = re.compile(r"^( *)```(?:\{code-cell\}|python\b).*\n((?:.*\n)*?)\1```$", re.MULTILINE)
_DIRECTIVE = re.compile(
    r"^( *)\.\. (?:codediff|testcode|testsetup|code-block:: python).*\n((?:\1 +.*\n| *\n)+)",
    re.MULTILINE,
)
_OPTIONS = re.compile(r"\s*(?:---\n(?:.*\n)*?---\n)?(?::[\w-]+:.*\n\s*)*")
_SHELL = re.compile(r"^(\s*)[!%].*$", re.MULTILINE)  # of IPython

Outcome = dict[str, Any] | None
"""How a cell failed: the kind of error, its message and the cell's line; None if it ran."""


def main(
    folder: Annotated[Path, typer.Argument(help="a clone of Flax, or its docs_nnx")],
    only: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="pages whose path has this; repeatable")
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="seconds that a page may run")] = 300.0,
    json: JsonPath = None,
) -> None:
    """Prints which pages of Flax's documentation run with the layers of `unitscale.nn`."""
    root = folder / "docs_nnx" if (folder / "docs_nnx").is_dir() else folder
    rows, failures, alike = [], [], 0
    for page in pages(root):
        name = page.relative_to(root).as_posix()
        if only and not any(text in name for text in only):
            continue
        if not any(_NAME.search(cell) for cell in cells(page)):
            alike += 1
            continue
        row, failed = compare(page, name, limit)
        rows.append(row)
        failures += failed
        print(f"# {name}: {row['verdict']}", flush=True)
    if not rows:
        raise RecipeError(
            f"{folder}: expected pages with layers of flax.nnx; found none; give a clone of "
            "https://github.com/google/flax, and another --only"
        )
    able = [row for row in rows if row["as they are"]]
    good = sum(row["verdict"] == "runs" for row in able)
    notes = [
        f"{good} of {len(able)} pages with a cell that runs as it is run with unitscale.nn as far.",
        "other values: cells that end in an AssertionError, as where a page compares with numbers "
        "that unit scaling changes.",
        f"in time: both runs came to the last cell within {limit:g} s; later cells do not count.",
        f"left out: {alike} pages that name none of nnx.{', nnx.'.join(REPLACED)}.",
    ]
    tables = [Table("Pages of Flax's documentation, by cells that run", rows)]
    tables += [Table("Cells that run as they are, and not with unitscale.nn", failures)]
    publish("flax", tables if failures else tables[:1], json, notes)


def pages(root: Path) -> list[Path]:
    """The pages of a folder that have cells."""
    found = [p for p in sorted(root.rglob("*")) if p.suffix in (".md", ".rst", ".ipynb")]
    twins = {p.with_suffix("") for p in found if p.suffix == ".md"}
    return [p for p in found if p.suffix != ".ipynb" or p.with_suffix("") not in twins]


def cells(page: Path) -> list[str]:
    """The programs of a page, in order; both sides where two stand side by side."""
    text = read_text(page, "page") + "\n"
    if page.suffix == ".ipynb":
        try:
            parts = jsonlib.loads(text)["cells"]
        except (ValueError, KeyError):  # not fetched, or damaged
            return []
        return ["".join(part["source"]) for part in parts if part["cell_type"] == "code"]
    if page.suffix == ".md":
        found = [textwrap.dedent(body) for _, body in _FENCE.findall(text)]
    else:
        bodies = (textwrap.dedent(body) for _, body in _DIRECTIVE.findall(text))
        found = [side for body in bodies for side in re.split(r"^---$", body, flags=re.MULTILINE)]
    return [_OPTIONS.sub("", cell, count=1) for cell in found if "skip-execution" not in cell]


def compare(page: Path, name: str, limit: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row of a page, and one for each cell that runs as it is alone."""
    plain, ours = (launched(page, which, limit) for which in ("plain", "ours"))
    able = [number for number, outcome in plain.items() if outcome is None]
    missing = {"error": f"not reached within {limit:g} s, or its process died", "line": None}
    failed = {n: error for n in able if (error := ours.get(n, missing)) is not None}
    values = sum(error["error"].startswith("AssertionError") for error in failed.values())
    verdict = "nothing to run" if not able else "runs" if not failed else "fails"
    row = {
        "page": name,
        "cells": len(cells(page)),
        "as they are": len(able),
        "with unitscale.nn": len(able) - len(failed),
        "other values": values,
        "in time": len(plain) == len(ours) == len(cells(page)),
        "verdict": "other values" if failed and values == len(failed) else verdict,
    }
    return row, [{"page": name, "cell": n, **error} for n, error in failed.items()]


def launched(page: Path, which: str, limit: float) -> dict[int, Outcome]:
    """What became of each cell that a process of its own reached, by number."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes"
        out.touch()
        command = [
            sys.executable,
            "-m",
            "recipes.bench.flax",
            str(page.resolve()),
            which,
            str(out),
        ]
        silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = os.environ | {"MPLBACKEND": "Agg"}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=environment, timeout=limit, check=False, **silent)
        lines = read_text(out, "outcomes").splitlines()
        return dict(enumerate(outcome for _, outcome in json_lines(lines, "cell ")))


def outcomes(programs: Sequence[str], which: str) -> Iterator[Outcome]:
    """Runs programs in one namespace, and prints values as a notebook does."""
    module = types.ModuleType("__main__")
    module.__dict__["_unitscale_nn"] = nn
    sys.modules["__main__"] = module
    for number, program in enumerate(programs):
        source = _SHELL.sub(r"\1pass", program)
        if which == "ours":
            source = _NAME.sub(r"_unitscale_nn.\1", source)
        name = f"cell {number}"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        try:
            tree = ast.Interactive(ast.parse(source, name).body)
            exec(compile(tree, name, "single"), module.__dict__)
        except BaseException as error:  # whatever a page raises, its next cell goes on
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == name]
            said = " ".join(f"{type(error).__name__}: {error}".split()).split(". ")[0]
            yield {"error": said[:160], "line": lines[-1] if lines else None}
        else:
            yield None


def _run(page: str, which: str, out: str) -> None:
    """One run of a page, in this process: a line of JSON for each cell when it is over."""
    programs = cells(Path(page))
    os.chdir(Path(out).parent)
    with Path(out).open("a", encoding="utf-8") as file:
        for outcome in outcomes(programs, which):
            print(jsonlib.dumps(outcome), file=file, flush=True)


if __name__ == "__main__":
    _run(*sys.argv[1:])
