"""Check that unit scaling leaves every gradient a constant times the true one, or blame an op.

Along every edge the given cotangent is a ratio times the true one. All gradients are right exactly
if the logarithms of the ratios off cut edges are the differences of a potential. An op is blamed if
its ratio is not 1 and does not cancel with the ratios of others.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import is_scaled
from ._cut_edges import Edge, Graph, bridges
from ._exact import evaluate, has_while, only_rounds
from ._program import Source, bind, is_float, source_of, traced, types_of

_SOUND = ("right", "no gradient")
# Gradients this much smaller than the largest are what rounding in float64 leaves of zero.
_NOTHING = 1e-11
# Factors are rounded to float32, and a few of them are multiplied in an op.
_TOLERANCE = 1e-5
_MOST_SUSPECTS = 100


@dataclasses.dataclass(frozen=True)
class ParameterGradient:
    """Findings for one parameter.

    Attributes:
        name: its path.
        verdict: "right"; "no gradient" if both are zero; "truth not finite" if the given one cannot
            be judged; or "lost", "negative", "wrong direction", "not of the loss", "not finite".
        constant: the given gradient over the true one.
        spread: share of the given gradient that is no multiple of the true one.
    """

    name: str
    verdict: str
    constant: float
    spread: float


@dataclasses.dataclass(frozen=True)
class Guilty:
    """An op whose backward factor differs from its forward one where it may not.

    Attributes:
        ratios: backward factor over forward factor, of each operand that is not a cut edge.
    """

    source: Source
    ratios: tuple[float, ...]
    advice: str

    def __str__(self) -> str:
        ratios = ", ".join(f"{ratio:.4g}" for ratio in self.ratios)
        return f"{self.source}: backward over forward factor {ratios} off cut edges; {self.advice}"


@dataclasses.dataclass(frozen=True, repr=False)
class GradientReport:
    """The result of `check_gradients`: true if every gradient is right, and a table as text.

    Attributes:
        loss: value of the loss, without rounding.
    """

    parameters: tuple[ParameterGradient, ...]
    guilty: tuple[Guilty, ...]
    loss: float

    def __bool__(self) -> bool:
        return all(p.verdict in _SOUND for p in self.parameters)

    @property
    def _broken(self) -> bool:
        return any(p.verdict not in (*_SOUND, "truth not finite") for p in self.parameters)

    def __str__(self) -> str:
        width = max(9, *(len(p.name) for p in self.parameters))
        lines = [f"{'parameter':{width}}  {'constant':>10}  {'spread':>8}  verdict"]
        for p in self.parameters:
            constant = "" if math.isnan(p.constant) else f"{p.constant:.5g}"
            lines.append(f"{p.name:{width}}  {constant:>10}  {p.spread:8.1e}  {p.verdict}")
        lines += [f"broken by {op}" for op in self.guilty]
        if self._broken and not self.guilty:
            lines.append("no single op was found to break it")
        if any(p.verdict == "truth not finite" for p in self.parameters):
            lines.append(
                "where the truth is not finite no gradient can be judged: use other values"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:  # what pytest shows of a failed assertion
        return f"GradientReport: {'right' if self else 'wrong'}\n{self}"


def check_gradients(
    loss: Callable[..., Any], params: Any, *batch: Any, tolerance: float = 1e-4
) -> GradientReport:
    """Check that each parameter's gradient is a positive constant times the true gradient.

    Scaling:
        Both gradients are computed in float64 without rounding, so that any policy can be checked,
        FP8 included: the given one runs the backward rules of the ops, the true one differentiates
        their forward bodies. Where they differ, the report names the ops that cause it.

    Args:
        loss: ``loss(params, *batch)``, a floating scalar, deterministic.
        params: tree of arrays or ScaledArrays; floating leaves are checked, of a ScaledArray the
            data with its scale held fixed.
        *batch: further arguments, which are not differentiated.
        tolerance: largest spread of a gradient that is right.

    Raises:
        TypeError: if ``loss`` cannot be traced.
        ValueError: if it is no floating scalar, has side effects, there is no floating parameter,
            or the arguments or the loss are not finite.

    Example:
        >>> from unitscale import ops
        >>> def loss(params, x):
        ...     h = ops.dense(x, params["w"], constraint=None)
        ...     return jnp.sum(jnp.sin(h.value)) + jnp.sum(x * h.value)
        >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
        >>> assert check_gradients(loss, {"w": w}, x)  # w is a cut edge, x a batch

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, proposition on cut edges.
    """
    name = "unitscale.analysis.check_gradients"
    names, chosen = _names_and_floats(params)
    if not chosen:
        raise ValueError(
            f"{name}: expected floating parameters; got {len(names)} leaves, none of them "
            "floating. Pass the tree that is differentiated, such as nnx.state(model, nnx.Param)."
        )
    leaves, treedef = jax.tree.flatten((params, batch))
    args = [*map(jnp.asarray, leaves[: len(names)]), *leaves[len(names) :]]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    labels = [*names, *(f"batch{jax.tree_util.keystr(path)}" for path in paths)]
    for label, leaf in zip(labels, args, strict=True):
        x = np.asarray(leaf)
        if is_float(x) and (wrong := int((~np.isfinite(x.astype(np.float64))).sum())):
            raise ValueError(
                f"{name}: expected finite arguments; got {wrong} elements of {label} that are not. "
                "No gradient can be compared there."
            )

    def flat(*xs: Any) -> Any:
        given, rest = jax.tree.unflatten(treedef, xs)
        return loss(given, *rest)

    closed, out = traced("check_gradients", flat if callable(loss) else loss, *args)
    if len(jax.tree.leaves(out)) != 1 or getattr(out, "shape", None) != () or not is_float(out):
        raise ValueError(
            f"{name}: expected a loss that returns one floating scalar; got "
            f"{jax.tree.map(lambda a: f'{a.dtype}{list(a.shape)}', out)}. Return the loss alone, "
            "as its .value if it is a ScaledArray."
        )
    of_given, _ = traced("check_gradients", jax.grad(flat, argnums=tuple(chosen)), *args)

    def both(*xs: Any) -> Any:
        true = jax.value_and_grad(lambda *xs: evaluate(closed, *xs)[0], argnums=tuple(chosen))
        return evaluate(of_given, *xs), true(*xs)

    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if i in chosen else x for i, x in enumerate(args)]
        given, (value, true) = _run(both, closed, wide)
        if not np.isfinite(value):
            raise ValueError(
                f"{name}: expected a finite loss; got {float(value)} for finite arguments. Use "
                "other values, or look for the first one that is not finite with "
                "analysis.trace_scales."
            )
        found = _judge([names[i] for i in chosen], given, true, tolerance)
        report = GradientReport(found, (), float(value))
        if report._broken:
            graphs = []

            def measured(*xs: Any) -> Any:
                flags = [i in chosen for i in range(len(args))]
                graphs.append(Graph(closed, flags, xs, _gradients_of_op))
                return graphs[-1].measured

            ratios = {
                call: [None if pair is None else Ratio.of(*pair) for pair in operands]
                for call, operands in _run(measured, closed, wide).items()
            }
            report = dataclasses.replace(report, guilty=blame(graphs[-1], ratios))
    return report


def _run(f: Callable[..., Any], closed: Any, args: list[Any]) -> Any:
    """Run an analysis of a program, compiled without optimization as it runs once."""
    if has_while(closed.jaxpr):  # reverse mode has to know how often such a loop runs
        return f(*args)
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*args)


def _names_and_floats(params: Any) -> tuple[list[str], list[int]]:
    """Names of the leaves, and which of them are differentiated."""
    names, chosen = [], []
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        for leaf in jax.tree.leaves(node):
            if is_float(jnp.asarray(leaf)) and (not is_scaled(node) or leaf is node.data):
                chosen.append(len(names))
            names.append(name or "params")
    return names, chosen


def _judge(
    names: list[str], given: Any, true: Any, tolerance: float
) -> tuple[ParameterGradient, ...]:
    ratios = [Ratio.of(g, t) for g, t in zip(given, true, strict=True)]
    least_given = _NOTHING * max((r.given for r in ratios if math.isfinite(r.given)), default=0.0)
    least_true = _NOTHING * max((r.true for r in ratios if math.isfinite(r.true)), default=0.0)

    def verdict_of(ratio: Ratio) -> str:
        if not math.isfinite(ratio.true):
            return "truth not finite"
        if not math.isfinite(ratio.given):
            return "not finite"
        is_given, is_true = ratio.given > least_given, ratio.true > least_true
        if not is_given:
            return "lost" if is_true else "no gradient"
        if not is_true:
            return "not of the loss"
        if ratio.spread > tolerance or not math.isfinite(ratio.constant):
            return "wrong direction"
        return "negative" if ratio.constant < 0 else "right"

    found = []
    for name, ratio in zip(names, ratios, strict=True):
        verdict = verdict_of(ratio)
        if verdict == "no gradient":
            ratio = Ratio(math.nan, 0.0, 0.0, 0.0)
        found.append(ParameterGradient(name, verdict, ratio.constant, ratio.spread))
    return tuple(found)


class Ratio(NamedTuple):
    """Constant and spread as in `ParameterGradient`, and the norms of both gradients."""

    constant: float
    spread: float
    given: float
    true: float

    @classmethod
    def of(cls, given: Any, true: Any) -> "Ratio":
        given, true = np.asarray(given, np.float64), np.asarray(true, np.float64)
        g, t = float(np.linalg.norm(given)), float(np.linalg.norm(true))
        if not (math.isfinite(g) and math.isfinite(t)):
            return cls(math.nan, math.nan, g, t)
        if not (g and t):
            return cls(math.nan, 1.0 if g != t else 0.0, g, t)
        constant = float(np.vdot(given / t, true / t))
        return cls(constant, float(np.linalg.norm(given - constant * true) / g), g, t)


def _gradients_of_op(eqn: Any, operands: list[Any]) -> list[Any]:
    """Pull a cotangent back to each operand of a custom_vjp by its own and the true derivative."""
    by_operand: list[Any] = [None] * len(operands)
    if only_rounds(eqn):
        return by_operand
    avals, results = types_of(eqn.invars), types_of(eqn.outvars)
    floats = [i for i, aval in enumerate(avals) if is_float(aval)]
    kept = [i for i, aval in enumerate(results) if is_float(aval)]

    def pulled_back(f: Callable[..., Any], xs: Any, cotangents: Any) -> Any:
        def of_floats(*moved: Any) -> Any:
            given = dict(zip(floats, moved, strict=True))
            found = f(*(given.get(i, x) for i, x in enumerate(xs)))
            return [found[i] for i in kept]

        return jax.vjp(of_floats, *(xs[i] for i in floats))[1](list(cotangents))

    def own(*xs: Any) -> Any:
        values, cotangents = xs[: len(avals)], xs[len(avals) :]
        return pulled_back(lambda *full: bind(eqn, full, eqn.params), values, cotangents)

    closed = jax.make_jaxpr(own)(*avals, *(results[i] for i in kept))
    keys = jax.random.split(jax.random.key(0), len(results))
    cotangents = [jax.random.normal(keys[i], results[i].shape, jnp.float64) for i in kept]
    given = evaluate(closed, *operands, *cotangents)
    body = eqn.params["call_jaxpr"]
    true = pulled_back(lambda *full: evaluate(body, *full), operands, cotangents)
    for i, g, t in zip(floats, given, true, strict=True):
        by_operand[i] = (g, t)
    return by_operand


def blame(graph: Graph, ratios: dict[int, list[Ratio | None]]) -> tuple[Guilty, ...]:
    """Return the ops that break the gradients of a program, by the ratios of each call."""
    edges = graph.live()
    cut = set(bridges((e.start, e.end) for e in edges))
    inner = [edge for i, edge in enumerate(edges) if i not in cut]
    wrong: dict[int, list[float]] = {}
    suspects: dict[int, list[tuple[Edge, float]]] = {}
    for i, edge in enumerate(edges):
        if edge.op is None or edge.operand is None:
            continue
        measured = ratios.get(edge.op)
        ratio = measured[edge.operand] if measured else None
        # Where no gradient flows for these values, a factor does no harm.
        if ratio is None or not math.isfinite(ratio.true) or ratio.given == ratio.true == 0:
            continue
        if not ratio.constant > 0 or ratio.spread > _TOLERANCE:
            wrong.setdefault(edge.op, []).append(ratio.constant)
        elif i not in cut and abs(math.log(ratio.constant)) > _TOLERANCE:
            suspects.setdefault(edge.op, []).append((edge, ratio.constant))
    suspects = {call: parts for call, parts in suspects.items() if call not in wrong}
    found: dict[Source, Guilty] = {}
    for call in sorted({*wrong, *_unexplained(inner, suspects)}):
        source = source_of(graph.ops[call])
        if call in wrong:
            constants = tuple(wrong[call])
            advice = "its backward pass is no positive multiple of its derivative: correct its rule"
        else:
            constants = tuple(constant for _, constant in suspects[call])
            advice = _advice(graph, inner, source, [edge for edge, _ in suspects[call]])
        known = found[source].ratios if source in found else ()
        if call not in wrong and known and not set(constants) <= set(known):
            advice = (
                "one line is called on inputs of several sizes: trace the loss within "
                "unitscale.batch_size(n), with n near the largest of them"
            )
        found[source] = Guilty(source, (*known, *constants), advice)
    return tuple(found.values())


def _unexplained(edges: list[Edge], suspects: dict[int, list[tuple[Edge, float]]]) -> set[int]:
    """Return the calls whose ratios stay inconsistent, alone and with up to two others."""
    parent: dict[int, int] = {}

    def root(vertex: int) -> int:
        while vertex in parent:
            vertex = parent[vertex]
        return vertex

    suspected = {edge for parts in suspects.values() for edge, _ in parts}
    for edge in edges:
        start, end = root(edge.start), root(edge.end)
        if edge not in suspected and start != end:
            parent[start] = end
    steps = [(call, edge, ratio) for call, parts in suspects.items() for edge, ratio in parts]
    vertices = {v: i for i, v in enumerate({root(v) for _, e, _ in steps for v in e[:2]})}
    incidence = np.zeros((len(steps), len(vertices)))
    logs = np.zeros((len(steps), len(suspects)))  # a column for each call
    for row, (call, edge, ratio) in enumerate(steps):
        incidence[row, vertices[root(edge.start)]] += 1
        incidence[row, vertices[root(edge.end)]] -= 1
        logs[row, list(suspects).index(call)] = math.log(ratio)
    # The residual of the logarithms after subtracting the nearest differences of a potential.
    rest = logs - incidence @ (np.linalg.pinv(incidence) @ logs) if steps else logs
    left = set(range(len(suspects)))
    for size in (1, 2, 3):
        if len(left) > _MOST_SUSPECTS:
            break
        for group in itertools.combinations(range(len(suspects)), size):
            if left.issuperset(group) and np.linalg.norm(rest[:, group].sum(1)) <= 16 * _TOLERANCE:
                left -= set(group)
    return {call for index, call in enumerate(suspects) if index in left}


def _advice(graph: Graph, inner: list[Edge], source: Source, edges: list[Edge]) -> str:
    starts = {edge.start for edge in edges}
    if any(v in graph.inputs and sum(e.start == v for e in inner) > 1 for v in starts):
        return (
            "a parameter is used several times with different factors: make them agree, by "
            "unitscale.batch_size(n) around the loss if inputs of several sizes meet it"
        )
    if source.op.startswith("residual"):
        return "use ops.residual, or residual_split and residual_add with the same tau"
    if source.op.startswith("scale"):
        return "give it the same factor forward and backward, or move it onto a cut edge"
    others = "'to_grad_input_scale'" if len(edges) == 1 else "'to_left_grad_scale'"
    return f"set constraint='to_output_scale' (or {others}, 'gmean', ...)"
