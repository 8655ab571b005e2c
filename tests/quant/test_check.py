"""`check_fp8` and the parser of optimized programs, on small texts and on programs for an H200."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import ShapeDtypeStruct as Spec, lax

from recipes.bench.aot import compile_h200
from tests.quant import programs
from unitscale.quant import (
    Block,
    Fp8Report,
    HloInstruction,
    HloProgram,
    Matmul,
    MatmulConfig,
    check_fp8,
    dot_general,
    fake_quantize_operands,
    parse_hlo,
    user_line,
)

LOST = programs.widened("f8e4m3fn", "bf16")


def found(text: str, opcode: str) -> tuple[HloProgram, HloInstruction]:
    program = parse_hlo(text)
    (instruction,) = [i for i in program.instructions if i.opcode == opcode]
    return program, instruction


def only(text: str) -> Matmul:
    (matmul,) = check_fp8(text).matmuls
    return matmul


def test_an_instruction_is_read() -> None:
    program, gemm = found(programs.direct(), "custom-call")
    assert (gemm.name, gemm.computation) == ("gemm.1", "main.1")
    assert (gemm.dtype, gemm.shape, gemm.operands) == ("bf16", (32, 16), ("a", "b"))
    assert gemm.quoted("custom_call_target") == "__cublas$lt$matmul$f8"
    assert gemm.quoted("absent") == ""
    assert gemm.types == (("bf16", (32, 16)), ("s8", (4194304,)))
    assert (program.entry, program.roots) == ("main.1", {"main.1": "out"})
    assert program.header.startswith("HloModule jit_step")
    # A parenthesis in a string closes nothing.
    assert program.computations["main.1"]["a"].attributes == ', metadata={op_name="a (the left)"}'
    body = parse_hlo(programs.LOOP).computations["body"]
    assert (body["state"].dtype, body["state"].shape, body["state"].literal) == ("s32", (), "0")
    assert body["next"].operands == ("i", "a", "b")
    for text in ("", "nothing\n  %a = f32[] parameter(0)\n"):
        assert parse_hlo(text).instructions == []


@pytest.mark.parametrize("wide", ["w", "first"])
def test_an_operand_is_followed_through_fusions(wide: str) -> None:
    program, dot = found(programs.fused("f8e4m3fn", "bf16", operand="l", wide=wide), "dot")
    source = program.operand(dot, 0)
    assert source is not None
    assert (source.opcode, source.dtype) == ("convert", "bf16")
    below = program.operand(source, 0)
    assert below is not None
    assert (below.computation, below.name, below.opcode) == ("main.1", "a", "parameter")
    assert program.operand(below, 0) is None


def test_an_asynchronous_fusion() -> None:
    """Newer XLA splits it in two, and lists operands, results and a context as the result."""
    program = parse_hlo("""\
%sliced (p: f32[8,4], i: s32[]) -> f32[1,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,4]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,4}
}

