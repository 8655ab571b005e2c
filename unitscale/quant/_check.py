"""Report which matmuls of a compiled GPU program became FP8 kernels, and why the others did not.

XLA makes an FP8 kernel of a matmul only if it recognizes the pattern; it computes any other in 16
bits, silently. Everything here is read from the text of the optimized program.
"""

import dataclasses
import math
import re
import warnings
from typing import Any

import jax

from ._hlo import CALLS, HloInstruction, HloProgram, bits, contracted, parse_hlo, user_line

# Compute capability of the first NVIDIA GPUs with kernels for block scales (MXFP8).
_BLOCK_SCALES_SINCE = 10.0

_CUBLAS = re.compile(r"__cublas\$(gemm|lt\$\w*[mM]atmul)")
_NOT_NVIDIA = {"f8e4m3fnuz": "AMD's", "f8e5m2fnuz": "AMD's", "f8e4m3b11fnuz": "for simulation"}
_NOT_NVIDIA |= dict.fromkeys(("f8e4m3", "f8e3m4"), "IEEE-style")
# Instructions between FP8 data and the matmul that keep its values, besides multiplications.
_UNCHANGED = frozenset(
    {"convert", "bitcast", "reshape", "transpose", "copy", "pad", "slice", "dynamic-slice"}
    | {"broadcast", "concatenate", "clamp", "negate", "all-gather", "optimization-barrier"}
)


class Fp8Warning(UserWarning):
    """Warning about a matmul of FP8 data that XLA did not compile to an FP8 kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """One matmul of a compiled program.

    Attributes:
        kernel: such as "cuBLASLt FP8", "cuBLASLt" or "Triton".
        fp8: whether the kernel multiplies FP8 operands.
        quantized: whether an operand was in FP8 at some point before the matmul.
        reason: why it is not an FP8 kernel; "" if it is one.
        lhs, rhs, out: such as "float8_e4m3fn[512,256]"; with an arrow if it was widened.
        flops: floating-point operations of all its runs, as far as XLA knows trip counts of loops.
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

    def __str__(self) -> str:
        """One line: operands, kernel, reason and origin."""
        what = f"{self.lhs} x {self.rhs} -> {self.out}"
        return f"{what} by {self.kernel}{': ' * bool(self.reason)}{self.reason} ({self.origin})"

    @property
    def origin(self) -> str:
        """JAX's name stack and the line of source."""
        return " at ".join(filter(None, (self.op_name, self.source))) or self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Report:
    """Result of `check_fp8`. Printed, it is a table; true if it has FP8 kernels and lost none.

    Attributes:
        matmuls: every matmul, in the order of the program.
        amax_reductions: reductions that compute the amax of a tensor.
        casts: conversions of wider data to FP8.
        transposes: copies and transposes of FP8 data.
    """

    matmuls: tuple[Matmul, ...]
    amax_reductions: int
    casts: int
    transposes: int

    @property
    def fp8(self) -> tuple[Matmul, ...]:
        """Matmuls that are FP8 kernels."""
        return tuple(m for m in self.matmuls if m.fp8)

    @property
    def lost(self) -> tuple[Matmul, ...]:
        """Matmuls of FP8 data that are not FP8 kernels."""
        return tuple(m for m in self.matmuls if m.quantized and not m.fp8)

    @property
    def wide(self) -> tuple[Matmul, ...]:
        """Matmuls whose operands were never FP8."""
        return tuple(m for m in self.matmuls if not m.quantized and not m.fp8)

    @property
    def share(self) -> float:
        """Share of the floating-point operations of all matmuls that FP8 kernels do."""
        total = sum(m.flops for m in self.matmuls)
        return sum(m.flops for m in self.fp8) / total if total else 0.0

    def __bool__(self) -> bool:
        """Whether there are FP8 kernels, and no matmul of FP8 data is another kernel."""
        return bool(self.fp8) and not self.lost

    def __str__(self) -> str:
        """A summary, then one row for each matmul."""
        head = (
            f"{len(self.fp8)} of {len(self.matmuls)} matmuls are FP8 kernels ({self.share:.1%} of "
            f"their operations); {len(self.lost)} lost their FP8 operands; "
            f"{self.amax_reductions} amax reductions, {self.casts} casts to FP8, "
            f"{self.transposes} FP8 transposes"
        )
        rows = [("FP8", "kernel", "lhs", "rhs", "result", "reason", "from")]
        for m in self.matmuls:
            state = "yes" if m.fp8 else "LOST" if m.quantized else "no"
            rows.append((state, m.kernel, m.lhs, m.rhs, m.out, m.reason, m.origin))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([head, *(lines if self.matmuls else ())])

    def warn(self) -> "Fp8Report":
        """Warn of each matmul that lost its FP8 operands (`Fp8Warning`); return the report."""
        for matmul in self.lost:
            warnings.warn(f"not an FP8 kernel: {matmul}", Fp8Warning, stacklevel=2)
        return self

    def raise_if_lost(self) -> "Fp8Report":
        """Raise a ValueError that lists the matmuls that lost their FP8 operands, if any."""
        if self.lost:
            lines = "".join(f"\n  {matmul}" for matmul in self.lost)
            raise ValueError(
                f"unitscale.quant.check_fp8: {len(self.lost)} matmuls of FP8 data are not FP8 "
                f"kernels:{lines}"
            )
        return self


