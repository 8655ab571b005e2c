"""Everything that only a GPU can say, in one run, each time beside the one that was projected.

    JAX_PLATFORMS=cuda python -m recipes bench gpu --data TEXT --squad FILE

Runs the tests marked gpu; times products, attention, the optimizer and whole training steps;
trains `configs/gpt/parity.yaml` in three formats on three seeds; with a file of questions, lets
`configs/bert/medium.yaml` answer them (`--parts answers`: about a quarter of an hour). Each part is
a process of its own, with the GPU to itself: one that fails is reported, and the others go on. The
file is written after each.
"""

from __future__ import annotations

import json
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

from .. import MODULE
from ..atomic import write_json
from ..errors import RecipeError, refused
from ..registry import CONFIGS
from ._gpu_parts import PARTS, USUAL, Setting, on_gpu
from ._programs import SHAPES, chosen
from ._runs import DataPath
from ._table import Table, plain, publish

OUT = Path("gpu.json")
KEPT = 3000  # characters of what a part that failed has printed
LEAST = 30.0  # seconds that a part is worth starting for
MOST = {"tests": 360.0, "losses": 540.0, "answers": 900.0}  # seconds after which a part is stopped
MOST_ELSE = 300.0
SHOWN = 8  # columns of a row; the file has all of them
NOTES = (
    "measured ms: the median over rounds of calls with inputs that differ, of which a round's last "
    "is waited for.",
    "projected: by unitscale.analysis.roofline, for an H200, of the program that was measured.",
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
    if not toy and (found := backend()) != "gpu":
        raise RecipeError(
            f"bench gpu: expected JAX to see a GPU; it sees {found}; install JAX for it and set "
            "JAX_PLATFORMS=cuda, or try the benchmark with --toy"
        )
    given = {"--data": data, "--squad": squad}
    texts = {option: Path(path).resolve() for option, path in given.items() if path is not None}
    results: dict[str, ProcessResult] = {}
    end = time.monotonic() + 60 * minutes
    for name in wanted:
        left = end - time.monotonic()
        if left < LEAST and not toy:
            results[name] = {"status": "left out", "error": f"{minutes:g} minutes were over"}
        else:
            Console(stderr=True).print(f"bench gpu: {name}", markup=False, highlight=False)
            limit = max(LEAST, min(left, MOST.get(name, MOST_ELSE)))
            results[name] = launched(name, toy=toy, texts=texts, limit=limit)
        write(out, results)
    publish("gpu", tables(results), notes=[*NOTES, f"written to {out}"])
    if bad := [name for name, result in results.items() if result["status"] == "failed"]:
        raise RecipeError(f"bench gpu: failed: {', '.join(bad)}; see {out}", exit_code=1)


def alone(name: str, setting: Setting, out: Path) -> None:
    """One part, in this process; its rows in a file."""
    (name,) = chosen("--part", name, PARTS)
    if not setting.toy and not on_gpu():
        raise RecipeError("bench gpu: expected a GPU; JAX sees none")
    rows = [plain(row) for row in PARTS[name](setting)]
    facts = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
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
        command = [sys.executable, "-m", MODULE, "bench", "gpu", "--part", name]
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
        return {"status": "done", **result, **json.loads(answer.read_text(encoding="utf-8"))}


def write(out: Path, results: dict[str, ProcessResult]) -> None:
    """All results so far."""
    with refused(f"--out: cannot write {out}", "give a path that can be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, {"benchmark": "gpu", "parts": results})


def tables(results: dict[str, ProcessResult]) -> list[Table]:
    """What was found, the steps of a shape in one table; then what was not."""
    groups: dict[str, list[Any]] = {}
    for name, result in results.items():
        shape = name.split(" ")[0]
        title = f"Training step of {shape}" if shape in SHAPES else name.capitalize()
        groups.setdefault(title, []).extend(result.get("rows", ()))
    bad = [
        {"part": name, "status": result["status"], "why": result.get("error", "")}
        for name, result in results.items()
        if result["status"] != "done"
    ]
    devices = {result["device"] for result in results.values() if "device" in result}
    on = f", {', '.join(sorted(devices))}" if devices else ""
    found = [
        Table(title + on, [dict(list(row.items())[:SHOWN]) for row in rows])
        for title, rows in groups.items()
        if rows
    ]
    return [*found, *([Table("Parts that say nothing", bad)] if bad else [])]
