"""Where the time of a compiled program would go on a GPU, projected from its text."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from ..quant import parse_hlo
from ._device import H200, Device
from ._plot_roofline import plot_roofline
from ._projection import Kernel, project
from ._work import ELEMENTWISE, KINDS

_ROWS = 15  # places that a report lists
_WIDTH = 100  # of a place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Total:
    """Sums over kernels of one kind or place.

    Attributes:
        label: the kind or place.
        seconds: projected.
        bytes: moved.
        flops: operations of products.
        kernels: how many there are, a loop's counted once.

    Example:
        >>> import jax
        >>> compiled = jax.jit(jax.lax.neg).lower(jax.numpy.ones(1024)).compile()
        >>> roofline(compiled).by_kind()[0].label
        'memory-bound'
    """

    label: str
    seconds: float
    bytes: float
    flops: float
    kernels: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """What `roofline` projects. Printed, it is a table.

    Attributes:
        kernels: in the order of the program.
        device: what they are projected for.
        uncounted: loops of which XLA does not say how often they run; they count once.

    Example:
        >>> import jax
        >>> compiled = jax.jit(jax.lax.neg).lower(jax.numpy.ones(1024)).compile()
        >>> report = roofline(compiled)
        >>> f"projected {report.seconds * 1e6:.1f} us", report.bytes
        ('projected 1.2 us', 8192.0)
    """

    kernels: tuple[Kernel, ...]
    device: Device
    uncounted: int = 0

    @property
    def seconds(self) -> float:
        """Projected, of the whole program."""
        return sum(k.seconds for k in self.kernels)

    @property
    def bytes(self) -> float:
        """Moved to and from memory."""
        return sum(k.bytes for k in self.kernels)

    @property
    def flops(self) -> float:
        """Operations of matrix products."""
        return sum(k.flops for k in self.kernels)

    def by_kind(self) -> tuple[Total, ...]:
        """Totals of each kind that the program has, the longest first."""
        return _totals((k.kind, k) for k in self.kernels)

    def by_place(self, *kinds: str) -> tuple[Total, ...]:
        """Totals of each place that kernels come from, the longest first.

        Args:
            kinds: of the kernels; by default those that are neither products nor attention nor
                anything else of a library: "memory-bound" and "arithmetic-bound".

        Raises:
            ValueError: if there is no such kind.
        """
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(
                "unitscale.analysis.Roofline.by_place: kinds must be of "
                f"{', '.join(KINDS)}; got {unknown[0]!r}"
            )
        wanted = kinds or ELEMENTWISE
        return _totals((k.place, k) for k in self.kernels if k.kind in wanted)

    def __str__(self) -> str:
        """Totals by kind, then the places that most time outside of products comes from."""
        head = (
            f"projected for {self.device.name}, not measured: {_ms(self.seconds)} ms in "
            f"{len(self.kernels)} kernels, {self.bytes / 2**30:.3g} GiB moved, "
            f"{self.flops / 1e12:.3g} TFLOP in products"
        )
        if self.uncounted:
            head += f"; {self.uncounted} loops of unknown length count once"
        lines = [head, *_rows(self.by_kind(), self.seconds, "kind")]
        if places := self.by_place()[:_ROWS]:
            lines += ["", *_rows(places, self.seconds, f"{' and '.join(ELEMENTWISE)}, by place")]
        return "\n".join(lines)

    def plot(self, path: Any = None) -> Any:
        """Returns a `matplotlib.figure.Figure`: projected time by kind, and by place.

        Args:
            path: of a file to save it to as well; None for none.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        figure = plot_roofline(self)
        if path is not None:
            figure.savefig(path)
        return figure


def roofline(compiled: "jax.stages.Compiled | str", device: Device = H200) -> Roofline:
    """Projects how long a compiled program takes on a GPU, kernel by kernel, without running it.

    A kernel takes the longest of its products at the speed of their format, its other operations at
    that of float32, its bytes at that of the memory, and what the smallest kernel takes. Kernels
    run one after the other; a loop's as often as XLA knows it to run, and of the branches of a
    condition the longest. Each does as well as the best of its kind, without caches and gaps: a
    projection is good for comparing two programs of one model and for seeing what to remove, and is
    no measurement. Steps of GPT-2 small took 1.2 to 1.4 times as long on an H200.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` or `compile_h200` returned; or the text of
            its optimized program. That of a CPU counts its own kernels at the GPU's speed.
        device: what to project for.

    Returns:
        The `Roofline`.

    Raises:
        TypeError: if it is neither a compiled program nor text.
        ValueError: if the text is no optimized HLO program.

    Example:
        >>> program = '''
        ... ENTRY %main (a: f32[32,64], b: f32[64]) -> f32[32,64] {
        ...   %a = f32[32,64] parameter(0)
        ...   %b = f32[64] parameter(1)
        ...   %c = f32[32,64] broadcast(%b), dimensions={1}
        ...   ROOT %y = f32[32,64] add(%a, %c)
        ... }'''
        >>> [(k.name, k.bytes) for k in roofline(program).kernels]
        [('c', 8448.0), ('y', 24576.0)]

    References:
        Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
    """
    if isinstance(compiled, str):
        text = compiled
    elif isinstance(compiled, jax.stages.Compiled):
        text = compiled.as_text() or ""
    else:
        raise TypeError(
            "unitscale.analysis.roofline: compiled must be what jax.jit(f).lower(...).compile() "
            f"returns, or its text; got {type(compiled).__name__}"
        )
    if not isinstance(device, Device):
        raise TypeError(
            "unitscale.analysis.roofline: device must be a unitscale.analysis.Device, such as "
            f"unitscale.analysis.H200; got {device!r}"
        )
    program = parse_hlo(text)
    if not program.computations.get(program.entry):
        raise ValueError(
            "unitscale.analysis.roofline: expected the text of an optimized HLO program, which has "
            f"an ENTRY computation; got {text.strip()[:60]!r}. Give compiled.as_text() of "
            "jax.jit(f).lower(...).compile(), not the text of what is lowered or traced."
        )
    kernels, uncounted = project(program, device)
    return Roofline(kernels=kernels, device=device, uncounted=uncounted)


def _totals(labelled: Iterable[tuple[str, Kernel]]) -> tuple[Total, ...]:
    groups: dict[str, list[Kernel]] = collections.defaultdict(list)
    for label, kernel in labelled:
        groups[label].append(kernel)
    totals = [
        Total(
            label=label,
            seconds=sum(k.seconds for k in group),
            bytes=sum(k.bytes for k in group),
            flops=sum(k.flops for k in group),
            kernels=len(group),
        )
        for label, group in groups.items()
    ]
    return tuple(sorted(totals, key=lambda t: -t.seconds))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _rows(totals: Iterable[Total], whole: float, title: str) -> list[str]:
    lines = [f"{'projected ms':>12} {'share':>6} {'MiB':>10} {'TFLOP':>8} {'kernels':>7}  {title}"]
    for t in totals:
        share = f"{t.seconds / whole:.1%}" if whole else ""
        label = t.label if len(t.label) <= _WIDTH else f"...{t.label[3 - _WIDTH :]}"
        lines.append(
            f"{_ms(t.seconds):>12} {share:>6} {t.bytes / 2**20:>10,.1f} {t.flops / 1e12:>8.3f} "
            f"{t.kernels:>7}  {label}"
        )
    return lines
