"""Cut edges: where a backward factor of its own leaves every gradient a constant times the truth.

An edge of the forward graph whose removal disconnects it is a bridge. Every path from a value above
it to the loss passes it, so a factor on its cotangent multiplies all of their gradients by one
constant. On any other edge a factor would weight the paths unequally.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core import is_scaled
from ._graph import Edge, bridges, build
from ._program import Source, source_of, traced


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
