"""Find cut edges, where a separate backward factor changes gradients only by a constant.

Cut edges are the bridges of the graph of values and operations. All paths from the inputs before a
bridge to the loss cross it, so a factor there multiplies their gradients by the same constant.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from ..core import is_floating, scan_counts
from ..rules import traced
from ._program import Interpreter, Source, inner_program, leaves_of, source_of

_NO_GRADIENT = {"stop_gradient", "sign", "floor", "ceil", "round", "nextafter"}


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of the program, named by its path in the arguments.

    Attributes:
        uses: number of operations that read the input; its gradient is the sum of theirs.
        cut: whether all of them read it through cut edges, so that its backward factor is free.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    uses: int
    cut: bool


@dataclasses.dataclass(frozen=True)
class Intermediate:
    """A value computed outside of custom_vjp functions; ``cut`` tells if its factor is free."""

    source: Source
    shape: tuple[int, ...]
    dtype: str
    cut: bool


@dataclasses.dataclass(frozen=True)
class CutEdges:
    """The differentiable inputs of a program, and the values computed from them, in order."""

    inputs: tuple[Input, ...]
    intermediates: tuple[Intermediate, ...]

    def __str__(self) -> str:
        lines: dict[bool, list[str]] = {True: ["cut edges"], False: ["not cut"]}
        for x in (*self.inputs, *self.intermediates):
            text = f"{x.dtype}[{','.join(map(str, x.shape))}]"
            if isinstance(x, Input):
                lines[x.cut].append(f"  input {x.name} {text}, uses {x.uses}")
            else:
                lines[x.cut].append(f"  {text} {x.source}")
        return "\n".join(lines[True] + lines[False])


def cut_edges(
    fn: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None
) -> CutEdges:
    """Find the cut edges of the forward graph of a function.

    Scaling:
        On a cut edge the backward factor may differ from the forward factor, so an op may have
        ``constraint=None``; on all other edges the two must be equal. Only paths of gradients
        count: integers and `stop_gradient` carry none.

    Args:
        fn: function that JAX can trace.
        *args: its arguments: arrays, or anything with shape and dtype.
        argnums: the arguments to differentiate; all by default. Paths from other arguments, such as
            a batch, do not count.

    Raises:
        TypeError: if ``fn`` cannot be traced.
        ValueError: if no differentiable input reaches a differentiable output.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import ops
        >>> def loss(w, x):
        ...     return ops.mse_loss(ops.gelu(ops.dense(x, w)), x)
        >>> edges = cut_edges(loss, jnp.ones((4, 4)), jnp.ones((2, 4)), argnums=0)
        >>> [value.source.op for value in edges.intermediates if value.cut]
        ['dense', 'gelu', 'mse_loss']

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, section 4.3.
    """
    name = "unitscale.analysis.cut_edges"
    closed = traced(name, fn, *args).jaxpr
    numbers = range(len(args)) if argnums is None else argnums
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if wrong := [n for n in numbers if not -len(args) <= n < len(args)]:
        got = ", ".join(map(str, wrong))
        raise ValueError(f"{name}: argnums must number the {len(args)} arguments; got {got}")
    chosen = {n % len(args) for n in numbers}
    leaves = leaves_of(args)
    graph = Graph(closed, [path[0].idx in chosen and part != "scale" for path, part in leaves])
    edges = graph.live()
    if not edges:
        raise ValueError(
            f"{name}: expected a floating input that reaches a floating output; got none. Integers "
            "and stop_gradient carry no gradient."
        )
    leaving: dict[int, list[bool]] = defaultdict(list)
    entering: dict[int, list[bool]] = defaultdict(list)
    for edge, is_cut in edges:
        leaving[edge.start].append(is_cut)
        entering[edge.end].append(is_cut)
    inputs = []
    for node, (path, part), var in zip(graph.inputs, leaves, closed.jaxpr.invars, strict=True):
        if node is not None:
            label, cuts = jax.tree_util.keystr(path) + (part and f".{part}"), leaving[node]
            inputs.append(Input(label, *_kind(var), len(cuts), all(cuts)))
    intermediates = [
        Intermediate(source_of(*eqns), *_kind(var), all(entering[node]))
        for node, (eqns, var) in sorted(graph.values.items())
        if node in entering
    ]
    return CutEdges(tuple(inputs), tuple(intermediates))


def _kind(var: Any) -> tuple[tuple[int, ...], str]:
    return tuple(var.aval.shape), var.aval.dtype.name


class Edge(NamedTuple):
    """A directed edge. If it enters a custom_vjp function, ``op`` and ``operand`` are set."""

    start: int
    end: int
    op: int | None = None
    operand: int | None = None


class Graph(Interpreter):
    """The graph of a program: numbers for vertices, None for values that carry no gradient."""

    def __init__(self, closed: ClosedJaxpr, differentiated: Sequence[bool]):
        super().__init__()
        self.edges: list[Edge] = []
        # For each vertex of a value: its equation and the calls around it, and its variable.
        self.values: dict[int, tuple[tuple[Any, ...], Any]] = {}
        # The outermost custom_vjp functions, each as its equation after the calls around it.
        self.ops: list[tuple[Any, ...]] = []
        self.inside, self.vertices = False, itertools.count(1)
        pairs = zip(differentiated, closed.jaxpr.invars, strict=True)
        active = (flag and is_floating(var.aval) for flag, var in pairs)
        self.inputs = [next(self.vertices) if is_active else None for is_active in active]
        self.connect(self.run(closed, self.inputs), 0)  # 0 is the vertex of all outputs

    def live(self) -> list[tuple[Edge, bool]]:
        """Return the edges on paths from inputs to outputs, each with whether it is a cut edge."""
        below = _reached(self.edges, [v for v in self.inputs if v is not None])
        above = _reached([Edge(e.end, e.start) for e in self.edges], [0])
        both = below & above
        edges = [edge for edge in self.edges if edge.start in both and edge.end in both]
        cut = set(bridges([(e.start, e.end) for e in edges]))
        return [(edge, i in cut) for i, edge in enumerate(edges)]

    def connect(self, nodes: Iterable[int | None], end: int) -> None:
        self.edges += [Edge(node, end) for node in nodes if node is not None]

    def name(self, nodes: Sequence[int | None], variables: Sequence[Any]) -> None:
        for node, var in zip(nodes, variables, strict=True):
            if node is not None and not self.inside:
                self.values[node] = tuple(reversed(self.calls)), var

    def constant(self, x: Any, aval: Any) -> None:
        return None

    def apply(self, eqn: Any, operands: list[int | None]) -> list[int | None]:
        name, params, inner = eqn.primitive.name, eqn.params, inner_program(eqn)
        if name in _NO_GRADIENT or all(node is None for node in operands):
            return [None] * len(eqn.outvars)
        if name == "custom_vjp_call" and not self.inside:
            nodes = self.custom_vjp(eqn, operands)
        elif name == "scan":
            first, carried = scan_counts(params)
            nodes = self.loop(params["jaxpr"], operands, first, first + carried)
        elif name == "while":
            kept = operands[params["cond_nconsts"] :]
            nodes = self.loop(params["body_jaxpr"], kept, params["body_nconsts"], len(kept))
        elif name == "cond":
            branches = [self.run(branch, operands[1:]) for branch in params["branches"]]
            choices = zip(*branches, eqn.outvars, strict=True)
            nodes = [self.operation(chosen, [var])[0] for *chosen, var in choices]
        elif inner is not None:
            nodes = self.run(inner, operands)
        else:
            nodes = self.operation(operands, eqn.outvars)
        pairs = zip(nodes, eqn.outvars, strict=True)
        return [node if is_floating(var.aval) else None for node, var in pairs]

    def operation(self, operands: Sequence[int | None], results: Sequence[Any]) -> list[int | None]:
        """Add an operation, with an edge to each result that has a gradient."""
        vertex, alive = next(self.vertices), any(node is not None for node in operands)
        nodes = [next(self.vertices) if alive and is_floating(v.aval) else None for v in results]
        self.connect(operands, vertex)
        self.edges += [Edge(vertex, node) for node in nodes if node is not None]
        self.name(nodes, results)
        return nodes

    def custom_vjp(self, eqn: Any, operands: list[int | None]) -> list[int | None]:
        """Add the body of a function, which each operand enters by a separate edge."""
        ports = [None if node is None else next(self.vertices) for node in operands]
        for operand, (node, port) in enumerate(zip(operands, ports, strict=True)):
            if node is not None and port is not None:
                self.edges.append(Edge(node, port, len(self.ops), operand))
        self.ops.append(tuple(self.calls))
        self.inside = True
        nodes = self.run(eqn.params["call_jaxpr"], ports)
        self.inside = False
        if all(node is None for node in nodes):
            # The body, such as a rounding, has no derivative, but the function has a rule.
            return self.operation(ports, eqn.outvars)
        self.name(nodes, eqn.outvars)
        return nodes

    def loop(
        self, body: ClosedJaxpr, operands: list[int | None], first: int, last: int
    ) -> list[int | None]:
        """Add the body of a loop once; its results return to the operands ``first`` to ``last``."""
        inner = list(operands)
        for index in range(first, last):
            inner[index] = None
            if is_floating(body.jaxpr.invars[index].aval):
                inner[index] = node = next(self.vertices)
                self.connect([operands[index]], node)
        results = self.run(body, inner)
        for result, carried in zip(results, inner[first:last], strict=False):
            if carried is not None and result != carried:
                self.connect([result], carried)
        return results


def _reached(edges: Iterable[Edge], start: Sequence[int]) -> set[int]:
    next_to: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        next_to[edge.start].append(edge.end)
    seen, waiting = set(start), list(start)
    while waiting:
        new = [v for v in next_to[waiting.pop()] if v not in seen]
        seen.update(new)
        waiting += new
    return seen


def bridges(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the positions of the edges of an undirected graph whose removal disconnects it."""
    around: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, (a, b) in enumerate(edges):
        around[a].append((b, index))
        around[b].append((a, index))
    above: dict[int, tuple[int, int]] = {}  # parent of each vertex and the edge to it, in preorder
    for root in list(around):
        waiting = [(root, root, -1)]
        while waiting:
            vertex, parent, index = waiting.pop()
            if vertex not in above:
                above[vertex] = parent, index
                waiting += [(other, vertex, i) for other, i in around[vertex]]
    forest = {index for _, index in above.values()}
    # Each other edge closes a cycle with a path up the forest. Edges in no such cycle are bridges.
    found, climbed = forest - {-1}, set()
    for top in above:
        for vertex, index in around[top]:
            if index not in forest:
                climbed.add(top)
                while vertex not in climbed:
                    climbed.add(vertex)
                    vertex, index = above[vertex]
                    found.discard(index)
    return sorted(found)
