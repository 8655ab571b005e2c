"""Bytes of kernels, counted by hand."""

from __future__ import annotations

import pytest

from tests.analysis.programs import fused, parameters, program
from unitscale.analysis._traffic import moved, size
from unitscale.quant import parse_hlo

F, N = "f32[8,1024]{1,0}", "s32[]"
K = 4 * 1024  # bytes of a row of F


def bytes_of(text: str, name: str = "out") -> float:
    found = parse_hlo(text)
    return moved(found, found.computations[found.entry][name])


@pytest.mark.parametrize(
    ("kind", "each"),
    [("f32", 4), ("bf16", 2), ("f16", 2), ("f8e4m3fn", 1), ("f8e8m0fnu", 1), ("s4", 0.5)]
    + [("pred", 1), ("f64", 8), ("c64", 8), ("u8", 1), ("token", 0)],
)
def test_bytes_of_an_element(kind: str, each: float) -> None:
    assert size((kind, (3, 4))) == 12 * each
    assert size((kind, ()), (kind, (2,))) == 3 * each


# What is fused, its result, its parameters, and the bytes.
FUSIONS = {
    "element-wise": ("ROOT %r = F add(%p0, %p1)", F, (F, F), 3 * 8 * K),
    "used twice": ("ROOT %r = F multiply(%p0, %p0)", F, (F,), 2 * 8 * K),
    "a broadcast row": (
        "%b = F broadcast(%p1), dimensions={1}\n  ROOT %r = F add(%p0, %b)",
        F,
        (F, "f32[1024]{0}"),
        (8 + 8 + 1) * K,
    ),
    "a cast": ("ROOT %r = f8e4m3fn[8,1024] convert(%p0)", "f8e4m3fn[8,1024]", (F,), 8 * K + 2 * K),
    "a sum": (
        "%z = f32[] constant(0)\n  ROOT %r = f32[8] reduce(%p0, %z), dimensions={1}, to_apply=%add",
        "f32[8]",
        (F,),
        8 * K + 4 * 8,
    ),
    "a slice": (
        "%s = f32[1,1024] dynamic-slice(%p0, %p1, %p1)\n  ROOT %r = f32[1,1024] negate(%s)",
        "f32[1,1024]",
        (F, N),
        2 * K + 4,
    ),
    "a slice of what is cast": (
        "%c = bf16[8,1024] convert(%p0)\n"
        "  ROOT %r = bf16[2,1024] slice(%c), slice={[0:2],[0:1024]}",
        "bf16[2,1024]",
        (F,),
        2 * K + K,
    ),
    "two slices": (
        "%a = f32[1,1024] slice(%p0), slice={[0:1],[0:1024]}\n"
        "  %b = f32[1,1024] slice(%p0), slice={[4:5],[0:1024]}\n"
        "  ROOT %r = f32[1,1024] add(%a, %b)",
        "f32[1,1024]",
        (F,),
        3 * K,
    ),
    "rows of a table": (
        "ROOT %r = f32[3,1024] gather(%p0, %p1), offset_dims={1}, slice_sizes={1,1024}",
        "f32[3,1024]",
        (F, "s32[3,1]"),
        6 * K + 12,
    ),
    "an update in place": (
        "%n = f32[1,1024] negate(%p1)\n  ROOT %r = F dynamic-update-slice(%p0, %n, %p2, %p2)",
        F,
        (F, "f32[1,1024]", N),
        2 * K + 4,
    ),
    "an update seen through a view": (
        "%v = f32[8192] bitcast(%p0)\n"
        "  %u = f32[8192] dynamic-update-slice(%v, %p1, %p2)\n  ROOT %r = F bitcast(%u)",
        F,
        (F, "f32[1024]", N),
        2 * K + 4,
    ),
    "an update of something new": (
        "%z = f32[] constant(0)\n  %b = F broadcast(%z), dimensions={}\n"
        "  ROOT %r = F dynamic-update-slice(%b, %p0, %p1, %p1)",
        F,
        ("f32[1,1024]", N),
        K + 8 * K + 4,
    ),
    "two results": (
        "%a = F negate(%p0)\n  %b = bf16[8,1024] convert(%p0)\n"
        "  ROOT %r = (F, bf16[8,1024]) tuple(%a, %b)",
        f"({F}, bf16[8,1024])",
        (F,),
        8 * K + 8 * K + 4 * K,
    ),
    "two updates in place": (
        "%a = F dynamic-update-slice(%p0, %p2, %p3, %p3)\n"
        "  %b = F dynamic-update-slice(%p1, %p2, %p3, %p3)\n  ROOT %r = (F, F) tuple(%a, %b)",
        f"({F}, {F})",
        (F, F, "f32[1,1024]", N),
        3 * K + 4,
    ),
    "a library's product of a slice": (
        "%s = f32[1,1024] dynamic-slice(%p0, %p2, %p2)\n"
        "  ROOT %r = (f32[1,8], s8[4096]) custom-call(%s, %p1), "
        'custom_call_target="__cublas$lt$matmul"',
        "(f32[1,8], s8[4096])",
        (F, F, N),
        K + 8 * K + 4 * 8 + 4,
    ),
    "a library's product in place": (
        "%c = (f32[1,1024], s8[4096]) custom-call(%p1, %p2), "
        'custom_call_target="__cublas$lt$matmul"\n'
        "  %a = f32[1,1024] get-tuple-element(%c), index=0\n"
        "  %u = F dynamic-update-slice(%p0, %a, %p3, %p3)\n"
        "  %w = s8[4096] get-tuple-element(%c), index=1\n"
        f"  ROOT %r = ({F}, s8[4096]) tuple(%u, %w)",
        f"({F}, s8[4096])",
        (F, "f32[1,8]", F, N),
        4 * 8 + 8 * K + K + 4,
    ),
    "sums into rows": (
        "ROOT %r = F scatter(%p0, %p1, %p2), to_apply=%add, update_window_dims={1}",
        F,
        (F, "s32[3,1]", "f32[3,1024]"),
        3 * 3 * K + 12,
    ),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion(name: str) -> None:
    inner, result, types, expected = FUSIONS[name]
    inner = inner.replace("= F ", f"= {F} ").replace("(F, ", f"({F}, ").replace("F)", f"{F})")
    named = {f"x{number}": kind for number, kind in enumerate(types)}
    text = fused(f"  {inner}", result, **named)
    assert bytes_of(text) == expected


# An instruction of the entry, its parameters, and the bytes.
ALONE = {
    "a copy": (f"ROOT %out = {F} copy(%a)", (F,), 16 * K),
    "numbers": ("ROOT %out = s32[1024] iota(), iota_dimension=0", (F,), K),
    "a slice": ("ROOT %out = f32[2,1024] slice(%a), slice={[0:2],[0:1024]}", (F,), 4 * K),
    "an update": (
        f"ROOT %out = {F} dynamic-update-slice(%a, %b, %c, %c)",
        (F, "f32[1,1024]", N),
        2 * K + 2 * 4,
    ),
    "a copy to elsewhere": (f"ROOT %out = ({F}, {F}, u32[]) copy-start(%a)", (F,), 16 * K),
    "a product": (
        "ROOT %out = (f32[8,8]{1,0}, s8[33554432]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul"',
        (F, F),
        16 * K + 4 * 64,
    ),
    "attention": (
        f"ROOT %out = ({F}, f32[8]{{0}}, u8[64]{{0}}) custom-call(%a), "
        'custom_call_target="__cudnn$fmhaSoftmax"',
        (F,),
        16 * K + 4 * 8,
    ),
    "bytes that are a result": (
        'ROOT %out = u8[1024] custom-call(%a), custom_call_target="pack"',
        (F,),
        8 * K + 1024,
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_an_instruction_by_itself(name: str) -> None:
    line, types, expected = ALONE[name]
    named = dict(zip("abc", types, strict=False))
    assert bytes_of(program(f"{parameters(**named)}\n  {line}")) == expected
