"""Mutation testing: count how many small errors in the library the tests notice.

    pip install -e ".[test,mutation]"
    python .ci/mutation.py --sample 300 --seed 0 --all

Draws mutants, small changes to the library by Cosmic Ray's operators, makes each in a copy of the
working tree, and runs tests that reach the changed line (found with coverage) until one fails.
`--all` then runs slow tests on the mutants that survived. Outcomes are kept in `runs/mutation` by a
hash of the sources, so that a rerun resumes.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "rules", "ops", "quant", "optim", "transforms", "nn")
TESTS, FILES = 80, 8  # most tests and test files per mutant; importing a file is slow, too
SECONDS = 400  # CPU time limit per mutant, several times what its tests take
LEFT_OUT = ("RemoveDecorator", "Variable", "ComparisonOperator_Is", "_Is")  # break, or no-op
Mutants = list[tuple[dict[str, Any], str]]  # place and operator, and the changed source
OPERATORS = {n: get_operator(n)() for n in operator_names() if not any(x in n for x in LEFT_OUT)}


def draw(size: int, seed: int) -> Mutants:
    """Draw mutants: at most one per place, and none in messages, annotations or assertions."""
    places: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for path in (p for name in PACKAGES for p in (ROOT / "unitscale" / name).glob("_[a-z]*.py")):
        source, name = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
        tree = ast.parse(source)
        alone = [n for n in tree.body if isinstance(n, ast.Assign) and " | " in ast.unparse(n)]
        for node in ast.walk(tree):
            alone += [getattr(node, "returns", None), getattr(node, "annotation", None)]
            alone += [node] if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)) else []
        spans = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in alone if n]
        nodes = list(ast_nodes(get_ast(source)))
        for operator, changes in OPERATORS.items():
            starts = [start for node in nodes for start, _ in changes.mutation_positions(node)]
            for number, at in enumerate(starts):
                if not any(first <= at < last for first, last in spans):
                    mutant = {"path": name, "line": at[0], "operator": operator}
                    places[name, *at].append(mutant | {"occurrence": number})
    generator, drawn = random.Random(seed), []
    for place in generator.sample(sorted(places), len(places)):
        mutant = generator.choice(places[place])
        source = (ROOT / mutant["path"]).read_text("utf-8")
        mutated = mutate_code(source, OPERATORS[mutant["operator"]], mutant["occurrence"])
        with contextlib.suppress(SyntaxError):
            drawn += [(mutant, mutated)] if ast.parse(mutated or "").body else []
        if len(drawn) == size:
            break
    return drawn


def run_tests(tree: Path, words: list[str], seconds: int) -> tuple[int, str]:
    """Run pytest with limits on CPU time and (for tests that hang) on elapsed time."""
    own = {"JAX_COMPILATION_CACHE_DIR": f"{tree}-compiled", "PYTHONDONTWRITEBYTECODE": "1"}
    limit = f"ulimit -t {seconds}; timeout -k 5 {4 * seconds} {sys.executable} -m pytest"
    # -n 0, because pytest-cov cannot record contexts under xdist, pyproject.toml's default.
    command = ["sh", "-c", f'{limit} -n 0 --dist no -q --tb=line "$@"', "sh", *words]
    run = subprocess.run(command, cwd=tree, env=os.environ | own, stdout=subprocess.PIPE)
    return run.returncode, run.stdout.decode()


def choose(mutant: dict[str, Any], tree: Path) -> list[str]:
    """Choose tests that run a mutant's statement, in random order, then others in their files."""
    # JAX traces a function once: later tests in a file use it without running its lines.
    data = CoverageData(f"{tree}-coverage")
    data.read()
    contexts = data.contexts_by_lineno(str(tree / mutant["path"]))
    nodes = ast.walk(ast.parse((tree / mutant["path"]).read_text("utf-8")))
    spans = [range(n.lineno, (n.end_lineno or 0) + 1) for n in nodes if isinstance(n, ast.stmt)]
    line = mutant["line"]  # of a decorator: in no statement
    span = min((span for span in spans if line in span), key=len, default=range(line, line + 1))
    met = {name for line in span for name in contexts.get(line, ())}
    if met == {""}:  # the statement runs only at import
        met = {name for names in contexts.values() for name in names}
    own = {name.rsplit("|", 1)[0] for name in met if name}
    files = [name for name, _ in Counter(test.split("::")[0] for test in own).most_common(FILES)]
    tests = sorted({name.rsplit("|", 1)[0] for name in data.measured_contexts()})
    tests = random.Random(0).sample(tests, len(tests))
    near = [test for test in tests if test.split("::")[0] in files]
    return sorted(near, key=lambda test: test not in own)[:TESTS]


def judge(mutant: dict[str, Any], mutated: str, tree: Path) -> str:
    """Run the chosen tests on a mutant; return the output of the failure, or "" if it survives."""
    if not (tests := choose(mutant, tree)):
        return ""
    source = (path := tree / mutant["path"]).read_text("utf-8")
    path.write_text(mutated, "utf-8")
    status, output = run_tests(tree, ["-m", "", "-x", *tests], SECONDS)
    path.write_text(source, "utf-8")
    return output[-300:] or str(status) if status else ""


def survivors(drawn: Mutants, tree: Path, mark: str) -> Mutants:
    """Return the mutants that survive the tests with a mark; reuse outcomes on disk."""
    copy = "git ls-files -zco --exclude-standard | xargs -0 cp --parents -t"
    subprocess.run(f"mkdir -p {tree}; {copy} {tree}", shell=True, cwd=ROOT)
    if not Path(f"{tree}-coverage").exists():
        words = [f"{top}/{package}" for top in ("tests", "unitscale") for package in PACKAGES]
        words += ["--cov=unitscale", "--cov-context=test", "--cov-report=", "-m", mark]
        status, output = run_tests(tree, words, 10**5)
        if status:
            raise SystemExit(f"Tests fail without a mutant:\n{output[-4000:]}")
        (tree / ".coverage").rename(f"{tree}-coverage")
    with Path(f"{tree}-outcomes.jsonl").open("a+", encoding="utf-8") as file:
        file.seek(0)
        killers = dict(map(json.loads, file))
        for mutant, mutated in drawn:
            if (key := json.dumps(mutant)) not in killers:
                killers[key] = judge(mutant, mutated, tree)
                print(json.dumps([key, killers[key]]), file=file, flush=True)
    return [one for one in drawn if not killers[json.dumps(one[0])]]


def main() -> None:
    """Test the mutants of the sample, and print those that survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="run slow tests on the survivors, too")
    asked = parser.parse_args()
    sources = sorted(path for top in ("unitscale", "tests") for path in (ROOT / top).rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    drawn = left = draw(asked.sample, asked.seed)
    for mark in ("not slow", "slow")[: 1 + asked.all]:
        left = survivors(left, ROOT / "runs" / "mutation" / f"{digest}-{mark.split()[0]}", mark)
        print(f"{mark} tests: {len(drawn) - len(left)} of {len(drawn)} noticed; survivors:")
        for mutant, mutated in left:
            print(json.dumps(mutant), mutated.splitlines()[mutant["line"] - 1].strip())


if __name__ == "__main__":
    main()
