"""What every value of a program looks like: a second program that computes statistics beside it.

The jaxpr is evaluated once more inside of one jitted function, which returns some sums over each
floating value in place of the value. Loops sum over their iterations, and nothing is kept.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun

from ..core import Format, format_of
from ..core._compat import scan_counts
from ._graph import inner_jaxpr, is_float
from ._scale_sums import DOWN, UP, ScaleSums, add_rows, over_iterations
from ._scale_trace import FormatShares, ScaleRecord, ScaleTrace
from ._source import Source, source_of
from ._tracing import traced

# Primitives whose results hold the same numbers as an operand.
_VIEWS = {
    "broadcast_in_dim",
    "copy",
    "copy_p",
    "expand_dims",
    "optimization_barrier",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
}


class _Site(NamedTuple):
    """A value whose statistics are computed, known while tracing."""

    source: Source
    primitive: str
    scope: str
    aval: Any


@dataclasses.dataclass(frozen=True)
class ScaleTracer:
    """What `trace_scales` returns: call it with the arguments of the function.

    Attributes:
        fn: the function.
        formats: formats that elements are counted for.
        sample: elements that large arrays are measured on, or None.

    Example:
        >>> tracer = trace_scales(lambda x: 3 * x)
        >>> tracer(2.0)
        ScaleTrace(2 values)
    """

    fn: Callable[..., Any]
    formats: tuple[Format, ...]
    sample: int | None

    def __call__(self, *args: Any, **kwargs: Any) -> ScaleTrace:
        """Measures a call of the function; the program is compiled anew each time."""
        flat, treedef = jax.tree.flatten((args, kwargs))
        program, names, out_tree, sites = _program(
            self.fn, flat, treedef, self.formats, self.sample
        )
        result, rows = jax.jit(program)(*flat)
        records = [
            _record(site, name, row, self.formats)
            for site, name, row in zip(sites, names, np.asarray(rows, np.float64), strict=True)
        ]
        return ScaleTrace(tuple(records), jax.tree.unflatten(out_tree, result))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Returns the measuring program, as ``jax.jit(fn).lower`` does that of the function.

        Compiled, it tells its cost (`cost_analysis`, `memory_analysis`), and is called with the
        same arguments: it returns the leaves of the function's result, and an array with a row of
        sums for each value.
        """

        def program(*args: Any, **kwargs: Any) -> Any:
            flat, treedef = jax.tree.flatten((args, kwargs))
            return _program(self.fn, flat, treedef, self.formats, self.sample)[0](*flat)

        return jax.jit(program).lower(*args, **kwargs)


def trace_scales(
    fn: Callable[..., Any],
    *,
    formats: Sequence[Any] = ("float16", "e4m3fn", "e5m2"),
    sample: int | None = 2**12,
) -> ScaleTracer:
    """Measures every floating value that a function computes, forward and backward.

    Scaling:
        amax over all elements and loop iterations; RMS = sqrt(mean(x^2)), the share of zeros, and
        for each format the shares of elements that it would make zero, hold as subnormal numbers,
        and saturate, over a sample of each array. The RMS of n normal elements has a relative
        standard error of (2n)^-1/2, 1.1% for the default.
        Unit scaling keeps RMS near 1, where all shares are small.

    Args:
        fn: any function that JAX can trace: with unitscale or without, jitted or not, with loops,
            and calling `jax.grad` itself if its backward pass is to be seen.
        formats: formats that the values might be stored in.
        sample: arrays of many more elements are measured on this many, or up to three times as
            many, evenly spread; None measures all of them.

    Returns:
        A `ScaleTracer`, a function of the arguments of ``fn`` that returns a `ScaleTrace`: a
        sequence of `ScaleRecord`, the inputs first and then the values in program order, with a
        table and a plot. Values that only rearrange another's elements are left out. What ``fn``
        returns is `ScaleTrace.result`.

    Raises:
        TypeError: if ``fn`` is no function that JAX can trace.
        ValueError: if it has side effects or no floating values, or a format is unknown.

    Example:
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.tanh(x @ w) ** 2)
        >>> trace = trace_scales(jax.grad(loss))(jnp.ones((4, 4)), jnp.ones((2, 4)))
        >>> [(r.name, r.rms) for r in trace if r.primitive == "input"]
        [('[0]', 1.0), ('[1]', 1.0)]
        >>> any(r.backward for r in trace)
        True

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, figure of scales in training.
    """
    if isinstance(formats, str):
        formats = (formats,)
    kept = tuple(format_of(f) for f in formats)
    if sample is not None and sample < 1:
        raise ValueError(
            "unitscale.analysis.trace_scales: sample must be at least 1, or None for all elements; "
            f"got {sample}"
        )

    return ScaleTracer(fn, kept, sample)


