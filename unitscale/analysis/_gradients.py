"""The proof that unit scaling left every gradient a constant times the truth."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..core import is_scaled
from ._blame import Guilty, blame
from ._exact import evaluate, has_while
from ._graph import build, is_float
from ._ratios import Ratio, local_ratios
from ._tracing import traced

Verdict = Literal[
    "right",
    "no gradient",
    "wrong direction",
    "negative",
    "lost",
    "not of the loss",
    "not finite",
    "truth not finite",
]

_SOUND = ("right", "no gradient")
# Gradients this much smaller than the largest are what rounding in float64 leaves of zero.
_NOTHING = 1e-11


@dataclasses.dataclass(frozen=True)
class ParameterGradient:
    """What was found of one parameter.

    Attributes:
        name: its path.
        verdict: "right"; "no gradient" if the loss does not depend on it and no gradient is given;
            "truth not finite" if the given one cannot be judged; or what is wrong.
        constant: the given gradient over the true one.
        spread: share of the given gradient that is no multiple of the true one; nan if one of them
            is not finite.

    Example:
        >>> ParameterGradient("kernel", "right", 2.0, 1e-9).verdict
        'right'
    """

    name: str
    verdict: Verdict
    constant: float
    spread: float


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """The result of `check_gradients`: true if every gradient is right, and a table as text.

    Attributes:
        parameters: one finding per parameter.
        guilty: the ops that broke it, where it is broken.
        loss: value of the loss, without rounding.

    Example:
        >>> bool(check_gradients(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2)))
        True
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
        width = max(len(p.name) for p in self.parameters)
        lines = [f"{'parameter':{max(width, 9)}}  {'constant':>10}  {'spread':>8}  verdict"]
        for p in self.parameters:
            constant = "" if math.isnan(p.constant) else f"{p.constant:.5g}"
            lines.append(f"{p.name:{max(width, 9)}}  {constant:>10}  {p.spread:8.1e}  {p.verdict}")
        if self:
            return "\n".join(lines)
        lines += [f"broken by {op}" for op in self.guilty]
        if self._broken and not self.guilty:
            lines.append("no single op was found to break it")
        if any(p.verdict == "truth not finite" for p in self.parameters):
            lines.append(
                "where the truth is not finite no gradient can be judged: use other values"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        # What pytest shows of a failed assertion.
        state = "right" if self else "wrong"
        return f"GradientReport: {state}\n{self}"


def check_gradients(
    loss: Callable[..., Any], params: Any, *batch: Any, tolerance: float = 1e-4
) -> GradientReport:
    """Checks that each parameter's gradient is a positive constant times the true gradient.

    Scaling:
        Both gradients are those of the program of ``loss`` in float64 with every rounding taken
        out, so that any policy can be checked, FP8 included: the given one runs the backward rules
        of its ops, the true one differentiates their forward bodies. Where they differ, the ratio
        of each op's own backward to its derivative is measured, and the smallest set of ops is
        named whose ratios disagree between the paths to the loss.

    Args:
        loss: ``loss(params, *batch)``, a floating scalar, deterministic.
        params: tree of arrays or ScaledArrays; its floating leaves are checked, the data of a
            ScaledArray with its scale held fixed.
        *batch: further arguments, which are not differentiated.
        tolerance: largest spread of a gradient that is right. Factors are float32 numbers, whose
            rounding is near 1e-7 each.

    Returns:
        `GradientReport`: true if all is right; its text is a table, and names the guilty ops. A
        gradient that is not finite is never right, nor one whose truth is not.

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
    names, leaves, chosen, treedef = _flat(params)
    rest, rest_tree = jax.tree.flatten(batch)
    args = [*leaves, *rest]
    batch_names = [
        f"batch{jax.tree_util.keystr(path)}"
        for path, _ in jax.tree_util.tree_leaves_with_path(batch)
    ]
    _check_finite(args, [*names, *batch_names])

    def flat(*xs: Any) -> Any:
        given = jax.tree.unflatten(rest_tree, xs[len(leaves) :])
        return loss(jax.tree.unflatten(treedef, xs[: len(leaves)]), *given)

    closed, out = traced("check_gradients", flat if callable(loss) else loss, *args)
    if len(jax.tree.leaves(out)) != 1 or getattr(out, "shape", None) != () or not is_float(out):
        raise ValueError(
            "unitscale.analysis.check_gradients: expected a loss that returns one floating scalar; "
            f"got {jax.tree.map(lambda a: f'{a.dtype}{list(a.shape)}', out)}. Return the loss "
            "alone, as its .value if it is a ScaledArray."
        )
    of_given, _ = traced("check_gradients", jax.grad(flat, argnums=tuple(chosen)), *args)

    def both(*xs: Any) -> Any:
        def value(*moved: Any) -> Any:
            full = list(xs)
            for i, x in zip(chosen, moved, strict=True):
                full[i] = x
            return evaluate(closed, *full)[0]

        true = jax.value_and_grad(value, argnums=tuple(range(len(chosen))))
        return evaluate(of_given, *xs), true(*(xs[i] for i in chosen))

    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if i in chosen else x for i, x in enumerate(args)]
        run = _run_unrolled if has_while(closed.jaxpr) else _run
        given, (value, true) = run(both, *wide)
        if not np.isfinite(value):
            raise ValueError(
                "unitscale.analysis.check_gradients: expected a finite loss; got "
                f"{float(value)} for finite arguments. Use other values, or look for the first "
                "one that is not finite with analysis.trace_scales."
            )
        found = _judge([names[i] for i in chosen], given, true, tolerance)
        report = GradientReport(found, (), float(value))
        if report._broken:
            graph = build(closed.jaxpr, [i in chosen for i in range(len(args))])
            guilty = blame(graph, local_ratios(closed, wide, run))
            report = dataclasses.replace(report, guilty=guilty)
    return report


def _run(f: Callable[..., Any], *args: Any) -> Any:
    # The program runs once: compiling it well would take longer than running it.
    compiled = jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})
    return compiled(*args)


def _run_unrolled(f: Callable[..., Any], *args: Any) -> Any:
    # JAX does not differentiate a loop backwards whose turns it cannot count, and nothing is traced
    # here that could not be: `evaluate` takes turn by turn.
    return f(*args)


def _flat(params: Any) -> tuple[list[str], list[Any], list[int], Any]:
    """Names and leaves, which of them are differentiated, and the structure."""
    names, chosen = [], []
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        for leaf in jax.tree.leaves(node):
            if is_float(jnp.asarray(leaf)) and (not is_scaled(node) or leaf is node.data):
                chosen.append(len(names))
            names.append(name or "params")
    if not chosen:
        raise ValueError(
            "unitscale.analysis.check_gradients: expected floating parameters; got "
            f"{len(names)} leaves, none of them floating. Pass the tree that is differentiated, "
            "such as nnx.state(model, nnx.Param)."
        )
    leaves, treedef = jax.tree.flatten(params)
    return names, [jnp.asarray(leaf) for leaf in leaves], chosen, treedef


def _check_finite(leaves: list[Any], names: list[str]) -> None:
    for name, leaf in zip(names, leaves, strict=True):
        if is_float(jnp.asarray(leaf)):
            wide = np.asarray(leaf).astype(np.float64)
            if not np.isfinite(wide).all():
                raise ValueError(
                    "unitscale.analysis.check_gradients: expected finite arguments; got "
                    f"{int((~np.isfinite(wide)).sum())} elements of {name} that are not. No "
                    "gradient can be compared there."
                )


def _judge(
    names: list[str], given: Any, true: Any, tolerance: float
) -> tuple[ParameterGradient, ...]:
    ratios = [Ratio.of(g, t) for g, t in zip(given, true, strict=True)]
    nothing_given = _NOTHING * _largest(r.given for r in ratios)
    nothing_true = _NOTHING * _largest(r.true for r in ratios)
    found = []
    for name, ratio in zip(names, ratios, strict=True):
        is_given, is_true = ratio.given > nothing_given, ratio.true > nothing_true
        verdict: Verdict = "right"
        if not math.isfinite(ratio.true):
            verdict = "truth not finite"
        elif not math.isfinite(ratio.given):
            verdict = "not finite"
        elif not (is_given or is_true):
            ratio, verdict = Ratio(float("nan"), 0.0, 0.0, 0.0), "no gradient"
        elif not is_given:
            verdict = "lost"
        elif not is_true:
            verdict = "not of the loss"
        elif ratio.spread > tolerance or not np.isfinite(ratio.constant):
            verdict = "wrong direction"
        elif ratio.constant < 0:
            verdict = "negative"
        found.append(ParameterGradient(name, verdict, ratio.constant, ratio.spread))
    return tuple(found)


def _largest(norms: Iterable[float]) -> float:
    return max(filter(math.isfinite, norms), default=0.0)
