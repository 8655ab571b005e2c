"""Which tests run a line of the library, and how long each of them takes.

Measured once, by the fast tests of the library in one process: of a program that JAX traced for one
test and keeps, the next test runs no line.
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData

PACKAGES = ("core", "rules", "ops", "quant", "optim", "transforms", "nn")
MEASURED = [f"{top}/{package}" for top in ("tests", "unitscale") for package in PACKAGES]
# Files of tests that a mutant meets at first, and at most: to read one takes as long as its tests.
FIRST, MOST = 4, 16


def options(folder: Path) -> list[str]:
    """Of pytest, for a run of `MEASURED` that leaves in a folder what `Covering` reads."""
    coverage = ["--cov=unitscale", "--cov-context=test", "--cov-report="]
    return [*coverage, "-o", "junit_family=xunit1", f"--junitxml={folder / 'times.xml'}"]


class Covering:
    """What a run with these options left in a folder."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.root = root
        self.data = CoverageData(str(folder / "coverage"))
        self.data.read()
        self.files = {Path(name).parts[-3:]: name for name in self.data.measured_files()}
        cases = ElementTree.parse(folder / "times.xml").iter("testcase")
        self.times = {f"{x.get('file')}::{x.get('name')}": float(x.get("time", 0)) for x in cases}

    def tests_of(self, path: str, line: int) -> set[str]:
        """Those that run the statement of a line; of what runs at import, its surroundings'.

        Surroundings: the body of a function, for its defaults, a class, or the whole file.
        """
        contexts = self.data.contexts_by_lineno(self.files[Path(path).parts])
        for span in spans(ast.parse((self.root / path).read_text("utf-8")), line):
            found = {name for n in span for name in contexts.get(n, ())}
            if tests := {name.rsplit("|", 1)[0] for name in found if name} & self.times.keys():
                return tests
            if not found:
                break  # no program comes here
        return set()

    def stages(self, path: str, line: int, seconds: float) -> Iterator[tuple[list[str], float]]:
        """Tests to run one after another, and the time that they take: about `seconds` a stage.

        First those of the module's own file of tests, also those that a cache may have kept from
        the line, and of the files with most tests of the line; of a parametrized test one case,
        then another.
        """
        own = f"test{Path(path).stem}.py"
        named = {test for test in self.times if Path(test.split("::")[0]).name == own}
        files: dict[str, list[str]] = {}
        for test in sorted(self.tests_of(path, line) | named):
            files.setdefault(test.split("::")[0], []).append(test)
        order = sorted(files, key=lambda x: (Path(x).name != own, x != path, -len(files[x])))
        for part in (order[:FIRST], order[FIRST:MOST]):
            ranked: list[tuple[int, float, str]] = []
            for name in part:
                cases: dict[str, list[str]] = {}
                for test in files[name]:
                    cases.setdefault(test.split("[")[0], []).append(test)
                for some in cases.values():
                    random.Random(0).shuffle(some)
                    ranked += [(rank, self.times[test], test) for rank, test in enumerate(some)]
            chosen, total = [], 0.0
            for _, time, test in sorted(ranked):
                if total + time <= seconds or not chosen:
                    chosen.append(test)
                    total += time
            if chosen:
                yield chosen, total


def spans(tree: ast.Module, line: int) -> Iterator[range]:
    """The lines of the statement that has a line, then those of each that it stands in, the file.

    Of one with a body, its head first.
    """
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    for node in sorted(around, key=lambda x: (x.end_lineno or 0) - x.lineno):
        body = getattr(node, "body", None)
        if isinstance(body, list) and line < body[0].lineno:
            yield range(node.lineno, body[0].lineno)
        yield range(node.lineno, (node.end_lineno or node.lineno) + 1)
    yield range(1, tree.body[-1].end_lineno or 1)
