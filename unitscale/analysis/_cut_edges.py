"""Cut edges: where a backward factor of one's own leaves every gradient a constant times the truth.

An edge of the forward graph whose removal disconnects it is a bridge, and every path from what lies
above it to the loss passes it: a factor on its cotangent multiplies all of that by one constant. On
any other edge a factor would weigh the paths unequally.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ..core import is_scaled
from ._graph import Edge, build
from ._source import Source, source_of
from ._tracing import traced


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
        for item in self.inputs:
            often = f", used {item.uses} times" if item.uses != 1 else ""
            lines[item.cut].append(f"  input {item.name} {_type(item)}{often}")
        for value in self.intermediates:
            lines[value.cut].append(f"  {_type(value)} {value.source}")
        return "\n".join(lines[True] + lines[False])


def _type(value: Input | Intermediate) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def cut_edges(
    fn: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None
) -> CutEdges:
    """Finds the cut edges of the forward graph of a function.

    Scaling:
        On a cut edge the backward factor may differ from the forward one, and the constraint of an
        op may be None; on every other edge they must agree. The graph is that of the jaxpr with
        values and operations as vertices, opened through jit, scan, remat and custom derivatives.
        Only paths that a gradient takes count: integers and `stop_gradient` carry none.

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
            # Of a ScaledArray the data is differentiated, the scale is a constant.
            for part in _parts(node):
                flags.append(index in chosen and part != ".scale")
                names.append(f"[{index}]{jax.tree_util.keystr(path)}{part}")
    graph = build(closed.jaxpr, flags)
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
    inputs = [
        Input(
            name,
            tuple(var.aval.shape),
            var.aval.dtype.name,
            len(uses.get(node, ())),
            all(edge in cut for edge in uses.get(node, ())),
        )
        for node, name, var in zip(graph.inputs, names, closed.jaxpr.invars, strict=True)
        if node is not None
    ]
    intermediates = []
    for vertex, (eqns, var) in sorted(graph.values.items()):
        if vertex in made:
            free = all(edge in cut for edge in made[vertex])
            shape, dtype = tuple(var.aval.shape), var.aval.dtype.name
            intermediates.append(Intermediate(source_of(*eqns), shape, dtype, free))
    return CutEdges(tuple(inputs), tuple(intermediates))


def _parts(node: Any) -> list[str]:
    if not is_scaled(node):
        return [""]
    return [".data" if leaf is node.data else ".scale" for leaf in jax.tree.leaves(node)]


def bridges(edges: Iterable[tuple[int, int]]) -> list[int]:
    """Returns the positions of the edges of an undirected graph that are its bridges.

    Example:
        >>> bridges([(0, 1), (1, 2), (2, 1), (2, 3)])
        [0, 3]
    """
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
