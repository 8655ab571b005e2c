"""Every public name shows by a doctest how it is used, and says which paper a formula is from.

The doctests themselves run with all others. A name that is no function or class (an alias, a
constant) has nowhere to put one: it names the function or class that takes it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture import ROOT, Module, Tree, public_imports

SECTION = re.compile(r"^(Scaling|References):$", re.MULTILINE)
NAMED = re.compile(r"`(?:[\w.]+\.)?(\w+)`")


def definition(tree: Tree, module: Module, name: str) -> tuple[bool, str]:
    """Whether a public name is a function or class, and its docstring."""
    for node, after in zip(module.tree.body, [*module.tree.body[1:], None], strict=True):
        match node:
            case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                return True, ast.get_docstring(node) or ""
            case (
                ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found))
            ) if found == name:
                value = getattr(getattr(after, "value", None), "value", "")
                return False, value if isinstance(value, str) else ""
    source, original = next(t.rsplit(".", 1) for n, t in public_imports(module) if n == name)
    return definition(tree, tree.modules[source], original)


def complaints(tree: Tree) -> Iterator[str]:
    packages = [module for module in tree.library if module.is_package]
    found = {
        f"{module.name}.{name}": definition(tree, module, name)
        for module in packages
        for name, target in public_imports(module)
        if not name.startswith("_") and target not in tree.modules
    }
    shown = {name.rsplit(".", 1)[1] for name, (_, text) in found.items() if ">>> " in text}
    for name, (callable_, text) in sorted(found.items()):
        if callable_ and ">>> " not in text:
            yield f"{name}: add an Example section with a doctest"
        if not callable_ and not shown & set(NAMED.findall(text)):
            yield f"{name}: name, in backticks, the function or class that takes it"
        if {"Scaling"} == set(SECTION.findall(text)):
            yield f"{name}: its Scaling section needs References"


def test_every_public_name_has_an_example_and_its_source() -> None:
    found = list(complaints(Tree(ROOT)))
    assert not found, "\n" + "\n".join(found)


def test_the_names_of_this_repository_are_seen() -> None:
    tree = Tree(ROOT)
    core = tree.modules["unitscale.core"]
    function, text = definition(tree, core, "rms")
    assert function
    assert ">>> print(rms(" in text
    assert not definition(tree, core, "Scale")[0]
    assert len({name for name, _ in public_imports(core)}) > 30


SOUND = '''
    def double(x):
        """Return 2 x.

        Scaling:
            2.

        Example:
            >>> double(1)
            2

        References:
            Euclid, Elements.
        """
    Number = int
    """What `double` takes."""
'''
MISTAKES = {
    ">>> double(1)": ("double(1)", "core.double: add an Example section"),
    "References:": ("Sources:", "core.double: its Scaling section needs References"),
    "`double`": ("this", "core.Number: name, in backticks"),
}


def planted(root: Path, text: str) -> list[str]:
    package = root / "unitscale" / "core"
    package.mkdir(parents=True)
    names = "double as double, Number as Number"
    (package / "__init__.py").write_text(f"from ._double import {names}\n", encoding="utf-8")
    (package / "_double.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return list(complaints(Tree(root)))


def test_sound_docstrings_have_no_complaints(tmp_path: Path) -> None:
    assert planted(tmp_path, SOUND) == []


@pytest.mark.parametrize("right", MISTAKES)
def test_a_mistake_is_found(right: str, tmp_path: Path) -> None:
    wrong, complaint = MISTAKES[right]
    found = planted(tmp_path, SOUND.replace(right, wrong))
    assert any(complaint in c for c in found), found
