"""How many wrong programs the fast tests notice, of a fixed sample of mutants of the library.

    pip install -e ".[test,mutation]"
    python -m tests.mutation --sample 300 --seed 0   # to runs/mutation, and goes on there
    python -m tests.mutation --seconds 600           # more tests for those that survived
    python -m tests.mutation --report                # survivors, share killed so far

Mutants are those of `tests.mutation.mutants`, made in copies of the working tree. One run of the
library's fast tests tells which of them come to a line (`tests.mutation.covering`). A mutant meets
those of its own line only, one process for a few files and one for more, each about as long as
`--seconds` says; so a survivor has met a sample of the tests, and the share that is killed is a
lower bound. A mutant that needs several times the usual time counts as killed. In the end the tests
that killed run once more without a mutation."""

import argparse
import difflib
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.compilation import cache_folder
from tests.mutation.covering import MEASURED, Covering, options
from tests.mutation.mutants import Mutant, draw

ROOT = Path(__file__).parents[2]
PYTEST = ("-m", "pytest", "-n", "0", "--dist", "no", "-p", "no:cacheprovider", "-q", "--tb=line")
# A mutant may use this many times the usual processor time, and as much more to compile and read.
TIMES, MORE = 4, 60


def key_of(line: dict[str, Any]) -> tuple[str, str, int]:
    return line["path"], line["operator"], line["occurrence"]


class Results:
    """JSON lines: what was asked, and what became of each mutant; the later line of two."""

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        self.path, self.lock = path, threading.Lock()
        lines = read(path)
        if not lines:
            self.add(asked)
        elif lines[0] != asked:
            raise SystemExit(
                f"{path} is of another run, {lines[0]}; expected {asked}. Another --out?"
            )
        self.found = {key_of(line): line for line in lines[1:]}

    def is_due(self, mutant: Mutant, seconds: float) -> bool:
        line = self.found.get(mutant[:3])
        return line is None or (line["outcome"] == "survived" and line["asked"] < seconds)

    def add(self, line: dict[str, Any]) -> None:
        with self.lock, self.path.open("a") as file:
            print(json.dumps(line), file=file)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def run_tests(folder: Path, tests: list[str], seconds: float | None = None) -> tuple[int, str]:
    """The exit status of pytest, and the end of what it prints."""
    own = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "COVERAGE_FILE": str(folder.parent / "coverage"),
        "PYTEST_ADDOPTS": "",
    }
    limit = f"ulimit -t {int(seconds)}; " if seconds else ""
    # A program that waits rather than computes is ended by the clock.
    clock = ["timeout", "-k", "5", str(int(10 * seconds) if seconds else 0)]
    listed = folder.parent / f"{folder.name}.tests"
    listed.write_text("\n".join(tests), "utf-8")
    done = subprocess.run(
        [*clock, "sh", "-c", f'{limit}exec "$@"', "sh", sys.executable, *PYTEST, f"@{listed}"],
        cwd=folder,
        env=os.environ | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout[-4000:]


def covering(kept: Path, folder: Path, sources: dict[str, str]) -> Covering:
    """Which tests come to which line: measured where that is not known of these sources."""
    state = kept / "covering.json"
    if not state.exists() or json.loads(state.read_text()) != sources:
        print("which tests come to which line: some ten minutes", flush=True)
        status, output = run_tests(folder, [*MEASURED, *options(kept.resolve())])
        if status:
            raise SystemExit(f"tests fail without a mutation:\n{output}")
        shutil.move(folder.parent / "coverage", kept / "coverage")
        state.write_text(json.dumps(sources))
    return Covering(kept, folder)


def judge(mutant: Mutant, folder: Path, tests: Covering, seconds: float, results: Results) -> None:
    path = folder / mutant.path
    source = path.read_text("utf-8")
    mutated = mutant.applied_to(source)
    assert mutated is not None, "draw() took those that apply"
    changed = difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0, lineterm="")
    change = [x for x in changed if not x.startswith(("---", "+++", "@@"))]
    line = mutant._asdict() | {"change": change, "outcome": "survived", "asked": seconds, "met": 0}
    for some, usual in tests.stages(mutant.path, mutant.line, seconds):
        line["met"] += len(some)
        write(path, mutated)
        status, output = run_tests(folder, ["-x", *some], TIMES * usual + MORE)
        write(path, source)
        if status:
            failed = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))]
            line |= {"outcome": "killed", "by": failed[:1] or [f"status {status}"]}
            break
    results.add(line)


def write(path: Path, source: str) -> None:
    """Two versions of a file within a second may have one size and one date: no stale bytecode."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(source, "utf-8")


def copy_tree(folder: Path) -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listing, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def digest(folder: Path) -> str:
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(p.read_bytes() for p in files)).hexdigest()[:12]


def killers(lines: list[dict[str, Any]]) -> list[str]:
    found = {text for line in lines for text in line.get("by", ()) if text.startswith("FAILED ")}
    return sorted(text.removeprefix("FAILED ").split(" - ")[0] for text in found)


def report(lines: list[dict[str, Any]]) -> None:
    mutants = {key_of(line): line for line in lines}.values()
    for line in (x for x in mutants if x["outcome"] == "survived"):
        print(json.dumps(line))
    killed = Counter(line["outcome"] for line in mutants)["killed"]
    print(f"killed {killed} of {len(mutants)}: {killed / max(len(mutants), 1):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="mutants (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for a mutant, twice")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutation", metavar="FOLDER")
    parser.add_argument("--report", action="store_true", help="of --out, without running a test")
    asked = parser.parse_args()
    outcomes = asked.out / "outcomes.jsonl"
    if asked.report:
        return report(read(outcomes)[1:])
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unitscale-mutation.") as temporary:
        # What mutants compile stays out of the folder that the tests keep.
        if cache_folder().exists():
            shutil.copytree(cache_folder(), Path(temporary) / "compiled")
        copies = [Path(temporary) / str(job) for job in range(asked.jobs)]
        folders: queue.Queue[Path] = queue.Queue()
        for folder in copies:
            copy_tree(folder)
            folders.put(folder)
        mutants = draw(copies[0], asked.sample, asked.seed)
        # Not the size of the sample: a larger one goes on from a smaller one.
        sources = {name: digest(copies[0] / name) for name in ("unitscale", "tests")}
        results = Results(outcomes, {"seed": asked.seed} | sources)
        tests = covering(asked.out, copies[0], sources)

        def one(mutant: Mutant) -> None:
            folder = folders.get()
            judge(mutant, folder, tests, asked.seconds, results)
            folders.put(folder)

        pool = ThreadPoolExecutor(asked.jobs)
        try:
            list(pool.map(one, (m for m in mutants if results.is_due(m, asked.seconds))))
        finally:
            pool.shutdown(cancel_futures=True)
        lines = read(outcomes)[1:]
        status, output = run_tests(copies[0], killers(lines))
        if status:
            raise SystemExit(f"tests that killed fail without a mutation:\n{output}")
    report(lines)


if __name__ == "__main__":
    main()