ENTRY %main (x: f32[8,4], n: s32[]) -> f32[1,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %begun = ((f32[8,4]{1,0}, s32[]), f32[1,4]{1,0}, u32[]) fusion-start(%x, %n), calls=%sliced
  %done = f32[1,4]{1,0} fusion-done(%begun)
  ROOT %out = f32[1,4]{1,0} negate(%done)
}
""")
    begun = program.computations["main"]["begun"]
    assert (begun.opcode, begun.types) == ("fusion", (("f32", (1, 4)),))
    source = program.operand(program.computations["main"]["out"], 0)
    assert source is not None
    assert source.name == "s"


@pytest.mark.parametrize("offset", [0, 1])
def test_the_source_is_the_users(offset: int) -> None:
    """Frames have the number of the caller, or that number plus one, as jaxlib 0.10 prints it."""
    text = programs.direct()
    for own, caller in ((1, 0), (2, 1)):
        row = f"file_location_id={own} parent_frame_id="
        text = text.replace(f"{row}{caller + 1}", f"{row}{caller + offset}")
    matmul = only(text)
    assert (matmul.source, matmul.op_name) == ("/home/user/train.py:17", "jit(step)/dot_general")
    # Without a line of the user's, the outermost that is known.
    library = text.replace("/home/user/", "/venv/site-packages/x/")
    assert only(library).source == "/venv/site-packages/x/train.py:17"
    own = text.replace("stack_frame_id=2", 'source_file="/home/user/a.py" source_line=5')
    assert user_line(*found(own, "custom-call")) == "/home/user/a.py:5"
    assert user_line(*found(text.replace(" stack_frame_id=2", ""), "custom-call")) == ""


HLO4, HLO5, HLO16 = "f8e4m3fn", "f8e5m2", "bf16"


@pytest.mark.parametrize("types", [(HLO4, HLO4), (HLO5, HLO4)])
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
        ((HLO5, HLO5), programs.WIDEN, "both operands are E5M2"),
        ((HLO4, HLO16), programs.WIDEN, "only one operand is FP8"),
        ((HLO16, HLO5), programs.WIDEN, "only one operand is FP8"),
        (("f8e4m3fnuz", HLO4), programs.WIDEN, "NVIDIA GPUs do not multiply f8e4m3fnuz"),
        (("f8e4m3", "f8e4m3"), programs.WIDEN, "NVIDIA GPUs do not multiply f8e4m3:"),
        ((HLO4, HLO4), programs.CAST_AFTER_SCALE, "converted or scaled first"),
        ((HLO4, HLO4), programs.ROWS, "converted or scaled first"),
        ((HLO4, HLO4), programs.WIDEN, "converted or scaled first"),
        ((HLO16, HLO16), programs.WIDEN, "operands were never FP8"),
    ],
)
def test_reasons(types: tuple[str, str], body: str, reason: str) -> None:
    matmul = only(programs.widened(*types, body))
    assert (matmul.fp8, matmul.kernel) == (False, "cuBLASLt")
    assert matmul.quantized == (types != (HLO16, HLO16))
    assert reason in matmul.reason
    named = types[0].replace("f8", "float8_").replace("bf16", "bfloat16")
    came = "" if types[0] == HLO16 else f"{named} -> "
    assert matmul.lhs == f"{came}bfloat16[32,64]"


@pytest.mark.parametrize("factor", ["%b", "%y"])
def test_a_product_of_two_tensors_is_not_scaled_fp8(factor: str) -> None:
    body = f"{programs.WIDEN}\n  %z = bf16[32,64]{{1,0}} multiply(%x, {factor})"
    text = programs.widened(HLO4, HLO16, body).replace("custom-call(%x,", "custom-call(%z,")
    assert not only(text).quantized


def test_other_kernels() -> None:
    for wide in ("w", "first"):
        matmul = only(programs.fused(HLO4, HLO4, operand="l", wide=wide))
        assert (matmul.kernel, matmul.fp8, matmul.quantized) == ("Triton", False, True)
    matmul = only(programs.fused(HLO4, HLO4, operand="d", kind="loop"))
    assert (matmul.kernel, matmul.fp8) == ("a loop", False)
    assert matmul.reason == "too small for a matrix kernel"
    assert only(programs.LOOP).flops == 12 * 2 * 32 * 16 * 64


def test_reports() -> None:
    good, bad = check_fp8(programs.direct()), check_fp8(LOST)
    wide = check_fp8(programs.widened("bf16", "bf16"))
    for report, counts in ((good, (1, 0, 0)), (bad, (0, 1, 0)), (wide, (0, 0, 1))):
        assert (len(report.fp8), len(report.lost), len(report.wide)) == counts
        assert report.share == bool(report) == counts[0]
    assert good.raise_if_lost() is good
    assert wide.raise_if_lost() is wide
    with pytest.raises(ValueError, match=r"check_fp8: (.|\n)*only one(.|\n)*train.py:17"):
        bad.raise_if_lost()
    matmuls = check_fp8(programs.LOOP).matmuls + bad.matmuls
    both = Fp8Report(matmuls=matmuls, amax_reductions=0, casts=0, transposes=0)
    assert both.share == pytest.approx(12 / 13)
    head, columns, row = str(bad).splitlines()
    assert head.startswith("0 of 1 matmuls are FP8 kernels (0.0% of their operations); 1 lost")
    assert columns.split() == ["FP8", "kernel", "lhs", "rhs", "result", "reason", "from"]
    for text in ("LOST", "cuBLASLt", "only one operand", "/home/user/train.py:17"):
        assert text in row
    counted = check_fp8(programs.STATISTICS)
    assert (counted.amax_reductions, counted.casts, counted.transposes) == (1, 1, 1)
    assert len(str(counted).splitlines()) == 1


def test_programs_that_are_refused() -> None:
    x, f = jnp.ones((8, 8)), lambda x: x @ x
    for compiled in (jax.jit(f).lower(x).compile(), nnx.jit(f).lower(x).compile()):
        with pytest.raises(ValueError, match="compiled for a GPU; got one for cpu"):
            check_fp8(compiled)
    with pytest.raises(ValueError, match="compiled for a GPU; got one with a plain dot"):
        check_fp8(
            "ENTRY %main (a: f32[8,8]) -> f32[8,8] {\n"
            "  %a = f32[8,8]{1,0} parameter(0)\n"
            "  ROOT %dot = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}\n}"
        )
    with pytest.raises(TypeError, match=r"compiled must be .* got Lowered"):
        check_fp8(jax.jit(f).lower(x))


E4, E5, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
NT = (((1,), (1,)), ((), ()))


def dot(a, b):
    return lax.dot_general(a, b, NT, preferred_element_type=BF16)


def direct(a, b, s):
    return dot(a, b) * s.astype(BF16)


def fake(a, b, s):
    return dot(a.astype(BF16) * s.astype(BF16), b.astype(BF16) * s.astype(BF16))


def rows_before(a, b, s):
    return dot(a.astype(BF16) * s.astype(BF16), b.astype(BF16))


def one_sided(a, b, s):
    return dot(a.astype(BF16), b) * s.astype(BF16)


def fused_output(a, b, s):
    y = direct(a, b, s)
    return jnp.clip(y, -448, 448).astype(E4), jnp.max(jnp.abs(y))


def batched(a, b, s):
    return jax.vmap(dot, (0, None))(jnp.reshape(a, (4, -1, a.shape[1])), b) * s.astype(BF16)


def scanned(a, b, s):
    rows = jnp.reshape(a, (4, -1, a.shape[1]))
    return lax.scan(lambda c, x: (c, direct(x, b, s)), 0, rows)[1]


M, N, K, ROWS = 512, 2048, 1024, (512, 1)


@pytest.mark.h200
@pytest.mark.parametrize(
    ("form", "m", "types", "scale", "reason"),
    [
        (direct, M, (E4, E4), (), ""),
        (direct, M, (E5, E4), (), ""),
        (direct, 500, (E4, E4), (), ""),
        (fake, M, (E4, E4), (), ""),
        (direct, M, (E4, E4), ROWS, ""),
        (fused_output, M, (E4, E4), (), ""),
        (batched, M, (E4, E4), (), ""),
        (scanned, M, (E4, E4), (), ""),
        (direct, M, (E5, E5), (), "both operands are E5M2"),
        (direct, M, (jnp.float8_e4m3fnuz,) * 2, (), "NVIDIA GPUs do not multiply f8e4m3fnuz"),
        (one_sided, M, (E4, BF16), (), "only one operand is FP8"),
        (rows_before, M, (E4, E4), ROWS, "the FP8 operands are converted or scaled first"),
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
@pytest.mark.parametrize(("form", "fp8"), [(direct, True), (fake, False)])
def test_triton_keeps_what_is_multiplied_directly(form, fp8: bool) -> None:
    """With XLA's default flags; the form that scales first loses its operands there."""
    args = Spec((M, K), E4), Spec((N, K), E4), Spec((), jnp.float32)
    (matmul,) = check_fp8(compile_h200(form, *args, triton=True)).matmuls
    assert (matmul.kernel, matmul.fp8) == ("Triton", fp8)


