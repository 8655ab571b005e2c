"""What the collectives of a compiled program send, read from its text.

Claims about bytes are made of the program that XLA compiled, not of the one that was written: XLA
widens small types where a backend has no arithmetic for them (a bfloat16 all-reduce on a CPU is one
of float32), and merges or drops collectives.
"""

import math
import re
from typing import Any, NamedTuple

# Bytes that a ring of n devices sends per device and byte of the result, by kind.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda _: 1,
    "collective-broadcast": lambda _: 1,
}
_INSTRUCTION = re.compile(
    rf"= (?P<result>[^%]*?) (?P<kind>{'|'.join(sorted(_SENT, key=len, reverse=True))})"
    r"(?P<start>-start)?\((?P<rest>.*)"
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_DEVICES = re.compile(r"num_partitions=(\d+)")
_REPLICAS = re.compile(r"replica_count=(\d+)")


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
        kind: as in the program, such as ``"all-reduce"``.
        dtype: XLA's name of the type of its first array, such as ``"u8"`` or ``"f32"``.
        size: bytes of its result on one device.
        devices: number of devices that take part together.

    Example:
        >>> Collective("all-reduce", "f32", size=1024, devices=8).sent
        1792.0
    """

    kind: str
    dtype: str
    size: int
    devices: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends, by the convention of `bytes_on_wire`."""
        return self.size * _SENT[self.kind](self.devices)


def collectives(compiled: Any) -> list[Collective]:
    """Returns the collectives of a compiled program, in the order of its text.

    Args:
        compiled: what ``jax.jit(f).lower(...).compile()`` returns, or its text.

    Returns:
        One Collective per instruction; one in the body of a loop stands there once.

    Raises:
        TypeError: if ``compiled`` has no text.
        ValueError: if XLA prints a collective in a way that is not understood.

    Example:
        >>> program = "%s = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add"
        >>> collectives(program)
        [Collective(kind='all-reduce', dtype='f32', size=32, devices=4)]
    """
    text = compiled if isinstance(compiled, str) else getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str):
        raise TypeError(
            "unitscale.parallel.collectives: compiled must be a compiled program or its text; got "
            f"{type(compiled).__name__}. Call jax.jit(f).lower(...).compile() first."
        )
    everyone = devices_of(text)
    return [
        _collective(match, everyone)
        for line in text.splitlines()
        if (match := _INSTRUCTION.search(line)) is not None
    ]


def _collective(match: re.Match[str], everyone: int) -> Collective:
    result = match["result"]
    if match["start"] and match["kind"] != "all-reduce":
        # An asynchronous start returns its operands, its results, and perhaps contexts.
        result = (_elements(result) + [""])[1]
    arrays = [(kind, _bytes(kind, shape)) for kind, shape in _ARRAY.findall(result)]
    if not arrays:
        raise ValueError(
            f"unitscale.parallel.collectives: XLA prints its types in another way: {match[0]}"
        )
    kind, devices = match["kind"], group_size(match["rest"], everyone)
    return Collective(kind, arrays[0][0], sum(size for _, size in arrays), devices)


def _elements(result: str) -> list[str]:
    """The elements of a tuple as XLA prints its type."""
    found, depth = [""], 0
    for character in result.strip()[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


def _bytes(kind: str, shape: str) -> int:
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
    return -(-bits * math.prod(int(n) for n in shape.split(",") if n) // 8)


def devices_of(text: str) -> int:
    """Devices that a compiled program is for.

    Example:
        >>> devices_of("HloModule jit_f, num_partitions=8")
        8
    """
    found = (pattern.search(text) for pattern in (_DEVICES, _REPLICAS))
    return math.prod(int(match[1]) for match in found if match is not None)


def group_size(rest: str, everyone: int) -> int:
    """Devices that take part in a collective together, by its attributes.

    Example:
        >>> group_size("replica_groups={{0,2},{1,3}}, to_apply=%add", everyone=4)
        2
    """
    if "source_target_pairs=" in rest:
        return everyone
    if (listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest)) is not None:
        return len(listed[1].split(","))
    if (iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest)) is not None:
        return int(iota[2])
    if (named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest)) is not None:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        # A part of an axis is written 'name':(size of what is before it)size.
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    if "replica_groups={}" in rest or "replica_groups=" not in rest:
        return everyone
    raise ValueError(
        f"unitscale.parallel.collectives: XLA prints its groups in another way: {rest}"
    )


def bytes_on_wire(compiled: Any) -> int:
    """Returns the bytes that each device sends in one run of a compiled program.

    One convention for all, that of a ring of n devices, with B the bytes of the whole array:
    reduce-scatter, all-gather and all-to-all send B (n - 1) / n, and an all-reduce, which is a
    reduce-scatter and an all-gather, twice that. So an all-reduce in float32 sends 8 (n - 1) / n
    bytes per element, in bfloat16 half, and the exchange of `all_reduce` in FP8 a quarter.

    What stands in the body of a loop is counted once, however often the loop turns.

    Args:
        compiled: what ``jax.jit(f).lower(...).compile()`` returns, or its text.

    Returns:
        Whole bytes, rounded up.

    Raises:
        TypeError: if ``compiled`` has no text.
        ValueError: if XLA prints a collective in a way that is not understood.

    Example:
        >>> program = "%s = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add"
        >>> bytes_on_wire(program)  # 2 * 32 * 3 / 4
        48

    References:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        2009, J. Parallel Distrib. Comput. 69, section 3.
    """
    return math.ceil(sum(c.sent for c in collectives(compiled)))
