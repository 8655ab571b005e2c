"""Bytes on the wire: of programs in XLA's own words, and of compiled ones."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from recipes.bench.wire import Collective, bytes_on_wire, collectives
from tests.parallel.devices import mesh_of
from unitscale.parallel import all_reduce


def program(*lines: str) -> str:
    head = "HloModule jit_f, replica_count=1, num_partitions=8\n\nENTRY %main () -> f32[] {\n"
    return head + "".join(f"  {line}\n" for line in lines) + "}"


# A line as XLA prints it, what it is, and the bytes that each device sends.
LINES = [
    (
        "%s.1 = f32[16,8]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,2},{1,3}}, "
        "use_global_device_ids=true, to_apply=%add",
        Collective("all-reduce", "f32", 512, 2),
        512,
    ),
    (
        "ROOT %g = u8[1024]{0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}",
        Collective("all-gather", "u8", 1024, 4),
        768,
    ),
    (
        "%a = (u8[1,4]{1,0}, u8[1,4]{1,0}) all-to-all(%x, %y), replica_groups={{0,1}}",
        Collective("all-to-all", "u8", 8, 2),
        4,
    ),
    (
        "%r = bf16[4]{0} reduce-scatter(%x), replica_groups={}, dimensions={0}, to_apply=%add",
        Collective("reduce-scatter", "bf16", 8, 8),
        56,
    ),
    (
        "%g = (f8e4m3fn[8]{0}, f8e4m3fn[64]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8]",
        Collective("all-gather", "f8e4m3fn", 64, 8),
        56,
    ),
    (
        "%a = ((u8[8,16]{1,0}), u8[8,16]{1,0}) all-to-all-start(%x), replica_groups=[1,8]<=[8]",
        Collective("all-to-all", "u8", 128, 8),
        112,
    ),
    (
        "%g = ((s8[2]{0}, f32[3]{0}), (s8[8]{0}, f32[12]{0})) all-gather-start(%x, %y), "
        "replica_groups=[2,4]<=[8]",
        Collective("all-gather", "s8", 56, 4),
        42,
    ),
    (
        "%s = (f32[4]{0}, f32[2]{0}) all-reduce-start(%x, %y), replica_groups=[4,2]<=[8]",
        Collective("all-reduce", "f32", 24, 2),
        24,
    ),
    (
        "%s = f32[4]{0} all-reduce(%x), replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] "
        "{'fsdp','data'}, use_global_device_ids=true, to_apply=%add",
        Collective("all-reduce", "f32", 16, 4),
        24,
    ),
    (
        "%s = s8[8]{0} all-gather(%x), replica_groups=mesh['data'=2,'model'=8] {'model':(2)4}",
        Collective("all-gather", "s8", 8, 4),
        6,
    ),
    (
        "%p = (f16[6]{0}, f16[6]{0}, u32[], u32[]) collective-permute-start(%x), "
        "source_target_pairs={{0,1},{1,0}}",
        Collective("collective-permute", "f16", 12, 8),
        12,
    ),
]


@pytest.mark.parametrize(("line", "wanted", "sent"), LINES, ids=lambda x: str(x)[:12])
def test_lines(line: str, wanted: Collective, sent: int) -> None:
    assert collectives(program(line)) == [wanted]
    assert bytes_on_wire(program(line)) == sent


def test_other_lines_send_nothing() -> None:
    lines = [
        "%d = f32[16]{0} all-reduce-done(%s)",
        '%f = f32[4]{0} fusion(%all-reduce.1), metadata={op_name="jit(f)/all-reduce"}',
        "%e = f32[4]{0} get-tuple-element(%all-to-all), index=0",
    ]
    assert bytes_on_wire(program(*lines)) == 0


def test_groups_of_an_unknown_form_are_an_error() -> None:
    with pytest.raises(ValueError, match="replica groups"):
        bytes_on_wire(program("%s = f32[8]{0} all-reduce(%x), replica_groups=@groups"))


def compiled(f, devices: int, size: int):
    mapped = jax.shard_map(f, mesh=mesh_of(data=devices), in_specs=P("data"), out_specs=P())
    return jax.jit(mapped).lower(np.zeros(size * devices, np.float32)).compile()


def test_fp8_is_a_quarter_of_float32_and_half_of_16_bits() -> None:
    devices, size = 8, 4096
    part = (devices - 1) / devices
    full = bytes_on_wire(compiled(lambda g: lax.pmean(g, "data"), devices, size))
    half, eighth = (
        bytes_on_wire(compiled(lambda g, d=d: all_reduce(g, "data", d), devices, size))
        for d in ("bfloat16", "float8_e4m3fn")
    )
    assert full == 2 * 4 * size * part
    assert half == full / 2
    assert eighth == full / 4 + 2 * 4 * part  # the scale: one integer's all-reduce


def test_fp8_travels_as_bytes() -> None:
    found = collectives(compiled(lambda g: all_reduce(g, "data"), 4, 4096))
    assert {(c.kind, c.dtype) for c in found} == {
        ("all-reduce", "s32"),
        ("all-to-all", "u8"),
        ("all-gather", "u8"),
    }
