"""Every public name has a docstring, and every formula a source."""

import ast
import functools
import re
from pathlib import Path

LIBRARY = Path(__file__).parents[1] / "unitscale"
NAMED = re.compile(r"`(?:[\w.]+\.)?(\w+)`")


@functools.cache
def parsed(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text("utf-8")).body


def public_names(package: Path) -> dict[str, tuple[bool, str]]:
    """Map names of a package's modules to whether they are callable, and their docstrings."""
    found = {}
    for node in parsed(package / "__init__.py"):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = definition(package, node.module, alias.name)
    return {name: text for name, text in found.items() if not name.startswith("_")}


def definition(package: Path, module: str, name: str) -> tuple[bool, str]:
    path = package / f"{module.replace('.', '/')}.py"
    if not path.exists():
        return public_names(path.with_suffix(""))[name]
    body = parsed(path)
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                return True, ast.get_docstring(node) or ""
            case (
                ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found))
            ) if found == name:
                text = getattr(getattr(after, "value", None), "value", "")
                return False, text if isinstance(text, str) else ""
            case ast.ImportFrom(level=level, module=str(source), names=names) if level and name in {
                alias.name for alias in names
            }:
                return definition([package, *package.parents][level - 1], source, name)
    raise LookupError(f"{name} is not defined in {path}")


def test_every_public_name_has_a_docstring_and_every_formula_a_source() -> None:
    packages = [path.parent for path in LIBRARY.rglob("__init__.py")]
    names = {f"{p.name}.{n}": found for p in packages for n, found in public_names(p).items()}
    assert len(names) > 200
    found = []
    for name, (callable_, text) in sorted(names.items()):
        if not text:
            found.append(f"{name}: write a docstring")
        if not callable_ and not NAMED.findall(text):
            found.append(f"{name}: name, in backticks, the function or class that takes it")
        if "Scaling:\n" in text and "References:\n" not in text and not NAMED.findall(text):
            found.append(f"{name}: its Scaling section needs References, or the name of its rule")
    assert not found, "\n".join(found)
