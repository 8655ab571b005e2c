"""Measure how many wrong programs the tests notice: mutation testing with Cosmic Ray's operators.

    pip install -e ".[test,mutation]"
    python .ci/mutation.py --sample 300 --seed 0         # tests that are not slow
    python .ci/mutation.py --sample 300 --seed 0 --all   # slow ones too

Draws a sample of small changes to the library, makes each in a copy of the working tree, and runs
some of the tests that come to the changed line, until one fails or CPU time is up. One run of all
tests with coverage finds which come to which line. `runs/mutation` keeps that and the outcomes, as
JSON lines, under a name of these sources; the same command goes on there.
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
TESTS, FILES = 80, 8  # that a mutant meets at most: to import a file takes as long as its tests
SECONDS = 400  # of CPU time for a mutant, several times what its tests take
# Operators that need a name or change an import; numbers do not tell `is` from `==`.
LEFT_OUT = ("RemoveDecorator", "Variable", "ComparisonOperator_Is", "_Is")
OPERATORS = {n: get_operator(n)() for n in operator_names() if not any(x in n for x in LEFT_OUT)}


def draw(root: Path, size: int, seed: int) -> list[tuple[dict[str, Any], str]]:
    """Draw mutants, with their sources: one at a place, none of messages, types and assertions."""
    places: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for path in (p for name in PACKAGES for p in (root / "unitscale" / name).glob("_[a-z]*.py")):
        source, name = path.read_text("utf-8"), path.relative_to(root).as_posix()
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
        source = (root / mutant["path"]).read_text("utf-8")
        mutated = mutate_code(source, OPERATORS[mutant["operator"]], mutant["occurrence"])
        with contextlib.suppress(SyntaxError):
            drawn += [(mutant, mutated)] if ast.parse(mutated or "").body else []
        if len(drawn) == size:
            break
    return drawn


def run_tests(tree: Path, words: list[str], seconds: int) -> tuple[int, str]:
    """The exit status and output of pytest; the clock is for one that waits."""
    own = {"JAX_COMPILATION_CACHE_DIR": f"{tree}-compiled", "PYTHONDONTWRITEBYTECODE": "1"}
    limit = f"ulimit -t {seconds}; timeout -k 5 {4 * seconds} {sys.executable} -m pytest"
    pytest = f'{limit} -n 0 --dist no -p no:cacheprovider -q --tb=line "$@"'
    command = ["sh", "-c", pytest, "sh", *words]
    run = subprocess.run(command, cwd=tree, env=os.environ | own, stdout=subprocess.PIPE)
    return run.returncode, run.stdout.decode()


def choose(mutant: dict[str, Any], tree: Path) -> list[str]:
    """The tests that run a mutant's statement, in random order, then others of the same files.

    Others, since of a function that JAX has traced for one test the next runs no line.
    """
    data = CoverageData(f"{tree}-coverage")
    data.read()
    contexts = data.contexts_by_lineno(str(tree / mutant["path"]))
    nodes = ast.walk(ast.parse((tree / mutant["path"]).read_text("utf-8")))
    spans = [range(n.lineno, (n.end_lineno or 0) + 1) for n in nodes if isinstance(n, ast.stmt)]
    span = min((span for span in spans if mutant["line"] in span), key=len)
    met = {name for line in span for name in contexts.get(line, ())}
    if met == {""}:  # it runs at import alone
        met = {name for names in contexts.values() for name in names}
    own = {name.rsplit("|", 1)[0] for name in met if name}
    files = [name for name, _ in Counter(test.split("::")[0] for test in own).most_common(FILES)]
    tests = sorted({name.rsplit("|", 1)[0] for name in data.measured_contexts()})
    random.Random(0).shuffle(tests)
    tests = [test for test in tests if test.split("::")[0] in files]
    return sorted(tests, key=lambda test: test not in own)[:TESTS]


def judge(mutant: dict[str, Any], mutated: str, tree: Path) -> dict[str, Any]:
    """Run the tests chosen for a mutant, with it in place."""
    path, status, output = tree / mutant["path"], 0, ""
    if tests := choose(mutant, tree):
        source = path.read_text("utf-8")
        path.write_text(mutated, "utf-8")
        status, output = run_tests(tree, ["-m", "", "-x", *tests], SECONDS)
        path.write_text(source, "utf-8")
    by = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))] or [str(status)]
    outcome = {"outcome": "killed", "by": by[0]} if status else {"outcome": "survived"}
    return mutant | outcome | {"change": mutated.splitlines()[mutant["line"] - 1].strip()}


def main() -> None:
    """Judge the mutants of the sample that are not judged yet, and print the survivors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="mutants (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="also tests marked slow")
    asked = parser.parse_args()
    sources = sorted(path for top in ("unitscale", "tests") for path in (ROOT / top).rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    tree = ROOT / "runs" / "mutation" / (digest + "-all" * asked.all)
    tree.mkdir(parents=True, exist_ok=True)
    files = f"git ls-files -zco --exclude-standard | xargs -0 cp --parents -t {tree}"
    subprocess.run(files, shell=True, cwd=ROOT)
    if not Path(f"{tree}-coverage").exists():
        words = [f"{top}/{package}" for top in ("tests", "unitscale") for package in PACKAGES]
        words += ["--cov=unitscale", "--cov-context=test", "--cov-report=", *["-m", ""] * asked.all]
        status, output = run_tests(tree, words, 10**5)
        if status:
            raise SystemExit(f"Tests fail without a mutant:\n{output[-4000:]}")
        (tree / ".coverage").rename(f"{tree}-coverage")
    with Path(f"{tree}-outcomes.jsonl").open("a+", encoding="utf-8") as file:
        file.seek(0)
        known = [json.loads(line) for line in file]
        drawn = draw(tree, asked.sample, asked.seed)
        for mutant, mutated in drawn:
            if not any(mutant.items() <= line.items() for line in known):
                known.append(judge(mutant, mutated, tree))
                print(json.dumps(known[-1]), file=file, flush=True)
    found = [line for line in known if any(mutant.items() <= line.items() for mutant, _ in drawn)]
    survivors = [line for line in found if line["outcome"] == "survived"]
    print(*map(json.dumps, survivors), sep="\n")
    print(f"killed {1 - len(survivors) / max(len(found), 1):.1%} of {len(found)}")


if __name__ == "__main__":
    main()
