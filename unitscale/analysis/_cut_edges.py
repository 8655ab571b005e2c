"""Cut edges: where a backward factor of its own leaves every gradient a constant times the truth.

An edge of the forward graph whose removal disconnects it is a bridge. Every path from a value above
it to the loss passes it, so a factor on its cotangent multiplies all of their gradients by one
constant. On any other edge a factor would weight the paths unequally.

In the graph values and operations are vertices. Calls, checkpoints and custom functions are opened.
A loop's body is in it once, with an edge from each carried result back to the carried operand: what
is true of the cycle is true of every iteration.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from ..core import is_scaled, scan_counts
from ._exact import Exact, wide
from ._program import Interpreter, Source, inner_program, is_float, source_of, traced

_NO_GRADIENT = {"stop_gradient", "sign", "floor", "ceil", "round", "nextafter"}


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of the program.

    Attributes:
        name: its path in the arguments, such as ``"[0]['kernel']"``.
        shape: of the array.
        dtype: name of its dtype.
        uses: number of operations that its gradient is summed from.
        cut: whether each of them reads it through a cut edge, so that the backward factor of its
            gradient there is free.

    Example:
        >>> cut_edges(lambda w: w * w, 1.0).inputs[0].cut
        False
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    uses: int
    cut: bool


@dataclasses.dataclass(frozen=True)
class Intermediate:
    """A value that the program computes from its inputs, outside of its custom_vjp functions.

    Attributes:
        source: the unitscale op or primitive that computes it, and the line of the code.
        shape: of the array.
        dtype: name of its dtype.
        cut: whether a backward factor applied to it is free.

    Example:
        >>> import jax.numpy as jnp
        >>> cut_edges(lambda w: jnp.sin(w), 1.0).intermediates[0].source.op
        'sin'
    """

    source: Source
    shape: tuple[int, ...]
    dtype: str
    cut: bool


@dataclasses.dataclass(frozen=True)
class CutEdges:
    """The inputs and intermediates of a program, and which of them are cut edges.

    Attributes:
        inputs: the differentiable ones, in order.
        intermediates: those on a path from an input to an output, in program order.

    Example:
        >>> print(cut_edges(lambda x, w: x + x * w, 1.0, 2.0))
        cut edges
          input [1] float32[]
          float32[] add at ...
        not cut
          input [0] float32[], used 2 times
          float32[] mul at ...
    """

    inputs: tuple[Input, ...]
    intermediates: tuple[Intermediate, ...]

    def __str__(self) -> str:
        lines: dict[bool, list[str]] = {True: ["cut edges"], False: ["not cut"]}
        for item in (*self.inputs, *self.intermediates):
            text = f"{item.dtype}[{','.join(map(str, item.shape))}]"
            if isinstance(item, Input):
                often = f", used {item.uses} times" if item.uses != 1 else ""
                lines[item.cut].append(f"  input {item.name} {text}{often}")
            else:
                lines[item.cut].append(f"  {text} {item.source}")
        return "\n".join(lines[True] + lines[False])


def cut_edges(
    fn: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None
) -> CutEdges:
    """Find the cut edges of the forward graph of a function.

    Scaling:
        On a cut edge the backward factor may differ from the forward one, and the constraint of an
        op may be None; on every other edge they must agree. The graph is that of the jaxpr, opened
        through jit, scan, remat and custom derivatives. Only paths that a gradient takes count:
        integers and `stop_gradient` carry none.

    Args:
        fn: function that JAX can trace.
        *args: its arguments: arrays, or anything with shape and dtype.
        argnums: the arguments that are differentiated; all by default. An input that is not, such
            as a batch, closes no cycle.

    Returns:
        `CutEdges`, whose text lists both kinds.

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
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, section 4.3 (cut edges);
        Tarjan, "A note on finding the bridges of a graph", 1974.
    """
    closed, _ = traced("cut_edges", fn, *args)
    numbers = range(len(args)) if argnums is None else argnums
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if wrong := [n for n in numbers if not -len(args) <= n < len(args)]:
        raise ValueError(
            "unitscale.analysis.cut_edges: argnums must number the arguments, of which there are "
            f"{len(args)}; got {', '.join(map(str, wrong))}"
        )
    chosen = {n % len(args) for n in numbers}
    flags, names = [], []
    for index, arg in enumerate(args):
        for path, node in jax.tree_util.tree_leaves_with_path(arg, is_leaf=is_scaled):
            for leaf in jax.tree.leaves(node):
                # The data of a ScaledArray is differentiated, its scale is a constant.
                part = "" if not is_scaled(node) else ".data" if leaf is node.data else ".scale"
                flags.append(index in chosen and part != ".scale")
                names.append(f"[{index}]{jax.tree_util.keystr(path)}{part}")
    graph = build(closed, flags)
    edges = graph.live()
    if not edges:
        raise ValueError(
            "unitscale.analysis.cut_edges: expected a floating input that reaches a floating "
            "output; got a function with none. Integers and stop_gradient carry no gradient."
        )
    cut = {edges[i] for i in bridges((e.start, e.end) for e in edges)}
    uses: dict[int, list[Edge]] = {}
    made: dict[int, list[Edge]] = {}
    for edge in edges:
        uses.setdefault(edge.start, []).append(edge)
        made.setdefault(edge.end, []).append(edge)
    inputs = []
    for node, name, var in zip(graph.inputs, names, closed.jaxpr.invars, strict=True):
        if node is not None:
            own = uses.get(node, [])
            shape, dtype = tuple(var.aval.shape), var.aval.dtype.name
            inputs.append(Input(name, shape, dtype, len(own), cut.issuperset(own)))
    intermediates = []
    for node, (eqns, var) in sorted(graph.values.items()):
        if node in made:
            shape, dtype, free = tuple(var.aval.shape), var.aval.dtype.name, cut.issuperset
            intermediates.append(Intermediate(source_of(*eqns), shape, dtype, free(made[node])))
    return CutEdges(tuple(inputs), tuple(intermediates))


class Edge(NamedTuple):
    """A directed edge; ``call`` and ``operand`` are set where it enters a custom_vjp function."""

    start: int
    end: int
    call: int | None = None
    operand: int | None = None


@dataclasses.dataclass
class Graph:
    """Vertices are numbers; every output leads to vertex 0.

    Attributes:
        edges: in program order.
        inputs: the vertex of each flat input; None for one that is not differentiable.
        values: of each vertex that is a value outside of custom_vjp functions: its equation, those
            of the calls that it is inside of, and its variable.
        calls: equations of the custom_vjp functions that are not inside of another.
        measured: what `build` was asked to measure of each call.
    """

    edges: list[Edge] = dataclasses.field(default_factory=list)
    inputs: list[int | None] = dataclasses.field(default_factory=list)
    values: dict[int, tuple[tuple[Any, ...], Any]] = dataclasses.field(default_factory=dict)
    calls: list[Any] = dataclasses.field(default_factory=list)
    measured: dict[int, Any] = dataclasses.field(default_factory=dict)

    def live(self) -> list[Edge]:
        """Return the edges that lie on a path from an input to an output, in program order."""
        below = _reached(self.edges, [v for v in self.inputs if v is not None])
        above = _reached([Edge(e.end, e.start) for e in self.edges], [0])
        both = below & above
        return [edge for edge in self.edges if edge.start in both and edge.end in both]


def _reached(edges: Iterable[Edge], start: Sequence[int]) -> set[int]:
    next_to: dict[int, list[int]] = {}
    for edge in edges:
        next_to.setdefault(edge.start, []).append(edge.end)
    seen, waiting = set(start), list(start)
    while waiting:
        new = [v for v in next_to.get(waiting.pop(), ()) if v not in seen]
        seen.update(new)
        waiting += new
    return seen


def bridges(edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the positions of the edges of an undirected graph whose removal disconnects it."""
    edges = list(edges)
    around: dict[int, list[tuple[int, int]]] = {}
    for index, (a, b) in enumerate(edges):
        around.setdefault(a, []).append((b, index))
        around.setdefault(b, []).append((a, index))
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    found = []
    for root in around:
        if root in order:
            continue
        order[root] = low[root] = len(order)
        stack = [(root, -1, iter(around[root]))]
        while stack:
            vertex, entered, neighbours = stack[-1]
            for other, index in neighbours:
                if index == entered:
                    continue
                if other not in order:
                    order[other] = low[other] = len(order)
                    stack.append((other, index, iter(around[other])))
                    break
                low[vertex] = min(low[vertex], order[other])
            else:
                stack.pop()
                if stack:
                    parent = stack[-1][0]
                    low[parent] = min(low[parent], low[vertex])
                    if low[vertex] > order[parent]:
                        found.append(entered)
    return sorted(found)


