"""Report which matmuls of a compiled GPU program became FP8 kernels, and why the others did not.

XLA compiles a matmul to an FP8 kernel only if it recognizes the pattern; otherwise it silently uses
16 bits. This module reads the text of the optimized program (HLO).
"""

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import jax

# Instructions that pass all their operands, in order, to another computation.
_CALLS = frozenset({"fusion", "call", "async-start"})
# Instructions whose result has the values of one operand, with the index of that operand.
_UNCHANGED = dict.fromkeys(
    ("convert", "bitcast", "bitcast-convert", "reshape", "transpose", "copy", "pad", "slice")
    + ("dynamic-slice", "broadcast", "concatenate", "negate", "all-gather", "optimization-barrier"),
    0,
) | {"clamp": 1}


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One HLO instruction; ``operands`` are names of instructions in the same computation."""

    name: str
    computation: str
    opcode: str
    dtype: str  # HLO's name, such as "bf16"; for a tuple, dtype and shape are the first element's
    shape: tuple[int, ...]
    operands: tuple[str, ...]
    attributes: str  # the text after the operands
    literal: str  # the text between the parentheses, such as the number of a parameter
    types: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape; one pair per tuple element

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that this instruction calls."""
        one = re.findall(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)", self.attributes)
        branches = _found(r"branch_computations=\{([^}]*)\}", self.attributes)
        return (*one, *re.findall(r"[\w.\-]+", branches))

    @property
    def trips(self) -> int:
        """Number of iterations of a while loop if XLA knows it; else 1."""
        count = _found(r'"known_trip_count":\s*\{"n":\s*"(\d+)"\}', self.attributes)
        return int(count) if self.opcode == "while" and count else 1

    def quoted(self, key: str) -> str:
        """Return the value of a quoted attribute such as "custom_call_target"; "" if missing."""
        return _found(rf'\b{key}="((?:[^"\\]|\\.)*)"', self.attributes)


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """A parsed HLO program: its computations, and how they call each other."""

    computations: dict[str, dict[str, HloInstruction]]  # instructions by name, in program order
    roots: dict[str, str]  # name of each computation's result
    callers: dict[str, HloInstruction]  # the instruction that calls each computation
    frames: dict[str, tuple[str, ...]]  # "file:line" of each stack frame and its callers
    entry: str = ""
    header: str = ""  # the first line, which states the number of devices

    @property
    def instructions(self) -> list[HloInstruction]:
        """All instructions of all computations."""
        return [i for body in self.computations.values() for i in body.values()]

    def operand(self, instruction: HloInstruction, index: int) -> HloInstruction | None:
        """Return the instruction that computes an operand, even across fusions and calls."""
        found = self._operand(instruction, index)
        while found is not None:
            caller = self.callers.get(found.computation)
            if found.opcode == "parameter" and caller is not None and caller.opcode in _CALLS:
                outer = self._operand(caller, int(found.literal))
                if outer is None:
                    return found
                found = outer
            elif (root := self._root(found)) is not None and root.opcode != "tuple":
                found = root
            elif found.opcode == "fusion-done":
                found = self._operand(found, 0)
            elif found.opcode == "get-tuple-element":
                root = self._root(self._operand(found, 0))
                number = _found(r"\bindex=(\d+)", found.attributes)
                if root is None or root.opcode != "tuple" or not number:
                    return found
                found = self._operand(root, int(number))
            else:
                return found
        return None

    def _operand(self, instruction: HloInstruction, index: int) -> HloInstruction | None:
        names = instruction.operands[index : index + 1]
        return self.computations[instruction.computation].get(names[0]) if names else None

    def _root(self, instruction: HloInstruction | None) -> HloInstruction | None:
        """Return the result instruction of the computation that a fusion or call runs."""
        if instruction is None or instruction.opcode not in _CALLS or not instruction.calls:
            return None
        called = instruction.calls[0]
        return self.computations[called][self.roots[called]] if called in self.roots else None

    def trips(self, instruction: HloInstruction) -> int:
        """Return how often an instruction runs, including iterations of enclosing loops."""
        caller = self.callers.get(instruction.computation)
        return 1 if caller is None else caller.trips * self.trips(caller)


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def bits(dtype: str) -> int:
    """Return the bits per element of an HLO type such as "bf16"; 0 for types such as "pred"."""
    return int(_found(r"^[a-z]+(\d+)", dtype) or 0)


def contracted(instruction: HloInstruction) -> tuple[int, ...]:
    """Return the dimensions of the left operand that a matmul sums over; () for other ops."""
    pattern = r'"?lhs_contracting_dim(?:ension)?s"?[:=]\s*[\[{]([^\]}]*)'
    return _numbers(_found(pattern, instruction.attributes))


