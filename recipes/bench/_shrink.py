"""Makes a program that differs smaller: fewer lines, smaller shapes, simpler numbers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ._environments import PLAIN
from ._grammar import Input, Program, is_float


def _simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    for name in program.results if len(program.results) > 1 else ():
        yield replace(program, only=name)
    kinds = _kinds(program)
    for i, (name, _) in enumerate(program.lines):
        others = [*program.inputs, *(n for n, _ in program.lines[:i])]
        others = [other for other in others if kinds[other] == kinds[name]]
        rest = program.lines[:i] + program.lines[i + 1 :]
        kept = None if program.only == name else program.only
        for other in others if rest else ():
            lines = tuple((n, t.replace(name, other)) for n, t in rest)
            yield replace(program, lines=lines, only=kept)
    used = " ".join(text for _, text in program.lines)
    for name, x in program.inputs.items():
        if name not in used:
            inputs = {n: v for n, v in program.inputs.items() if n != name}
            yield replace(program, inputs=inputs)
            continue
        changes = [_narrower(x, axis) for axis in range(x.data.ndim) if x.data.shape[axis] > 1]
        if x.scale is not None and not np.all(x.scale == 1):
            changes.append(replace(x, scale=np.ones((), np.float32)))
        if is_float(x.data.dtype) and not np.all(x.data == 1):
            changes += [replace(x, data=np.ones_like(x.data))]
            rounded = np.clip(np.round(x.data.astype(np.float64)), -4, 4).astype(x.data.dtype)
            changes += [replace(x, data=rounded)] if not np.array_equal(rounded, x.data) else []
        for change in changes:
            yield replace(program, inputs={**program.inputs, name: change})


def _kinds(program: Program) -> dict[str, str]:
    """For each variable, whether it holds floats, integers or booleans."""
    lines = [name for name, _ in program.lines]
    whole = replace(
        program,
        lines=(*program.lines, ("all_of_them", f"[{', '.join(lines)}]")),
        only="all_of_them",
    )
    values = {name: x.value for name, x in program.inputs.items()}
    with jax.enable_x64(True), jax.disable_jit():
        (found,) = jax.eval_shape(whole.function(PLAIN), **values)
    named = [*values.items(), *zip(lines, found, strict=True)]
    return {name: x.dtype.kind for name, x in named}


def _narrower(x: Input, axis: int) -> Input:
    """The first item along an axis."""
    scale = x.scale if x.scale is None or not x.scale.ndim else np.take(x.scale, [0], axis)
    return Input(np.take(x.data, [0], axis), scale)


def smaller(program: Program, differs: Callable[[Program], Any], most: int = 80) -> Program:
    """A program that still differs, of fewer lines and simpler inputs; ``most`` are tried."""
    tried = 0
    while True:
        for candidate in _simpler(program):
            tried += 1
            if tried > most:
                return program
            try:
                if differs(candidate):
                    program = candidate
                    break
            except Exception:
                continue
        else:
            return program
