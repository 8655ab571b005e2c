"""Bytes that a kernel of an optimized program moves, read from the text of the program.

What a kernel keeps to itself costs nothing: a fusion reads its parameters and writes its result. Of
a parameter that it slices it reads the slice, and of an array that it updates in place it writes
the update.
"""

import collections
import itertools
import math
import re

from ..quant._hlo import Instruction, Program
from ..quant._kernels import bits

# Instructions that take part of their first operand.
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
# Instructions that change part of their first operand, and which operand that part is.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# Other names of the same memory.
_VIEWS = frozenset({"bitcast", "reshape"})


def size(*types: tuple[str, tuple[int, ...]]) -> float:
    """Bytes of arrays, by element type and dimensions."""
    return sum((1 if kind == "pred" else bits(kind) / 8) * math.prod(dims) for kind, dims in types)


def moved(program: Program, instruction: Instruction) -> float:
    """Bytes that an instruction reads and writes in memory, when it runs once."""
    if instruction.opcode == "custom-call":
        return _library_call(program, instruction)
    if instruction.opcode == "fusion":
        name = instruction.calls[0]
        inner = program.computations[name]
        root = inner[program.roots[name]]
        needed = _needed(program, root)
        read = (_share(i, needed[i.name]) for i in inner.values() if i.opcode == "parameter")
        results = _operands(program, root) if root.opcode == "tuple" else [root]
        return sum(read) + sum(_written(program, i) for i in results)
    operands = _operands(program, instruction)
    if instruction.opcode == "copy-start":
        return 2 * size(*operands[0].types)
    asked = _asked(program, instruction, _elements(instruction))
    return sum(map(_share, operands, asked)) + _written(program, instruction)


def _operands(program: Program, i: Instruction) -> list[Instruction]:
    body = program.computations[i.computation]
    return [body[name] for name in i.operands if name in body]


def _elements(i: Instruction) -> float:
    return sum(math.prod(dims) for _, dims in i.types)


def _share(i: Instruction, count: float) -> float:
    """Bytes of some elements of an instruction's result."""
    whole = _elements(i)
    return size(*i.types) * min(1.0, count / whole) if whole else 0.0


def _needed(program: Program, root: Instruction) -> dict[str, float]:
    """How many elements a fusion needs of each of its instructions, from its result backwards."""
    needed: dict[str, float] = collections.defaultdict(float, {root.name: math.inf})
    # Operands stand before those who use them.
    for i in reversed(list(program.computations[root.computation].values())):
        count = needed[i.name] = min(needed[i.name], _elements(i))
        for operand, asked in zip(_operands(program, i), _asked(program, i, count), strict=True):
            needed[operand.name] += asked
    return needed


def _asked(program: Program, i: Instruction, count: float) -> list[float]:
    """Elements of each operand that some elements of a result need."""
    whole = [_elements(operand) for operand in _operands(program, i)]
    if i.opcode in _SLICES:
        return [min(count, whole[0]), *whole[1:]]
    if i.opcode in _UPDATES:
        update = whole[_UPDATES[i.opcode]]
        if not _in_place(program, i):
            own = max(count - update, 0.0)
        else:  # a scatter adds to what is there
            own = update if i.opcode == "scatter" else 0.0
        return [own, *whole[1:]]
    share = 1.0 if i.opcode == "tuple" or not _elements(i) else count / _elements(i)
    return [share * n for n in whole]


def _written(program: Program, i: Instruction) -> float:
    """Bytes of a result, or of what it changes in place."""
    while i.opcode in _VIEWS:
        (i,) = _operands(program, i)
    if i.opcode in _UPDATES and _in_place(program, i):
        return size(*_operands(program, i)[_UPDATES[i.opcode]].types)
    return size(*i.types)


def _in_place(program: Program, update: Instruction) -> bool:
    """Whether an update changes an array that its kernel was given, rather than makes another.

    What may not be changed XLA has copied before.
    """
    caller = program.callers.get(update.computation)
    if caller is None or caller.opcode != "fusion":
        return True
    i = update
    while i.opcode in _VIEWS or i.opcode in _UPDATES:
        i = _operands(program, i)[0]
    return i.opcode == "parameter"


def _library_call(program: Program, call: Instruction) -> float:
    """Operands and results, without the memory that the library works in."""
    results = [
        kind
        for index, kind in enumerate(call.types)
        if index == 0 or not (re.fullmatch("[su]8", kind[0]) and len(kind[1]) == 1)
    ]
    operands = itertools.chain.from_iterable(i.types for i in _operands(program, call))
    return size(*results) + size(*operands)