def user_line(program: HloProgram, instruction: HloInstruction) -> str:
    """Return the innermost "file:line" outside unitscale and installed packages."""
    text = instruction.attributes
    stack = program.frames.get(_found(r"\bstack_frame_id=(\d+)", text), ())
    if file := instruction.quoted("source_file"):
        stack = (f"{file}:{_found(r'source_line=([0-9]+)', text)}",)
    package = str(Path(__file__).parents[1])
    own = [f for f in stack if not f.startswith(package) and "site-packages" not in f]
    return (own or list(stack[-1:]) or [""])[0]


def _instruction(name: str, computation: str, rest: str) -> HloInstruction | None:
    opcode = re.search(r"\s([a-z][\w\-]*)\(", rest)
    if opcode is None:
        return None
    kind, depth, end = opcode[1], 1, opcode.end()
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', rest[opcode.end() :]):
        depth += {"(": 1, ")": -1}.get(found[0], 0)  # ignores parentheses inside strings
        if not depth:
            end += found.start()
            break
    inner, result = rest[opcode.end() : end], rest[: opcode.start()]
    types = tuple((t, _numbers(n)) for t, n in re.findall(r"([a-z]\w*)\[([\d,]*)\]", result))
    operands = tuple(re.findall(r"%([\w.\-]+)", inner)) if kind != "constant" else ()
    if kind == "fusion-start":  # asynchronous: its types are operands, results and a context
        kind, types = "fusion", types[len(operands) : -1]
    dtype, shape = types[0] if types else ("", ())
    text = rest[end + 1 :]
    return HloInstruction(name, computation, kind, dtype, shape, operands, text, inner, types)


def _frames(text: str) -> dict[str, tuple[str, ...]]:
    """Parse the tables of stack frames at the beginning of a program."""
    names = text.partition("\nFileNames\n")[2].partition("\n\n")[0]
    files = dict(re.findall(r'(?m)^(\d+) "(.*)"$', names))
    places = re.findall(r"(?m)^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", text)
    lines = {place: f"{files.get(file)}:{line}" for place, file, line in places}
    rows = re.findall(r"(?m)^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", text)
    # XLA may print the caller's number plus one; the first frame, without a caller, then shows 1.
    offset = int(bool(rows) and rows[0][2] == "1")
    frames: dict[str, tuple[str, ...]] = {}
    for frame, place, caller in rows:  # callers come first
        frames[frame] = (lines.get(place, ""), *frames.get(str(int(caller) - offset), ()))
    return frames


