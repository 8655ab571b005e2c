"""Quantized matmuls become FP8 kernels of an H200, with factors folded in.

The tests inspect the program that XLA compiles for it.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Spec, lax

from recipes.bench.aot import compile_h200
from tests.h200 import FP8_GEMM, gemms, library_calls
from unitscale import ops
from unitscale.quant import (
    PRESETS,
    Block,
    Contraction,
    Delayed,
    Dynamic,
    MatmulConfig,
    Static,
    Unit,
    check_fp8,
    dot_general,
    fake_quantize_operands,
    named_operands,
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


@pytest.mark.parametrize("transform", [direct, vmapped, scanned])
@pytest.mark.parametrize("cotangent", SHORT)
def test_all_three_matmuls_are_fp8(cotangent: str, transform) -> None:
    config = MatmulConfig(cotangent=cotangent)
    f = transform(lambda x, w: ops.dense(x, w, config=config).data)

    def three(x, w, ct):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(ct)

    lead = () if transform is direct else (2,)
    x, dy = (Spec((*lead, BATCH, TIME, n), jnp.bfloat16) for n in (IN, OUT))
    text = compile_h200(three, x, Spec((IN, OUT), jnp.float32), dy).as_text()
    assert library_calls(text) == [FP8_GEMM] * 3
    found = gemms(text)
    operands = sorted(sorted(types) for _, types, _ in found)
    forward, backward = ["f8e4m3fn"] * 2, sorted(["f8e4m3fn", SHORT[cotangent]])
    assert operands == sorted([forward, backward, backward])
    if transform is not direct:
        return
    # Factors are inside: forward and dx share in^-1/2; dkernel, in float32, has batch^-1/2.
    shared, weight = IN**-0.5, (BATCH * TIME) ** -0.5
    results = sorted((result, factor) for result, _, factor in found)
    assert [result for result, _ in results] == ["bf16", "bf16", "f32"]
    assert [factor for _, factor in results] == pytest.approx([shared, shared, weight], rel=1e-6)
    # FP8 operands are transposed in words of four numbers, not in bytes. One kernel casts a weight
    # and writes both layouts.
    assert re.findall(r" = f8\w+\[[\d,]*\]\S* transpose\(", text) == []
    words = re.findall(r" = u32\[([\d,]*)\]\S* transpose\(", text)
    tokens = f"{BATCH},{TIME // 4}"
    assert sorted(words) == sorted([f"{IN},{tokens}", f"{OUT},{tokens}", f"{OUT},{IN // 4}"])
    assert f" = (u32[{OUT},{IN // 4}]" in text


def test_factors_of_several_matmuls_are_inside_them_and_not_rounded() -> None:
    """Matmuls with the same operand and equal factors are not merged, and factors stay inside."""
    kernels = [Spec((320, OUT), jnp.float32)] * 3
    text = compile_h200(
        lambda x, *kernels: [ops.dense(x, w, config=MatmulConfig()).data for w in kernels],
        Spec((BATCH, TIME, 320), jnp.bfloat16),
        *kernels,
    ).as_text()
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


# Reports of programs: what XLA makes of each way to write a matmul of 8-bit operands.

E4, E5, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
NT = (((1,), (1,)), ((), ()))
M, N, K, ROWS = 512, 2048, 1024, (512, 1)


def dot(a, b):
    return lax.dot_general(a, b, NT, preferred_element_type=BF16)


def scaled_after(a, b, s):
    return dot(a, b) * s.astype(BF16)


def scaled_before(a, b, s):
    return dot(a.astype(BF16) * s.astype(BF16), b.astype(BF16) * s.astype(BF16))


def rows_before(a, b, s):
    return dot(a.astype(BF16) * s.astype(BF16), b.astype(BF16))


def one_sided(a, b, s):
    return dot(a.astype(BF16), b) * s.astype(BF16)


def fused_output(a, b, s):
    y = scaled_after(a, b, s)
    return jnp.clip(y, -448, 448).astype(E4), jnp.max(jnp.abs(y))


@pytest.mark.parametrize(
    ("form", "m", "types", "scale", "reason"),
    [
        (scaled_after, M, (E4, E4), (), ""),
        (scaled_after, 500, (E5, E4), (), ""),
        (scaled_after, M, (E4, E4), ROWS, ""),
        (scaled_before, M, (E4, E4), (), ""),
        (fused_output, M, (E4, E4), (), ""),
        (scaled_after, M, (E5, E5), (), "both operands are E5M2"),
        (scaled_after, M, (jnp.float8_e4m3fnuz,) * 2, (), "NVIDIA GPUs do not multiply f8e4m3fnuz"),
        (one_sided, M, (E4, BF16), (), "only one operand is FP8"),
        (rows_before, M, (E4, E4), ROWS, "the FP8 operands are converted or scaled first"),
    ],
)
def test_every_known_form(form, m, types, scale, reason: str) -> None:
    args = Spec((m, K), types[0]), Spec((N, K), types[1]), Spec(scale, jnp.float32)
    report = check_fp8(compile_h200(form, *args))
    (matmul,) = report.matmuls
    assert matmul.fp8 is bool(report) is (not reason)
    assert matmul.reason.startswith(reason)
    assert len(report.lost) == bool(reason)
    assert matmul.source.partition(":")[0] == __file__
    assert matmul.op_name.startswith(f"jit({form.__name__})")
    if m == M:
        assert matmul.flops == 2 * M * N * K


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


@pytest.mark.parametrize(("accumulation", "count"), [("fast_forward", 2), ("exact", 3)])
def test_exact_accumulation_keeps_the_kernels(accumulation: str, count: int) -> None:
    config = MatmulConfig(accumulation=accumulation)
    three = three_products(config, Contraction("btk", "kn", "btn"))
    args = [Spec(shape, BF16) for shape in ((4, 64, 128), (128, 256), (4, 64, 256))]
    text = compile_h200(lambda *args: three(*args)[:3], *args).as_text()
    kernels = [line for line in text.splitlines() if f'target="{FP8_GEMM}"' in line]
    assert len(kernels) == 3
    assert sum('"HIGHEST"' in line for line in kernels) == count


@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4"])
def test_blocks_are_multiplied_natively_on_blackwell(preset: str) -> None:
    config = PRESETS[preset]
    three = three_products(config, Contraction("btk", "kn", "btn"))
    shapes = (4, 64, 128), (128, 256), (4, 64, 256)
    args = [Spec(shape, BF16) for shape in shapes]
    for blackwell, count in ((True, 3), (False, 0)):
        with named_operands():  # 4-bit operands have names too
            program = compile_h200(lambda *args: three(*args)[:3], *args, blackwell=blackwell)
        assert program.as_text().count('target="__cudnn$blockScaledDot"') == count


def test_amax_reductions_and_roundings_are_counted() -> None:
    """XLA drops a conversion to FP8 and back, with its rounding, unless that is prevented."""
    x, w = Spec((M, K), BF16), Spec((N, K), BF16)
    dynamic, block = (dot_general(MatmulConfig(strategy=s)) for s in (Dynamic(), Block()))
    report = check_fp8(compile_h200(lambda x, w: dynamic(x, w, NT), x, w))
    assert report
    assert (report.amax_reductions, report.casts) == (2, 2)
    assert check_fp8(compile_h200(lambda x: jax.nn.softmax(x, axis=1), x)).amax_reductions == 0
    for f in (
        lambda x, w: fake_quantize_operands(x, w, MatmulConfig()),
        lambda x, w: block(x, w, NT),
    ):
        assert check_fp8(compile_h200(f, x, w)).casts >= 1
