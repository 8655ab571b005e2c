"""Check that every gradient is a constant times the true one, and find the ops that break it.

Along every edge, the computed cotangent is the true one times a ratio. All gradients are right if
and only if the logarithms of the ratios off cut edges are differences of a potential. An op is
reported if its ratio is not 1 and does not cancel with the ratios of other ops.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..core import is_floating, scan_counts
from ..rules import traced
from ._cut_edges import Edge, Graph
from ._program import (
    Exact,
    Source,
    bind,
    evaluate,
    leaves_of,
    only_rounds,
    source_of,
    types_of,
)

_SOUND = ("right", "no gradient")
# Gradients below this share of the largest count as zero: they may be rounding errors.
_NOTHING = 1e-11
# Tolerance of ratios, because an op multiplies a few factors that are rounded to float32.
_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class ParameterGradient:
    """The result for one parameter, named by its path.

    Attributes:
        verdict: "right"; "no gradient" if the computed and the true gradient are zero; "truth not
            finite" if the true one is not; or the error: "lost" (only the computed one is zero),
            "not of the loss" (only the true one is), "negative", "wrong direction", "not finite".
        constant: the computed gradient divided by the true one.
        spread: share of the computed gradient that is not a multiple of the true one.
    """

    name: str
    verdict: str
    constant: float
    spread: float


@dataclasses.dataclass(frozen=True)
class Guilty:
    """An op whose backward factors wrongly differ from its forward factor, by these ratios."""

    source: Source
    ratios: tuple[float, ...]
    advice: str

    def __str__(self) -> str:
        ratios = ", ".join(f"{ratio:.4g}" for ratio in self.ratios)
        return f"{self.source}: backward over forward factor {ratios} off cut edges; {self.advice}"


@dataclasses.dataclass(frozen=True, repr=False)
class GradientReport:
    """The result of `check_gradients`: true if every gradient is right; prints as a table."""

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
            lines.append("truth not finite: the true gradient is not finite, so use other values")
        return "\n".join(lines)

    def __repr__(self) -> str:  # shown by pytest if an assertion fails
        return f"GradientReport: {'right' if self else 'wrong'}\n{self}"


def check_gradients(
    loss: Callable[..., Any], params: Any, *batch: Any, tolerance: float = 1e-4
) -> GradientReport:
    """Check that each parameter's gradient is a positive constant times the true gradient.

    Scaling:
        Two gradients are computed in float64 without rounding, so that any policy can be checked,
        also FP8. The computed gradient uses the backward rules of the ops; the true gradient
        differentiates their forward bodies. If they differ by more than a constant, for example
        because of factors off cut edges (`cut_edges`), the report names the ops that cause it.

    Args:
        loss: deterministic function ``loss(params, *batch)`` that returns a floating scalar.
        params: tree of arrays or ScaledArrays, whose floating leaves are checked; ScaledArrays with
            respect to their data, at a constant scale.
        *batch: further arguments, which are not differentiated.
        tolerance: largest spread of a right gradient.

    Raises:
        TypeError: if ``loss`` cannot be traced.
        ValueError: if the loss is not a floating scalar or has side effects, no parameter is
            floating, or the arguments or the loss are not finite.

    Example:
        >>> from unitscale import ops
        >>> def loss(params, x):
        ...     h = ops.dense(x, params["w"], constraint=None)
        ...     return jnp.sum(jnp.sin(h.value)) + jnp.sum(x * h.value)
        >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
        >>> assert check_gradients(loss, {"w": w}, x)  # w is a cut edge, x a batch
    """
    name = "unitscale.analysis.check_gradients"
    leaves, treedef = jax.tree.flatten((params, batch))
    count = len(jax.tree.leaves(params))
    args = [*map(jnp.asarray, leaves[:count]), *leaves[count:]]
    names, chosen = [], []
    for index, ((first, *path), part) in enumerate(leaves_of((params, batch))):
        if first.idx:
            names.append(f"batch{jax.tree_util.keystr(tuple(path))}")
            continue
        text = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
        names.append(text.removesuffix(".value") or "params")
        if part != "scale" and is_floating(args[index]):
            chosen.append(index)
    if not chosen:
        raise ValueError(
            f"{name}: expected floating parameters; got {count} leaves, none of them floating. "
            "Pass the tree to differentiate, such as nnx.state(model, nnx.Param)."
        )
    for label, leaf in zip(names, args, strict=True):
        x = np.asarray(leaf)
        if is_floating(x) and (wrong := int((~np.isfinite(x.astype(np.float64))).sum())):
            raise ValueError(
                f"{name}: expected finite arguments; got {wrong} elements of {label} that are not. "
                "No gradient can be compared there."
            )

    def flat(*xs: Any) -> Any:
        given, rest = jax.tree.unflatten(treedef, xs)
        return loss(given, *rest)

    program = traced(name, flat if callable(loss) else loss, *args)
    closed, out = program.jaxpr, program.out_info
    if len(jax.tree.leaves(out)) != 1 or getattr(out, "shape", None) != () or not is_floating(out):
        raise ValueError(
            f"{name}: expected a loss that returns one floating scalar; got "
            f"{jax.tree.map(lambda a: f'{a.dtype}{list(a.shape)}', out)}. Return the loss alone, "
            "as its .value if it is a ScaledArray."
        )
    of_given = traced(name, jax.grad(flat, argnums=tuple(chosen)), *args).jaxpr

    def both(*xs: Any) -> Any:
        true = jax.value_and_grad(lambda *xs: evaluate(closed, *xs)[0], argnums=tuple(chosen))
        return evaluate(of_given, *xs), true(*xs)

    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if is_floating(np.asarray(x)) else x for x in args]
        given, (value, true) = _run(both, closed, wide)
        if not np.isfinite(value):
            raise ValueError(
                f"{name}: expected a finite loss; got {float(value)} for finite arguments. Use "
                "other values, or find the first that is not finite by analysis.trace_scales."
            )
        judged = _judge([names[i] for i in chosen], given, true, tolerance)
        report = GradientReport(judged, (), float(value))
        if report._broken:
            graph = Graph(closed, [i in chosen for i in range(len(args))])

            def of_ops(*xs: Any) -> list[Any]:
                comparison = Comparison()
                comparison.run(closed, xs)
                return [comparison.gradients.get(op, {}) for op in graph.ops]

            report = dataclasses.replace(report, guilty=_blame(graph, _run(of_ops, closed, wide)))
    return report


def _run(f: Callable[..., Any], closed: Any, args: list[Any]) -> Any:
    """Run an analysis of a program, compiled without optimization because it runs once."""
    if _has_while(closed.jaxpr):  # reverse mode has to count the iterations
        return f(*args)
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*args)


def _has_while(jaxpr: Any) -> bool:
    inner = (p.jaxpr for e in jaxpr.eqns for p in e.params.values() if isinstance(p, ClosedJaxpr))
    return any(e.primitive.name == "while" for e in jaxpr.eqns) or any(map(_has_while, inner))


def _judge(
    names: list[str], given: Any, true: Any, tolerance: float
) -> tuple[ParameterGradient, ...]:
    ratios = [Ratio.of(g, t) for g, t in zip(given, true, strict=True)]
    norms = np.array([(r.given, r.true) for r in ratios])
    least_given, least_true = _NOTHING * norms.max(0, where=np.isfinite(norms), initial=0.0)
    found = []
    for name, (constant, spread, g, t) in zip(names, ratios, strict=True):
        if not math.isfinite(t):
            verdict = "truth not finite"
        elif not math.isfinite(g):
            verdict = "not finite"
        elif g <= least_given and t <= least_true:
            verdict, constant, spread = "no gradient", math.nan, 0.0
        elif g <= least_given:
            verdict = "lost"
        elif t <= least_true:
            verdict = "not of the loss"
        elif spread > tolerance or not math.isfinite(constant):
            verdict = "wrong direction"
        else:
            verdict = "negative" if constant < 0 else "right"
        found.append(ParameterGradient(name, verdict, constant, spread))
    return tuple(found)


class Ratio(NamedTuple):
    """Constant and spread (see `ParameterGradient`), and the norms of both gradients."""

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


class Comparison(Exact):
    """Differentiate each outermost custom_vjp function, in first iterations and all branches."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[tuple[Any, ...], dict[int, tuple[Any, Any]]] = {}

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "custom_jvp_call":
            return self.run(params["call_jaxpr"], operands)
        if name == "custom_vjp_call":
            self.gradients[tuple(self.calls)] = _gradients_of_op(eqn, operands)
        elif name == "scan" and params["length"]:
            carried, start = sum(scan_counts(params)), -1 if params["reverse"] else 0
            self.run(params["jaxpr"], operands[:carried] + [x[start] for x in operands[carried:]])
        elif name == "while":
            self.run(params["body_jaxpr"], operands[params["cond_nconsts"] :])
        elif name == "cond":
            for branch in params["branches"]:
                self.run(branch, operands[1:])
        else:
            return super().apply(eqn, operands)
        return Exact().apply(eqn, operands)


