"""The mutants of the library that a run of `tests.mutation` draws from.

The operators are Cosmic Ray's. A place in the source is drawn first and then one of its mutants, so
that an operator with many replacements weighs no more than another; a smaller sample is the
beginning of a larger one.

Not mutated are strings, annotations, aliases of types, decorators, `raise`, `assert` (an invariant
never fails) and `__init__.py`: that would change a message, a type or an import. Nor does `is`
stand in for `==`, which small numbers do not tell apart.
"""

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

MUTATED = ("rules", "ops", "quant", "optim", "core")
# From or to `is`, but not both; and what asks for the names of variables.
_LEFT_OUT = re.compile(
    r"core/(RemoveDecorator|Variable\w+|ReplaceComparisonOperator_(Is\w*?_(?!Is)|(?!Is)\w+_Is)\w*)"
)
OPERATORS = {
    name: get_operator(name)() for name in operator_names() if not _LEFT_OUT.fullmatch(name)
}


class Mutant(NamedTuple):
    path: str
    operator: str
    occurrence: int
    line: int
    column: int

    def applied_to(self, source: str) -> str | None:
        """The mutated source, or None where it is no program or the same one."""
        mutated = mutate_code(source, OPERATORS[self.operator], self.occurrence)
        try:
            same = mutated is None or ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source))
        except SyntaxError:
            return None
        return None if same else mutated


def left_alone(tree: ast.Module) -> Iterator[Any]:
    """The parts of a program whose mutants would only change a message, a type or an import."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef():
                yield from [*node.decorator_list, *([node.returns] if node.returns else [])]
            case ast.ClassDef():
                yield from node.decorator_list
            case ast.arg(annotation=ast.expr() as found) | ast.AnnAssign(annotation=found):
                yield found
            case ast.Raise() | ast.Assert() | ast.JoinedStr():
                yield node
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield node
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(n, ast.BitOr) for n in ast.walk(node)):
            yield node


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    source = path.read_text("utf-8")
    spans = [
        ((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset))
        for n in left_alone(ast.parse(source))
    ]
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name, operator in OPERATORS.items():
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            if not any(first <= start < last for first, last in spans):
                where = path.relative_to(root).as_posix()
                found.append(Mutant(where, name, occurrence, *start))
    return found


def draw(root: Path, size: int, seed: int) -> list[Mutant]:
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for package in MUTATED:
        for path in sorted((root / "unitscale" / package).glob("_[a-z]*.py")):
            for mutant in mutants_of(path, root):
                places.setdefault((mutant.path, mutant.line, mutant.column), []).append(mutant)
    generator = random.Random(seed)
    order = sorted(places)
    generator.shuffle(order)
    drawn: list[Mutant] = []
    for place in order:
        if len(drawn) == size:
            break
        mutant = generator.choice(places[place])
        if mutant.applied_to((root / mutant.path).read_text("utf-8")):
            drawn.append(mutant)
    return drawn
