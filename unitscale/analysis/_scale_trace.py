"""The findings of `trace_scales`: records, a table and a plot."""

import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import format_of
from ._program import Source

_NAMED = 60  # values up to which each has its name in the plot
_FORMAT_COLORS = ("tab:green", "tab:purple", "tab:brown", "tab:olive", "tab:cyan", "tab:gray")


def extra(where: str, module: str) -> Any:
    """Import a module of the extra ``recipes``, which only tables and plots need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"unitscale.analysis.{where}: needs {module.split('.')[0]}, which is not installed; "
            'run pip install "unitscale[recipes]"'
        ) from error


@dataclasses.dataclass(frozen=True)
class FormatShares:
    """Shares of a tensor's elements that are zero, subnormal or saturated in a format.

    Example:
        >>> FormatShares(0.0, 0.25, 0.0).subnormal
        0.25
    """

    zero: float
    subnormal: float
    saturated: float


@dataclasses.dataclass(frozen=True)
class ScaleRecord:
    """Statistics of one value of a program, over all its elements and executions.

    Attributes:
        name: path of an input, or ``result`` and the path of a result; "" for what is neither.
        source: the unitscale op or primitive, and the line of the code.
        primitive: name of the primitive; "input" for an input.
        scope: JAX's name stack, as `jax.named_scope` and the transformations wrote it.
        backward: whether a backward pass computed it.
        shape, dtype: of one execution.
        executions: how often it was computed: more than once in a loop, 0 in a branch not taken.
        rms: root mean square; not finite if an element is not.
        amax: largest magnitude.
        zeros: share of elements that are zero.
        formats: shares by format.

    Example:
        >>> from unitscale.analysis import trace_scales
        >>> trace_scales(lambda x: 3 * x)(2.0)[-1].rms
        6.0
    """

    name: str
    source: Source
    primitive: str
    scope: str
    backward: bool
    shape: tuple[int, ...]
    dtype: str
    executions: int
    rms: float
    amax: float
    zeros: float
    formats: Mapping[str, FormatShares]

    @property
    def label(self) -> str:
        """A short name: that of the input or result, or the layer and op."""
        own = f"{self.source.layer}/{self.source.op}" if self.source.layer else self.source.op
        return self.name or own


class ScaleTrace(Sequence[ScaleRecord]):
    """The records of a program's values in order; `result` is what the function returned.

    Example:
        >>> from unitscale.analysis import trace_scales
        >>> trace = trace_scales(lambda x: 3 * x)(2.0)
        >>> len(trace), float(trace.result)
        (2, 6.0)
    """

    def __init__(self, records: tuple[ScaleRecord, ...], result: Any):
        self.records, self.result = records, result

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    def __repr__(self) -> str:
        return f"ScaleTrace({len(self)} values)"

    def table(self) -> Any:
        """Return a `rich.table.Table` with a row for each value.

        Raises:
            ImportError: if rich is not installed.
        """

        def percent(share: float) -> str:
            return "0" if share == 0 else f"{100 * share:.3g}%"

        table = extra("ScaleTrace.table", "rich.table").Table(title=repr(self))
        for column in ("value", "pass", "type", "rms", "amax", "zero"):
            table.add_column(column, justify="left" if column in ("value", "pass") else "right")
        for name in self.records[0].formats if self.records else ():
            table.add_column(f"{name}\nzero/subn./sat.", justify="right")
        table.add_column("source", overflow="fold")
        for r in self.records:
            shares = (dataclasses.astuple(f) for f in r.formats.values())
            table.add_row(
                r.label,
                "backward" if r.backward else "forward",
                f"{r.dtype}[{','.join(map(str, r.shape))}]",
                f"{r.rms:.3g}",
                f"{r.amax:.3g}",
                percent(r.zeros),
                *(" / ".join(map(percent, parts)) for parts in shares),
                f"{r.primitive} {r.source.line}",
            )
        return table

    def plot(self) -> Any:
        """Return a `matplotlib.figure.Figure` of the RMS and amax of each value, on a log2 axis.

        Values are in program order, with their names if they are up to 60. The range of each format
        is shaded, its normal numbers darker than its subnormal ones.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        count = len(self.records)
        width = min(20.0, 6 + 0.15 * count)
        figure = extra("ScaleTrace.plot", "matplotlib.figure").Figure((width, 5))
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        shown = [(i, r) for i, r in enumerate(self) if r.rms > 0 and math.isfinite(r.amax)]
        levels = [math.log2(v) for _, r in shown for v in (r.rms, r.amax)]
        low, high = min([-8.0, *levels]) - 2, max([4.0, *levels]) + 2
        for backward, color in ((False, "tab:blue"), (True, "tab:orange")):
            label = "backward" if backward else "forward"
            points = [(i, math.log2(r.rms), math.log2(r.amax)) for i, r in shown]
            points = [p for p, (_, r) in zip(points, shown, strict=True) if r.backward is backward]
            if points:
                places, rms, amax = zip(*points, strict=True)
                axes.vlines(places, rms, amax, color=color, alpha=0.35)
                axes.plot(places, rms, "o", color=color, markersize=4, label=f"{label} RMS")
                axes.plot(places, amax, "_", color=color, label=f"{label} amax")
        lost = sorted({i for i, r in enumerate(self) if r.executions} - {i for i, _ in shown})
        if lost:
            label = "all zero or not finite"
            axes.plot(lost, [low + 0.5] * len(lost), "x", color="tab:red", label=label)
        for index, name in enumerate(self.records[0].formats if self.records else ()):
            fmt, color = format_of(name), _FORMAT_COLORS[index % len(_FORMAT_COLORS)]
            edges = (fmt.smallest_subnormal, fmt.smallest_normal, fmt.max)
            bottom, normal, top = (min(max(math.log2(v), low), high) for v in edges)
            axes.axhspan(bottom, normal, color=color, alpha=0.05, linewidth=0)
            axes.axhspan(normal, top, color=color, alpha=0.12, linewidth=0, label=name)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(ylim=(low, high), xlim=(-1, max(count, 1)), ylabel="log2 of the value")
        axes.set_xlabel("value, in program order")
        if 0 < count <= _NAMED:
            labels = [r.label if len(r.label) <= 48 else f"...{r.label[-45:]}" for r in self]
            axes.set_xticks(range(count), labels, rotation=90, fontsize=8)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside upper center", ncols=4, frameon=False)
        return figure
