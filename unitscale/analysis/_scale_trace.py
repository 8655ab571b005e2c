"""The findings of `trace_scales`, as records, as a table and as a picture."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from ._extras import extra
from ._plot_scales import plot_scales
from ._source import Source


@dataclasses.dataclass(frozen=True)
class FormatShares:
    """What a format would make of a tensor: shares of its elements, zeros counted as zero.

    Attributes:
        zero: become or are zero.
        subnormal: are held as subnormal numbers, with fewer bits.
        saturated: exceed the largest value.

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
        shape: of one execution.
        dtype: name of its dtype.
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
    """The values of a program in order, as records.

    Attributes:
        records: the same, as a tuple.
        result: what the function returned.

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

    @overload
    def __getitem__(self, index: int) -> ScaleRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ScaleRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> ScaleRecord | tuple[ScaleRecord, ...]:
        return self.records[index]

    def __iter__(self) -> Iterator[ScaleRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"ScaleTrace({len(self)} values)"

    def table(self) -> Any:
        """Returns a `rich.table.Table` with a row for each value.

        Raises:
            ImportError: if rich is not installed.
        """
        table = extra("ScaleTrace.table", "rich.table").Table(title=repr(self))
        names = list(self.records[0].formats) if self.records else []
        for column in ("value", "pass", "type", "rms", "amax", "zero"):
            table.add_column(column, justify="left" if column in ("value", "pass") else "right")
        for name in names:
            table.add_column(f"{name}\nzero/subn./sat.", justify="right")
        table.add_column("source", overflow="fold")
        for r in self.records:
            shares = [
                " / ".join(_percent(s) for s in (f.zero, f.subnormal, f.saturated))
                for f in r.formats.values()
            ]
            table.add_row(
                r.label,
                "backward" if r.backward else "forward",
                f"{r.dtype}[{','.join(map(str, r.shape))}]",
                f"{r.rms:.3g}",
                f"{r.amax:.3g}",
                _percent(r.zeros),
                *shares,
                f"{r.primitive} {r.source.line}",
            )
        return table

    def plot(self) -> Any:
        """Returns a `matplotlib.figure.Figure`: RMS and amax of each value, formats shaded.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        return plot_scales(self.records)


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.3g}%"
