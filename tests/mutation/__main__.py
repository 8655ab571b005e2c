"""How many wrong programs the fast tests notice, of a fixed sample of mutants of the library.

    pip install -e ".[test,mutation]"
    python -m tests.mutation --sample 300 --seed 0            # to mutation.jsonl, and goes on there
    python -m tests.mutation --tests main --out before.jsonl  # with the tests of a git revision
    python -m tests.mutation --report --out before.jsonl      # survivors, share killed so far

Mutants are those of `tests.mutation.mutants`, made in copies of the working tree. Tests run in
stages, the likely killers first: those of the module, of its namesakes in other packages, of its
package, and, for what is undecided when all mutants have come so far, of the packages that import
that. A mutant that needs several times the usual time counts as killed."""

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
from tests.mutation.mutants import Mutant, draw

ROOT = Path(__file__).parents[2]
# The packages whose tests may notice a mutant of another: those that import it, the nearest first.
IMPORTED_BY = {
    "core": ("rules", "quant", "ops", "optim", "transforms", "nn"),
    "rules": ("ops", "optim", "nn"),
    "quant": ("ops", "nn"),
    "ops": ("nn",),
    "optim": (),
}
PYTEST = ("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-x", "-q", "--tb=line")
# A mutant may use this many times the usual processor time, and as much more for its compilations.
TIMES, MORE = 4, 30


def stages(root: Path, path: str) -> tuple[list[str], ...]:
    """Arguments of pytest, the tests that know the module best first, other packages' last."""
    _, package, file = Path(path).parts
    others = IMPORTED_BY[package]
    stem = f"test{Path(file).stem}.py"
    own, *twins = (
        [n] if (root / (n := f"tests/{p}/{stem}")).exists() else [] for p in (package, *others)
    )
    twins = [name for found in twins for name in found]
    rest = [f"tests/{package}", f"unitscale/{package}", *(f"--ignore={n}" for n in (*own, path))]
    folders = [f"{top}/{p}" for top in ("tests", "unitscale") for p in others]
    return [*own, path], twins, rest, folders and [*folders, *(f"--ignore={n}" for n in twins)]


def key_of(line: dict[str, Any]) -> tuple[str, str, int]:
    return line["path"], line["operator"], line["occurrence"]


class Results:
    """JSON lines: what was asked, the usual times, and what became of each mutant."""

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        self.path, self.lock = path, threading.Lock()
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        if not lines:
            self.add(asked)
        elif lines[0] != asked:
            raise SystemExit(
                f"{path} is of another run, {lines[0]}; expected {asked}. Another --out?"
            )
        self.usual = {tuple(x["tests"]): x["usual"] for x in lines if "usual" in x}
        self.outcomes = {key_of(x): x["outcome"] for x in lines if "outcome" in x}

    def usual_seconds(self, tests: list[str], folder: Path) -> float:
        """What tests take without a mutation, where they pass."""
        if tuple(tests) not in self.usual:
            status, seconds, output = run_tests(folder, tests, None)
            if not passes(status):
                raise SystemExit(f"{' '.join(tests)} fail without a mutation:\n{output}")
            self.usual[tuple(tests)] = seconds
            self.add({"tests": tests, "usual": round(seconds, 1)})
        return self.usual[tuple(tests)]

    def add(self, line: dict[str, Any]) -> None:
        with self.lock, self.path.open("a") as file:
            print(json.dumps(line), file=file)


def run_tests(folder: Path, tests: list[str], seconds: float | None) -> tuple[int, float, str]:
    """The exit status of pytest, its processor seconds, and the end of what it prints."""
    caches = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"), "PYTEST_ADDOPTS": ""}
    limit = f"ulimit -t {int(seconds)}; " if seconds else ""
    # A program that waits rather than computes is ended by the clock.
    clock = ["timeout", "-k", "5", str(int(20 * seconds) if seconds else 0)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*clock, "sh", "-c", f'{limit}exec "$@"', "sh", sys.executable, *PYTEST, *tests],
            cwd=folder,
            env=os.environ | caches,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return process.returncode, usage.ru_utime + usage.ru_stime, output.read()[-2000:]