def _gradients_of_op(eqn: Any, operands: list[Any]) -> dict[int, tuple[Any, Any]]:
    """Return both cotangents of each operand of a custom_vjp: by its own rule, and the true one."""
    if only_rounds(eqn):
        return {}
    avals, results = types_of(eqn.invars), types_of(eqn.outvars)
    floats = [i for i, aval in enumerate(avals) if is_floating(aval)]
    kept = [i for i, aval in enumerate(results) if is_floating(aval)]

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
    return dict(zip(floats, zip(given, true, strict=True), strict=True))


def _blame(graph: Graph, gradients: list[dict[Any, Any]]) -> tuple[Guilty, ...]:
    """Return the ops that break the gradients of a program, given the gradients of each call."""
    edges = graph.live()
    inner = [edge for edge, is_cut in edges if not is_cut]
    wrong: dict[int, list[float]] = {}
    suspects: dict[int, list[tuple[Edge, float]]] = {}
    for edge, is_cut in edges:
        if edge.op is None or (pair := gradients[edge.op].get(edge.operand)) is None:
            continue
        ratio = Ratio.of(*pair)
        # Factors have no effect where the gradient is zero.
        if not math.isfinite(ratio.true) or ratio.given == ratio.true == 0:
            continue
        if not ratio.constant > 0 or ratio.spread > _TOLERANCE:
            wrong.setdefault(edge.op, []).append(ratio.constant)
        elif not is_cut and abs(math.log(ratio.constant)) > _TOLERANCE:
            suspects.setdefault(edge.op, []).append((edge, ratio.constant))
    suspects = {call: parts for call, parts in suspects.items() if call not in wrong}
    found: dict[Source, Guilty] = {}
    for call in sorted({*wrong, *_unexplained(inner, suspects)}):
        source = source_of(graph.ops[call][-1])
        if call in wrong:
            constants = tuple(wrong[call])
            advice = "its rule does not give a positive multiple of its derivative: correct it"
        else:
            constants = tuple(constant for _, constant in suspects[call])
            advice = _advice(graph, inner, source, [edge for edge, _ in suspects[call]])
        known = found[source].ratios if source in found else ()
        if call not in wrong and known and not set(constants) <= set(known):
            advice = (
                "this line is called with inputs of several sizes: trace the loss within "
                "unitscale.batch_size(n), with n near the largest of them"
            )
        found[source] = Guilty(source, (*known, *constants), advice)
    return tuple(found.values())


