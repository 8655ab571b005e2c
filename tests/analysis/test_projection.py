"""Programs with loops, conditions and calls: which kernels run, how often, and from where."""

from __future__ import annotations

import dataclasses

import pytest

from tests.analysis.programs import AT_ONCE, fusion, loop, parameters, program
from tests.quant import programs
from unitscale.analysis._projection import project
from unitscale.quant import parse_hlo

K = 4 * 1024


def kernels(text: str):
    return project(parse_hlo(text), AT_ONCE)[0]


def test_a_loop_runs_as_often_as_is_known() -> None:
    (found,), uncounted = project(parse_hlo(loop()), AT_ONCE)
    assert (found.name, found.runs, found.bytes, uncounted) == ("y", 12, 12 * 2 * K, 0)
    assert found.seconds == pytest.approx(12 * 2 * K / AT_ONCE.bandwidth)
    assert found.place == "jit(f)/while/body/neg"


def test_a_loop_of_unknown_length_counts_once_and_is_told() -> None:
    (found,), uncounted = project(parse_hlo(loop("")), AT_ONCE)
    assert (found.runs, found.bytes, uncounted) == (1, 2 * K, 1)


def branch(name: str, body: str) -> str:
    return f"%{name} (p: f32[1024]) -> f32[1024] {{\n  %p = f32[1024] parameter(0)\n{body}\n}}"


@pytest.mark.parametrize(
    "names",
    ["branch_computations={%short, %long}", "true_computation=%long, false_computation=%short"],
)
def test_a_condition_takes_its_longest_branch(names: str) -> None:
    short = branch("short", "  ROOT %r = f32[1024] negate(%p)")
    long = branch("long", "  %s = f32[1024] sine(%p)\n  ROOT %r = f32[1024] cosine(%s)")
    own = parameters(c="s32[]", x="f32[1024]")
    text = program(f"{own}\n  ROOT %out = f32[1024] conditional(%c, %x, %x), {names}", short, long)
    assert [k.name for k in kernels(text)] == ["s", "r"]


@pytest.mark.parametrize(
    "lines",
    [
        "  ROOT %out = f32[1024] call(%x), to_apply=%inner",
        "  %start = ((f32[1024]), f32[1024], u32[]) async-start(%x), calls=%inner\n"
        "  %more = ((f32[1024]), f32[1024], u32[]) async-update(%start)\n"
        "  ROOT %out = f32[1024] async-done(%more)",
    ],
    ids=["call", "asynchronous"],
)
def test_a_call_is_what_it_calls(lines: str) -> None:
    inner = branch("inner", "  ROOT %r = f32[1024] negate(%p)")
    (found,) = kernels(program(f"{parameters(x='f32[1024]')}\n{lines}", inner))
    assert (found.name, found.bytes) == ("r", 2 * K)


def test_other_names_of_the_same_memory_are_no_kernels() -> None:
    own = parameters(x="f32[1024]")
    view = "  %v = f32[32,32] bitcast(%x)\n  ROOT %out = (f32[32,32]) tuple(%v)"
    assert kernels(program(f"{own}\n{view}")) == ()


def test_a_product_takes_the_longer_of_its_bytes_and_its_operations() -> None:
    (small,) = kernels(programs.direct())
    size = 32 * 64 + 16 * 64 + 2 * 32 * 16
    assert (small.kind, small.format, small.bytes) == ("FP8 products", "f8", size)
    assert small.flops == 2 * 32 * 64 * 16
    assert small.seconds == size / AT_ONCE.bandwidth
    large = programs.direct().replace("32,64", "8192,8192").replace("16,64", "8192,8192")
    (large,) = kernels(large.replace("32,16", "8192,8192"))
    assert large.seconds == pytest.approx(2 * 8192**3 / AT_ONCE.flops["f8"])


def test_what_is_sent_takes_the_time_of_the_link() -> None:
    own = parameters(x="f32[1024]")
    line = "  ROOT %out = f32[1024] all-reduce(%x), replica_groups={{0,1}}, to_apply=%add"
    (found,) = kernels(program(f"{own}\n{line}"))
    assert (found.kind, found.seconds) == ("collectives", pytest.approx(K / AT_ONCE.link))


def test_a_kernel_knows_the_users_line() -> None:
    (found,) = kernels(programs.direct())
    assert found.source == "/home/user/train.py:17"
    assert found.stack[0].endswith("flax/nnx/nn/linear.py:400")
    assert found.place == "jit(step)/dot_general at /home/user/train.py:17"


def test_layers_share_a_place_and_what_has_no_name_keeps_its_own() -> None:
    call, inner = fusion("  ROOT %p = f32[8] parameter(0)", "x", result="f32[1024]")
    own = parameters(x="f32[1024]")
    (bare,) = kernels(program(f"{own}\n{call.replace('%out', '%loop_fusion.12')}", inner))
    assert bare.place == "loop_fusion"
    named = call + ', metadata={op_name="jit(f)/layers/3/add"}'
    (one,) = kernels(program(f"{own}\n{named}", inner))
    (other,) = kernels(program(f"{own}\n{named.replace('/3/', '/11/')}", inner))
    assert one.place == other.place == "jit(f)/layers/#/add"


def test_no_kernel_is_shorter_than_the_smallest() -> None:
    slow = dataclasses.replace(AT_ONCE, start=1e-3)
    (found,), _ = project(parse_hlo(loop()), slow)
    assert (found.kind, found.seconds) == ("memory-bound", pytest.approx(12e-3))


def test_attention_has_a_speed_of_its_own() -> None:
    """Two products over 128 by 128 pairs, of 64 numbers each."""
    types = dict.fromkeys("qkv", "bf16[2,128,4,64]")
    line = "  ROOT %out = (bf16[2,128,4,64], u8[64]) custom-call(%q, %k, %v), "
    text = program(f'{parameters(**types)}\n{line}custom_call_target="__cudnn$fmhaSoftmax"')
    (found,), _ = project(parse_hlo(text), dataclasses.replace(AT_ONCE, attention=1e9))
    assert found.kind == "attention"
    assert found.seconds == pytest.approx(found.flops / 1e9)
    assert found.flops == 2 * 2 * 2 * 4 * 128 * 128 * 64


def test_a_fusion_without_a_name_is_where_its_last_operation_is() -> None:
    inner = (
        "  %p = f32[8] parameter(0)\n"
        '  %s = f32[8] sine(%p), metadata={op_name="jit(f)/sin"}\n'
        '  %n = f32[8] negate(%s), metadata={op_name="jit(f)/neg"}\n'
        '  %q = f32[8] parameter(1), metadata={op_name="y"}\n'
        "  %a = f32[8] add(%n, %q)\n"
        "  ROOT %r = (f32[8]) tuple(%a)"
    )
    call, computation = fusion(inner, "x", "y", result="(f32[8])", root="(f32[8])")
    text = program(f"{parameters(x='f32[8]', y='f32[8]')}\n{call}", computation)
    assert [kernel.place for kernel in kernels(text)] == ["jit(f)/neg"]
