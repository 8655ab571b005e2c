"""`check_fp8` and the parser of optimized programs on small texts; test_h200 has real programs."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.quant import programs
from unitscale.quant import (
    Fp8Report,
    HloInstruction,
    HloProgram,
    Matmul,
    check_fp8,
    parse_hlo,
    user_line,
)

HLO4, HLO5, HLO16 = "f8e4m3fn", "f8e5m2", "bf16"
LOST = programs.widened(HLO4, HLO16)


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


def test_an_operand_is_followed_through_fusions() -> None:
    for wide in ("w", "first"):
        program, dot = found(programs.fused(HLO4, HLO16, operand="l", wide=wide), "dot")
        source = program.operand(dot, 0)
        assert source is not None
        assert (source.opcode, source.dtype) == ("convert", "bf16")
        below = program.operand(source, 0)
        assert below is not None
        assert (below.computation, below.name, below.opcode) == ("main.1", "a", "parameter")
        assert program.operand(below, 0) is None
    # Newer XLA splits a fusion in two, and lists operands, results and a context as the result.
    main = (program := parse_hlo(programs.ASYNCHRONOUS)).computations["main"]
    assert (main["begun"].opcode, main["begun"].types) == ("fusion", (("f32", (1, 4)),))
    source = program.operand(main["out"], 0)
    assert source is not None
    assert source.name == "s"


def test_the_source_is_the_users() -> None:
    """Frames refer to the caller's number, or, in jaxlib 0.10, to that number plus one."""
    for offset in (0, 1):
        text = programs.direct()
        for own, caller in ((1, 0), (2, 1)):
            row = f"file_location_id={own} parent_frame_id="
            text = text.replace(f"{row}{caller + 1}", f"{row}{caller + offset}")
        matmul = only(text)
        assert (matmul.source, matmul.op_name) == (
            "/home/user/train.py:17",
            "jit(step)/dot_general",
        )
        # Without a line of the user's, the outermost that is known.
        library = text.replace("/home/user/", "/venv/site-packages/x/")
        assert only(library).source == "/venv/site-packages/x/train.py:17"
        own = text.replace("stack_frame_id=2", 'source_file="/home/user/a.py" source_line=5')
        assert user_line(*found(own, "custom-call")) == "/home/user/a.py:5"
        assert user_line(*found(text.replace(" stack_frame_id=2", ""), "custom-call")) == ""


def test_fp8_kernels() -> None:
    for types in ((HLO4, HLO4), (HLO5, HLO4)):
        kernels = {"cuBLASLt FP8": programs.direct(*types)} | {
            name: programs.fused(*types, operand="d", kind=f"__{name.lower()}$fusion")
            for name in ("Triton", "cuDNN")
        }
        for kernel, text in kernels.items():
            matmul = only(text)
            assert (matmul.kernel, matmul.fp8, matmul.reason) == (kernel, True, "")
            assert matmul.lhs == types[0].replace("f8", "float8_") + "[32,64]"
            assert matmul.rhs == types[1].replace("f8", "float8_") + "[16,64]"
            assert matmul.out == "bfloat16[32,16]"
            assert matmul.flops == 2 * 32 * 16 * 64
    assert only(programs.LOOP).flops == 12 * 2 * 32 * 16 * 64


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


def test_other_kernels() -> None:
    for factor in ("%b", "%y"):  # a product of two tensors is not scaled FP8
        body = f"{programs.WIDEN}\n  %z = bf16[32,64]{{1,0}} multiply(%x, {factor})"
        text = programs.widened(HLO4, HLO16, body).replace("custom-call(%x,", "custom-call(%z,")
        assert not only(text).quantized
    for wide in ("w", "first"):
        matmul = only(programs.fused(HLO4, HLO4, operand="l", wide=wide))
        assert (matmul.kernel, matmul.fp8, matmul.quantized) == ("Triton", False, True)
    matmul = only(programs.fused(HLO4, HLO4, operand="d", kind="loop"))
    assert (matmul.kernel, matmul.fp8) == ("a loop", False)
    assert matmul.reason == "too small for a matrix kernel"


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
