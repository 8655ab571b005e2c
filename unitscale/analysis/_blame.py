"""Which op's factor made a gradient wrong.

Along every edge the given cotangent is a ratio times the true one. A gradient is a constant times
the truth exactly if the product of the ratios is the same on all paths from a value to the loss:
if the logarithms of the ratios of the edges that are not cut are the differences of a potential.
Where they are not, some op must be blamed: one whose ratio is not 1, unless with others, as the
split and the sum of a residual connection, it cancels.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

from ._cut_edges import bridges
from ._graph import Edge, Graph
from ._ratios import Ratio
from ._source import Source, source_of

# Factors are rounded to float32, and a few of them are multiplied in an op.
_TOLERANCE = 1e-5
_MOST = 100
_SIZES = (
    "one line is called on inputs of several sizes: trace the loss within unitscale.batch_size(n), "
    "with n near the largest of them"
)


@dataclasses.dataclass(frozen=True)
class Guilty:
    """An op whose backward factor lies where it may not.

    Attributes:
        source: the op and the line that calls it.
        ratios: backward factor over forward factor, of each operand that is not a cut edge.
        advice: what would mend it.

    Example:
        >>> Guilty(Source("dense", "model.py:3 (loss)"), (2.0,), "set a constraint").ratios
        (2.0,)
    """

    source: Source
    ratios: tuple[float, ...]
    advice: str

    def __str__(self) -> str:
        ratios = ", ".join(f"{ratio:.4g}" for ratio in self.ratios)
        return f"{self.source}: backward over forward factor {ratios} off cut edges; {self.advice}"


def blame(graph: Graph, ratios: dict[tuple[int, ...], list[Ratio | None]]) -> tuple[Guilty, ...]:
    """Returns the ops that break the gradients of a program, in program order.

    Args:
        graph: its graph.
        ratios: those of its custom_vjp functions, by path.

    Example:
        >>> blame(Graph(), {})
        ()
    """
    edges = graph.live()
    cut = set(bridges((e.start, e.end) for e in edges))
    inner = [edge for i, edge in enumerate(edges) if i not in cut]
    suspects: dict[int, list[tuple[Edge, float]]] = {}
    wrong: dict[int, list[Ratio]] = {}
    for edge in edges:
        ratio = _ratio(graph, ratios, edge)
        if ratio is not None and _is_no_multiple(ratio) and edge.call is not None:
            wrong.setdefault(edge.call, []).append(ratio)
    for edge in inner:
        ratio = _ratio(graph, ratios, edge)
        if ratio is None or edge.call is None or edge.call in wrong:
            continue
        if abs(math.log(ratio.constant)) > _TOLERANCE:
            suspects.setdefault(edge.call, []).append((edge, ratio.constant))
    guilty = _unexplained(inner, suspects)
    found = {}
    for call in sorted({*wrong, *guilty}):
        source = source_of(graph.calls[call].eqn)
        if call in wrong:
            constants = tuple(ratio.constant for ratio in wrong[call])
            advice = "its backward pass is no positive multiple of its derivative: mend its rule"
        else:
            constants = tuple(constant for _, constant in suspects[call])
            advice = _advice(graph, inner, source, [edge for edge, _ in suspects[call]])
        known = found.get(source)
        if call in guilty and known and not set(constants) <= set(known.ratios):
            advice = _SIZES
        found[source] = Guilty(source, (*(known.ratios if known else ()), *constants), advice)
    return tuple(found.values())


def _ratio(graph: Graph, ratios: dict[Any, list[Ratio | None]], edge: Edge) -> Ratio | None:
    if edge.call is None or edge.operand is None:
        return None
    found = ratios.get(graph.calls[edge.call].path)
    ratio = None if found is None else found[edge.operand]
    if ratio is None or not math.isfinite(ratio.true):
        return None
    # No gradient flows here for these values, so that its factor does no harm.
    return None if ratio.given == ratio.true == 0 else ratio


def _is_no_multiple(ratio: Ratio) -> bool:
    return not ratio.constant > 0 or ratio.spread > _TOLERANCE


class _Potential:
    """Union-find in which every member knows its difference to the root."""

    def __init__(self) -> None:
        self.parent: dict[int, tuple[int, float]] = {}

    def root(self, vertex: int) -> tuple[int, float]:
        total = 0.0
        while vertex in self.parent:
            vertex, step = self.parent[vertex]
            total += step
        return vertex, total

    def join(self, start: int, end: int, difference: float) -> bool:
        """Adds potential(start) - potential(end) = difference; False if that contradicts."""
        (a, at_start), (b, at_end) = self.root(start), self.root(end)
        if a != b:
            self.parent[a] = (b, difference + at_end - at_start)
            return True
        return abs(at_start - at_end - difference) <= 16 * _TOLERANCE


def _unexplained(edges: list[Edge], suspects: dict[int, list[tuple[Edge, float]]]) -> set[int]:
    """Returns the calls whose ratios stay inconsistent, alone and with up to two others."""
    suspected = {edge for parts in suspects.values() for edge, _ in parts}
    base = _Potential()
    for edge in edges:
        if edge not in suspected:
            base.join(edge.start, edge.end, 0.0)
    parts = {
        call: [(base.root(e.start)[0], base.root(e.end)[0], math.log(r)) for e, r in pairs]
        for call, pairs in suspects.items()
    }

    def consistent(accepted: Iterable[int]) -> bool:
        accepted, potential = set(accepted), _Potential()
        return all(
            potential.join(start, end, difference if call in accepted else 0.0)
            for call, steps in parts.items()
            for start, end, difference in steps
        )

    accepted: set[int] = set()
    for size in (1, 2, 3):
        if len(parts) - len(accepted) > _MOST:
            break
        for group in itertools.combinations(parts, size):
            if not accepted & set(group) and consistent(accepted | set(group)):
                accepted |= set(group)
    return parts.keys() - accepted


def _advice(graph: Graph, inner: list[Edge], source: Source, edges: list[Edge]) -> str:
    starts = {edge.start for edge in edges}
    shared = [v for v in starts if v in graph.inputs and sum(e.start == v for e in inner) > 1]
    if shared:
        return (
            "a parameter is used several times with different factors: make the factors of its "
            "uses agree, by unitscale.batch_size(n) around the loss if inputs of several sizes "
            "meet it, or as nn.Embed and its attend do, or give each use a parameter of its own"
        )
    if source.op.startswith("residual"):
        return (
            "weigh a branch by ops.residual, or by residual_split and residual_add with the same "
            "tau around the whole branch"
        )
    if source.op.startswith("scale"):
        return "give it the same factor forward and backward, or move it onto a cut edge"
    if len(edges) == 1:
        return "set constraint='to_output_scale' (or 'to_grad_input_scale', 'gmean', ...)"
    return (
        "set constraint='to_output_scale' (or 'to_left_grad_scale', 'to_right_grad_scale', "
        "'gmean', ...)"
    )
