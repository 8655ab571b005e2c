"""`check_fp8`: the report, what it refuses, and programs compiled for an H200."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Spec, lax

from recipes.bench.aot import compile_h200
from tests.quant import programs
from unitscale.quant import (
    Block,
    Fp8Report,
    Fp8Warning,
    MatmulConfig,
    check_fp8,
    dot_general,
    fake_quantize,
    fake_quantize_operands,
)

LOST = programs.widened("f8e4m3fn", "bf16")
WIDE = programs.widened("bf16", "bf16")


def test_a_program_of_fp8_kernels() -> None:
    report = check_fp8(programs.direct())
    assert report
    assert (len(report.fp8), report.lost, report.wide, report.share) == (1, (), (), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.warn() is report.raise_if_lost() is report


def test_a_program_that_lost_its_operands() -> None:
    report = check_fp8(LOST)
    assert not report
    assert (report.fp8, len(report.lost), report.wide, report.share) == ((), 1, (), 0.0)
    with pytest.warns(Fp8Warning, match=r"not an FP8 kernel: float8_e4m3fn -> bfloat16.*only one"):
        report.warn()
    with pytest.raises(ValueError, match=r"check_fp8: 1 matmuls(.|\n)*only one(.|\n)*train.py:17"):
        report.raise_if_lost()


def test_a_program_without_fp8_is_not_one_with_it() -> None:
    """A quantization that had no effect is not a success, though nothing was lost."""
    report = check_fp8(WIDE)
    assert not report
    assert (report.fp8, report.lost, len(report.wide)) == ((), (), 1)
    assert report.raise_if_lost() is report


def test_the_share_goes_by_operations() -> None:
    fp8, lost = (check_fp8(t).matmuls for t in (programs.LOOP, LOST))
    report = Fp8Report(matmuls=fp8 + lost, amax_reductions=0, casts=0, transposes=0)
    assert report.share == pytest.approx(12 / 13)


def test_a_report_prints_as_a_table() -> None:
    head, columns, row = str(check_fp8(LOST)).splitlines()
    assert head.startswith("0 of 1 matmuls are FP8 kernels (0.0% of their operations); 1 lost")
    assert columns.split() == ["FP8", "kernel", "lhs", "rhs", "result", "reason", "from"]
    for text in ("LOST", "cuBLASLt", "only one operand", "/home/user/train.py:17"):
        assert text in row
    assert "2 casts" not in head
    assert len(str(check_fp8(programs.STATISTICS)).splitlines()) == 1


def test_statistics_are_counted() -> None:
    report = check_fp8(programs.STATISTICS)
    assert (report.amax_reductions, report.casts, report.transposes) == (1, 1, 1)


def test_a_program_for_a_cpu_is_refused() -> None:
    x = jnp.ones((8, 8))
    compiled = jax.jit(lambda x: x @ x).lower(x).compile()
    with pytest.raises(ValueError, match=r"check_fp8: expected a program compiled for a GPU.*cpu"):
        check_fp8(compiled)
    with pytest.raises(ValueError, match=r"check_fp8: expected a program compiled for a GPU"):
        check_fp8(
            "ENTRY %main (a: f32[8,8]) -> f32[8,8] {\n"
            "  %a = f32[8,8]{1,0} parameter(0)\n"
            "  ROOT %dot = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}\n}"
        )


def test_what_is_not_compiled_is_refused() -> None:
    lowered = jax.jit(lambda x: x).lower(jnp.ones(2))
    with pytest.raises(TypeError, match=r"compiled must be what .* returns, or its text; got Low"):
        check_fp8(lowered)


E4, E5, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
NT = (((1,), (1,)), ((), ()))


def dot(a, b):
    return lax.dot_general(a, b, NT, preferred_element_type=BF16)


def direct(a, b, s):
    return dot(a, b) * s.astype(BF16)


def fake(a, b, s):
    return dot(a.astype(BF16) * s.astype(BF16), b.astype(BF16) * s.astype(BF16))


def scaled_in_float32(a, b, s):
    return dot((a.astype(jnp.float32) * s).astype(BF16), (b.astype(jnp.float32) * s).astype(BF16))


def rows_before(a, b, s):
    return dot(a.astype(BF16) * s.astype(BF16), b.astype(BF16))


def rows_after(a, b, s):
    return direct(a, b, s)


def one_sided(a, b, s):
    return dot(a.astype(BF16), b) * s.astype(BF16)


def fused_output(a, b, s):
    y = direct(a, b, s)
    return jnp.clip(y, -448, 448).astype(E4), jnp.max(jnp.abs(y))


def rectified(a, b, s):
    return jax.nn.relu(direct(a, b, s))


def batched(a, b, s):
    return jax.vmap(dot, (0, None))(jnp.reshape(a, (4, -1, a.shape[1])), b) * s.astype(BF16)


def scanned(a, b, s):
    rows = jnp.reshape(a, (4, -1, a.shape[1]))
    return lax.scan(lambda c, x: (c, direct(x, b, s)), 0, rows)[1]


def heads(a, b, s):
    left = jnp.reshape(a.astype(BF16) * s.astype(BF16), (4, -1, 16, 64))
    right = jnp.reshape(b.astype(BF16) * s.astype(BF16), (-1, 16, 64))
    return jnp.einsum("bthd,nhd->btn", left, right)


M, N, K, ROWS = 512, 2048, 1024, (512, 1)


@pytest.mark.h200
@pytest.mark.parametrize(
    ("form", "m", "types", "scale", "reason"),
    [
        (direct, M, (E4, E4), (), ""),
        (direct, M, (E5, E4), (), ""),
        (direct, M, (E4, E5), (), ""),
        (direct, 500, (E4, E4), (), ""),
        (fake, M, (E4, E4), (), ""),
        (rows_after, M, (E4, E4), ROWS, ""),
        (fused_output, M, (E4, E4), (), ""),
        (rectified, M, (E4, E4), (), ""),
        (batched, M, (E4, E4), (), ""),
        (scanned, M, (E4, E4), (), ""),
        (direct, M, (E5, E5), (), "both operands are E5M2"),
        (direct, M, (jnp.float8_e4m3fnuz,) * 2, (), "float8_e4m3fnuz is AMD's"),
        (direct, M, (jnp.float8_e4m3,) * 2, (), "float8_e4m3 is IEEE-style"),
        (one_sided, M, (E4, BF16), (), "only one operand is FP8"),
        (scaled_in_float32, M, (E4, E4), (), "scaled in float32 and cast to bfloat16"),
        (rows_before, M, (E4, E4), ROWS, "a scale for each row or block"),
        (direct, 1, (E4, E4), (), "a matmul with a vector"),
    ],
)
def test_every_known_form(form, m, types, scale, reason: str) -> None:
    args = Spec((m, K), types[0]), Spec((N, K), types[1]), Spec(scale, jnp.float32)
    report = check_fp8(compile_h200(form, *args))
    (matmul,) = report.matmuls
    assert matmul.fp8 is (not reason)
    assert matmul.reason.startswith(reason)
    assert bool(report) is (not reason)
    assert len(report.lost) == bool(reason)
    assert matmul.source.partition(":")[0] == __file__
    assert matmul.op_name.startswith(f"jit({form.__name__})")
    if m == M:
        assert matmul.flops == 2 * M * N * K


@pytest.mark.h200
@pytest.mark.parametrize(("form", "fp8"), [(direct, True), (fake, False), (heads, False)])
def test_triton_keeps_what_is_multiplied_directly(form, fp8: bool) -> None:
    """With XLA's default flags; the form that scales first loses its operands there."""
    args = Spec((M, K), E4), Spec((N, K), E4), Spec((), jnp.float32)
    (matmul,) = check_fp8(compile_h200(form, *args, triton=True)).matmuls
    assert (matmul.kernel, matmul.fp8) == ("Triton", fp8)


