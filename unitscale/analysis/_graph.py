"""The graph of a program's differentiable values, through every call and loop.

Values and operations are vertices. Jitted, checkpointed and custom functions are opened. A loop's
body stands in the graph once, with an edge from each carried result back to the carried operand:
what is true of the cycle is true of every iteration.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ..core import scan_counts

_NO_GRADIENT = {"stop_gradient", "sign", "floor", "ceil", "round", "nextafter"}


class Edge(NamedTuple):
    """A directed edge; ``call`` and ``operand`` are set where it enters a custom_vjp function."""

    start: int
    end: int
    call: int | None = None
    operand: int | None = None


@dataclasses.dataclass
class Call:
    """A custom_vjp function in the graph, and how its equation is reached from the top."""

    eqn: Any
    path: tuple[int, ...]


@dataclasses.dataclass
class Graph:
    """Vertices are numbers.

    Attributes:
        edges: in program order.
        inputs: the vertex of each flat input; None for one that is not differentiable.
        values: the variable of each vertex that is an intermediate value outside of custom_vjp
            functions, and its equation, after which come those of the calls that it is inside of.
        calls: the custom_vjp functions that are not inside of another.
        sink: the vertex that every output leads to.
    """

    edges: list[Edge] = dataclasses.field(default_factory=list)
    inputs: list[int | None] = dataclasses.field(default_factory=list)
    values: dict[int, tuple[tuple[Any, ...], Any]] = dataclasses.field(default_factory=dict)
    calls: list[Call] = dataclasses.field(default_factory=list)
    sink: int = 0
    count: int = 1

    def vertex(self) -> int:
        """Returns a new vertex."""
        self.count += 1
        return self.count - 1

    def live(self) -> list[Edge]:
        """Returns the edges that lie on a path from an input to an output, in program order."""
        forward: dict[int, list[int]] = {}
        backward: dict[int, list[int]] = {}
        for edge in self.edges:
            forward.setdefault(edge.start, []).append(edge.end)
            backward.setdefault(edge.end, []).append(edge.start)
        below = _reach(forward, [v for v in self.inputs if v is not None])
        above = _reach(backward, [self.sink])
        both = below & above
        return [edge for edge in self.edges if edge.start in both and edge.end in both]


def _reach(neighbours: dict[int, list[int]], start: Sequence[int]) -> set[int]:
    seen, waiting = set(start), list(start)
    while waiting:
        for vertex in neighbours.get(waiting.pop(), ()):
            if vertex not in seen:
                seen.add(vertex)
                waiting.append(vertex)
    return seen


def is_float(aval: Any) -> bool:
    """Whether values of a type have derivatives.

    Example:
        >>> is_float(jnp.ones(1, jnp.int32)), is_float(jnp.ones(1, jnp.bfloat16))
        (False, True)
    """
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


_REDUCERS = frozenset({"reduce", "reduce_window"})


def inner_jaxpr(eqn: Any) -> Jaxpr | None:
    """Returns the one inner program that an equation applies to its operands, if it has one.

    That of a reduction is none: it is applied to two of their elements at a time.

    Example:
        >>> import jax
        >>> eqn = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).eqns[0]
        >>> inner_jaxpr(eqn).eqns[0].primitive.name
        'sin'
    """
    if eqn.primitive.name in _REDUCERS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        if isinstance(inner, ClosedJaxpr):
            inner = inner.jaxpr
        if (
            isinstance(inner, Jaxpr)
            and len(inner.invars) == len(eqn.invars)
            and len(inner.outvars) == len(eqn.outvars)
        ):
            return inner
    return None


Nodes = list[int | None]


def build(jaxpr: Jaxpr, differentiated: Sequence[bool]) -> Graph:
    """Builds the graph of a jaxpr, whose inputs are differentiable where the flags say so."""
    graph = Graph()
    graph.inputs = [
        graph.vertex() if flag and is_float(var.aval) else None
        for var, flag in zip(jaxpr.invars, differentiated, strict=True)
    ]
    for node in _Builder(graph).run(jaxpr, graph.inputs, (), False):
        if node is not None:
            graph.edges.append(Edge(node, graph.sink))
    return graph


class _Builder:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.calls: list[Any] = []

    def name(self, vertex: int, eqn: Any, var: Any, inside: bool) -> None:
        if not inside:
            self.graph.values[vertex] = ((eqn, *reversed(self.calls[:-1])), var)

    def run(self, jaxpr: Jaxpr, nodes: Nodes, path: tuple[int, ...], inside: bool) -> Nodes:
        """Adds a program; ``inside`` a custom_vjp function there are no further calls."""
        env: dict[Any, int | None] = dict(zip(jaxpr.invars, nodes, strict=True))

        def read(atom: Any) -> int | None:
            return None if isinstance(atom, Literal) else env.get(atom)

        for index, eqn in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in eqn.invars]
            if any(node is not None for node in operands):
                self.calls.append(eqn)
                results = self.apply(eqn, operands, (*path, index), inside)
                self.calls.pop()
                for var, node in zip(eqn.outvars, results, strict=True):
                    env[var] = node if is_float(var.aval) else None
        return [read(atom) for atom in jaxpr.outvars]

    def apply(self, eqn: Any, nodes: Nodes, path: tuple[int, ...], inside: bool) -> Nodes:
        name = eqn.primitive.name
        if name == "custom_vjp_call" and not inside:
            return self.custom_vjp(eqn, nodes, path)
        if name == "scan":
            first, carried = scan_counts(eqn.params)
            jaxpr = eqn.params["jaxpr"].jaxpr
            return self.loop(jaxpr, nodes, first, first + carried, path, inside)
        if name == "while":
            skipped = eqn.params["cond_nconsts"]
            jaxpr, first = eqn.params["body_jaxpr"].jaxpr, eqn.params["body_nconsts"]
            kept = nodes[skipped:]
            return self.loop(jaxpr, kept, first, len(kept), path, inside)
        if name == "cond":
            return self.branches(eqn, nodes[1:], path, inside)
        inner = inner_jaxpr(eqn)
        if inner is not None:
            return self.run(inner, nodes, path, inside)
        return self.operation(eqn, nodes, inside)

    def operation(self, eqn: Any, nodes: Nodes, inside: bool) -> Nodes:
        graph = self.graph
        if eqn.primitive.name in _NO_GRADIENT:
            return [None] * len(eqn.outvars)
        vertex = graph.vertex()
        graph.edges += [Edge(node, vertex) for node in nodes if node is not None]
        results: Nodes = []
        for var in eqn.outvars:
            results.append(graph.vertex() if is_float(var.aval) else None)
            if results[-1] is not None:
                graph.edges.append(Edge(vertex, results[-1]))
                self.name(results[-1], eqn, var, inside)
        return results

    def custom_vjp(self, eqn: Any, nodes: Nodes, path: tuple[int, ...]) -> Nodes:
        """Opens a function whose operands each enter by an edge of their own."""
        graph = self.graph
        call = len(graph.calls)
        graph.calls.append(Call(eqn, path))
        ports: Nodes = []
        for operand, node in enumerate(nodes):
            ports.append(None if node is None else graph.vertex())
            if node is not None and ports[-1] is not None:
                graph.edges.append(Edge(node, ports[-1], call, operand))
        results = self.run(eqn.params["call_jaxpr"].jaxpr, ports, path, True)
        if all(node is None for node in results):
            # Rounded or otherwise without a derivative, but differentiable by its own rule.
            return self.operation(eqn, ports, False)
        for var, node in zip(eqn.outvars, results, strict=True):
            if node is not None:
                self.name(node, eqn, var, False)
        return results

    def loop(
        self,
        body: Jaxpr,
        nodes: Nodes,
        first: int,
        last: int,
        path: tuple[int, ...],
        inside: bool,
    ) -> Nodes:
        """Adds a body whose operands from ``first`` to ``last`` are carried."""
        graph = self.graph
        inner = list(nodes)
        for index in range(first, last):
            inner[index] = graph.vertex() if is_float(body.invars[index].aval) else None
            start, carried = nodes[index], inner[index]
            if start is not None and carried is not None:
                graph.edges.append(Edge(start, carried))
        results = self.run(body, inner, path, inside)
        for index, node in zip(range(first, last), results, strict=False):
            carried = inner[index]
            if node is not None and carried is not None and node != carried:
                graph.edges.append(Edge(node, carried))
        return results

    def branches(self, eqn: Any, nodes: Nodes, path: tuple[int, ...], inside: bool) -> Nodes:
        graph = self.graph
        every = [
            self.run(branch.jaxpr, nodes, (*path, number), inside)
            for number, branch in enumerate(eqn.params["branches"])
        ]
        results: Nodes = []
        for var, found in zip(eqn.outvars, zip(*every, strict=True), strict=True):
            known = [node for node in found if node is not None]
            results.append(graph.vertex() if known else None)
            if results[-1] is not None:
                either = graph.vertex()
                graph.edges += [*(Edge(node, either) for node in known), Edge(either, results[-1])]
                self.name(results[-1], eqn, var, inside)
        return results
