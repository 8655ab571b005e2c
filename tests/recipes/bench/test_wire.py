"""Bytes on the wire, of lines as XLA prints them; tests/parallel has compiled programs."""

import pytest

from recipes.bench.wire import Collective, bytes_on_wire, collectives

# A line, the collective's kind, type, bytes and devices, and the bytes that each device sends.
LINES = """
%s.1 = f32[16,8]{1,0} all-reduce(%x), replica_groups={{0,2},{1,3}} | all-reduce f32 512 2 | 512
ROOT %g = u8[1024]{0} all-gather(%x), replica_groups=[2,4]<=[8] | all-gather u8 1024 4 | 768
%a = (u8[1,4]{1,0}, u8[1,4]{1,0}) all-to-all(%x, %y), replica_groups={{0,1}} | all-to-all u8 8 2 | 4
%r = bf16[4]{0} reduce-scatter(%x), replica_groups={}, to_apply=%add | reduce-scatter bf16 8 8 | 56
%g = (f8e4m3fn[8], f8e4m3fn[64]) all-gather-start(%x), replica_groups=[1,8]<=[8] \
| all-gather f8e4m3fn 64 8 | 56
%a = ((u8[8,16]), u8[8,16]) all-to-all-start(%x), replica_groups=[1,8]<=[8] | all-to-all u8 128 8 \
| 112
%g = ((s8[2], f32[3]), (s8[8], f32[12])) all-gather-start(%x, %y), replica_groups=[2,4]<=[8] \
| all-gather s8 56 4 | 42
%s = (f32[4], f32[2]) all-reduce-start(%x, %y), replica_groups=[4,2]<=[8] | all-reduce f32 24 2 | 24
%s = f32[4] all-reduce(%x), replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp','data'}, \
to_apply=%add | all-reduce f32 16 4 | 24
%s = s8[8] all-gather(%x), replica_groups=mesh['data'=2,'model'=8] {'model':(2)4} \
| all-gather s8 8 4 | 6
%p = (f16[6], f16[6], u32[], u32[]) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,0}} | collective-permute f16 12 8 | 12
"""
# Lines that send nothing.
OTHERS = """
%d = f32[16]{0} all-reduce-done(%s)
%f = f32[4]{0} fusion(%all-reduce.1), metadata={op_name="jit(f)/all-reduce"}
%e = f32[4]{0} get-tuple-element(%all-to-all), index=0
"""


def program(lines: str) -> str:
    head = "HloModule jit_f, replica_count=1, num_partitions=8\n\nENTRY %main () -> f32[] {\n  "
    return head + lines.strip().replace("\n", "\n  ") + "\n}"


@pytest.mark.parametrize("case", LINES.strip().splitlines())
def test_lines(case: str) -> None:
    line, wanted, sent = case.split(" | ")
    kind, dtype, size, devices = wanted.split()
    assert collectives(program(line)) == [Collective(kind, dtype, int(size), int(devices))]
    assert bytes_on_wire(program(line)) == int(sent)


def test_other_lines() -> None:
    assert bytes_on_wire(program(OTHERS)) == 0
    with pytest.raises(ValueError, match="replica groups"):
        bytes_on_wire(program("%s = f32[8]{0} all-reduce(%x), replica_groups=@groups"))