def _program(
    fn: Callable[..., Any],
    flat: list[Any],
    treedef: Any,
    formats: tuple[Format, ...],
    sample: int | None,
) -> tuple[Callable[..., Any], list[str], Any, list[_Site]]:
    """The measuring program of flat arguments, and what its rows are statistics of."""

    def of_leaves(*leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        return fn(*args, **kwargs)

    closed, out = traced("trace_scales", of_leaves if callable(fn) else fn, *flat)
    paths = [
        path
        for path, _ in jax.tree_util.tree_leaves_with_path(
            jax.tree.unflatten(treedef, range(len(flat)))
        )
    ]
    inputs = [
        jax.tree_util.keystr(path[1:])
        if path[0].idx == 0
        else f"[{path[1].key!r}]" + jax.tree_util.keystr(path[2:])
        for path in paths
    ]
    results = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(out)]
    sites: list[_Site] = []
    watcher = _Watcher(formats, sample)
    labels: list[str] = []

    def name_results(*xs: Any) -> None:
        # The sites are those of one evaluation, so it is done here, without computing anything.
        values, _ = watcher.rows(closed.jaxpr, closed.consts, xs)
        named = {id(value): f"result{path}" for value, path in zip(values, results, strict=True)}
        labels.extend(named.get(id(value), "") for value in watcher.values)

    jax.eval_shape(name_results, *flat)
    watcher.values.clear()
    own = []
    for var, name in zip(closed.jaxpr.invars, inputs, strict=True):
        if is_float(var.aval):
            sites.append(_Site(Source("input", ""), "input", "", var.aval))
            own.append(name)
    sites += watcher.sites
    if not sites:
        raise ValueError(
            "unitscale.analysis.trace_scales: expected a function with floating values; got one "
            "that computes none from its arguments. Integers have no scale."
        )
    labels[:0] = own

    def program(*xs: Any) -> tuple[list[Any], Any]:
        inside = _Watcher(formats, sample)
        sums = inside.sums()
        for x, var in zip(xs, closed.jaxpr.invars, strict=True):
            if is_float(var.aval):
                sums.add(x)
        return inside.run(closed.jaxpr, closed.consts, xs, sums), sums.rows()

    return program, labels, jax.tree.structure(out), sites


