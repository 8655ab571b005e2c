"""The training steps that `bench h200` and `bench gpu` look at, and what is said of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from recipes.bench import _programs
from recipes.bench._programs import (
    BEST,
    READOUT,
    READOUT_GRADIENTS,
    READOUT_SCALED,
    REFERENCE,
    ROWS,
    SHAPES,
    Program,
    chosen,
    config_of,
)
from recipes.bench._table import FORMATS
from recipes.bench.aot import roofline
from recipes.errors import RecipeError
from unitscale.quant import check_fp8

TEXT = """\
ENTRY %main (x: f8e4m3fn[32,64], t: f8e4m3fn[64,300], w: f32[100]) -> bf16[32,300] {
  %x = f8e4m3fn[32,64] parameter(0)
  %k = f8e4m3fn[64,48] parameter(1)
  %t = bf16[64,300] parameter(2)
  %h = bf16[32,64] parameter(3)
  %w = f32[100] parameter(4)
  %y = bf16[32,48] custom-call(%x, %k), custom_call_target="__cublas$lt$matmul$f8", \
backend_config={"lhs_contracting_dimensions":["1"]}
  %new = f32[100] negate(%w), metadata={op_name="jit(run)/optimizer/neg"}
  %norm = f32[100] negate(%w), metadata={op_name="jit(run)/norm/neg"}
  ROOT %z = bf16[32,300] custom-call(%h, %t), custom_call_target="__cublas$gemm", \
backend_config={"lhs_contracting_dimensions":["1"]}
}"""


def test_a_program_is_described() -> None:
    program = Program(TEXT, roofline(TEXT), check_fp8(TEXT), 3 * 2**20, 100, 300)
    whole, *parts = program.times().values()
    assert sum(parts) == pytest.approx(whole)
    row = program.contents()
    assert (row["FP8 of Dense"], row["FP8 of readout"], row["amax"]) == (1.0, 0.0, 0)
    assert (row["temporaries MiB"], row["optimizer B/param"]) == (3.0, 8.0)
    assert {*row, *program.times()} <= set(FORMATS)
    bare = program._replace(fp8=None).contents()
    assert set(row) - set(bare) == {"FP8 of Dense", "FP8 of readout", "amax"}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_differ_in_what_they_say_alone(shape: str) -> None:
    configs = {row: config_of(shape, row) for row in ROWS}
    assert {row: config.policy for row, config in configs.items()} == {
        "plain-bfloat16": "bfloat16",
        "qwix": "bfloat16",
        "bfloat16": "bfloat16",
        "fp8": "fp8",
        "fp8-readout": "fp8",
        "fp8-scaled": "fp8",
        "fp8-readout-gradients-scaled": "fp8",
        "fp8-readout-scaled": "fp8",
    }
    scaled = [row for row, config in configs.items() if config.optimizer.scaled]
    assert scaled == [BEST, READOUT_GRADIENTS, READOUT_SCALED]
    quantized = {row: config.fp8_readout for row, config in configs.items() if config.fp8_readout}
    assert quantized == {READOUT: True, READOUT_GRADIENTS: "gradients", READOUT_SCALED: True}
    assert len({(c.model.width, c.model.vocab, c.data.step_size) for c in configs.values()}) == 1
    plain = configs[REFERENCE].model
    assert (plain.library, plain.products) == ("plain", None)
    assert config_of(shape, BEST, toy=True).model.layers == 1


def test_shapes_are_those_that_figures_are_of() -> None:
    small, large = (config_of(shape, BEST) for shape in ("gpt2-small", "llama-1b"))
    assert (small.data.batch_size, small.data.sequence_length, small.model.vocab) == (
        8,
        1024,
        50257,
    )
    assert (large.data.batch_size, large.data.sequence_length, large.model.vocab) == (
        4,
        2048,
        32000,
    )


def test_lists_of_the_command_line_are_checked() -> None:
    assert chosen("--rows", "fp8, bfloat16,", ROWS) == ["bfloat16", "fp8"]
    with pytest.raises(RecipeError, match=r"--rows: expected some of plain-.*; got fp7; correct"):
        chosen("--rows", "fp8,fp7", ROWS)


def test_a_row_whose_library_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_programs, "has_qwix", lambda: False)
    rows, (note,) = _programs.installed(list(ROWS))
    assert "qwix" not in rows
    assert note == "Row qwix: not installed: pip install qwix"
    assert _programs.installed(["fp8"]) == (["fp8"], [])
    monkeypatch.setattr(_programs, "has_qwix", lambda: True)
    assert _programs.installed(list(ROWS)) == (list(ROWS), [])


def test_16_bit_attention_alone_is_traced_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def attention(q, k, v, *, implementation=None):
        asked.append(implementation)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    x = jnp.ones((1, 1, 1, 8))
    with _programs.fused_attention():
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            jax.nn.dot_product_attention(*[x.astype(dtype)] * 3)
        jax.nn.dot_product_attention(*[x.astype(jnp.bfloat16)] * 3, implementation="xla")
    assert asked == ["cudnn", "cudnn", None, "xla"]
    assert jax.nn.dot_product_attention is attention
