"""What becomes of a product: kernels, reasons, and statistics, on small programs."""

import pytest

from tests.quant import programs
from unitscale.quant import check_fp8

E4, E5, BF16 = "f8e4m3fn", "f8e5m2", "bf16"


def only(text: str):
    (matmul,) = check_fp8(text).matmuls
    return matmul


@pytest.mark.parametrize("types", [(E4, E4), (E5, E4), (E4, E5)])
@pytest.mark.parametrize("kernel", ["cuBLASLt FP8", "Triton", "cuDNN"])
def test_fp8_kernels(types: tuple[str, str], kernel: str) -> None:
    if kernel == "cuBLASLt FP8":
        matmul = only(programs.direct(*types))
    else:
        kind = f"__{kernel.lower()}$fusion"
        matmul = only(programs.fused(*types, operand="d", kind=kind))
    assert (matmul.kernel, matmul.fp8, matmul.reason) == (kernel, True, "")
    assert matmul.lhs == types[0].replace("f8", "float8_") + "[32,64]"
    assert matmul.rhs == types[1].replace("f8", "float8_") + "[16,64]"
    assert matmul.out == "bfloat16[32,16]"
    assert matmul.flops == 2 * 32 * 16 * 64


@pytest.mark.parametrize(
    ("types", "body", "reason"),
    [
        ((E5, E5), programs.WIDEN, "both operands are E5M2"),
        ((E4, BF16), programs.WIDEN, "only one operand is FP8"),
        ((BF16, E5), programs.WIDEN, "only one operand is FP8"),
        (("f8e4m3fnuz", "f8e4m3fnuz"), programs.WIDEN, "float8_e4m3fnuz is AMD's"),
        (("f8e5m2fnuz", E4), programs.WIDEN, "float8_e5m2fnuz is AMD's"),
        (("f8e4m3", "f8e4m3"), programs.WIDEN, "float8_e4m3 is IEEE-style"),
        ((E4, E4), programs.CAST_AFTER_SCALE, "scaled in float32 and cast to bfloat16"),
        ((E4, E4), programs.ROWS, "a scale for each row or block"),
        ((E4, E4), programs.WIDEN, "widened first"),
        ((BF16, BF16), programs.WIDEN, "operands were never FP8"),
    ],
)
def test_reasons(types: tuple[str, str], body: str, reason: str) -> None:
    matmul = only(programs.widened(*types, body))
    assert not matmul.fp8
    assert matmul.kernel == "cuBLASLt"
    assert matmul.quantized == (types != (BF16, BF16))
    assert matmul.reason.startswith(reason) or reason in matmul.reason
    named = types[0].replace("f8", "float8_").replace("bf16", "bfloat16")
    came = "" if types[0] == BF16 else f"{named} -> "
    assert matmul.lhs == f"{came}bfloat16[32,64]"


@pytest.mark.parametrize("wide", ["w", "first"])
def test_operands_widened_in_another_fusion(wide: str) -> None:
    matmul = only(programs.fused(E4, E4, operand="l", wide=wide))
    assert (matmul.kernel, matmul.fp8, matmul.quantized) == ("Triton", False, True)
    assert "widened first" in matmul.reason


def test_a_product_in_a_loop_is_not_a_kernel() -> None:
    matmul = only(programs.fused(E4, E4, operand="d", kind="loop"))
    assert (matmul.kernel, matmul.fp8) == ("a loop", False)
    assert matmul.reason == "too small for a matrix kernel"


def test_a_product_with_a_vector() -> None:
    matmul = only(programs.VECTOR)
    assert (matmul.kernel, matmul.fp8, matmul.quantized) == ("a reduction", False, True)
    assert "M or N is 1" in matmul.reason
    assert matmul.flops == 2 * 16 * 64
    wide = programs.VECTOR.replace("f8e4m3fn", "bf16")
    assert "never FP8; a matmul with a vector" in only(wide).reason


def test_other_reductions_are_no_products() -> None:
    other = programs.VECTOR.replace("jit(step)/dot_general", "jit(step)/reduce_sum")
    assert check_fp8(other).matmuls == ()


def test_runs_of_a_loop_are_counted() -> None:
    assert only(programs.LOOP).flops == 12 * 2 * 32 * 16 * 64


def test_the_source_is_the_users() -> None:
    matmul = only(programs.direct())
    assert matmul.source == "/home/user/train.py:17"
    assert matmul.op_name == "jit(step)/dot_general"
    assert matmul.origin == "jit(step)/dot_general at /home/user/train.py:17"
    # With nobody's line in it, the outermost that is known.
    library = programs.direct().replace("/home/user/", "/venv/site-packages/x/")
    assert only(library).source == "/venv/site-packages/x/train.py:17"
