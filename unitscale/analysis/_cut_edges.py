"""Find cut edges, where a separate backward factor changes gradients only by a constant.

Cut edges are the bridges of the graph of values and operations. All paths from the inputs before a
bridge to the loss cross it, so a factor there multiplies their gradients by the same constant.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from ..core import scan_counts
from ._program import (
    Exact,
    Interpreter,
    Source,
    inner_program,
    is_float,
    leaves_of,
    source_of,
    traced,
    wide,
)

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
    closed = traced("cut_edges", fn, *args).jaxpr
    numbers = range(len(args)) if argnums is None else argnums
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if wrong := [n for n in numbers if not -len(args) <= n < len(args)]:
        raise ValueError(
            f"unitscale.analysis.cut_edges: argnums must number the {len(args)} arguments; got "
            f"{', '.join(map(str, wrong))}"
        )
    chosen = {n % len(args) for n in numbers}
    leaves = leaves_of(args)
    graph = Graph(closed, [path[0].idx in chosen and part != "scale" for path, part in leaves])
    edges = graph.live()
    if not edges:
        raise ValueError(
            "unitscale.analysis.cut_edges: expected a floating input that reaches a floating "
            "output; got a function with none. Integers and stop_gradient carry no gradient."
        )
    leaving: dict[int, list[bool]] = defaultdict(list)
    entering: dict[int, list[bool]] = defaultdict(list)
    for edge, is_cut in edges:
        leaving[edge.start].append(is_cut)
        entering[edge.end].append(is_cut)
    inputs = []
    for node, (path, part), var in zip(graph.inputs, leaves, closed.jaxpr.invars, strict=True):
        if node is not None:
            name, cuts = jax.tree_util.keystr(path) + (part and f".{part}"), leaving[node]
            inputs.append(Input(name, *_kind(var), len(cuts), all(cuts)))
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


class Value(NamedTuple):
    """The vertex of a value (None if it carries no gradient), and the value itself if known."""

    node: int | None
    x: Any = None


class Graph(Interpreter):
    """The graph of a program. Vertices are numbers; every output has an edge to vertex 0.

    The graph includes the bodies of calls and custom functions. It has the body of a loop once,
    with an edge from each carried result back to its operand.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        differentiated: Sequence[bool],
        args: Sequence[Any] | None = None,
        measure: Callable[[Any, list[Any]], Any] | None = None,
    ):
        super().__init__()
        self.edges: list[Edge] = []
        # For each vertex of a value: its equation and the calls around it, and its variable.
        self.values: dict[int, tuple[tuple[Any, ...], Any]] = {}
        # The outermost custom_vjp functions, and the result of ``measure(eqn, operands)`` for each.
        self.ops: list[Any] = []
        self.measured: dict[int, Any] = {}
        self.measure, self.exact, self.inside = measure, Exact(), False
        self.vertices = itertools.count(1)
        inputs = []
        for flag, var in zip(differentiated, closed.jaxpr.invars, strict=True):
            node = next(self.vertices) if flag and is_float(var.aval) else None
            inputs.append(Value(node, wide(args[len(inputs)]) if args else None))
        self.inputs = [value.node for value in inputs]
        self.connect(self.run(closed, inputs), 0)

    def live(self) -> list[tuple[Edge, bool]]:
        """Return the edges on paths from inputs to outputs, each with whether it is a cut edge."""
        below = _reached(self.edges, [v for v in self.inputs if v is not None])
        above = _reached([Edge(e.end, e.start) for e in self.edges], [0])
        both = below & above
        edges = [edge for edge in self.edges if edge.start in both and edge.end in both]
        cut = set(bridges([(e.start, e.end) for e in edges]))
        return [(edge, i in cut) for i, edge in enumerate(edges)]

    def connect(self, values: Iterable[Value], end: int) -> None:
        self.edges += [Edge(value.node, end) for value in values if value.node is not None]

    def name(self, node: int, var: Any) -> None:
        if not self.inside:
            self.values[node] = tuple(reversed(self.calls)), var

    def constant(self, x: Any, aval: Any) -> Value:
        return Value(None, self.exact.constant(x, aval) if self.measure else None)

    def apply(self, eqn: Any, operands: list[Value]) -> list[Value]:
        name, inner = eqn.primitive.name, inner_program(eqn)
        nodes: list[int | None] = [None] * len(eqn.outvars)
        if any(value.node is not None for value in operands):
            if name == "custom_vjp_call" and not self.inside:
                nodes = self.custom_vjp(eqn, operands)
            elif name == "scan":
                nodes = self.scan(eqn.params, operands)
            elif name == "while":
                first = eqn.params["body_nconsts"]
                kept = operands[eqn.params["cond_nconsts"] :]
                nodes = self.loop(eqn.params["body_jaxpr"], kept, first, len(kept))
            elif name == "cond":
                branches = [self.run(branch, operands[1:]) for branch in eqn.params["branches"]]
                for i, values in enumerate(zip(*branches, strict=True)):
                    nodes[i] = self.operation(eqn, values, eqn.outvars[i : i + 1])[0]
            elif inner is not None:
                results = zip(self.run(inner, operands), eqn.outvars, strict=True)
                return [v if is_float(var.aval) else Value(None, v.x) for v, var in results]
            elif name not in _NO_GRADIENT:
                nodes = self.operation(eqn, operands)
        xs = [value.x for value in operands]
        known = self.measure and not self.inside and all(x is not None for x in xs)
        results = self.exact.apply(eqn, xs) if known else [None] * len(nodes)
        return [
            Value(node if is_float(var.aval) else None, x)
            for node, var, x in zip(nodes, eqn.outvars, results, strict=True)
        ]

    def operation(
        self, eqn: Any, operands: Sequence[Value], results: Sequence[Any] | None = None
    ) -> list[int | None]:
        """Add an operation, with an edge to each result that has a gradient."""
        nodes: list[int | None] = []
        vertex = next(self.vertices)
        self.connect(operands, vertex)
        alive = any(value.node is not None for value in operands)
        for var in eqn.outvars if results is None else results:
            nodes.append(next(self.vertices) if alive and is_float(var.aval) else None)
            if (node := nodes[-1]) is not None:
                self.connect([Value(vertex)], node)
                self.name(node, var)
        return nodes

    def custom_vjp(self, eqn: Any, operands: list[Value]) -> list[int | None]:
        """Add the body of a function, which each operand enters by a separate edge."""
        number = len(self.ops)
        self.ops.append(eqn)
        xs = [value.x for value in operands]
        if self.measure and all(x is not None for x in xs):
            self.measured[number] = self.measure(eqn, xs)
        ports = []
        for operand, value in enumerate(operands):
            ports.append(Value(None if value.node is None else next(self.vertices)))
            if value.node is not None:
                self.edges.append(Edge(value.node, ports[-1].node, number, operand))
        self.inside = True
        nodes = [value.node for value in self.run(eqn.params["call_jaxpr"], ports)]
        self.inside = False
        if all(node is None for node in nodes):
            # The body has no derivative, as if it rounds, but the function has a rule.
            return self.operation(eqn, ports)
        for node, var in zip(nodes, eqn.outvars, strict=True):
            if node is not None:
                self.name(node, var)
        return nodes

    def scan(self, params: dict[str, Any], operands: list[Value]) -> list[int | None]:
        """Add the first iteration of a scan."""
        first, carried = scan_counts(params)
        start, last = -1 if params["reverse"] else 0, first + carried
        xs = [
            Value(value.node, value.x[start] if value.x is not None and params["length"] else None)
            for value in operands[last:]
        ]
        return self.loop(params["jaxpr"], [*operands[:last], *xs], first, last)

    def loop(
        self, body: ClosedJaxpr, operands: list[Value], first: int, last: int
    ) -> list[int | None]:
        """Add the body of a loop that carries its operands from ``first`` to ``last``."""
        inner = list(operands)
        for index in range(first, last):
            inner[index] = Value(None, operands[index].x)
            if is_float(body.jaxpr.invars[index].aval):
                node = next(self.vertices)
                inner[index] = Value(node, operands[index].x)
                self.connect([operands[index]], node)
        results = self.run(body, inner)
        for result, carried in zip(results, inner[first:last], strict=False):
            if carried.node is not None and result.node != carried.node:
                self.connect([result], carried.node)
        return [result.node for result in results]


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
    """Return the positions of the edges of an undirected graph whose removal disconnects it.

    An edge of a spanning forest is a bridge unless another edge connects its two sides. Each edge
    outside of the forest gets a random word, which is XORed at both of its ends. The XOR over a
    subtree is then 0 (almost surely only) if no such edge leaves the subtree.
    """
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
    words, random = dict.fromkeys(above, 0), Random(0)
    for index, pair in enumerate(edges):
        if index not in forest:
            word = random.getrandbits(128)
            for vertex in pair:
                words[vertex] ^= word
    found = []
    for vertex, (parent, index) in reversed(above.items()):
        if index >= 0:
            found += [] if words[vertex] else [index]
            words[parent] ^= words[vertex]
    return sorted(found)
