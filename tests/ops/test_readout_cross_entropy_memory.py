"""Logits are never whole: no array of the compiled program has tokens times classes elements."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from unitscale import ops
from unitscale.quant import MatmulConfig

OPTIMIZED = True
WIDTH, VOCAB, CHUNK = 8, 4096, 32


def compiled(tokens: int, chunk: int | None, config: MatmulConfig | None = None) -> Any:
    def loss(x, table, labels):
        return ops.readout_cross_entropy(
            x, table, labels, transposed=True, chunk_size=chunk, config=config
        )

    shapes = (
        jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()


def largest(program: Any) -> int:
    """Elements of the largest array that an optimized program names."""
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\w*\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize("config", [None, MatmulConfig()], ids=["float32", "fp8"])
def test_memory_does_not_grow_with_the_logits(config: MatmulConfig | None) -> None:
    few, many = (compiled(n * CHUNK, CHUNK, config) for n in (4, 64))
    bytes_of = [program.memory_analysis().temp_size_in_bytes for program in (few, many)]
    # What does grow is what there is of each token: x, dx and a number or two, in chunks and not.
    own = 60 * CHUNK * (4 * WIDTH + 4) * 4
    assert bytes_of[1] <= bytes_of[0] + own
    assert own < 60 * CHUNK * VOCAB  # a byte of each logit
    assert largest(many) < CHUNK * VOCAB * 2
    whole = compiled(64 * CHUNK, 64 * CHUNK, config)
    assert largest(whole) >= 64 * CHUNK * VOCAB
    assert whole.memory_analysis().temp_size_in_bytes > 10 * bytes_of[1]


def test_large_logits_are_cut_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 64 * VOCAB
    monkeypatch.setattr("unitscale.ops._readout_cross_entropy.MOST_LOGITS", limit)
    assert largest(compiled(64, None)) == limit
    assert largest(compiled(1024, None)) == limit
