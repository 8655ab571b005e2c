"""The kernels of an optimized program, each with its work and the time projected for it."""

import dataclasses
import re

from ..quant import HloInstruction, HloProgram, user_line
from ._arithmetic import operations
from ._device import Device
from ._traffic import moved
from ._work import ARITHMETIC, ATTENTION, MEMORY, work_of

# What takes no time: other names of the same memory, and the ends of what was counted as it began.
_FREE = frozenset({"parameter", "tuple", "get-tuple-element", "constant", "bitcast", "after-all"})
_FREE |= {"partition-id", "replica-id", "opt-barrier", "optimization-barrier", "domain"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a program; times, bytes and operations are those of all its runs.

    Attributes:
        name: its name in the program.
        kind: "FP8 products", "16-bit products", "32-bit products" (and others), "attention",
            "memory-bound", "arithmetic-bound" (element-wise work of many operations to a byte),
            "collectives" or "library calls".
        format: of its products, as in `Device.flops`; "" if it has none.
        seconds: projected.
        bytes: moved to and from memory.
        flops: operations of its products.
        runs: how often it runs.
        op_name: JAX's name stack.
        source: "file:line" of the user's code, or "".
        stack: "file:line" of all its frames, the innermost first.

    Example:
        >>> import jax
        >>> from unitscale.analysis import roofline
        >>> x = jax.numpy.ones((16, 16))
        >>> compiled = jax.jit(jax.numpy.dot).lower(x, x).compile()
        >>> kernel = roofline(compiled).kernels[-1]
        >>> kernel.kind, kernel.bytes, kernel.flops
        ('32-bit products', 3072.0, 8192.0)
    """

    name: str
    kind: str
    format: str
    seconds: float
    bytes: float
    flops: float
    runs: int
    op_name: str
    source: str
    stack: tuple[str, ...]

    @property
    def place(self) -> str:
        """Where it comes from, the numbers of layers left out: name stack and line, or its name."""
        scope = re.sub(r"\d+", "#", self.op_name)
        line = f" at {self.source}" if self.source else ""
        return scope + line if scope or line else re.sub(r"[.\d]+$", "", self.name)


def project(program: HloProgram, device: Device) -> tuple[tuple[Kernel, ...], int]:
    """Returns the kernels of a program, and how many of its loops are of unknown length."""
    projection = _Projection(program, device)
    return tuple(projection.of(program.entry, 1)), projection.uncounted


class _Projection:
    """Walks a program's computations as they run."""

    def __init__(self, program: HloProgram, device: Device):
        self.program, self.device, self.uncounted = program, device, 0

    def of(self, computation: str, runs: int) -> list[Kernel]:
        found: list[Kernel] = []
        for i in self.program.computations.get(computation, {}).values():
            if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
                continue
            if i.opcode == "while":
                self.uncounted += "known_trip_count" not in i.attributes
                body = re.search(r"\bbody=%?([\w.\-]+)", i.attributes)
                found += self.of(body[1], runs * i.trips) if body else []
            elif i.opcode == "conditional":
                branches = [self.of(name, runs) for name in _branches(i)]
                found += max(branches, key=lambda b: sum(k.seconds for k in b), default=[])
            elif i.opcode in ("call", "async-start") and i.calls:
                found += self.of(i.calls[0], runs)
            else:
                found.append(self.kernel(i, runs))
        return found

    def kernel(self, i: HloInstruction, runs: int) -> Kernel:
        work, size = work_of(self.program, i), moved(self.program, i)
        vector = operations(self.program, i) / self.device.vector
        device = self.device
        times = [size / device.bandwidth, vector, work.wire / device.link, device.start]
        elementwise = work.kind == MEMORY and vector == max(times)
        kind = ARITHMETIC if elementwise else work.kind
        told = self.told(i)
        if work.format:
            rate = device.attention if kind == ATTENTION else device.flops[work.format]
            times.append(work.flops / rate)
        return Kernel(
            name=i.name,
            kind=kind,
            format=work.format,
            seconds=runs * max(times),
            bytes=runs * size,
            flops=runs * work.flops,
            runs=runs,
            op_name=told.quoted("op_name"),
            source=user_line(self.program, told),
            stack=self.program.stack(told),
        )

    def told(self, i: HloInstruction) -> HloInstruction:
        """What says where a kernel comes from: itself, or the last in it that does."""
        if i.opcode != "fusion" or i.quoted("op_name"):
            return i
        inner = self.program.computations[i.calls[0]].values()
        named = (j for j in reversed(inner) if j.quoted("op_name") and j.opcode != "parameter")
        return next(named, i)


def _branches(i: HloInstruction) -> list[str]:
    two = re.findall(r"\b(?:true|false)_computation=%?([\w.\-]+)", i.attributes)
    return two or list(i.calls)
