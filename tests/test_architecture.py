"""Rules of CONTRIBUTING.md that ruff and lint-imports do not check."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import unitscale

ROOT = Path(__file__).parents[1]
FILES = sorted(p for top in ("unitscale", "recipes", "tests") for p in (ROOT / top).rglob("*.py"))
# x ** -0.5 and its spellings; `ast.unparse` has one for each.
SCALING_RULE = re.compile(
    r"\*\* \(?-\(?(0\.5|1 / 2)"
    r"|\b1(\.0)? / [^-+*/]+ \*\* \(?(0\.5|1 / 2)|pow(er)?\(.+, -\(?(0\.5|1 / 2)"
)


def public(node: ast.AST, inside: bool) -> bool:
    """Return True if an import is relative inside unitscale, or of public names elsewhere."""
    match node:
        case ast.ImportFrom(level=0, module=str(module), names=names):
            dotted = [f"{module}.{alias.name}" for alias in names]
        case ast.Import(names=names):
            dotted = [alias.name for alias in names]
        case _:
            return True
    mine = [name for name in dotted if name.split(".")[0] == "unitscale"]
    return not mine if inside else not any(re.search(r"\._(?!_)", name) for name in mine)


def complaints(source: str, inside: bool, layer: str = "") -> Iterator[str]:
    """List what is wrong with a file of recipes/, or (inside) of the library."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if not public(node, inside):
            yield f"{line}: import " + ("relatively" if inside else "public names only")
        if inside and isinstance(node, ast.Assert) and node.msg is None:
            yield f"{line}: an assert states the invariant it guards"
        if inside and layer != "rules" and isinstance(node, ast.BinOp | ast.Call):
            text = ast.unparse(node)
            if SCALING_RULE.search(text):
                yield f"{line}: {text} is a scaling rule; write it in rules/"


def test_files_keep_the_rules() -> None:
    found = []
    for path in FILES:
        top, *rest = path.relative_to(ROOT).parts
        source = path.read_text("utf-8")
        if top != "tests":
            said = complaints(source, inside=top == "unitscale", layer=rest[0])
            found += [f"{path.relative_to(ROOT)}:{text}" for text in said]
    assert len(FILES) > 100
    assert not found, "\n".join(found)


def budgets() -> list[tuple[str, int, int]]:
    """Read the table "Size" of CONTRIBUTING.md: package, most lines, most files."""
    rows = re.findall(
        r"^\| `([\w/]+)/` \| ([\d,]+) \| (\d+) \|",
        (ROOT / "CONTRIBUTING.md").read_text("utf-8"),
        flags=re.MULTILINE,
    )
    return [(name, int(lines.replace(",", "")), int(files)) for name, lines, files in rows]


def test_every_package_has_a_budget() -> None:
    packages = {f"unitscale/{p.name}" for p in (ROOT / "unitscale").iterdir() if p.is_dir()}
    packages -= {"unitscale/__pycache__"}
    assert packages | {"unitscale", "recipes", "tests"} <= {name for name, *_ in budgets()}


@pytest.mark.parametrize(("package", "most_lines", "most_files"), budgets())
def test_packages_keep_their_budgets(package: str, most_lines: int, most_files: int) -> None:
    paths = [p for p in FILES if p.is_relative_to(ROOT / package)]
    lines = sum(len(p.read_text("utf-8").splitlines()) for p in paths)
    assert lines <= most_lines, f"{package}: {lines} lines; the budget is {most_lines}"
    assert len(paths) <= most_files, f"{package}: {len(paths)} files; the budget is {most_files}"


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert unitscale.__version__ == project["version"]
