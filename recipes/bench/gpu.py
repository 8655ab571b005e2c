"""Everything that only a GPU can say, in one run, each time beside the one that was projected.

    JAX_PLATFORMS=cuda python -m recipes bench gpu --data TEXT --squad FILE

Runs the tests marked gpu; times products, attention, the optimizer and whole training steps;
trains `configs/gpt/parity.yaml` in three formats on three seeds; with a file of questions, lets
`configs/bert/medium.yaml` answer them (`--parts answers`: about a quarter of an hour). Each part is
a process of its own, with the GPU to itself: one that fails is reported, and the others go on. The
file is written after each, and what it has already is not measured again.
"""

from __future__ import annotations

import datetime
import json as json_text
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from ..atomic import write_json
from ..errors import RecipeError, read_text, refused
from ..registry import CONFIGS
from ._gpu_parts import PARTS, USUAL, Setting, on_gpu
from ._profile import KINDS
from ._programs import BEST, PEER, REFERENCE, SHAPES, chosen
from ._runs import DataPath, Fresh
from ._table import JsonPath, Table, asked, plain, publish
from .h200 import MOST_OVER_PEER, MOST_TIME

OUT = Path("gpu.json")
KEPT = 3000  # characters of what a part that failed has printed
LEAST = 30.0  # seconds that a part is worth starting for
MOST = {"tests": 360.0, "losses": 540.0, "answers": 900.0}  # seconds after which a part is stopped
MOST_ELSE = 300.0
SHOWN = 8  # columns of a row; the file has all of them
NOTES = (
    "measured ms: the median over rounds of calls with inputs that differ, of which a round's last "
    "is waited for.",
    "projected: by recipes.bench.aot, for an H200, of the program that was measured.",
)
ProcessResult = dict[str, Any]


def main(
    parts: Annotated[str, typer.Option(help="what to measure, separated by commas")] = "all",
    minutes: Annotated[float, typer.Option(min=0.1, help="no part goes on beyond this")] = 20.0,
    data: DataPath = None,
    squad: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON, for the part answers")
    ] = None,
    out: Annotated[Path, typer.Option(help="the file of all results")] = OUT,
    toy: Annotated[bool, typer.Option("--toy", help="tiny shapes, on any device: a trial")] = False,
    fresh: Fresh = False,
    json: JsonPath = None,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measures on this machine's GPU what other benchmarks project."""
    if part is not None:
        alone(part, Setting(toy, data, out.parent / "runs", squad), out)
        return
    wanted = list(USUAL) if parts == "all" else chosen("--parts", parts, PARTS)
    if squad is None and "answers" in wanted:
        if parts != "all":
            raise RecipeError("--parts answers: expected questions too; got none; add --squad FILE")
        wanted.remove("answers")
    results = done(out, toy)
    left = [name for name in wanted if fresh or name not in results]
    if left and not toy and (found := backend()) != "gpu":
        raise RecipeError(
            f"bench gpu: expected JAX to see a GPU; it sees {found}; install JAX for it and set "
            "JAX_PLATFORMS=cuda, or try the benchmark with --toy"
        )
    given = {"--data": data, "--squad": squad}
    texts = {option: Path(path).resolve() for option, path in given.items() if path is not None}
    end = time.monotonic() + 60 * minutes
    for name in left:
        rest = end - time.monotonic()
        if rest < LEAST and not toy:
            results[name] = {"status": "left out", "error": f"{minutes:g} minutes were over"}
        else:
            Console(stderr=True).print(f"bench gpu: {name}", markup=False, highlight=False)
            limit = max(LEAST, min(rest, MOST.get(name, MOST_ELSE)))
            results[name] = launched(name, toy=toy, texts=texts, limit=limit)
        write(out, results)
    results = {name: results[name] for name in wanted}
    publish("gpu", tables(results), json, NOTES, origin(results))
    Console().print(f"all results are in {out}", markup=False, highlight=False, soft_wrap=True)
    if bad := [name for name, result in results.items() if result["status"] == "failed"]:
        raise RecipeError(f"bench gpu: failed: {', '.join(bad)}; see {out}", exit_code=1)


def done(out: Path, toy: bool) -> dict[str, ProcessResult]:
    """The parts that a file has already; never of both tiny shapes and real ones."""
    if not out.exists():
        return {}
    try:
        parts = json_text.loads(read_text(out, "--out"))["parts"]
        found = {name: part for name, part in parts.items() if part["status"] == "done"}
        others = [name for name, part in found.items() if part.get("toy", False) != toy]
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise RecipeError(
            f"--out: expected a file of this benchmark; {out} is none; remove it, or give another"
        ) from error
    if others:
        raise RecipeError(
            f"--out: {out} has results {'without' if toy else 'of'} --toy; give another file"
        )
    return found


