"""Count the bytes that the collectives of a compiled program send.

Bytes are counted in compiled programs, because XLA merges and drops collectives, and runs some in
wider types, such as bfloat16 all-reduces on a CPU in float32.
"""

import math
import re
from typing import Any, NamedTuple

from unitscale.quant import HloInstruction, bits, parse_hlo

# Bytes that each of n devices in a ring sends, per byte of the result (Patarasuk and Yuan 2009,
# "Bandwidth optimal all-reduce algorithms for clusters of workstations", section 3).
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda _: 1,
    "collective-broadcast": lambda _: 1,
}


class Collective(NamedTuple):
    """One collective: kind, HLO type of the first result, bytes of all results, and runs."""

    kind: str
    dtype: str
    size: int
    devices: int
    runs: int = 1

    @property
    def sent(self) -> float:
        return self.runs * self.size * _SENT[self.kind](self.devices)


def collectives(compiled: Any) -> list[Collective]:
    """List the collectives of a compiled program or its text; loops of unknown length run once."""
    program = parse_hlo(compiled if isinstance(compiled, str) else compiled.as_text())
    everyone = devices_of(program.header)
    found = (i for i in program.instructions if i.opcode.removesuffix("-start") in _SENT)
    return [collective(i, everyone)._replace(runs=program.trips(i)) for i in found]


def bytes_on_wire(compiled: Any) -> int:
    """Return the bytes that each device of a ring sends in one run of a compiled program."""
    return math.ceil(sum(c.sent for c in collectives(compiled)))


def collective(i: HloInstruction, everyone: int) -> Collective:
    """Describe a collective instruction of a program for `everyone` devices."""
    kind, arrays = i.opcode.removesuffix("-start"), i.types
    if kind != i.opcode and kind != "all-reduce":
        # An asynchronous start returns its operands, its results, and perhaps contexts.
        arrays = arrays[len(i.operands) : 2 * len(i.operands)]
    size = math.ceil(size_of(*arrays))
    return Collective(kind, arrays[0][0], size, _group_size(i.attributes, everyone))


def size_of(*arrays: tuple[str, tuple[int, ...]]) -> float:
    """Return the bytes of arrays, given as HLO types and shapes."""
    return sum((1 if kind == "pred" else bits(kind) / 8) * math.prod(d) for kind, d in arrays)


def devices_of(header: str) -> int:
    """Read the number of a program's devices from its first line."""
    return math.prod(map(int, re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)))


def _group_size(attributes: str, everyone: int) -> int:
    if "replica_groups=" not in attributes or "replica_groups={}" in attributes:
        return everyone
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(iota[2])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        # Part of an axis is written 'name':(size of the parts before it)size.
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    raise ValueError(f"recipes.bench: unknown format of replica groups: {attributes}")
