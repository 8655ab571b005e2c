"""What became of each matrix product of an optimized GPU program, read from its instructions."""

import dataclasses
import math
import re
from pathlib import Path

from ._hlo import CALLS, HloInstruction, HloProgram

FP8_SINCE = 8.9
"""The compute capability from which on NVIDIA GPUs have FP8 kernels."""
BLOCK_SCALES_SINCE = 10.0
"""The same of kernels that multiply by block scales, such as MXFP8's."""

_KINDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint"}
_CUBLAS = re.compile(r"__cublas\$(gemm|lt\$\w*[mM]atmul)")
_NOT_NVIDIA = {
    "f8e4m3fnuz": "AMD's",
    "f8e5m2fnuz": "AMD's",
    "f8e4m3b11fnuz": "for simulation",
    "f8e4m3": "IEEE-style",
    "f8e3m4": "IEEE-style",
}
# What an operand may pass through on its way from FP8 data to the product; then multiplications.
_UNCHANGED = frozenset(
    {"convert", "bitcast", "reshape", "transpose", "copy", "pad", "slice", "dynamic-slice"}
    | {"broadcast", "concatenate", "clamp", "negate", "all-gather", "optimization-barrier"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """One matrix product of a compiled program.

    Attributes:
        name: its name in the program.
        kernel: what computes it, such as "cuBLASLt FP8", "cuBLASLt" or "Triton".
        fp8: whether the kernel multiplies FP8 operands.
        quantized: whether an operand was in FP8 at some point before the product.
        reason: why it is not an FP8 kernel; "" if it is one.
        lhs: left operand, such as "float8_e4m3fn[512,256]"; with an arrow if it was widened.
        rhs: right operand.
        out: result.
        flops: floating-point operations of all its runs, where XLA knows how often a loop repeats.
        op_name: JAX's name stack.
        source: "file:line" of the user's code, or "".

    Example:
        >>> from unitscale.quant import check_fp8
        >>> program = '''
        ... ENTRY %main (a: bf16[32,64], b: bf16[16,64]) -> bf16[32,16] {
        ...   %a = bf16[32,64] parameter(0)
        ...   %b = bf16[16,64] parameter(1)
        ...   ROOT %y = bf16[32,16] custom-call(%a, %b), custom_call_target="__cublas$gemm"
        ... }'''
        >>> check_fp8(program).matmuls[0].kernel
        'cuBLASLt'
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
        """One line: the operands, the kernel, the reason and where it comes from."""
        what = f"{self.lhs} x {self.rhs} -> {self.out}"
        return f"{what} by {self.kernel}{': ' * bool(self.reason)}{self.reason} ({self.origin})"

    @property
    def origin(self) -> str:
        """Where it comes from: JAX's name stack and the line of source."""
        return " at ".join(filter(None, (self.op_name, self.source))) or self.name


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An operand of a product: as it is multiplied, and where it comes from."""

    dtype: str
    shape: tuple[int, ...]
    origin: str  # dtype of the FP8 data it was made from; "" if it never was FP8
    obstacle: str = ""  # what stood between that data and the product

    def __str__(self) -> str:
        came = f"{_name(self.origin)} -> " if self.origin not in ("", self.dtype) else ""
        return came + f"{_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def _name(dtype: str) -> str:
    """NumPy's name of an HLO element type."""
    if re.match(r"f[4-8]e\d", dtype):
        return re.sub(r"^f(\d)", r"float\1_", dtype)
    return re.sub(r"^(bf|[fsu])(?=\d)", lambda m: _KINDS[m[0]], dtype)


def is_fp8(dtype: str) -> bool:
    return dtype.startswith("f8e") and dtype != "f8e8m0fnu"


def _scale_of(program: HloProgram, multiply: HloInstruction) -> tuple[int, tuple[int, ...]] | None:
    """Which operand of a multiplication is a broadcast scale, and the shape of that scale."""
    for index in (1, 0):
        node = program.operand(multiply, index)
        shape = multiply.shape
        while node is not None and node.opcode in _UNCHANGED:
            if node.opcode == "broadcast" and math.prod(node.shape) == math.prod(multiply.shape):
                inner = program.operand(node, 0)
                return index, tuple(n for n in (inner.shape if inner else shape) if n != 1)
            node = program.operand(node, 0)
        if node is not None and node.opcode == "constant" and not node.shape:
            return index, ()
    return None


def _trace(program: HloProgram, product: HloInstruction, index: int) -> _Operand:
    """Follows an operand back to FP8 data."""
    body = program.computations[product.computation]
    direct = body[product.operands[index]]
    node = program.operand(product, index)
    narrowed, obstacle = "", ""
    while node is not None:
        if is_fp8(node.dtype):
            return _Operand(direct.dtype, direct.shape, node.dtype, obstacle)
        if node.opcode == "convert":
            before = program.operand(node, 0)
            if before is not None and bits(before.dtype) > bits(node.dtype):
                narrowed = node.dtype
        elif node.opcode == "multiply":
            scale = _scale_of(program, node)
            if scale is None:
                break
            if scale[1]:
                obstacle = "a scale for each row or block is applied before the product"
            elif narrowed and not obstacle:
                obstacle = f"scaled in {_name(node.dtype)} and cast to {_name(narrowed)}"
            node = program.operand(node, 1 - scale[0])
            continue
        elif node.opcode not in _UNCHANGED:
            break
        node = program.operand(node, 1 if node.opcode == "clamp" else 0)
    return _Operand(direct.dtype, direct.shape, "")


def bits(dtype: str) -> int:
    """The number in the name of an HLO element type; 0 if it has none, as "pred"."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0


def _reason(lhs: _Operand, rhs: _Operand, how: str) -> str:
    """Why a product that is not an FP8 kernel is none; `how` is what is known of its kernel."""
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


def user_line(program: HloProgram, instruction: HloInstruction) -> str:
    """The user's line: the innermost one that is neither unitscale's nor a dependency's."""
    stack = program.stack(instruction)
    package = str(Path(__file__).parents[1])
    own = [f for f in stack if not f.startswith(package) and "site-packages" not in f]
    return (own or list(stack[-1:]) or [""])[0]


def contracted(instruction: HloInstruction) -> tuple[int, ...]:
    """The dimensions of the left operand that a product sums over."""
    found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    if found:
        return tuple(int(n) for n in re.findall(r"\d+", found[1]))
    return instruction.dimensions("lhs_contracting_dims")


def _matmul(
    program: HloProgram,
    at: HloInstruction,
    kernel: str,
    fp8: bool,
    how: str,
    product: HloInstruction,
) -> Matmul:
    """One row: `product` has the operands, `at` the result."""
    lhs, rhs = (_trace(program, product, index) for index in (0, 1))
    summed = math.prod(lhs.shape[d] for d in contracted(product))
    once = 2.0 * math.prod(product.shape) * summed
    return Matmul(
        name=at.name,
        kernel=kernel,
        fp8=fp8,
        quantized=bool(lhs.origin or rhs.origin),
        reason="" if fp8 else _reason(lhs, rhs, how),
        lhs=str(lhs),
        rhs=str(rhs),
        out=str(_Operand(at.dtype, at.shape, "")),
        flops=once * program.trips(at),
        op_name=at.quoted("op_name"),
        source=user_line(program, at),
    )


def _vector_product(program: HloProgram, instruction: HloInstruction) -> HloInstruction | None:
    """The multiplication in a reduction that XLA made of a product with a vector."""
    node: HloInstruction | None = instruction
    if instruction.opcode != "reduce" or not instruction.quoted("op_name").endswith("dot_general"):
        return None
    node = program.operand(instruction, 0)
    while node is not None and node.opcode in ("convert", "bitcast", "reshape"):
        node = program.operand(node, 0)
    if node is None or node.opcode != "multiply":
        return None
    return node if node.quoted("op_name").endswith("dot_general") else None


def examine(program: HloProgram, at: HloInstruction, capability: float) -> Matmul | None:
    target = at.quoted("custom_call_target")
    if at.opcode == "custom-call" and _CUBLAS.match(target):
        fp8 = target.endswith(("$f8", "$mx"))
        return _matmul(program, at, "cuBLASLt FP8" if fp8 else "cuBLASLt", fp8, "", at)
    if at.opcode in ("dot", "scaled-dot"):
        caller = program.callers.get(at.computation)
        while caller is not None and caller.opcode not in CALLS:
            caller = program.callers.get(caller.computation)
        if caller is None:
            raise ValueError(
                "unitscale.quant.check_fp8: expected a program compiled for a GPU; got one with a "
                f"plain {at.opcode}, as compiled for a CPU. Compile for a GPU, or ahead of time "
                "for a topology of GPUs."
            )
        kernel = next((k for k in ("Triton", "cuDNN") if k.lower() in caller.attributes), "a loop")
        types = [program.computations[at.computation][n].dtype for n in at.operands[:2]]
        if at.opcode == "scaled-dot":
            emulated = capability < BLOCK_SCALES_SINCE
            how = "block scales: FP8 kernels exist from sm_100" if emulated else ""
            return _matmul(program, at, f"{kernel}, block scales", not how, how, at)
        how = "too small for a matrix kernel" if kernel == "a loop" else ""
        fp8 = not how and all(map(is_fp8, types))
        return _matmul(program, at, kernel, fp8, how, at)
    if (product := _vector_product(program, at)) is not None:
        how = "a product with a vector (M or N is 1) is a reduction: multiply more rows at once"
        return _matmul(program, at, "a reduction", False, how, product)
    return None


def is_amax(program: HloProgram, instruction: HloInstruction) -> bool:
    """Whether a reduction takes the maximum of magnitudes (the second of two steps does not)."""
    if instruction.opcode != "reduce" or not instruction.calls:
        return False
    called = instruction.calls[0]
    if program.computations[called][program.roots[called]].opcode != "maximum":
        return False
    node = program.operand(instruction, 0)
    while node is not None and (node.opcode in _UNCHANGED or node.opcode == "bitcast-convert"):
        node = program.operand(node, 0)
    return node is not None and node.opcode == "abs"


def is_cast(program: HloProgram, instruction: HloInstruction) -> bool:
    if instruction.opcode != "convert" or not is_fp8(instruction.dtype):
        return False
    before = program.operand(instruction, 0)
    return before is not None and not is_fp8(before.dtype)