def check_fp8(compiled: Any) -> Fp8Report:
    """List every matmul of a compiled GPU program, whether it is an FP8 kernel, and why not.

    An FP8 kernel is a cuBLASLt FP8 call, or a Triton or cuDNN kernel that reads FP8 operands. A
    matmul is *lost* if an operand was FP8 data and the kernel is another.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()` (or of `nnx.jit`) for a GPU, or
            the text of its optimized program.

    Raises:
        TypeError: if it is neither a compiled program nor text.
        ValueError: if the program was not compiled for a GPU.

    Example:
        >>> program = '''
        ... ENTRY %main (a: f8e4m3fn[32,64], b: f8e4m3fn[16,64]) -> bf16[32,16] {
        ...   %a = f8e4m3fn[32,64] parameter(0)
        ...   %b = f8e4m3fn[16,64] parameter(1)
        ...   ROOT %y = bf16[32,16] custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8"
        ... }'''
        >>> report = check_fp8(program)
        >>> bool(report), report.matmuls[0].lhs
        (True, 'float8_e4m3fn[32,64]')
    """
    text, capability = (compiled, 0.0) if isinstance(compiled, str) else _program_of(compiled)
    program = parse_hlo(text)
    found = [_examine(program, i, capability) for i in program.instructions]
    return Fp8Report(
        matmuls=tuple(m for m in found if m is not None),
        amax_reductions=sum(_is_amax(program, i) for i in program.instructions),
        casts=sum(_is_cast(program, i) for i in program.instructions),
        transposes=sum(
            i.opcode in ("transpose", "copy") and _is_fp8(i.dtype) for i in program.instructions
        ),
    )


def _program_of(compiled: Any) -> tuple[str, float]:
    """Text and compute capability of a `jax.stages.Compiled`, or of an object that holds one."""
    attributes = vars(compiled).values() if hasattr(compiled, "__dict__") else ()
    for stage in (compiled, *attributes):
        text = stage.as_text() if hasattr(stage, "as_text") else None
        if not (isinstance(text, str) and text.startswith("HloModule")):
            continue
        shardings = [getattr(stage, f"{side}_shardings", None) for side in ("input", "output")]
        devices = {d for s in jax.tree.leaves(shardings) for d in getattr(s, "device_set", ())}
        if other := sorted({d.platform for d in devices} - {"gpu", "cuda", "rocm"}):
            raise _not_for_gpu(f"one for {other[0]}")
        capabilities = (float(getattr(d, "compute_capability", 0)) for d in devices)
        return text, min(capabilities, default=0.0)
    raise TypeError(
        "unitscale.quant.check_fp8: compiled must be what jax.jit(f).lower(...).compile() "
        f"returns, or its text; got {type(compiled).__name__}"
    )


