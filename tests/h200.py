"""What became of the products of a program for an H200, read from its text."""

import re

FP8_GEMM = "__cublas$lt$matmul$f8"


def library_calls(program: str) -> list[str]:
    """Targets of the library calls, in order."""
    return re.findall(r'custom_call_target="([^"]+)"', program)


def gemms(program: str) -> list[tuple[str, list[str], float]]:
    """Each FP8 product: type of its result, types of its operands, and the alpha folded into it."""
    found = []
    for line in program.splitlines():
        if FP8_GEMM not in line or "custom-call(" not in line:
            continue
        result = re.search(r"= \(?(\w+)\[", line)
        alpha = re.search(r'"alpha_real":([-\d.eE+]+)', line)
        operands = re.search(r"custom-call\((.*?)\), custom_call_target", line)
        if result is None or alpha is None or operands is None:
            raise ValueError(f"XLA prints its products in another way: {line}")
        names = [o.split()[-1].lstrip("%") for o in operands.group(1).split(", ") if o.strip()]
        found.append(
            (result.group(1), [_type(program, n) for n in names[:2]], float(alpha.group(1)))
        )
    return found


def _type(program: str, name: str) -> str:
    match = re.search(rf"%?{re.escape(name)} = \(?(\w+)\[", program)
    return match.group(1) if match else "?"