class _Watcher:
    """Evaluates programs, and returns statistics of their values beside their results."""

    def __init__(self, formats: tuple[Format, ...], sample: int | None):
        self.formats = formats
        self.sample = sample
        self.sites: list[_Site] = []
        self.values: list[Any] = []
        self.calls: list[Any] = []
        # What depends on no input: XLA would fold its statistics one by one while compiling.
        self.constants: dict[int, Any] = {}

    def sums(self) -> ScaleSums:
        """What collects the values of a body: one for each, as none may leave the body's trace."""
        return ScaleSums(self.formats, self.sample)

    def rows(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list, Any]:
        """The results of a program, and the statistics of its values."""
        sums = self.sums()
        return self.run(jaxpr, consts, args, sums), sums.rows()

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], sums: ScaleSums
    ) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            self.calls.append(eqn)
            results = self.apply(eqn, [read(atom) for atom in eqn.invars], sums)
            env.update(zip(eqn.outvars, results, strict=True))
            self.calls.pop()
        return [read(atom) for atom in jaxpr.outvars]

    def apply(self, eqn: Any, operands: list[Any], sums: ScaleSums) -> list[Any]:
        name = eqn.primitive.name
        special = {"scan": self.scan, "while": self.loop, "cond": self.cond}
        if name in special:
            results, rows = special[name](eqn, operands)
            sums.extend(rows)
            return results
        inner = inner_jaxpr(eqn)
        if inner is not None and name not in ("pallas_call", "shard_map"):
            closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.params.get("differentiated"):
                # Computed again in the backward pass, as it was meant to be.
                operands = list(lax.optimization_barrier(tuple(operands)))
            return self.run(inner, getattr(closed, "consts", ()), operands, sums)
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        results = list(results) if eqn.primitive.multiple_results else [results]
        if all(
            isinstance(atom, Literal) or id(x) in self.constants
            for atom, x in zip(eqn.invars, operands, strict=True)
        ):
            self.constants.update((id(x), x) for x in results)
        elif name not in _VIEWS:
            self.note(eqn, zip(eqn.outvars, results, strict=True), sums)
        return results

    def note(self, eqn: Any, pairs: Any, sums: ScaleSums) -> None:
        """Adds sites for the floating results of an equation, and their statistics."""
        for var, value in pairs:
            if is_float(var.aval) and jnp.size(value) and type(var).__name__ != "DropVar":
                source = source_of(*reversed(self.calls))
                scope = "/".join(
                    part for e in self.calls if (part := str(e.source_info.name_stack))
                )
                self.sites.append(_Site(source, eqn.primitive.name, scope, var.aval))
                self.values.append(value)
                sums.add(value)

    def scan(self, eqn: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        params, closed = eqn.params, eqn.params["jaxpr"]
        first, carried = scan_counts(params)
        last = first + carried

        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            (*state,) = carry
            results, rows = self.rows(closed.jaxpr, closed.consts, [*operands[:first], *state, *x])
            return results[: last - first], (results[last - first :], rows)

        before = len(self.sites), len(self.values)
        carry, (ys, rows) = lax.scan(
            body,
            operands[first:last],
            operands[last:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        self.once(before, rows.shape[1])
        return [*carry, *ys], over_iterations(rows)

    def once(self, before: tuple[int, int], count: int) -> None:
        """Keeps the sites of one trace of a body that JAX may have traced several times."""
        del self.sites[before[0] + count :], self.values[before[1] + count :]

    def loop(self, eqn: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        params = eqn.params
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        before = len(self.sites), len(self.values)

        def step(state: Any) -> Any:
            return self.rows(body.jaxpr, body.consts, [*operands[first:second], *state])

        shape = jax.eval_shape(step, operands[second:])[1]

        def advance(state: Any) -> Any:
            results, rows = step(state[0])
            return results, add_rows(state[1], rows)

        def proceed(state: Any) -> Any:
            plain = jaxpr_as_fun(test)
            return plain(*operands[:first], *state[0])[0]

        none = jnp.zeros(shape.shape, shape.dtype)
        results, rows = lax.while_loop(proceed, advance, (operands[second:], none))
        self.once(before, len(none))
        return results, rows

    def cond(self, eqn: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        branches = eqn.params["branches"]
        before = len(self.sites), len(self.values)
        shapes = [
            jax.eval_shape(lambda *xs, b=b: self.rows(b.jaxpr, b.consts, xs), *operands[1:])[1]
            for b in branches
        ]

        def taken(number: int) -> Callable[..., Any]:
            def branch(*xs: Any) -> Any:
                results, own = self.rows(branches[number].jaxpr, branches[number].consts, xs)
                every = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
                every[number] = own
                return results, jnp.concatenate(every)

            return branch

        results, rows = lax.switch(operands[0], [*map(taken, range(len(branches)))], *operands[1:])
        self.once(before, len(rows))
        return results, rows


def _record(site: _Site, name: str, row: np.ndarray, formats: tuple[Format, ...]) -> ScaleRecord:
    count, middle, small, large, zeros, *rest, amax = row.tolist()
    safe = max(count, 1.0)
    squares = middle
    if 0 < amax < DOWN * 2**4 or middle == 0:
        squares = small * DOWN**2
    elif not math.isfinite(middle):
        squares = large * UP**2
    shares = {}
    for index, fmt in enumerate(formats):
        lost, below, above = rest[3 * index : 3 * index + 3]
        shares[fmt.name] = FormatShares(
            zero=lost / safe, subnormal=(below - lost) / safe, saturated=above / safe
        )
    backward = "transpose(" in site.scope
    return ScaleRecord(
        name=name,
        source=site.source,
        primitive=site.primitive,
        scope=site.scope,
        backward=backward,
        shape=tuple(site.aval.shape),
        dtype=site.aval.dtype.name,
        executions=round(count / max(math.prod(site.aval.shape), 1)),
        rms=math.sqrt(squares / safe),
        amax=amax,
        zeros=zeros / safe,
        formats=shares,
    )
