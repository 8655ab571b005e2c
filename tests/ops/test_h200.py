"""Kernels of an H200 for the readout and its loss in chunks."""

from __future__ import annotations

import functools
import re

import jax
import pytest
from jax import ShapeDtypeStruct as Spec

from recipes.bench.aot import compile_h200
from tests.h200 import gemms
from unitscale import ops
from unitscale.quant import MatmulConfig, check_fp8

pytestmark = pytest.mark.h200
TOKENS, WIDTH, VOCAB, COLUMNS, CHUNK = 4096, 256, 8100, 8192, 512
FP8 = MatmulConfig(cotangent="float8_e5m2")


def test_all_three_products_of_a_chunk_are_in_8_bits() -> None:
    options = {"transposed": True, "vocab": VOCAB, "chunk_size": CHUNK, "config": FP8}
    loss = functools.partial(ops.readout_cross_entropy, **options)
    shapes = Spec((TOKENS, WIDTH), "bfloat16"), Spec((COLUMNS, WIDTH), "float32")
    program = compile_h200(jax.jit(jax.grad(loss, (0, 1))), *shapes, Spec((TOKENS,), "int32"))
    assert check_fp8(program).share == 1
    # Of the first chunk, and of each of the others.
    forward, backward = ["f8e4m3fn", "f8e4m3fn"], ["f8e5m2", "f8e4m3fn"]
    found = sorted(types for _, types, _ in gemms(program.as_text()))
    assert found == [forward] * 2 + [backward] * 4
    # Nothing of the table's size is cast, turned or padded for each chunk again.
    whole = {f"{COLUMNS},{WIDTH}", f"{WIDTH},{COLUMNS}"}
    parts = program.as_text().split("\n\n")
    body = next(part for part in parts if "__cublas$lt$matmul" in part)  # for each chunk
    made = re.findall(r"= \(?\w+\[([\d,]+)\]\S* (?:fusion|copy|transpose|pad)\(", body)
    assert made
    assert not whole & set(made)
