"""Operations of element-wise kernels, counted by hand."""

from __future__ import annotations

import pytest

from tests.analysis.programs import AT_ONCE, fused, parameters, program
from unitscale.analysis._arithmetic import operations
from unitscale.analysis._projection import project
from unitscale.quant import parse_hlo

N = 8 * 1024
F = "f32[8,1024]"


def count(text: str) -> float:
    found = parse_hlo(text)
    return operations(found, found.computations[found.entry]["out"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{F} add(%a, %a)", N),
        (f"{F} exponential(%a)", 8 * N),
        (f"{F} tanh(%a)", 24 * N),
        (f"{F} copy(%a)", 0),
        ("s32[8,1024] xor(%b, %b)", 2 * N),
        ("u32[8,1024] shift-left(%b, %b)", 2 / 3 * N),
        ("f32[8] reduce(%a, %c), dimensions={1}, to_apply=%add", N),
        (f'{F} custom-call(%a), custom_call_target="f"', 0),
    ],
)
def test_an_instruction_by_itself(line: str, expected: float) -> None:
    own = parameters(a=F, b="s32[8,1024]", c="f32[]")
    assert count(program(f"{own}\n  ROOT %out = {line}")) == expected


def test_a_reduction_applies_its_own_computation() -> None:
    """An exponential, a product and a sum for each number that goes in."""
    joins = """\
%join (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  %e = f32[] exponential(%b)
  %p = f32[] multiply(%a, %e)
  ROOT %s = f32[] add(%p, %b)
}
"""
    own = parameters(a=F, c="f32[]")
    line = "f32[8] reduce(%a, %c), dimensions={1}, to_apply=%join"
    assert count(program(f"{own}\n  ROOT %out = {line}", joins)) == (8 + 1 + 1) * N


def test_a_fusion_calculates_what_its_result_needs() -> None:
    """Of the exponentials one row of eight."""
    inner = f"""\
  %e = {F} exponential(%p0)
  %s = f32[1,1024] slice(%e), slice={{[0:1],[0:1024]}}
  ROOT %r = f32[1,1024] negate(%s)"""
    assert count(fused(inner, "f32[1,1024]", a=F)) == (8 + 1) * 1024


def test_many_operations_to_a_byte_are_what_bounds_a_kernel() -> None:
    """Random bits of eight rounds, 32 operations of integers each, are written as bytes."""
    rounds = "\n".join(f"  %p{n + 1} = u32[8,1024] add(%p{n}, %p{n})" for n in range(256))
    inner = f"{rounds}\n  ROOT %r = u8[8,1024] convert(%p256)"
    (kernel,) = project(parse_hlo(fused(inner, "u8[8,1024]", a="u32[8,1024]")), AT_ONCE)[0]
    assert kernel.kind == "arithmetic-bound"
    assert kernel.seconds == pytest.approx((2 * 256 + 2) * N / AT_ONCE.vector)
    few = inner.replace("add(", "bitcast(").replace("%p1, %p1", "%p1")
    (kernel,) = project(parse_hlo(fused(few, "u8[8,1024]", a="u32[8,1024]")), AT_ONCE)[0]
    assert kernel.kind == "memory-bound"
