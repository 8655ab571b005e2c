"""Read from the text of a program for an H200 how its matmuls run."""

import math
import re

FP8_GEMM = "__cublas$lt$matmul$f8"


def library_calls(program: str) -> list[str]:
    """List the targets of library calls, in order."""
    return re.findall(r'custom_call_target="([^"]+)"', program)


def gemms(program: str) -> list[tuple[str, list[str], float]]:
    """List the FP8 matmuls: dtype of the result, dtypes of operands, and the folded factor.

    The factor is alpha times the two scales of the FP8 matmul, if they are constants.
    """
    found = []
    for line in program.splitlines():
        if FP8_GEMM not in line or "custom-call(" not in line:
            continue
        result = re.search(r"= \(?(\w+)\[", line)
        alpha = re.search(r'"alpha_real":([-\d.eE+]+)', line)
        operands = re.search(r"custom-call\((.*?)\), custom_call_target", line)
        if result is None or alpha is None or operands is None:
            raise ValueError(f"XLA prints its products in another way: {line}")
        names = _names(operands.group(1))
        factor = float(alpha.group(1)) * math.prod(_number(program, n) for n in names[2:4])
        found.append((result.group(1), [_type(program, n) for n in names[:2]], factor))
    return found


def _number(program: str, name: str) -> float:
    """Return the value of a constant, also if it went through a tuple; NaN for others."""
    defined = re.search(rf"%?{re.escape(name)} = \S+ ([\w-]+)\((.*?)\)(?:, index=(\d+))?", program)
    if defined is None:
        return math.nan
    kind, given, index = defined.groups()
    if kind == "constant":
        return float(given)
    if kind != "get-tuple-element":
        return math.nan
    tuple_ = re.search(rf"%?{re.escape(given.lstrip('%'))} = .*? tuple\((.*?)\)", program)
    return math.nan if tuple_ is None else _number(program, _names(tuple_.group(1))[int(index)])


def _names(operands: str) -> list[str]:
    return [o.split()[-1].lstrip("%") for o in operands.split(", ") if o.strip()]


def _type(program: str, name: str) -> str:
    match = re.search(rf"%?{re.escape(name)} = \(?(\w+)\[", program)
    return match.group(1) if match else "?"