def parse_hlo(text: str) -> HloProgram:
    """Parse the text of an optimized HLO program."""
    header = text.partition("\n")[0]
    program = HloProgram({}, {}, {}, _frames(text.partition("\n%")[0]), header=header)
    current, entry = "", ""
    for line in text.splitlines():
        if begin := re.match(r"(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$", line):
            current = begin[2]
            program.computations[current] = {}
            entry = current if begin[1] else entry
            continue
        found = re.match(r"\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$", line) if current else None
        instruction = _instruction(found[2], current, found[3]) if found else None
        if found is None or instruction is None:
            continue
        program.computations[current][instruction.name] = instruction
        program.callers.update(dict.fromkeys(instruction.calls, instruction))
        if found[1]:
            program.roots[current] = instruction.name
    return dataclasses.replace(program, entry=entry)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """One matmul of a compiled program.

    Attributes:
        kernel: the kernel, such as "cuBLASLt FP8", "cuBLASLt" or "Triton".
        fp8: whether the kernel multiplies FP8 operands.
        quantized: whether an operand was in FP8 at some point before the matmul.
        reason: why the kernel is not an FP8 kernel; "" if it is.
        lhs, rhs, out: types such as "float8_e4m3fn[512,256]"; an arrow shows a widened operand.
        flops: total floating-point operations; loops of unknown trip count count as one iteration.
        op_name: JAX's name stack.
        source: "file:line" of the user's code, or "".
    """

    name: str
    kernel: str
    fp8: bool
    quantized: bool
    reason: str
    lhs: str
    rhs: str
    out: str
    flops: float
    op_name: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Report:
    """Result of `check_fp8`: prints as a table; true if it has FP8 kernels and no matmul is lost.

    Attributes:
        matmuls: all matmuls, in program order.
        amax_reductions: number of reductions that compute an amax.
        casts: number of conversions from wider data to FP8.
        transposes: number of copies and transposes of FP8 data.
    """

    matmuls: tuple[Matmul, ...]
    amax_reductions: int
    casts: int
    transposes: int

    @property
    def fp8(self) -> tuple[Matmul, ...]:
        """Matmuls that run as FP8 kernels."""
        return tuple(m for m in self.matmuls if m.fp8)

    @property
    def lost(self) -> tuple[Matmul, ...]:
        """Matmuls of FP8 data that do not run as FP8 kernels."""
        return tuple(m for m in self.matmuls if m.quantized and not m.fp8)

    @property
    def wide(self) -> tuple[Matmul, ...]:
        """Matmuls whose operands were never FP8."""
        return tuple(m for m in self.matmuls if not m.quantized and not m.fp8)

    @property
    def share(self) -> float:
        """Fraction of the floating-point operations of all matmuls that run in FP8 kernels."""
        total = sum(m.flops for m in self.matmuls)
        return sum(m.flops for m in self.fp8) / total if total else 0.0

    def __bool__(self) -> bool:
        """Return whether there are FP8 kernels, and every matmul of FP8 data is one."""
        return bool(self.fp8) and not self.lost

    def __str__(self) -> str:
        """Return a summary, then one row per matmul."""
        head = (
            f"{len(self.fp8)} of {len(self.matmuls)} matmuls are FP8 kernels ({self.share:.1%} of "
            f"their operations); {len(self.lost)} lost their FP8 operands; "
            f"{self.amax_reductions} amax reductions, {self.casts} casts to FP8, "
            f"{self.transposes} FP8 transposes"
        )
        rows = [("FP8", "kernel", "lhs", "rhs", "result", "reason", "from")]
        for m in self.matmuls:
            state = "yes" if m.fp8 else "LOST" if m.quantized else "no"
            origin = " at ".join(filter(None, (m.op_name, m.source))) or m.name
            rows.append((state, m.kernel, m.lhs, m.rhs, m.out, m.reason, origin))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([head, *(lines if self.matmuls else ())])

    def raise_if_lost(self) -> "Fp8Report":
        """Return the report; raise a ValueError with it if a matmul lost its FP8 operands."""
        if self.lost:
            raise ValueError(f"unitscale.quant.check_fp8: {self}")
        return self


def check_fp8(compiled: Any) -> Fp8Report:
    """List every matmul of a compiled GPU program: whether it is an FP8 kernel, and if not, why.

    An FP8 kernel is a cuBLASLt FP8 call, or a Triton or cuDNN kernel that reads FP8 operands. A
    matmul is *lost* if an operand was FP8 data but its kernel is not an FP8 kernel. Matrix-vector
    products (M or N is 1) are not listed, because XLA compiles them to reductions.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()` (or the same with `nnx.jit`) for a
            GPU, or the text of its optimized program.

    Raises:
        TypeError: if ``compiled`` is neither a compiled program nor text.
        ValueError: if the program was not compiled for a GPU.
    """
    program = parse_hlo(compiled if isinstance(compiled, str) else _text_of(compiled))
    nodes = program.instructions
    to_fp8 = [program.operand(i, 0) for i in nodes if i.opcode == "convert" and _is_fp8(i.dtype)]
    return Fp8Report(
        matmuls=tuple(m for i in nodes if (m := _examine(program, i)) is not None),
        amax_reductions=sum(_is_amax(program, i) for i in nodes),
        casts=sum(x is not None and not _is_fp8(x.dtype) for x in to_fp8),
        transposes=sum(i.opcode in ("transpose", "copy") and _is_fp8(i.dtype) for i in nodes),
    )


def _text_of(compiled: Any) -> str:
    compiled = getattr(compiled, "compiled", compiled)  # nnx.jit wraps it
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            "unitscale.quant.check_fp8: compiled must be the result of "
            f"jax.jit(f).lower(...).compile(), or its text; got {type(compiled).__name__}"
        )
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = {device for sharding in shardings for device in sharding.device_set}
    if other := sorted({d.platform for d in devices} - {"gpu", "cuda", "rocm"}):
        raise _not_for_gpu(f"one for {other[0]}")
    return compiled.as_text() or ""


def _not_for_gpu(got: str) -> ValueError:
    return ValueError(
        f"unitscale.quant.check_fp8: expected a program compiled for a GPU; got {got}. Compile for "
        "a GPU, or ahead of time for a topology of GPUs."
    )


def _is_fp8(dtype: str) -> bool:
    return dtype.startswith("f8e") and dtype != "f8e8m0fnu"