@pytest.mark.h200
def test_block_scales_need_a_later_gpu() -> None:
    def product(a, b, p, q):
        return lax.scaled_dot(
            a, b, lhs_scale=p, rhs_scale=q, dimension_numbers=NT, preferred_element_type=BF16
        )

    exponents = [Spec((rows, K // 32), jnp.float8_e8m0fnu) for rows in (M, N)]
    args = Spec((M, K), E4), Spec((N, K), E4), *exponents
    program = compile_h200(product, *args, triton=True)  # else XLA refuses
    (matmul,) = check_fp8(program).lost
    assert matmul.reason == "block scales: FP8 kernels exist from sm_100"


@pytest.mark.h200
def test_amax_reductions_of_a_dynamic_scale() -> None:
    def quantized(x):
        amax = jnp.max(jnp.abs(x))
        return jnp.clip(x * (448 / amax), -448, 448).astype(E4), amax

    def product(x, w):
        (x, s), (w, t) = quantized(x), quantized(w)
        return dot(x, w) * (s * t / 448**2).astype(BF16)

    def softmax(x):
        return jax.nn.softmax(x, axis=1)

    x, w = Spec((M, K), BF16), Spec((N, K), BF16)
    report = check_fp8(compile_h200(product, x, w))
    assert report
    assert (report.amax_reductions, report.casts) == (2, 2)
    assert check_fp8(compile_h200(softmax, x)).amax_reductions == 0


@pytest.mark.h200
@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: fake_quantize(x, "e4m3fn"),
        lambda x, w: fake_quantize_operands(x, w, MatmulConfig()),
        lambda x, w: dot_general(MatmulConfig(strategy=Block()))(x, w, NT),
    ],
    ids=["fake_quantize", "fake_quantize_operands", "block"],
)
def test_rounding_survives_where_the_product_is_wide(f) -> None:
    """XLA drops a conversion to FP8 and back, and with it the rounding, unless it is kept from."""
    report = check_fp8(compile_h200(f, Spec((M, K), BF16), Spec((N, K), BF16)))
    assert report.casts >= 1
