"""What every value of a program looks like: RMS, amax, and what formats would make of it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import Format, format_of
from ._graph import is_float
from ._scale_sums import DOWN, UP
from ._scale_trace import FormatShares, ScaleRecord, ScaleTrace
from ._source import Source
from ._tracing import traced
from ._watcher import Memory, Site, Watcher


class _Program(NamedTuple):
    """A function for arguments of some types."""

    jaxpr: Any
    out: Any
    memory: Memory


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
    _programs: dict[Any, _Program] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, *args: Any, **kwargs: Any) -> ScaleTrace:
        """Executes the function equation by equation, and measures what each computes.

        As by `jax.jit`, it is traced once for all arguments of the same types.
        """
        flat, treedef = jax.tree.flatten((args, kwargs))
        closed, out, memory = self._program(flat, treedef)
        jaxpr = closed.jaxpr
        inputs = [
            x if isinstance(x, jax.Array) else jnp.asarray(x, var.aval.dtype)
            for x, var in zip(flat, jaxpr.invars, strict=True)
        ]
        watcher = Watcher(self.formats, self.sample, memory)
        sums = watcher.sums()
        for x, var, path in zip(inputs, jaxpr.invars, _paths(treedef), strict=True):
            if is_float(var.aval):
                watcher.sites.append(Site(Source("input", ""), "input", "", var.aval, path))
                sums.add(x)
        results = watcher.run(jaxpr, closed.consts, inputs, sums)
        if not watcher.sites:
            raise ValueError(
                "unitscale.analysis.trace_scales: expected a function with floating values; got "
                "one that computes none from its arguments. Integers have no scale."
            )
        watcher.name_results(results, out)
        rows = np.concatenate(jax.device_get(sums.rows)).astype(np.float64)
        records = [
            _record(site, row, self.formats) for site, row in zip(watcher.sites, rows, strict=True)
        ]
        return ScaleTrace(tuple(records), jax.tree.unflatten(jax.tree.structure(out), results))

    def _program(self, flat: list[Any], treedef: Any) -> _Program:
        def of_leaves(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(treedef, leaves)
            return self.fn(*args, **kwargs)

        fn = of_leaves if callable(self.fn) else self.fn

        def program() -> _Program:
            return _Program(*traced("trace_scales", fn, *flat), Memory({}, {}))

        key = treedef, tuple(jax.typeof(x) if hasattr(x, "dtype") else type(x) for x in flat)
        try:
            known = key in self._programs
        except TypeError:  # a part of the tree that is no array cannot be hashed
            return program()
        return self._programs[key] if known else self._programs.setdefault(key, program())


def _paths(treedef: Any) -> list[str]:
    """Names of the leaves of (args, kwargs), as `ScaleRecord` has them."""
    numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
    return [
        jax.tree_util.keystr(path[1:])
        if path[0].idx == 0
        else f"[{path[1].key!r}]" + jax.tree_util.keystr(path[2:])
        for path in paths
    ]


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
        Equations are executed one by one, so that each value has been rounded to its own dtype; a
        compiler that fuses them may round less often.

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


def _record(site: Site, row: np.ndarray, formats: tuple[Format, ...]) -> ScaleRecord:
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
        name=site.name,
        source=site.source,
        primitive=site.primitive,
        scope=site.scope,
        backward=backward,
        shape=tuple(site.aval.shape),
        dtype=site.aval.dtype.name,
        executions=round(count / max(math.prod(site.aval.shape), 1)),
        rms=math.sqrt(squares / safe) if math.isfinite(amax) else amax,
        amax=amax,
        zeros=zeros / safe,
        formats=shares,
    )
