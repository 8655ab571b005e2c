"""Reading optimized programs: instructions, operands through fusions, loops, source lines."""

import pytest

from tests.quant import programs
from unitscale.quant import parse_hlo


def only(text: str, opcode: str):
    program = parse_hlo(text)
    (found,) = [i for i in program.instructions if i.opcode == opcode]
    return program, found


def test_an_instruction_is_read() -> None:
    program, gemm = only(programs.direct(), "custom-call")
    assert (gemm.name, gemm.computation) == ("gemm.1", "main.1")
    assert (gemm.dtype, gemm.shape, gemm.operands) == ("bf16", (32, 16), ("a", "b"))
    assert gemm.quoted("custom_call_target") == "__cublas$lt$matmul$f8"
    assert gemm.quoted("op_name") == "jit(step)/dot_general"
    assert gemm.quoted("absent") == ""
    assert gemm.types == (("bf16", (32, 16)), ("s8", (4194304,)))
    assert program.entry == "main.1"
    assert program.roots == {"main.1": "out"}
    # A parenthesis in a string closes nothing.
    assert program.computations["main.1"]["a"].attributes == ', metadata={op_name="a (the left)"}'


def test_scalars_constants_and_tuples() -> None:
    program = parse_hlo(programs.LOOP)
    body = program.computations["body"]
    assert body["state"].dtype == "s32"
    assert body["state"].shape == ()
    assert body["state"].literal == "0"
    assert body["next"].operands == ("i", "a", "b")
    assert program.computations["condition"]["n"].literal == "12"
    assert set(program.callers) == {"body", "condition"}


@pytest.mark.parametrize("wide", ["w", "first"])
def test_an_operand_is_followed_through_fusions(wide: str) -> None:
    program, dot = only(programs.fused("f8e4m3fn", "bf16", operand="l", wide=wide), "dot")
    assert dot.dimensions("lhs_contracting_dims") == (1,)
    source = program.operand(dot, 0)
    assert source is not None
    assert (source.opcode, source.dtype) == ("convert", "bf16")
    below = program.operand(source, 0)
    assert below is not None
    assert (below.computation, below.name, below.opcode) == ("main.1", "a", "parameter")
    assert program.operand(below, 0) is None


def test_a_loop_counts_its_body() -> None:
    program, gemm = only(programs.LOOP, "custom-call")
    assert program.trips(gemm) == 12
    other, gemm = only(programs.direct(), "custom-call")
    assert other.trips(gemm) == 1


@pytest.mark.parametrize("offset", [0, 1])
def test_the_stack_is_read_from_the_tables(offset: int) -> None:
    """The number of the caller, or that number plus one, as jaxlib 0.10 prints it."""
    text = programs.direct()
    for own, caller in ((1, 0), (2, 1)):
        row = f"file_location_id={own} parent_frame_id="
        text = text.replace(f"{row}{caller + 1}", f"{row}{caller + offset}")
    program, gemm = only(text, "custom-call")
    assert program.stack(gemm) == (
        "/venv/lib/python3.11/site-packages/flax/nnx/nn/linear.py:400",
        "/home/user/train.py:17",
    )


def test_the_stack_is_read_from_the_instruction() -> None:
    own = programs.direct().replace(
        "stack_frame_id=2", 'source_file="/home/user/a.py" source_line=5'
    )
    program, gemm = only(own, "custom-call")
    assert program.stack(gemm) == ("/home/user/a.py:5",)
    program, gemm = only(programs.direct().replace(" stack_frame_id=2", ""), "custom-call")
    assert program.stack(gemm) == ()


def test_text_that_is_no_program_is_empty() -> None:
    assert parse_hlo("").instructions == []
    assert parse_hlo("").entry == ""
    assert parse_hlo("nothing\n  %a = f32[] parameter(0)\n").instructions == []


def test_a_fusion_that_runs_beside_others_is_one() -> None:
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
    found = program.operand(program.computations["main"]["out"], 0)
    assert found is not None
    assert found.name == "s"
