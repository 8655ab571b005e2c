"""Operations of element-wise kernels, each weighed by how many simple ones of float32 it takes.

They matter where there are many to a byte: random bits, chains of transcendental functions.
"""

from ..quant import HloInstruction, HloProgram
from ._traffic import elements, needed, operands

# What only moves or names data.
_MOVES = frozenset(
    {"parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "reshape", "copy"}
    | {"broadcast", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate"}
    | {"pad", "gather", "reverse", "bitcast-convert", "copy-start", "fusion", "custom-call"}
    | {"dot", "scaled-dot", "convolution"}
)
# One unit for special functions stands beside eight others; some functions take several steps.
_FUNCTIONS: dict[str, int] = dict.fromkeys(("exponential", "log", "rsqrt", "sqrt", "divide"), 8)
_FUNCTIONS |= dict.fromkeys(("exponential-minus-one", "log-plus-one", "logistic", "cbrt"), 16)
_FUNCTIONS |= dict.fromkeys(("erf", "tanh", "sine", "cosine", "tan", "atan2"), 24)
_FUNCTIONS |= dict.fromkeys(("power", "remainder"), 24)
# Half as many units calculate with integers. A rotation is one operation that XLA writes as three.
_INTEGER = 2
_ROTATION = {"shift-left": 2 / 3, "shift-right-logical": 2 / 3, "or": 2 / 3}


def operations(program: HloProgram, instruction: HloInstruction) -> float:
    """Returns the simple operations of an instruction when it runs once, products left out."""
    if instruction.opcode != "fusion":
        return _cost(program, instruction, elements(instruction))
    name = instruction.calls[0]
    counts = needed(program, name)
    inner = program.computations[name].values()
    return sum(_cost(program, i, counts[i.name]) for i in inner)


def _cost(program: HloProgram, i: HloInstruction, count: float) -> float:
    if i.opcode in _MOVES:
        return 0.0
    if i.opcode in ("reduce", "reduce-window", "scatter", "sort", "map"):
        # What joins two numbers, about once for each that goes in.
        whole = elements(i)
        given = max((elements(o) for o in operands(program, i)), default=0.0)
        return _of_one(program, i) * given * (count / whole if whole else 0.0)
    if i.dtype[:1] in ("u", "s"):
        return _ROTATION.get(i.opcode, _INTEGER) * count
    return _FUNCTIONS.get(i.opcode, 1) * count


def _of_one(program: HloProgram, i: HloInstruction) -> float:
    """Operations of the computation that an instruction applies; of an addition, 1."""
    inside = [o for name in i.calls for o in program.computations.get(name, {}).values()]
    return sum(_cost(program, o, 1.0) for o in inside) or 1.0
