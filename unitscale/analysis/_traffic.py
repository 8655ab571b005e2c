"""Bytes that a kernel of an optimized program moves, read from the text of the program.

What a kernel keeps to itself costs nothing: a fusion reads its parameters and writes its result. Of
a parameter that it slices it reads the slice, and of an array that it updates in place it writes
the update.
"""

import collections
import itertools
import math
import re

from ..quant import HloInstruction, HloProgram, bits

# Instructions that take part of their first operand.
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
# Instructions that change part of their first operand, and which operand that part is.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# Other names of the same memory.
_VIEWS = frozenset({"bitcast", "reshape"})


def size(*types: tuple[str, tuple[int, ...]]) -> float:
    """Bytes of arrays, by element type and dimensions."""
    return sum((1 if kind == "pred" else bits(kind) / 8) * math.prod(dims) for kind, dims in types)


def moved(program: HloProgram, instruction: HloInstruction) -> float:
    """Bytes that an instruction reads and writes in memory, when it runs once."""
    if instruction.opcode == "custom-call":
        return _library_call(program, instruction)
    if instruction.opcode == "fusion":
        name = instruction.calls[0]
        inner = program.computations[name]
        root = inner[program.roots[name]]
        counts = needed(program, name)
        read = (_share(i, counts[i.name]) for i in inner.values() if i.opcode == "parameter")
        results = operands(program, root) if root.opcode == "tuple" else [root]
        return sum(read) + sum(_written(program, i) for i in results)
    given = operands(program, instruction)
    if instruction.opcode == "copy-start":
        return 2 * size(*given[0].types)
    asked = _asked(program, instruction, elements(instruction))
    return sum(map(_share, given, asked)) + _written(program, instruction)


def operands(program: HloProgram, i: HloInstruction) -> list[HloInstruction]:
    """The instructions whose results another one takes."""
    body = program.computations[i.computation]
    return [body[name] for name in i.operands if name in body]


def elements(i: HloInstruction) -> float:
    """How many numbers its result has, or its results together."""
    return sum(math.prod(dims) for _, dims in i.types)


def _share(i: HloInstruction, count: float) -> float:
    """Bytes of some elements of an instruction's result."""
    whole = elements(i)
    return size(*i.types) * min(1.0, count / whole) if whole else 0.0


def needed(program: HloProgram, computation: str) -> dict[str, float]:
    """How many elements a fusion needs of each of its instructions, from its result backwards."""
    counts: dict[str, float] = collections.defaultdict(float)
    counts[program.roots[computation]] = math.inf
    # Operands stand before those who use them.
    for i in reversed(list(program.computations[computation].values())):
        count = counts[i.name] = min(counts[i.name], elements(i))
        for operand, asked in zip(operands(program, i), _asked(program, i, count), strict=True):
            counts[operand.name] += asked
    return counts


def _asked(program: HloProgram, i: HloInstruction, count: float) -> list[float]:
    """Elements of each operand that some elements of a result need."""
    whole = [elements(operand) for operand in operands(program, i)]
    if i.opcode in _SLICES:
        return [min(count, whole[0]), *whole[1:]]
    if i.opcode in _UPDATES:
        update = whole[_UPDATES[i.opcode]]
        if not _in_place(program, i):
            own = max(count - update, 0.0)
        else:  # a scatter adds to what is there
            own = update if i.opcode == "scatter" else 0.0
        return [own, *whole[1:]]
    share = 1.0 if i.opcode == "tuple" or not elements(i) else count / elements(i)
    return [share * n for n in whole]


def _written(program: HloProgram, i: HloInstruction) -> float:
    """Bytes of a result, or of what it changes in place."""
    while i.opcode in _VIEWS:
        (i,) = operands(program, i)
    if i.opcode in _UPDATES and _in_place(program, i):
        return size(*operands(program, i)[_UPDATES[i.opcode]].types)
    if i.opcode == "get-tuple-element":
        (call,), index = operands(program, i), re.search(r"\bindex=(\d+)", i.attributes)
        works_in = index and call.opcode == "custom-call" and not _is_result(call, int(index[1]))
        return 0.0 if works_in else size(*i.types)
    return _results(i) if i.opcode == "custom-call" else size(*i.types)


def _in_place(program: HloProgram, update: HloInstruction) -> bool:
    """Whether an update changes an array that its kernel was given, rather than makes another.

    What may not be changed XLA has copied before.
    """
    caller = program.callers.get(update.computation)
    if caller is None or caller.opcode != "fusion":
        return True
    i = update
    while i.opcode in _VIEWS or i.opcode in _UPDATES:
        i = operands(program, i)[0]
    return i.opcode == "parameter"


def _library_call(program: HloProgram, call: HloInstruction) -> float:
    given = itertools.chain.from_iterable(i.types for i in operands(program, call))
    return _results(call) + size(*given)


def _results(call: HloInstruction) -> float:
    """Bytes of a library's results, without the memory that it works in."""
    return size(*(kind for index, kind in enumerate(call.types) if _is_result(call, index)))


def _is_result(call: HloInstruction, index: int) -> bool:
    kind, dims = call.types[index]
    return index == 0 or not (re.fullmatch("[su]8", kind) and len(dims) == 1)
