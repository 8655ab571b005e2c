"""Which matrix products of a compiled GPU program became FP8 kernels, and why the others did not.

XLA makes an FP8 kernel of a product only if it recognises the pattern; a product that it does not
recognise is computed in 16 bits, correctly and silently. Everything here is read from the text of
the optimized program.
"""

import dataclasses
import warnings
from typing import Any

import jax

from ._hlo import parse_hlo
from ._kernels import Matmul, examine, is_amax, is_cast, is_fp8


class Fp8Warning(UserWarning):
    """A product of FP8 data that XLA did not make an FP8 kernel of.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", Fp8Warning)  # Fp8Report.warn() then raises
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Report:
    """What `check_fp8` found. Printed, it is a table; true if it has FP8 kernels and lost none.

    Attributes:
        matmuls: every matrix product, in the order of the program.
        amax_reductions: reductions that take the greatest magnitude of a tensor.
        casts: conversions of wider data to FP8.
        transposes: copies and transpositions of FP8 data.

    Example:
        >>> report = Fp8Report(matmuls=(), amax_reductions=0, casts=0, transposes=0)
        >>> bool(report), report.share  # no product, so no FP8 kernel
        (False, 0.0)
    """

    matmuls: tuple[Matmul, ...]
    amax_reductions: int
    casts: int
    transposes: int

    @property
    def fp8(self) -> tuple[Matmul, ...]:
        """The products that are FP8 kernels."""
        return tuple(m for m in self.matmuls if m.fp8)

    @property
    def lost(self) -> tuple[Matmul, ...]:
        """The products of FP8 data that are not FP8 kernels."""
        return tuple(m for m in self.matmuls if m.quantized and not m.fp8)

    @property
    def wide(self) -> tuple[Matmul, ...]:
        """The products that nobody asked to be in FP8."""
        return tuple(m for m in self.matmuls if not m.quantized and not m.fp8)

    @property
    def share(self) -> float:
        """Share of the floating-point operations of all products that FP8 kernels do."""
        total = sum(m.flops for m in self.matmuls)
        return sum(m.flops for m in self.fp8) / total if total else 0.0

    def __bool__(self) -> bool:
        """Whether there are FP8 kernels, and no product of FP8 data is another kernel."""
        return bool(self.fp8) and not self.lost

    def __str__(self) -> str:
        """A summary, then one row for each product."""
        head = (
            f"{len(self.fp8)} of {len(self.matmuls)} products are FP8 kernels "
            f"({self.share:.1%} of their operations); {len(self.lost)} lost their FP8 operands; "
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
        """Warns of each product that lost its FP8 operands (`Fp8Warning`); returns the report."""
        for matmul in self.lost:
            warnings.warn(f"not an FP8 kernel: {matmul}", Fp8Warning, stacklevel=2)
        return self

    def raise_if_lost(self) -> "Fp8Report":
        """Returns the report.

        Raises:
            ValueError: if a product of FP8 data is not an FP8 kernel; all of them are listed.
        """
        if self.lost:
            lines = "".join(f"\n  {matmul}" for matmul in self.lost)
            raise ValueError(
                f"unitscale.quant.check_fp8: {len(self.lost)} products of FP8 data are not FP8 "
                f"kernels:{lines}"
            )
        return self


def check_fp8(compiled: "jax.stages.Compiled | str") -> Fp8Report:
    """Names every matrix product of a compiled GPU program, whether it is an FP8 kernel, and why.

    An FP8 kernel is a cuBLASLt FP8 call, or a Triton or cuDNN kernel that reads FP8 operands. A
    product is *lost* if an operand was FP8 data and the kernel is another.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returned, on a GPU or ahead of time for
            one; or the text of its optimized program.

    Returns:
        The `Fp8Report`.

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

    References:
        XLA, RFC "FP8 in XLA", openxla/xla discussion 22 (patterns and kernels).
    """
    capability = 0.0
    if isinstance(compiled, str):
        text = compiled
    elif isinstance(compiled, jax.stages.Compiled):
        devices = _devices(compiled)
        if other := sorted({d.platform for d in devices} - {"gpu", "cuda", "rocm"}):
            raise ValueError(
                "unitscale.quant.check_fp8: expected a program compiled for a GPU; got one for "
                f"{other[0]}. Compile for a GPU, or ahead of time for a topology of GPUs."
            )
        capability = min((float(getattr(d, "compute_capability", 0)) for d in devices), default=0.0)
        text = compiled.as_text() or ""
    else:
        raise TypeError(
            "unitscale.quant.check_fp8: compiled must be what jax.jit(f).lower(...).compile() "
            f"returns, or its text; got {type(compiled).__name__}"
        )
    program = parse_hlo(text)
    found = [examine(program, i, capability) for i in program.instructions]
    return Fp8Report(
        matmuls=tuple(m for m in found if m is not None),
        amax_reductions=sum(is_amax(program, i) for i in program.instructions),
        casts=sum(is_cast(program, i) for i in program.instructions),
        transposes=sum(
            i.opcode in ("transpose", "copy") and is_fp8(i.dtype) for i in program.instructions
        ),
    )


def _devices(compiled: jax.stages.Compiled) -> list[Any]:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return list({d for s in shardings for d in getattr(s, "device_set", ())})
