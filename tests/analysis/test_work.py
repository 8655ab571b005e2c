"""Kinds and operations of kernels, counted by hand."""

from __future__ import annotations

import pytest

from tests.analysis.programs import fused, parameters, program
from unitscale.analysis._work import work_of
from unitscale.quant import parse_hlo

GEMM = '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}'
PRECISION = '"precision_config":{"operand_precision":["%s","DEFAULT"]}'
CUDNN = (
    '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "32", "64"]}'
)


def work(line: str, *types: str):
    named = dict(zip("abcd", types, strict=False))
    found = parse_hlo(program(f"{parameters(**named)}\n  ROOT %out = {line}"))
    return work_of(found, found.computations[found.entry]["out"])


def library(result: str, target: str, config: str = "", operands: str = "%a, %b") -> str:
    return (
        f'({result}, s8[64]) custom-call({operands}), custom_call_target="{target}"'
        f", backend_config={{{config}}}"
    )


def types(name: str) -> tuple[str, str]:
    return f"{name}[8,32]", f"{name}[32,16]"


@pytest.mark.parametrize(
    ("name", "config", "kind", "width"),
    [
        ("f8e4m3fn", GEMM, "FP8 products", "f8"),
        ("bf16", GEMM, "16-bit products", "16"),
        ("f16", GEMM, "16-bit products", "16"),
        ("f32", GEMM + PRECISION % "DEFAULT", "32-bit products", "32"),
        ("f32", GEMM + PRECISION % "HIGHEST", "exact 32-bit products", "32 exact"),
        ("f64", GEMM, "64-bit products", "64"),
    ],
)
def test_a_product_of_a_library(name: str, config: str, kind: str, width: str) -> None:
    found = work(library(f"{name}[8,16]", "__cublas$lt$matmul", config), *types(name))
    assert found[:3] == (kind, width, 2 * 8 * 32 * 16)


def test_operands_of_two_formats_count_as_the_wider() -> None:
    line = library("bf16[8,16]", "__cublas$lt$matmul", GEMM)
    assert work(line, "f8e4m3fn[8,32]", "bf16[32,16]").format == "16"


@pytest.mark.parametrize("batch", [(), (3,), (3, 5)])
def test_a_product_that_does_not_say_what_it_sums_over(batch: tuple[int, ...]) -> None:
    lead = "".join(f"{n}," for n in batch)
    line = library(f"f32[{lead}8,16]", "__onednn$matmul")
    count = 1
    for n in batch:
        count *= n
    assert work(line, f"f32[{lead}8,32]", f"f32[{lead}32,16]").flops == 2 * count * 8 * 32 * 16


def test_a_dot_alone_and_in_a_fusion() -> None:
    dot = "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    assert work(f"f32[8,16] {dot}", *types("f32")) == ("32-bit products", "32", 8192.0, 0.0)
    exact = work(f"f32[8,16] {dot}, operand_precision={{highest,highest}}", *types("f32"))
    assert exact.format == "32 exact"
    text = fused(
        "  %d = bf16[8,16] dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  ROOT %r = bf16[8,16] negate(%d)",
        "bf16[8,16]",
        **dict(zip("ab", types("bf16"), strict=True)),
    )
    found = parse_hlo(text)
    out = found.computations[found.entry]["out"]
    assert work_of(found, out) == ("16-bit products", "16", 8192.0, 0.0)


def test_a_product_of_a_library_that_reads_a_slice() -> None:
    text = fused(
        "  %s = bf16[1,8,32] dynamic-slice(%p0, %p2, %p2, %p2), dynamic_slice_sizes={1,8,32}\n"
        "  %v = bf16[8,32] bitcast(%s)\n"
        f"  ROOT %r = {library('bf16[8,16]', '__cublas$lt$matmul', GEMM, '%v, %p1')}",
        "(bf16[8,16], s8[64])",
        a="bf16[3,8,32]",
        b="bf16[32,16]",
        c="s32[]",
    )
    found = parse_hlo(text)
    out = found.computations[found.entry]["out"]
    assert work_of(found, out) == ("16-bit products", "16", 8192.0, 0.0)


@pytest.mark.parametrize(
    ("target", "result", "left", "right"),
    [
        ("Forward", "f32[2,30,7]", "f32[2,32,5]", "f32[3,5,7]"),
        ("BackwardInput", "f32[2,32,5]", "f32[2,30,7]", "f32[3,5,7]"),
        ("BackwardFilter", "f32[3,5,7]", "f32[2,32,5]", "f32[2,30,7]"),
    ],
)
def test_a_convolution(target: str, result: str, left: str, right: str) -> None:
    """Each of 2 x 30 x 7 outputs is a sum over 3 places and 5 features."""
    line = library(result, f"__cudnn$conv{target}") + ", dim_labels=b0f_0io->b0f"
    assert work(line, left, right)[:3] == ("32-bit products", "32", 2 * 2 * 30 * 7 * 3 * 5)
    if target == "Forward":
        plain = f"{result} convolution(%a, %b), window={{size=3}}, dim_labels=b0f_0io->b0f"
        assert work(plain, left, right).flops == 2 * 2 * 30 * 7 * 3 * 5


@pytest.mark.parametrize(
    ("target", "mask", "share"),
    [("", "NO_MASK", 1.0), ("", "CAUSAL", 0.5), ("Backward", "CAUSAL", 1.25)],
)
def test_attention(target: str, mask: str, share: float) -> None:
    """2 items, 4 heads of 16, 32 queries, 64 keys; 2 products forward, 5 backward."""
    whole = 2 * 2 * (2 * 4 * 32 * 64 * 16)
    operands = "bf16[2,32,4,16]", "bf16[2,64,2,16]"
    for config in (CUDNN, ""):
        line = library(
            operands[0], f"__cudnn$fmhaSoftmax{target}", f'{config} "mask_type": "{mask}"'
        )
        assert work(line, *operands)[:3] == ("attention", "16", share * whole)


SENT = {  # bytes that each of four devices sends of 1,024 numbers
    "all-reduce(%a), replica_groups={{0,1,2,3}}": 2 * 0.75 * 4096,
    "all-reduce-start(%a), replica_groups=[2,4]<=[8]": 2 * 0.75 * 4096,
    "all-gather(%a), replica_groups=[1,4]<=[4]": 3 * 4096,
    "reduce-scatter(%a), replica_groups={{0,1,2,3},{4,5,6,7}}": 0.75 * 4096,
    "all-to-all(%a), replica_groups={{0,1,2,3}}": 0.75 * 4096,
    "all-gather(%a), replica_groups=mesh['data'=4] {'data'}": 3 * 4096,
    "collective-permute(%a), source_target_pairs={{0,1}}": 4096,
}


@pytest.mark.parametrize("line", SENT)
def test_a_collective(line: str) -> None:
    assert work(f"f32[1024] {line}", "f32[1024]") == ("collectives", "", 0.0, SENT[line])


def test_a_collective_of_all_devices() -> None:
    line = "ROOT %out = f32[4096] all-gather(%a), replica_groups={}"
    first, rest = program(f"{parameters(a='f32[1024]')}\n  {line}").split("\n", 1)
    found = parse_hlo(f"{first}, num_partitions=4\n{rest}")
    assert work_of(found, found.computations[found.entry]["out"]).wire == 3 * 4096


def test_what_else_there_is() -> None:
    assert work("f32[8] negate(%a)", "f32[8]").kind == "memory-bound"
    assert work(library("f32[8]", "cub_sort", operands="%a"), "f32[8]").kind == "library calls"