def _unexplained(edges: list[Edge], suspects: dict[int, list[tuple[Edge, float]]]) -> set[int]:
    """Return the calls whose ratios do not cancel, alone or with one or two other calls."""
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
    steps = [(i, *step) for i, parts in enumerate(suspects.values()) for step in parts]
    vertices = [[root(edge.start), root(edge.end)] for _, edge, _ in steps]
    _, columns = np.unique(np.array(vertices, int), return_inverse=True)
    starts, ends = np.eye(2 * len(steps))[columns.reshape(-1, 2).T]
    incidence = starts - ends
    logs = np.zeros((len(steps), len(suspects)))  # a column for each call
    for row, (column, _, ratio) in enumerate(steps):
        logs[row, column] = math.log(ratio)
    # The residual of a least-squares fit of the logarithms by differences of a potential.
    rest = logs - incidence @ (np.linalg.pinv(incidence) @ logs) if steps else logs
    left = set(range(len(suspects)))
    for size in (1, 2, 3):
        if len(left) > 100:  # too many groups
            break
        for group in itertools.combinations(range(len(suspects)), size):
            if left.issuperset(group) and np.linalg.norm(rest[:, group].sum(1)) <= 16 * _TOLERANCE:
                left -= set(group)
    return {call for index, call in enumerate(suspects) if index in left}


def _advice(graph: Graph, inner: list[Edge], source: Source, edges: list[Edge]) -> str:
    starts = {edge.start for edge in edges}
    if any(v in graph.inputs and sum(e.start == v for e in inner) > 1 for v in starts):
        return (
            "a parameter is used several times with different factors: make them equal, by "
            "unitscale.batch_size(n) around the loss if it is used with inputs of several sizes"
        )
    if source.op.startswith("residual"):
        return "use ops.residual, or residual_split and residual_add with the same tau"
    if source.op.startswith("scale"):
        return "give it the same factor forward and backward, or move it onto a cut edge"
    if source.op.endswith(("_entropy", "_loss")):
        return "compute all terms of the sum in jax.numpy, and scale its gradient by ops.scale_bwd"
    others = "'to_grad_input_scale'" if len(edges) == 1 else "'to_left_grad_scale'"
    return f"set constraint='to_output_scale' (or {others}, 'gmean', ...)"