def _not_for_gpu(got: str) -> ValueError:
    return ValueError(
        f"unitscale.quant.check_fp8: expected a program compiled for a GPU; got {got}. Compile for "
        "a GPU, or ahead of time for a topology of GPUs."
    )


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An operand of a matmul, as it is multiplied, and the FP8 data it was made from."""

    dtype: str
    shape: tuple[int, ...]
    origin: str = ""  # dtype of that FP8 data; "" if it never was FP8
    obstacle: str = ""  # what was between that data and the matmul

    def __str__(self) -> str:
        came = f"{_name(self.origin)} -> " if self.origin not in ("", self.dtype) else ""
        return came + f"{_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def _name(dtype: str) -> str:
    """NumPy's name of an HLO element type."""
    if re.match(r"f[4-8]e\d", dtype):
        return re.sub(r"^f(\d)", r"float\1_", dtype)
    kinds = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint"}
    return re.sub(r"^(bf|[fsu])(?=\d)", lambda m: kinds[m[0]], dtype)


def _is_fp8(dtype: str) -> bool:
    return dtype.startswith("f8e") and dtype != "f8e8m0fnu"


def _scale_of(program: HloProgram, multiply: HloInstruction) -> tuple[int, tuple[int, ...]] | None:
    """Which operand of a multiplication is a broadcast scale, and the shape of that scale."""
    for index in (1, 0):
        node = program.operand(multiply, index)
        shape = multiply.shape
        while node is not None and node.opcode in _UNCHANGED:
            if node.opcode == "broadcast" and math.prod(node.shape) == math.prod(shape):
                inner = program.operand(node, 0)
                return index, tuple(n for n in (inner.shape if inner else shape) if n != 1)
            node = program.operand(node, 0)
        if node is not None and node.opcode == "constant" and not node.shape:
            return index, ()
    return None


def _trace(program: HloProgram, matmul: HloInstruction, index: int) -> _Operand:
    """Follow an operand back to FP8 data."""
    direct = program.computations[matmul.computation][matmul.operands[index]]
    node = program.operand(matmul, index)
    narrowed, obstacle = "", ""
    while node is not None:
        if _is_fp8(node.dtype):
            return _Operand(direct.dtype, direct.shape, node.dtype, obstacle)
        through = 1 if node.opcode == "clamp" else 0
        if node.opcode == "convert":
            before = program.operand(node, 0)
            if before is not None and bits(before.dtype) > bits(node.dtype):
                narrowed = node.dtype
        elif node.opcode == "multiply" and (scale := _scale_of(program, node)) is not None:
            if scale[1]:
                obstacle = "a scale for each row or block is applied before the matmul"
            elif narrowed and not obstacle:
                obstacle = f"scaled in {_name(node.dtype)} and cast to {_name(narrowed)}"
            through = 1 - scale[0]
        elif node.opcode not in _UNCHANGED:
            break
        node = program.operand(node, through)
    return _Operand(direct.dtype, direct.shape)


def _reason(lhs: _Operand, rhs: _Operand, how: str) -> str:
    """Why a matmul is not an FP8 kernel; ``how`` is what is known of its kernel."""
    origins = {lhs.origin, rhs.origin}
    if origins == {""}:
        return f"operands were never FP8{'; ' * bool(how)}{how}"
    if "" in origins:
        return "only one operand is FP8: quantize the other one too"
    if foreign := sorted(origins & _NOT_NVIDIA.keys()):
        return (
            f"{_name(foreign[0])} is {_NOT_NVIDIA[foreign[0]]}, NVIDIA GPUs do not multiply it: "
            "use float8_e4m3fn and float8_e5m2"
        )
    if how:
        return how
    if origins == {"f8e5m2"}:
        return "both operands are E5M2: keep one of them in E4M3"
    if obstacle := lhs.obstacle or rhs.obstacle:
        return f"{obstacle}: multiply the FP8 data and scale the result"
    return (
        "the FP8 operands are widened first: multiply them directly "
        "(lax.dot_general with preferred_element_type) and scale the result"
    )


