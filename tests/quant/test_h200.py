"""The quantized products become FP8 kernels of an H200, with their factors inside.

What is compared is the program that XLA would run there.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Spec

from recipes.bench.aot import compile_h200
from tests.h200 import FP8_GEMM, gemms, library_calls
from unitscale import ops
from unitscale.quant import (
    Contraction,
    Delayed,
    Dynamic,
    MatmulConfig,
    Static,
    Unit,
)

from .products import state_of, three_products

pytestmark = pytest.mark.h200
OPTIMIZED = True

BATCH, TIME, IN, OUT = 4, 128, 256, 512
SHORT = {"float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}


def direct(dense: Callable[..., Any]) -> Callable[..., Any]:
    return dense


def vmapped(dense: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: jax.vmap(dense, (0, None))(x, w)


def scanned(dense: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: jax.lax.scan(lambda c, x: (c, dense(x, w)), 0, x)[1]


def program(cotangent: str, transform: Callable[..., Any], in_features: int = IN) -> str:
    config = MatmulConfig(cotangent=cotangent)
    f = transform(lambda x, w: ops.dense(x, w, config=config).data)

    def three_products(x, w, ct):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(ct)

    lead = () if transform is direct else (2,)
    return compile_h200(
        three_products,
        Spec((*lead, BATCH, TIME, in_features), jnp.bfloat16),
        Spec((in_features, OUT), jnp.float32),
        Spec((*lead, BATCH, TIME, OUT), jnp.bfloat16),
    ).as_text()


@pytest.mark.parametrize("transform", [direct, vmapped, scanned])
@pytest.mark.parametrize("cotangent", SHORT)
def test_all_three_products_are_fp8(cotangent: str, transform) -> None:
    text = program(cotangent, transform)
    assert library_calls(text) == [FP8_GEMM] * 3
    products = gemms(text)
    operands = sorted(sorted(types) for _, types, _ in products)
    forward, backward = ["f8e4m3fn"] * 2, sorted(["f8e4m3fn", SHORT[cotangent]])
    assert operands == sorted([forward, backward, backward])
    if transform is not direct:
        return
    # Factors are inside: forward and dx share in^-1/2; dkernel, in float32, has batch^-1/2.
    found = sorted((result, factor) for result, _, factor in gemms(text))
    shared, weight = IN**-0.5, (BATCH * TIME) ** -0.5
    assert [result for result, _ in found] == ["bf16", "bf16", "f32"]
    assert [factor for _, factor in found] == pytest.approx([shared, shared, weight], rel=1e-6)
    # Both operands of the weight gradient are transposed in words of four tokens, not in bytes.
    shapes = re.findall(rf" = {SHORT[cotangent]}\[([\d,]*)\].* transpose\(", text)
    assert f"{OUT},{BATCH},{TIME // 4},4" in shapes


def test_factors_of_several_products_are_inside_them_and_not_rounded() -> None:
    """Products that share an operand, and whose factors are equal: none is merged or multiplied."""
    config = MatmulConfig()

    def three(x, *kernels):
        return [ops.dense(x, w, config=config).data for w in kernels]

    kernels = [Spec((320, OUT), jnp.float32)] * 3
    text = compile_h200(three, Spec((BATCH, TIME, 320), jnp.bfloat16), *kernels).as_text()
    found = gemms(text)
    assert [result for result, _, _ in found] == ["bf16"] * 3
    assert [factor for _, _, factor in found] == pytest.approx([320**-0.5] * 3, rel=1e-6)
    assert re.findall(rf"bf16\[[\d,]*{OUT}\]\S* fusion\(", text) == []


STRATEGIES = [Unit(), Static((2.0, 4.0, 2.0**-10)), Static(), Delayed(), Dynamic()]


@pytest.mark.parametrize("strategy", [*STRATEGIES, Dynamic("channel")], ids=str)
def test_scales_of_every_strategy_leave_fp8_kernels(strategy: Any) -> None:
    config = MatmulConfig(cotangent="float8_e5m2", strategy=strategy)
    text = compile_h200(
        three_products(config, Contraction("btk", "kn", "btn")),
        Spec((BATCH, TIME, IN), jnp.bfloat16),
        Spec((IN, OUT), jnp.float32),
        Spec((BATCH, TIME, OUT), jnp.bfloat16),
        state_of(strategy),
    ).as_text()
    assert library_calls(text) == [FP8_GEMM] * 3
    operands = sorted(sorted(types) for _, types, _ in gemms(text))
    mixed = ["f8e4m3fn", "f8e5m2"]
    assert operands == [["f8e4m3fn"] * 2, mixed, mixed]
    # Only strategies of amax read tensors for statistics.
    measured = isinstance(strategy, Dynamic) or strategy in (Delayed(), Static())
    assert (" reduce(" in text) == measured
    if strategy == Dynamic("channel"):
        return
    # Scales per tensor are inside the matmuls: only the program's result takes what they write.
    calls = re.findall(r"%(\S+) = [^\n]*" + re.escape(FP8_GEMM), text)
    assert len(calls) == 3
    for call in map(re.escape, calls):
        (result,) = re.findall(rf"%(\S+) = \S+ get-tuple-element\(%{call}\), index=0", text)
        use = re.compile(rf"%{re.escape(result)}\b(?![.\d])(?! =)")
        users = [line for line in text.splitlines() if use.search(line) and " = " in line]
        assert all(re.search(r"= \S+ bitcast\(|ROOT .* tuple\(", line) for line in users), users