def _array(x: HloInstruction) -> str:
    """Return the shape and NumPy's name of the type, such as "float8_e4m3fn[8,4]"."""
    name, kinds = x.dtype, {"f": "float", "bf": "bfloat", "s": "int", "u": "uint"}
    if found := re.fullmatch(r"(bf|[fsu])(\d+)(\w*)", name):
        name = "_".join(filter(None, (kinds[found[1]] + found[2], found[3])))
    return f"{name}[{','.join(map(str, x.shape))}]"


def _unchanged(
    program: HloProgram, node: HloInstruction | None, until: str = ""
) -> HloInstruction | None:
    """Return the nearest producer that changes values, or that has the opcode ``until``."""
    while node is not None and node.opcode in _UNCHANGED and node.opcode != until:
        node = program.operand(node, _UNCHANGED[node.opcode])
    return node


def _fp8_origin(program: HloProgram, node: HloInstruction | None) -> HloInstruction | None:
    """Return the FP8 data that an operand was converted or scaled from, or None."""
    while node is not None and not _is_fp8(node.dtype):
        if node.opcode == "multiply":
            sides = [program.operand(node, i) for i in (0, 1)]
            ends = [_unchanged(program, side, "broadcast") for side in sides]
            scales = [end is not None and end.opcode in ("broadcast", "constant") for end in ends]
            node = sides[scales.index(False)] if any(scales) and not all(scales) else None
        else:
            through = _UNCHANGED.get(node.opcode)
            node = None if through is None else program.operand(node, through)
    return node


def _reason(origins: list[HloInstruction | None]) -> str:
    """Return why a matmul of operands with these FP8 origins is not an FP8 kernel."""
    types = {"" if x is None else x.dtype for x in origins}
    if types == {""}:
        return "operands were never FP8"
    if "" in types:
        return "only one operand is FP8: quantize the other one too"
    if foreign := sorted(types - {"f8e4m3fn", "f8e5m2"}):
        return f"NVIDIA GPUs do not multiply {foreign[0]}: use float8_e4m3fn and float8_e5m2"
    if types == {"f8e5m2"}:
        return "both operands are E5M2: keep one of them in E4M3"
    return (
        "the FP8 operands are converted or scaled first: multiply them directly "
        "(lax.dot_general with preferred_element_type) and scale the result"
    )


def _examine(program: HloProgram, at: HloInstruction) -> Matmul | None:
    """Return the `Matmul` of an instruction, or None if it is not a matmul."""
    target = at.quoted("custom_call_target") if at.opcode == "custom-call" else ""
    is_cublas = re.match(r"__cublas\$(gemm|lt\$\w*[mM]atmul)", target)
    if not is_cublas and at.opcode not in ("dot", "scaled-dot"):
        return None
    operands = [program.computations[at.computation][name] for name in at.operands[:2]]
    if is_cublas:
        fp8, problem = target.endswith(("$f8", "$mx")), ""
        kernel = "cuBLASLt FP8" if fp8 else "cuBLASLt"
    else:
        caller = program.callers.get(at.computation)
        while caller is not None and caller.opcode not in _CALLS:
            caller = program.callers.get(caller.computation)
        if caller is None:
            raise _not_for_gpu(f"one with a plain {at.opcode}, as compiled for a CPU")
        kernel = next((k for k in ("Triton", "cuDNN") if k.lower() in caller.attributes), "a loop")
        problem = "too small for a matrix kernel" if kernel == "a loop" else ""
        if at.opcode == "scaled-dot":
            problem = "block scales: GPUs before sm_100 have no FP8 kernel for them"
        fp8 = not problem and all(_is_fp8(x.dtype) for x in operands)
    origins = [_fp8_origin(program, program.operand(at, i)) for i in (0, 1)]
    names = [_array(x) for x in operands]
    for i, origin in enumerate(origins):
        if origin is not None and origin.dtype != operands[i].dtype:
            names[i] = f"{_array(origin).partition('[')[0]} -> {names[i]}"
    summed = math.prod(operands[0].shape[d] for d in contracted(at))
    return Matmul(
        name=at.name,
        kernel=kernel,
        fp8=fp8,
        quantized=any(origins),
        reason="" if fp8 else problem or _reason(origins),
        lhs=names[0],
        rhs=names[1],
        out=_array(at),
        flops=2.0 * math.prod(at.shape) * summed * program.trips(at),
        op_name=at.quoted("op_name"),
        source=user_line(program, at),
    )


def _is_amax(program: HloProgram, at: HloInstruction) -> bool:
    """Return whether an instruction reduces absolute values to their maximum."""
    if at.opcode != "reduce" or not at.calls:
        return False
    body, root = program.computations[at.calls[0]], program.roots[at.calls[0]]
    node = _unchanged(program, program.operand(at, 0))
    return body[root].opcode == "maximum" and node is not None and node.opcode == "abs"
