"""Kernels of compiled programs: bytes, FLOPs and number of runs; bytes sent by collectives."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from recipes.bench.aot import BANDWIDTH, SMALLEST, roofline
from recipes.bench.wire import Collective, bytes_on_wire, collectives
from tests.quant import programs

OPTIMIZED = True
F, S = "f32[8,1024]", "f32[8192,8192]"
K = 4 * 1024  # bytes of a row of F


def program(line: str, *types: str, called: str = "") -> str:
    """Make an HLO program of one instruction with parameters x0, x1, ..."""
    own = "\n".join(f"  %x{n} = {kind} parameter({n})" for n, kind in enumerate(types))
    entry = f"ENTRY %main () -> f32[] {{\n{own}\n  ROOT %out = {line}\n}}"
    return f"HloModule jit_f, num_partitions=4\n\n{called}\n{entry}"


def function(lines: str, *types: str, name: str = "called") -> str:
    """Make an HLO computation with parameters p0, p1, ..."""
    own = "\n".join(f"  %p{n} = {kind} parameter({n})" for n, kind in enumerate(types))
    return f"%{name} () -> f32[] {{\n{own}\n  {lines}\n}}\n"


def fused(inner: str, result: str, *types: str) -> str:
    operands = ", ".join(f"%x{n}" for n in range(len(types)))
    line = f"{result} fusion({operands}), calls=%called"
    return program(line, *types, called=function(inner, *types))


UPDATE = f"ROOT %r = {F} dynamic-update-slice(%p0, %p1, %p2, %p2)"
# Fused instructions, result, parameters and bytes moved.
FUSIONS = {
    "element-wise": (f"ROOT %r = {F} add(%p0, %p1)", F, (F, F), 3 * 8 * K),
    "a slice": ("ROOT %r = f32[1,1024] slice(%p0)", "f32[1,1024]", (F,), 2 * K),
    "an update in place": (UPDATE, F, (F, "f32[1,1024]", "s32[]"), 2 * K + 4),
}


def test_a_fusion_moves_what_it_reads_and_writes() -> None:
    for name, (inner, result, types, expected) in FUSIONS.items():
        report = roofline(fused(inner, result, *types))
        assert (report.bytes, report.seconds) == (expected, SMALLEST), name  # all are small


def test_time_is_that_of_the_slowest_resource() -> None:
    assert roofline(program(f"{S} negate(%x0)", S)).seconds == pytest.approx(
        2 * 4 * 8192**2 / BANDWIDTH
    )
    chain = "%a = S power(%p0, %p0)\n  %b = S power(%a, %a)\n  ROOT %r = S power(%b, %b)"
    (found,) = roofline(fused(chain.replace("S", S), S, S)).kernels
    assert found.kind == "arithmetic-bound"
    assert found.seconds == pytest.approx(3 * 24 * 8192**2 / (0.80 * 33.5e12))


def test_loops_count_their_runs_and_conditions_their_longest_branch() -> None:
    trips = 'backend_config={"known_trip_count":{"n":"12"}}'
    body = function(f"ROOT %r = {F} negate(%p0)", F)
    report = roofline(program(f"{F} while(%x0), body=%called, {trips}", F, called=body))
    assert (report.bytes, report.uncounted, len(report.kernels)) == (12 * 16 * K, 0, 1)
    report = roofline(program(f"{F} while(%x0), body=%called", F, called=body))
    assert (report.bytes, report.uncounted) == (16 * K, 1)
    long = f"%s = {F} sine(%p0)\n  ROOT %r = {F} cosine(%s)"
    both = function(f"ROOT %q = {F} negate(%p0)", F, name="short") + function(long, F)
    line = f"{F} conditional(%x1, %x0, %x0), branch_computations={{%short, %called}}"
    assert [k.name for k in roofline(program(line, F, "s32[]", called=both)).kernels] == ["s", "r"]


def test_compiled_programs() -> None:
    w = jnp.ones((64, 64))
    scan = jax.jit(lambda x: lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=7)[0])
    report = roofline(scan.lower(w).compile())
    assert (report.flops, report.uncounted) == (7 * 2 * 64**3, 0)
    assert sum(total.seconds for total in report.by_kind()) == pytest.approx(report.seconds)
    (found,) = roofline(programs.direct()).kernels
    assert found.place == "jit(step)/dot_general at /home/user/train.py:17"
    assert found.kind == "FP8 products"
    with pytest.raises(ValueError, match="optimized HLO program"):
        roofline(scan.lower(w).as_text())


# A line, the collective's kind, type, bytes and devices, and the bytes that each device sends.
LINES = """
%s.1 = f32[16,8]{1,0} all-reduce(%x), replica_groups={{0,2},{1,3}} | all-reduce f32 512 2 | 512
ROOT %g = u8[1024]{0} all-gather(%x), replica_groups=[2,4]<=[8] | all-gather u8 1024 4 | 768
%a = (u8[1,4]{1,0}, u8[1,4]{1,0}) all-to-all(%x, %y), replica_groups={{0,1}} | all-to-all u8 8 2 | 4
%r = bf16[4]{0} reduce-scatter(%x), replica_groups={}, to_apply=%add | reduce-scatter bf16 8 8 | 56
%g = ((s8[2], f32[3]), (s8[8], f32[12])) all-gather-start(%x, %y), replica_groups=[2,4]<=[8] \
| all-gather s8 56 4 | 42
%s = (f32[4], f32[2]) all-reduce-start(%x, %y), replica_groups=[4,2]<=[8] | all-reduce f32 24 2 | 24
%s = f32[4] all-reduce(%x), replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp','data'}, \
to_apply=%add | all-reduce f32 16 4 | 24
%p = (f16[6], f16[6], u32[], u32[]) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,0}} | collective-permute f16 12 8 | 12
"""
# Lines that send nothing.
OTHERS = """
%d = f32[16]{0} all-reduce-done(%s)
%f = f32[4]{0} fusion(%all-reduce.1), metadata={op_name="jit(f)/all-reduce"}
%e = f32[4]{0} get-tuple-element(%all-to-all), index=0
"""


def lines(text: str) -> str:
    head = "HloModule jit_f, replica_count=1, num_partitions=8\n\nENTRY %main () -> f32[] {\n  "
    return head + text.strip().replace("\n", "\n  ") + "\n}"


def test_bytes_on_the_wire() -> None:
    """Count bytes in HLO text; tests/parallel does so for compiled programs."""
    for case in LINES.strip().splitlines():
        line, wanted, sent = case.split(" | ")
        kind, dtype, size, devices = wanted.split()
        assert collectives(lines(line)) == [Collective(kind, dtype, int(size), int(devices))]
        assert bytes_on_wire(lines(line)) == int(sent)
    assert bytes_on_wire(lines(OTHERS)) == 0
    with pytest.raises(ValueError, match="replica groups"):
        bytes_on_wire(lines("%s = f32[8]{0} all-reduce(%x), replica_groups=@groups"))