def origin(results: Mapping[str, ProcessResult]) -> dict[str, Any]:
    """What a published file says of the machine: that of the parts, which may not be this one."""
    parts = [result for result in results.values() if result["status"] == "done"]
    if not parts:
        return {}

    def all_of(fact: str) -> str:
        return ", ".join(dict.fromkeys(part[fact] for part in parts))

    machine, versions = all_of("device"), {"jax": all_of("jax")}
    return {"machine": machine, "versions": versions, "date": max(p["date"] for p in parts)}


def alone(name: str, setting: Setting, out: Path) -> None:
    """One part, in this process; its rows in a file."""
    (name,) = chosen("--part", name, PARTS)
    if not setting.toy and not on_gpu():
        raise RecipeError("bench gpu: expected a GPU; JAX sees none")
    rows = [plain(row) for row in PARTS[name](setting)]
    facts = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    facts |= {"date": datetime.date.today().isoformat(), "toy": setting.toy}
    write_json(out, {**facts, "rows": rows})


def backend() -> str:
    """What JAX runs on, asked in another process: this one leaves the GPU to the parts."""
    ask = "import jax; print(jax.default_backend())"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return (found.stdout.strip().splitlines() or ["none"])[-1]


def launched(name: str, *, toy: bool, texts: Mapping[str, Path], limit: float) -> ProcessResult:
    """A part in a process of its own: its rows, or how it failed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "recipes", "bench", "gpu", "--part", name]
        command += ["--out", str(answer), *(["--toy"] if toy else [])]
        command += [word for option, path in texts.items() for word in (option, str(path))]
        # The tests run in a process of their own, beside that of their part.
        own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if name == "tests" else {}
        log = Path(folder) / "log"
        try:
            with log.open("w", encoding="utf-8") as printed:
                code = subprocess.run(
                    command,
                    cwd=CONFIGS.parent,
                    env=os.environ | own,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                    check=False,
                ).returncode
            problem = "" if answer.exists() else f"exit code {code}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit:.0f} s"
        result: ProcessResult = {"seconds": round(time.monotonic() - start, 1)}
        if problem:
            tail = log.read_text(encoding="utf-8", errors="replace")[-KEPT:]
            return {"status": "failed", **result, "error": problem, "printed": tail}
        return {"status": "done", **result, **json_text.loads(answer.read_text(encoding="utf-8"))}


def write(out: Path, results: dict[str, ProcessResult]) -> None:
    """All results so far."""
    with refused(f"--out: cannot write {out}", "give a path that can be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, {"benchmark": "gpu", "parts": results})


def tables(results: Mapping[str, ProcessResult]) -> list[Table]:
    """What was found, the steps of a shape in tables of their own; then what was not."""
    found: list[Table] = []
    shapes: dict[str, list[Any]] = {}
    for name, result in results.items():
        rows, shape = result.get("rows", ()), name.split(" ")[0]
        if shape in SHAPES:
            shapes.setdefault(shape, []).extend(rows)
        else:
            found.append(Table(name.capitalize() + _on(results), _narrow(rows)))
    for shape, rows in shapes.items():
        kinds = [kept for row in rows if (kept := _kinds(row))]
        found.append(Table(f"Training step of {shape}{_on(results)}", _narrow(rows)))
        found.append(Table(f"Kernels of a step of {shape}", kinds))
        found.append(Table(f"What is asked of {BEST}, {shape}", _judged(shape, rows)))
    bad = [
        {"part": name, "status": result["status"], "why": result.get("error", "")}
        for name, result in results.items()
        if result["status"] != "done"
    ]
    return [table for table in [*found, Table("Parts that say nothing", bad)] if table.rows]


def _on(results: Mapping[str, ProcessResult]) -> str:
    devices = {result["device"] for result in results.values() if "device" in result}
    return f", {', '.join(sorted(devices))}" if devices else ""


def _narrow(rows: list[Any]) -> list[Any]:
    return [dict(list(row.items())[:SHOWN]) for row in rows]


def _kinds(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a step that say what its kernels were; of some files it has none."""
    names = [*(f"measured {kind} ms" for kind in KINDS), "kernels run"]
    kept = {name: row[name] for name in names if name in row}
    return {"program": row["program"], **kept} if kept else {}


def _judged(shape: str, rows: list[Any]) -> list[dict[str, Any]]:
    """How the measured step of `fp8-scaled` compares with others, and what was asked of it."""
    measured = {row["program"]: row for row in rows}
    best, found = measured.get(BEST), []
    for other, most in ((REFERENCE, MOST_TIME[shape]), (PEER, MOST_OVER_PEER)):
        if best and other in measured:
            over = best["measured ms"] / measured[other]["measured ms"]
            figure = {"figure": f"measured step over {other}", "value": over}
            found.append(figure | asked(over, most=most))
            if (peak := measured[other].get("peak MiB")) and best.get("peak MiB"):
                figure = f"measured peak of memory over {other}"
                found.append({"figure": figure, "value": best["peak MiB"] / peak})
    return found