def passes(status: int) -> bool:
    return status in (0, 5)  # 5: no test among these


def judge(mutant: Mutant, folder: Path, results: Results, last: bool) -> None:
    """Runs all stages of tests but the last, or the last."""
    path = folder / mutant.path
    source = path.read_text("utf-8")
    mutated = mutant.applied_to(source)
    assert mutated is not None, "draw() took those that apply"
    changed = difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0, lineterm="")
    change = [x for x in changed if not x.startswith(("---", "+++", "@@"))]
    *near, far = stages(folder, mutant.path)
    outcome = "survived" if last or not far else "undecided"
    line = mutant._asdict() | {"change": change, "outcome": outcome}
    spent = 0.0
    for tests in filter(None, [far] if last else near):
        usual = results.usual_seconds([name for name in tests if not name.startswith("-")], folder)
        write(path, mutated)
        status, seconds, output = run_tests(folder, tests, TIMES * usual + MORE)
        write(path, source)
        spent += seconds
        if not passes(status):
            by = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))][:1]
            line |= {"outcome": "killed", "by": by or f"status {status}"}
            break
    results.add(line | {"seconds": round(spent, 1)})
    results.outcomes[mutant[:3]] = line["outcome"]


def write(path: Path, source: str) -> None:
    """Two versions of a file within a second may have one size and one date: no stale bytecode."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(source, "utf-8")


def copy_tree(folder: Path, tests: str | None) -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listing, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    if tests:
        shutil.rmtree(folder / "tests")
        archive = subprocess.check_output(["git", "archive", tests, "tests"], cwd=ROOT)
        subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)


def digest(folder: Path) -> str:
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(p.read_bytes() for p in files)).hexdigest()[:12]


def report(path: Path) -> None:
    lines = [x for x in map(json.loads, path.read_text().splitlines()) if "outcome" in x]
    mutants = {key_of(line): line for line in lines}.values()  # the later line of two
    for outcome in ("undecided", "survived"):
        for line in (x for x in mutants if x["outcome"] == outcome):
            print(json.dumps(line))
    counts = Counter(line["outcome"] for line in mutants)
    share = counts["killed"] / max(len(mutants), 1)
    print(
        f"killed {counts['killed']} of {len(mutants)}: {share:.1%}; {counts['undecided']} undecided"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="mutants (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", metavar="REV", help="take tests/ from a revision of git")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument("--out", type=Path, default=Path("mutation.jsonl"))
    parser.add_argument("--report", action="store_true", help="of --out, without running a test")
    asked = parser.parse_args()
    if asked.report:
        return report(asked.out)
    with tempfile.TemporaryDirectory(prefix="unitscale-mutation.") as temporary:
        # What mutants compile stays out of the folder that the tests keep.
        if cache_folder().exists():
            shutil.copytree(cache_folder(), Path(temporary) / "compiled")
        copies = [Path(temporary) / str(job) for job in range(asked.jobs)]
        folders: queue.Queue[Path] = queue.Queue()
        for folder in copies:
            copy_tree(folder, asked.tests)
            folders.put(folder)
        mutants = draw(copies[0], asked.sample, asked.seed)
        # Not the size of the sample: a larger one goes on from a smaller one.
        sources = {name: digest(copies[0] / name) for name in ("unitscale", "tests")}
        results = Results(asked.out, {"seed": asked.seed} | sources)

        def one(mutant: Mutant, last: bool) -> None:
            folder = folders.get()
            judge(mutant, folder, results, last)
            folders.put(folder)

        pool = ThreadPoolExecutor(asked.jobs)
        try:
            for last, due in ((False, None), (True, "undecided")):
                todo = [m for m in mutants if results.outcomes.get(m[:3]) == due]
                list(pool.map(one, todo, [last] * len(todo)))
        finally:
            pool.shutdown(cancel_futures=True)
    report(asked.out)


if __name__ == "__main__":
    main()