def _examine(program: HloProgram, at: HloInstruction, capability: float) -> Matmul | None:
    """Describe an instruction that is a matmul; None for any other."""
    target = at.quoted("custom_call_target")
    how, source = "", at  # `source` has the operands
    if at.opcode == "custom-call" and _CUBLAS.match(target):
        fp8 = target.endswith(("$f8", "$mx"))
        kernel = "cuBLASLt FP8" if fp8 else "cuBLASLt"
    elif at.opcode in ("dot", "scaled-dot"):
        caller = program.callers.get(at.computation)
        while caller is not None and caller.opcode not in CALLS:
            caller = program.callers.get(caller.computation)
        if caller is None:
            raise _not_for_gpu(f"one with a plain {at.opcode}, as compiled for a CPU")
        kernel = next((k for k in ("Triton", "cuDNN") if k.lower() in caller.attributes), "a loop")
        types = [program.computations[at.computation][n].dtype for n in at.operands[:2]]
        if at.opcode == "scaled-dot":
            fp8, kernel = capability >= _BLOCK_SCALES_SINCE, f"{kernel}, block scales"
            how = "" if fp8 else "block scales: FP8 kernels exist from sm_100"
        else:
            how = "too small for a matrix kernel" if kernel == "a loop" else ""
            fp8 = not how and all(map(_is_fp8, types))
    elif (multiply := _vector_matmul(program, at)) is not None:
        kernel, fp8, source = "a reduction", False, multiply
        how = "a matmul with a vector (M or N is 1) is a reduction: multiply more rows at once"
    else:
        return None
    lhs, rhs = (_trace(program, source, index) for index in (0, 1))
    summed = math.prod(lhs.shape[d] for d in contracted(source))
    return Matmul(
        name=at.name,
        kernel=kernel,
        fp8=fp8,
        quantized=bool(lhs.origin or rhs.origin),
        reason="" if fp8 else _reason(lhs, rhs, how),
        lhs=str(lhs),
        rhs=str(rhs),
        out=str(_Operand(at.dtype, at.shape)),
        flops=2.0 * math.prod(source.shape) * summed * program.trips(at),
        op_name=at.quoted("op_name"),
        source=user_line(program, at),
    )


def _vector_matmul(program: HloProgram, instruction: HloInstruction) -> HloInstruction | None:
    """The multiplication inside a reduction that XLA made of a matmul with a vector."""
    if instruction.opcode != "reduce" or not instruction.quoted("op_name").endswith("dot_general"):
        return None
    node = program.operand(instruction, 0)
    while node is not None and node.opcode in ("convert", "bitcast", "reshape"):
        node = program.operand(node, 0)
    if node is None or node.opcode != "multiply":
        return None
    return node if node.quoted("op_name").endswith("dot_general") else None


def _is_amax(program: HloProgram, instruction: HloInstruction) -> bool:
    """Whether a reduction computes a maximum of magnitudes (its second step does not count)."""
    if instruction.opcode != "reduce" or not instruction.calls:
        return False
    called = instruction.calls[0]
    if program.computations[called][program.roots[called]].opcode != "maximum":
        return False
    node = program.operand(instruction, 0)
    while node is not None and node.opcode in _UNCHANGED | {"bitcast-convert"}:
        node = program.operand(node, 0)
    return node is not None and node.opcode == "abs"


def _is_cast(program: HloProgram, instruction: HloInstruction) -> bool:
    before = program.operand(instruction, 0) if instruction.opcode == "convert" else None
    return before is not None and _is_fp8(instruction.dtype) and not _is_fp8(before.dtype)