class Value(NamedTuple):
    """The vertex of a value, None if it carries no gradient, and the value where it is known."""

    node: int | None
    x: Any = None


Measure = Callable[[Any, list[Any]], Any]


def build(
    closed: ClosedJaxpr,
    differentiated: Sequence[bool],
    args: Sequence[Any] = (),
    measure: Measure | None = None,
) -> Graph:
    """Build the graph of a program.

    Args:
        closed: the program.
        differentiated: which of its inputs are.
        args: its flat arguments in float64, where calls are measured.
        measure: called with the equation and operands of each custom_vjp function, of a loop's in
            its first iteration; what it returns is kept in `Graph.measured`.
    """
    builder = _Builder(measure)
    inputs = [
        Value(builder.vertex() if flag and is_float(var.aval) else None, wide(x))
        for flag, var, x in zip(
            differentiated, closed.jaxpr.invars, args or itertools.repeat(None), strict=False
        )
    ]
    builder.graph.inputs = [value.node for value in inputs]
    builder.connect([value.node for value in builder.run(closed, inputs)], 0)
    return builder.graph


class _Builder(Interpreter):
    def __init__(self, measure: Measure | None):
        super().__init__()
        self.graph, self.measure, self.inside = Graph(), measure, False
        self.count = itertools.count(1)
        self.exact = Exact()

    def vertex(self) -> int:
        return next(self.count)

    def connect(self, starts: Iterable[int | None], end: int) -> None:
        self.graph.edges += [Edge(start, end) for start in starts if start is not None]

    def constant(self, x: Any, aval: Any) -> Value:
        return Value(None, self.exact.constant(x, aval) if self.measure else None)

    def apply(self, eqn: Any, operands: list[Value]) -> list[Value]:
        name, inner = eqn.primitive.name, inner_program(eqn)
        nodes: list[int | None] = [None] * len(eqn.outvars)
        if any(value.node is not None for value in operands):
            if name == "custom_vjp_call" and not self.inside:
                nodes = self.custom_vjp(eqn, operands)
            elif name == "scan":
                nodes = self.scan(eqn, operands)
            elif name == "while":
                first = eqn.params["body_nconsts"]
                kept = operands[eqn.params["cond_nconsts"] :]
                nodes = self.loop(eqn.params["body_jaxpr"], kept, first, len(kept))
            elif name == "cond":
                nodes = self.cond(eqn, operands[1:])
            elif inner is not None:
                return [
                    value._replace(node=value.node if is_float(var.aval) else None)
                    for value, var in zip(self.run(inner, operands), eqn.outvars, strict=True)
                ]
            else:
                nodes = self.operation(eqn, operands)
        xs = [value.x for value in operands]
        known = self.measure and not self.inside and all(x is not None for x in xs)
        results = self.exact.apply(eqn, xs) if known else itertools.repeat(None)
        return [
            Value(node if is_float(var.aval) else None, x)
            for node, var, x in zip(nodes, eqn.outvars, results, strict=False)
        ]

    def result(self, start: int, var: Any) -> int | None:
        """Add a vertex for a result of an operation, unless it has no gradient."""
        if not is_float(var.aval):
            return None
        node = self.vertex()
        self.connect([start], node)
        self.name(node, var)
        return node

    def name(self, node: int, var: Any) -> None:
        if not self.inside:
            self.graph.values[node] = tuple(reversed(self.calls)), var

    def operation(self, eqn: Any, operands: list[Value]) -> list[int | None]:
        if eqn.primitive.name in _NO_GRADIENT:
            return [None] * len(eqn.outvars)
        vertex = self.vertex()
        self.connect([value.node for value in operands], vertex)
        return [self.result(vertex, var) for var in eqn.outvars]

    def custom_vjp(self, eqn: Any, operands: list[Value]) -> list[int | None]:
        """Open a function; each operand enters by an edge of its own."""
        call = len(self.graph.calls)
        self.graph.calls.append(eqn)
        xs = [value.x for value in operands]
        if self.measure and all(x is not None for x in xs):
            self.graph.measured[call] = self.measure(eqn, xs)
        ports = [Value(None if value.node is None else self.vertex()) for value in operands]
        for operand, (value, port) in enumerate(zip(operands, ports, strict=True)):
            if value.node is not None and port.node is not None:
                self.graph.edges.append(Edge(value.node, port.node, call, operand))
        self.inside = True
        nodes = [value.node for value in self.run(eqn.params["call_jaxpr"], ports)]
        self.inside = False
        if all(node is None for node in nodes):
            # It rounds or has no derivative otherwise, but is differentiable by its own rule.
            return self.operation(eqn, ports)
        for node, var in zip(nodes, eqn.outvars, strict=True):
            if node is not None:
                self.name(node, var)
        return nodes

    def scan(self, eqn: Any, operands: list[Value]) -> list[int | None]:
        """Add a scan by its first iteration."""
        params = eqn.params
        first, carried = scan_counts(params)
        start, last = -1 if params["reverse"] else 0, first + carried
        xs = [
            value._replace(x=value.x[start] if value.x is not None and params["length"] else None)
            for value in operands[last:]
        ]
        return self.loop(params["jaxpr"], [*operands[:last], *xs], first, last)

    def loop(
        self, body: ClosedJaxpr, operands: list[Value], first: int, last: int
    ) -> list[int | None]:
        """Add a body whose operands from ``first`` to ``last`` are carried."""
        inner = list(operands)
        for index in range(first, last):
            node = self.vertex() if is_float(body.jaxpr.invars[index].aval) else None
            inner[index] = operands[index]._replace(node=node)
            if node is not None:
                self.connect([operands[index].node], node)
        nodes = [value.node for value in self.run(body, inner)]
        for node, value in zip(nodes, inner[first:last], strict=False):
            if value.node is not None and node != value.node:
                self.connect([node], value.node)
        return nodes

    def cond(self, eqn: Any, operands: list[Value]) -> list[int | None]:
        branches = [self.run(branch, operands) for branch in eqn.params["branches"]]
        nodes: list[int | None] = []
        for var, values in zip(eqn.outvars, zip(*branches, strict=True), strict=True):
            nodes.append(None)
            if any(value.node is not None for value in values):
                either = self.vertex()
                self.connect([value.node for value in values], either)
                nodes[-1] = self.result(either, var)
        return nodes