@pytest.mark.h200
def test_block_scales_need_a_later_gpu() -> None:
    def matmul(a, b, p, q):
        return lax.scaled_dot(
            a, b, lhs_scale=p, rhs_scale=q, dimension_numbers=NT, preferred_element_type=BF16
        )

    exponents = [Spec((rows, K // 32), jnp.float8_e8m0fnu) for rows in (M, N)]
    args = Spec((M, K), E4), Spec((N, K), E4), *exponents
    program = compile_h200(matmul, *args, triton=True)  # else XLA refuses
    (matmul,) = check_fp8(program).lost
    assert matmul.reason.startswith("block scales")


@pytest.mark.h200
def test_amax_reductions_of_a_dynamic_scale() -> None:
    def quantized(x):
        amax = jnp.max(jnp.abs(x))
        return jnp.clip(x * (448 / amax), -448, 448).astype(E4), amax

    def matmul(x, w):
        (x, s), (w, t) = quantized(x), quantized(w)
        return dot(x, w) * (s * t / 448**2).astype(BF16)

    def softmax(x):
        return jax.nn.softmax(x, axis=1)

    x, w = Spec((M, K), BF16), Spec((N, K), BF16)
    report = check_fp8(compile_h200(matmul, x, w))
    assert report
    assert (report.amax_reductions, report.casts) == (2, 2)
    assert check_fp8(compile_h200(softmax, x)).amax_reductions == 0


@pytest.mark.h200
@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: fake_quantize_operands(x, w, MatmulConfig()),
        lambda x, w: dot_general(MatmulConfig(strategy=Block()))(x, w, NT),
    ],
    ids=["fake_quantize_operands", "block"],
)
def test_rounding_survives_where_the_product_is_wide(f) -> None:
    """XLA drops a conversion to FP8 and back, and with it the rounding, unless it is kept from."""
    report = check_fp8(compile_h200(f, Spec((M, K), BF16), Spec((N, K), BF16)))
    assert report.casts >= 1
