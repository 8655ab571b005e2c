"""The rules of the house that a parser can check: each takes a `Tree` and yields its complaints."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIBRARY, RECIPES = "unitscale", "recipes"
MAX_LINES = 400

# What each package may import beside itself; "" is unitscale/__init__.py. CONTRIBUTING.md draws it.
PACKAGES: dict[str, set[str]] = {
    "": {"core", "transforms"},
    "core": set(),
    "rules": {"core"},
    "quant": {"core"},
    "ops": {"core", "rules", "quant"},
    "nn": {"core", "rules", "quant", "ops"},
    "transforms": {"core"},
    "optim": {"core", "rules"},
    "parallel": {"core"},
    "analysis": {"core", "rules", "quant", "ops", "nn", "transforms", "optim", "parallel"},
}
# Where a dependency may be imported: a package or one module of it.
ONLY_IN = {
    "flax": (
        "unitscale.nn",
        "unitscale.quant._convert",
        "unitscale.quant._hooks",
        "unitscale.quant._nnx",
        "unitscale.quant._serve",
    ),
    "optax": ("unitscale.optim",),
    "jax._src": ("unitscale.core._compat",),
}
# Modules with no test file of their own, and why.
UNTESTED: dict[str, str] = {
    "unitscale/rules/__main__.py": "tests/rules/test_table.py runs it",
    "unitscale/transforms/__main__.py": "tests/transforms/test_coverage.py runs it",
}


class Edge(NamedTuple):
    target: str  # dotted name of a module, or of a name in a module
    line: int
    deferred: bool  # inside a function
    relative: bool


class Module(NamedTuple):
    name: str
    path: Path
    tree: ast.Module
    is_package: bool

    @property
    def library(self) -> bool:
        return self.name.split(".")[0] == LIBRARY

    @property
    def layer(self) -> str:
        return (self.name.split(".") + [""])[1]

    def edges(self) -> Iterator[Edge]:
        in_function = {
            id(inner)
            for outer in ast.walk(self.tree)
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(outer)
        }
        parts = self.name.split(".") + (["__init__"] if self.is_package else [])
        for node in ast.walk(self.tree):
            deferred = id(node) in in_function
            match node:
                case ast.Import(names=names):
                    for alias in names:
                        yield Edge(alias.name, node.lineno, deferred, False)
                case ast.ImportFrom(module=module, names=names, level=level):
                    base = ".".join(
                        [*(parts[:-level] if level else []), *([module] if module else [])]
                    )
                    for alias in names:
                        yield Edge(f"{base}.{alias.name}", node.lineno, deferred, level > 0)
                case ast.Call(
                    func=ast.Attribute(attr="import_module")
                    | ast.Name(id="__import__" | "import_module")
                ):
                    if node.args and isinstance(node.args[0], ast.Constant):
                        target = str(node.args[0].value)
                        relative = target.startswith(".")
                        yield Edge(
                            f"{LIBRARY}{target}" if relative else target,
                            node.lineno,
                            True,
                            relative,
                        )


class Tree:
    """The source of a repository, parsed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for path in sorted(p for top in (LIBRARY, RECIPES) for p in (root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            self.modules[name] = Module(name, path, ast.parse(path.read_text("utf-8")), is_package)

    @property
    def library(self) -> list[Module]:
        return [m for m in self.modules.values() if m.library]

    def at(self, module: Module, line: int) -> str:
        return f"{module.path.relative_to(self.root)}:{line}: "

    def module_of(self, target: str) -> str | None:
        """The module of this repository that holds the target of an edge."""
        parent = target.rpartition(".")[0]
        return next((name for name in (target, parent) if name in self.modules), None)


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_private(dotted: str) -> bool:
    return any(re.match("_(?!_)", part) for part in dotted.split("."))


def attribute_chain(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; a first name of "" where the chain hangs on something else."""
    match node:
        case ast.Attribute(value=value, attr=attr):
            return [*attribute_chain(value), attr]
        case ast.Name(id=name):
            return [name]
    return [""]


def upward_edge(tree: Tree) -> Iterator[str]:
    for module in tree.library:
        if module.layer not in PACKAGES:
            yield tree.at(module, 1) + f"package {module.layer!r} is not in the table PACKAGES"
            continue
        for edge in module.edges():
            if not is_within(edge.target, (LIBRARY, RECIPES)):
                continue
            found = tree.module_of(edge.target)
            target = tree.modules[found] if found else None
            allowed = PACKAGES[module.layer] | {module.layer}
            if target is None or not target.library or target.layer not in allowed:
                yield tree.at(module, edge.line) + f"{module.layer!r} may not import {edge.target}"


def cycle(tree: Tree) -> Iterator[str]:
    graph = {
        m.name: sorted({t for e in m.edges() if (t := tree.module_of(e.target))})
        for m in tree.modules.values()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield "imports in a circle: " + " -> ".join((*path[path.index(name) :], name))
        elif name not in done:
            for target in graph[name]:
                yield from visit(target, (*path, name))
            done.add(name)

    for name in graph:
        yield from visit(name, ())


def deferred_import(tree: Tree) -> Iterator[str]:
    for module in tree.library:
        for edge in module.edges():
            if edge.deferred and is_within(edge.target, (LIBRARY,)):
                yield tree.at(module, edge.line) + f"{edge.target} is imported inside a function"


def absolute_import(tree: Tree) -> Iterator[str]:
    for module in tree.library:
        for edge in module.edges():
            if not edge.relative and is_within(edge.target, (LIBRARY,)):
                yield tree.at(module, edge.line) + f"import {edge.target} relatively"


def misplaced_dependency(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        for dependency, places in ONLY_IN.items():
            if is_within(module.name, places) or not (module.library or dependency == "jax._src"):
                continue
            for edge in module.edges():
                if is_within(edge.target, (dependency,)):
                    yield (
                        tree.at(module, edge.line)
                        + f"{edge.target} belongs in "
                        + " or ".join(places)
                    )
        if not is_within(module.name, ONLY_IN["jax._src"]):
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Attribute) and node.attr == "_src":
                    yield (
                        tree.at(module, node.lineno) + "jax._src belongs in unitscale.core._compat"
                    )


def private_name_in_recipes(tree: Tree) -> Iterator[str]:
    for module in (m for m in tree.modules.values() if not m.library):
        for edge in module.edges():
            if is_within(edge.target, (LIBRARY,)) and is_private(edge.target):
                yield tree.at(module, edge.line) + f"{edge.target} is not a public name"
        bound = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Import)
            or (isinstance(node, ast.ImportFrom) and node.level == 0 and node.module)
            for alias in node.names
            if is_within(getattr(node, "module", None) or alias.name, (LIBRARY,))
        }
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                root, *rest = attribute_chain(node)
                if root in bound and is_private(node.attr):
                    yield (
                        tree.at(module, node.lineno)
                        + f"{'.'.join((root, *rest))} is not a public name"
                    )


def definition_is_documented(tree: Tree, module: Module, name: str) -> bool:
    """Whether `name`, at the top level of `module` or where it came from, has a docstring."""
    body = module.tree.body
    documented = False
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                documented = ast.get_docstring(node) is not None
            case (
                ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found))
            ) if found == name:
                documented = isinstance(after, ast.Expr) and isinstance(
                    getattr(after.value, "value", None), str
                )
    for bound, target in public_imports(module):
        if bound == name:
            if target in tree.modules:
                return ast.get_docstring(tree.modules[target].tree) is not None
            source, _, original = target.rpartition(".")
            return source not in tree.modules or definition_is_documented(
                tree, tree.modules[source], original
            )
    return documented


def public_imports(module: Module) -> Iterator[tuple[str, str]]:
    """Pairs of a name bound by a relative import at the top level, and what it stands for."""
    parts = module.name.split(".") + (["__init__"] if module.is_package else [])
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*parts[: -node.level], *([node.module] if node.module else [])])
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}"


def undocumented_name(tree: Tree) -> Iterator[str]:
    for module in tree.library:
        if not module.is_package:
            continue
        names = {bound for bound, _ in public_imports(module)}
        for node in module.tree.body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    names.add(name)
        if ast.get_docstring(module.tree) is None:
            yield tree.at(module, 1) + f"{module.name} has no docstring"
        for name in sorted(n for n in names if not n.startswith("_")):
            if not definition_is_documented(tree, module, name):
                yield tree.at(module, 1) + f"{module.name}.{name} has no docstring"


def untested_module(tree: Tree) -> Iterator[str]:
    paths = {m.path.relative_to(tree.root).as_posix(): m for m in tree.library if not m.is_package}
    for path, module in paths.items():
        package, stem = Path(path).parent.relative_to(LIBRARY), module.path.stem.lstrip("_")
        test = Path("tests") / package / f"test_{stem}.py"
        if path not in UNTESTED and not (tree.root / test).exists():
            yield f"{path}: expected its test in {test.as_posix()}"
    if tree.root == ROOT:
        yield from (
            f"{path}: exempted from a test, but is not there"
            for path in UNTESTED.keys() - paths.keys()
        )


def constant(node: ast.expr) -> float | None:
    """The value of an expression of literal numbers."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand) if (
            value := constant(operand)
        ) is not None:
            return -value
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            above, below = constant(left), constant(right)
            return above / below if above is not None and below else None
    return None


def scaling_rule_outside_rules(tree: Tree) -> Iterator[str]:
    for module in (m for m in tree.library if m.layer != "rules"):
        for node in ast.walk(module.tree):
            match node:
                case ast.BinOp(op=ast.Pow(), right=exponent) if constant(exponent) == -0.5:
                    pass
                case ast.BinOp(
                    left=one, op=ast.Div(), right=ast.BinOp(op=ast.Pow(), right=exponent)
                ) if constant(one) == 1 and constant(exponent) == 0.5:
                    pass
                case ast.Call(
                    func=ast.Name(id="pow") | ast.Attribute(attr="pow" | "power"),
                    args=[_, exponent],
                ) if constant(exponent) == -0.5:
                    pass
                case _:
                    continue
            text = ast.unparse(node)
            yield tree.at(module, node.lineno) + f"{text} is a scaling rule; write it in rules/"


def long_file(tree: Tree) -> Iterator[str]:
    for path in sorted(
        p for top in (LIBRARY, RECIPES, "tests") for p in (tree.root / top).rglob("*.py")
    ):
        lines = len(path.read_text("utf-8").splitlines())
        if lines > MAX_LINES:
            name = path.relative_to(tree.root)
            yield f"{name}: {lines} lines; past {MAX_LINES} a file is two ideas"


def bare_assert(tree: Tree) -> Iterator[str]:
    for module in tree.library:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assert) and node.msg is None:
                yield tree.at(module, node.lineno) + "an assert states the invariant it guards"


CHECKS: tuple[Callable[[Tree], Iterator[str]], ...] = (
    upward_edge,
    cycle,
    deferred_import,
    absolute_import,
    misplaced_dependency,
    private_name_in_recipes,
    undocumented_name,
    untested_module,
    scaling_rule_outside_rules,
    long_file,
    bare_assert,
)
