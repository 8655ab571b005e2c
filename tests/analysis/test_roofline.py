"""The projection of whole programs: of text, and of what XLA compiles for a CPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.analysis.programs import AT_ONCE, loop
from tests.quant import programs
from unitscale.analysis import Roofline, compile_h200, roofline
from unitscale.analysis._work import KINDS

OPTIMIZED = True


def test_totals_are_those_of_the_kernels() -> None:
    report = roofline(programs.LOOP)
    assert report.kernels
    assert report.seconds == sum(k.seconds for k in report.kernels)
    for totals in (report.by_kind(), report.by_place(*KINDS)):
        assert sum(t.bytes for t in totals) == report.bytes
        assert sum(t.flops for t in totals) == report.flops
        assert sum(t.kernels for t in totals) == len(report.kernels)
        assert sum(t.seconds for t in totals) == pytest.approx(report.seconds)
        times = [t.seconds for t in totals]
        assert times == sorted(times, reverse=True)


def test_every_figure_is_called_projected() -> None:
    """Each line with a time is a head that says so, or stands below one."""
    text = str(roofline(loop("")))
    head, _, *rows = text.splitlines()
    assert head.startswith("projected for NVIDIA H200, not measured: 0.001 ms in 1 kernels")
    assert "1 loops of unknown length count once" in head
    columns = [line.split() for line in text.splitlines() if " share " in line]
    assert [words[:2] for words in columns] == [["projected", "ms"]] * 2
    assert rows[0].endswith("memory-bound")
    assert rows[-1].endswith("jit(f)/while/body/neg")


def test_a_faster_memory_shortens_what_it_bounds() -> None:
    twice = dataclasses.replace(AT_ONCE, name="twice", bandwidth=2 * AT_ONCE.bandwidth)
    assert roofline(loop(), twice).seconds == pytest.approx(roofline(loop(), AT_ONCE).seconds / 2)
    assert "projected for twice" in str(roofline(loop(), twice))


def test_a_long_place_is_cut_on_the_left() -> None:
    text = loop().replace("jit(f)/while", "jit(f)" + "/layer" * 30 + "/while")
    row = str(roofline(text)).splitlines()[-1]
    assert row.endswith("layer/while/body/neg")
    assert "..." in row


def of(f, *args) -> Roofline:
    return roofline(jax.jit(f).lower(*args).compile())


def test_a_compiled_chain_is_one_pass() -> None:
    x = jnp.ones((256, 1024), jnp.float32)
    report = of(lambda x: jnp.tanh(x) * 2 + 1, x)
    assert (report.bytes, report.flops) == (2 * 4 * 256 * 1024, 0)


def test_a_compiled_product() -> None:
    """XLA may transpose an operand beforehand; the product's own bytes and operations are these."""
    a, b = jnp.ones((256, 128)), jnp.ones((128, 512))
    report = of(jnp.dot, a, b)
    (product,) = (k for k in report.kernels if k.flops)
    assert product.flops == report.flops == 2 * 256 * 128 * 512
    assert product.bytes == 4 * (256 * 128 + 128 * 512 + 256 * 512)


def test_a_compiled_scan_counts_its_steps() -> None:
    w = jnp.ones((64, 64))

    def f(x):
        return lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=7)[0]

    report = of(f, jnp.ones((64, 64)))
    assert report.flops == 7 * 2 * 64**3
    assert report.uncounted == 0


def test_a_compiled_update_in_place_moves_the_update() -> None:
    """Of 4,096 rows one is written in each of 8 steps."""
    rows = jnp.ones((4096, 256))

    def f(rows, row):
        def step(i, rows):
            return lax.dynamic_update_slice_in_dim(rows, row * i.astype(jnp.float32), i, 0)

        return lax.fori_loop(0, 8, step, rows)

    report = roofline(jax.jit(f, donate_argnums=0).lower(rows, jnp.ones((1, 256))).compile())
    updates = [k for k in report.kernels if k.runs == 8]
    # The row that is read and the row that is written, beside some scalars.
    assert 8 * 2 * 4 * 256 <= sum(k.bytes for k in updates) < 8 * 5 * 4 * 256


def test_the_line_of_this_file_is_named() -> None:
    report = of(lambda x: jnp.cumsum(jnp.sin(x)), jnp.ones(4096))
    assert any("test_roofline.py:" in k.source for k in report.kernels)


def test_what_is_no_program_is_refused() -> None:
    lowered = jax.jit(jnp.sin).lower(1.0)
    for text in ("", "nothing", lowered.as_text()):
        with pytest.raises(ValueError, match=r"roofline: expected the text of an optimized HLO"):
            roofline(text)
    with pytest.raises(TypeError, match=r"roofline: compiled must be .*; got Lowered"):
        roofline(lowered)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"by_place: kinds must be of FP8.*; got 'matmul'"):
        roofline(loop()).by_place("matmul")


@pytest.mark.h200
def test_attention_of_cudnn_is_one_kernel_each_way() -> None:
    """8 items, 12 heads of 64, 1,024 tokens: seven products over half of all pairs."""
    x = jax.ShapeDtypeStruct((8, 1024, 12, 64), jnp.bfloat16)

    def loss(q, k, v):
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return y.astype(jnp.float32).sum()

    report = roofline(compile_h200(jax.grad(loss, argnums=(0, 1, 2)), x, x, x))
    kernels = [k for k in report.kernels if k.kind == "attention"]
    assert len(kernels) == 2
    assert report.flops == 7 * 2 * (8 * 12 * 1024 * 1024 * 64) / 2


@pytest.mark.h200
def test_a_scan_for_a_gpu_counts_its_steps() -> None:
    def f(x, w):
        return lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=7)[0]

    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    report = roofline(compile_h200(f, x, x))
    assert (report.flops, report.uncounted) == (7 * 2 * 512**3, 0)
