"""Run a program equation by equation, and record the scale of every floating value."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core import Format, amax, format_of, is_floating
from ..rules import traced
from ._program import Interpreter, Source, bind, inner_program, source_of

# Primitives whose results hold the same numbers as an operand.
_VIEWS = {"broadcast_in_dim", "copy", "copy_p", "expand_dims", "optimization_barrier", "reshape"}
_VIEWS |= {"rev", "slice", "squeeze", "stop_gradient", "transpose"}


def extra(where: str, module: str) -> Any:
    """Import a module of the extra ``recipes``, which only tables and plots need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        todo = f"needs {module.split('.')[0]}; run pip install 'unitscale[recipes]'"
        raise ImportError(f"unitscale.analysis.{where}: {todo}") from error


@dataclasses.dataclass(frozen=True)
class FormatShares:
    """Shares of a tensor's elements that are zero, subnormal or saturated in a format."""

    zero: float
    subnormal: float
    saturated: float


@dataclasses.dataclass(frozen=True)
class ScaleRecord:
    """Statistics of one value of a program, over all its elements and executions.

    Attributes:
        name: path of an input, or ``result`` and the path of a result; "" for any other value.
        source: the unitscale op or primitive, and the line of code.
        primitive: name of the primitive; "input" for an input.
        scope: JAX's name stack, from `jax.named_scope` and transformations.
        backward: whether the value was computed in a backward pass.
        shape, dtype: shape and dtype in one execution.
        executions: number of times that the value was computed: more than 1 in loops, 0 in branches
            that were not taken.
        rms, amax: root mean square and largest magnitude; not finite if any element is not.
        zeros: share of elements that are zero.
        formats: for each format, the shares that it would make zero, subnormal or saturated.
    """

    name: str
    source: Source
    primitive: str
    scope: str
    backward: bool
    shape: tuple[int, ...]
    dtype: str
    executions: int
    rms: float
    amax: float
    zeros: float
    formats: Mapping[str, FormatShares]

    @property
    def label(self) -> str:
        """The name of an input or result, otherwise the layer and op."""
        return self.name or "/".join(filter(None, (self.source.layer, self.source.op)))


class ScaleTrace(Sequence[ScaleRecord]):
    """The records of a program's values in order, and the function's ``result``."""

    def __init__(self, records: tuple[ScaleRecord, ...], result: Any):
        self.records, self.result = records, result

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    def __repr__(self) -> str:
        return f"ScaleTrace({len(self)} values)"

    def table(self) -> Any:
        """Return a `rich.table.Table` with a row for each value."""

        def percent(share: float) -> str:
            return f"{100 * share:.3g}%"

        table = extra("ScaleTrace.table", "rich.table").Table(title=repr(self))
        for column in ("value", "pass", "type", "rms", "amax", "zero"):
            table.add_column(column, justify="left" if column in ("value", "pass") else "right")
        for name in self[0].formats if self else ():
            table.add_column(f"{name}\nzero/subn./sat.", justify="right")
        table.add_column("source", overflow="fold")
        for r in self.records:
            shares = (dataclasses.astuple(f) for f in r.formats.values())
            table.add_row(
                r.label,
                "backward" if r.backward else "forward",
                f"{r.dtype}[{','.join(map(str, r.shape))}]",
                f"{r.rms:.3g}",
                f"{r.amax:.3g}",
                percent(r.zeros),
                *(" / ".join(map(percent, parts)) for parts in shares),
                f"{r.primitive} {r.source.line}",
            )
        return table

    def plot(self) -> Any:
        """Plot the RMS and amax of each value in a `matplotlib.figure.Figure`.

        The range of each format is shaded, its normal numbers darker than its subnormal ones.
        """
        count, module = len(self), extra("ScaleTrace.plot", "matplotlib.figure")
        figure = module.Figure((min(20.0, 6 + 0.15 * count), 5), layout="constrained")
        axes = figure.subplots()
        shown = {i for i, r in enumerate(self) if r.rms > 0 and math.isfinite(r.amax)}
        for backward, label, color in ((False, "forward", "C0"), (True, "backward", "C1")):
            if places := [i for i in sorted(shown) if self[i].backward is backward]:
                rms, amax = [self[i].rms for i in places], [self[i].amax for i in places]
                axes.vlines(places, rms, amax, color=color, alpha=0.35)
                axes.plot(places, rms, "o", color=color, markersize=4, label=f"{label} RMS")
                axes.plot(places, amax, "_", color=color, label=f"{label} amax")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log", base=2)
        low, high = axes.get_ylim()
        low, high = min(low, 2.0**-10), max(high, 2.0**6)
        if lost := [i for i, r in enumerate(self) if r.executions and i not in shown]:
            label = "all zero or not finite"
            axes.plot(lost, [1.5 * low] * len(lost), "x", color="C3", label=label)
        for index, name in enumerate(self[0].formats if count else ()):
            fmt, shade = format_of(name), {"color": f"C{index + 4}", "linewidth": 0}
            axes.axhspan(fmt.smallest_subnormal, fmt.smallest_normal, alpha=0.05, **shade)
            axes.axhspan(fmt.smallest_normal, fmt.max, alpha=0.12, label=name, **shade)
        axes.set(ylim=(low, high), xlim=(-1, max(count, 1)), ylabel="RMS and amax")
        axes.set_xlabel("value, in program order")
        if 0 < count <= 60:  # more labels would overlap
            axes.set_xticks(range(count), [r.label[-48:] for r in self], rotation=90, fontsize=8)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside upper center", ncols=4, frameon=False)
        return figure


def trace_scales(
    fn: Callable[..., Any],
    *,
    formats: Sequence[Any] = ("float16", "e4m3fn", "e5m2"),
    sample: int | None = 2**12,
) -> Callable[..., ScaleTrace]:
    """Return a function that runs ``fn`` and measures every floating value that it computes.

    Scaling:
        amax is exact. RMS = sqrt(mean(x^2)) and shares of elements come from a sample of each
        array. The RMS of n normal elements has a relative standard error of (2n)^-1/2, 1.1% for the
        default.

    Args:
        fn: any function that JAX can trace. To see a backward pass, give it a gradient function.
        formats: formats that the values might be stored in.
        sample: number of evenly spaced elements to measure, at least. Arrays with fewer than twice
            as many, and all arrays for None, are measured as a whole.

    Returns:
        A function of the arguments of ``fn``, traced once for arguments of the same types. It
        returns a `ScaleTrace`: records in program order, without values that only rearrange others.

    Raises:
        TypeError: if JAX cannot trace ``fn``.
        ValueError: if it has side effects or no floating values, or a format is unknown.

    Example:
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.tanh(x @ w) ** 2)
        >>> trace = trace_scales(jax.grad(loss))(jnp.ones((4, 4)), jnp.ones((2, 4)))
        >>> [(r.name, r.rms) for r in trace if r.primitive == "input"]
        [('[0]', 1.0), ('[1]', 1.0)]
        >>> any(r.backward for r in trace)
        True
    """
    where = "unitscale.analysis.trace_scales"
    kept = tuple(format_of(f) for f in ((formats,) if isinstance(formats, str) else formats))
    if sample is not None and sample < 1:
        raise ValueError(f"{where}: sample must be at least 1, or None for all; got {sample}")
    memory: dict[Any, Any] = {}

    def measured(*args: Any, **kwargs: Any) -> ScaleTrace:
        program = traced(where, fn, *args, **kwargs)
        watcher = Watcher(kept, sample, memory)
        leaves, keystr = jax.tree_util.tree_leaves_with_path((args, kwargs)), jax.tree_util.keystr
        inputs = []
        for (path, x), var in zip(leaves, program.jaxpr.jaxpr.invars, strict=True):
            x = x if isinstance(x, jax.Array) else jnp.asarray(x, var.aval.dtype)
            inputs.append(x)
            if is_floating(x):
                name = keystr(path[1:])
                watcher.measure(x, _about(x, Source("input", ""), "input", name=name))
        results = watcher.run(program.jaxpr, inputs)
        if not watcher.records:
            raise ValueError(f"{where}: expected a function with floating values; got none")
        paths = jax.tree_util.tree_leaves_with_path(program.out_info)
        for value, (path, _) in zip(results, paths, strict=True):
            if (index := watcher.noted.get(id(value))) is not None:
                watcher.records[index] = f"result{keystr(path)}", *watcher.records[index][1:]
        rows = np.concatenate(jax.device_get(watcher.rows)).astype(np.float64)
        pairs = zip(watcher.records, rows, strict=True)
        records = tuple(_record(about, row, kept) for about, row in pairs)
        result = jax.tree.unflatten(jax.tree.structure(program.out_info), results)
        return ScaleTrace(records, result)

    return measured


def _about(x: Any, source: Source, primitive: str, scope: str = "", name: str = "") -> Any:
    """Return the fields of a value's `ScaleRecord` that precede its statistics."""
    return name, source, primitive, scope, "transpose(" in scope, tuple(x.shape), x.dtype.name


class Watcher(Interpreter):
    """Execute a program, and collect a record and a row of statistics for each value."""

    def __init__(self, formats: tuple[Format, ...], sample: int | None, memory: dict[Any, Any]):
        super().__init__()
        self.formats, self.sample, self.memory = formats, sample, memory
        self.records: list[Any] = []  # without statistics
        self.rows: list[Any] = []
        self.noted: dict[int, int] = {}  # index of a value's record, by the value's id
        # Values that depend on no input are not measured; kept here so that ids are not reused.
        self.constants: dict[int, Any] = {}

    def measure(self, x: Any, about: Any) -> None:
        """Add a value and its statistics."""
        self.records.append(about)
        self.rows.append(_row(x, self.sample, self.formats))

    def body(self, closed: ClosedJaxpr, args: Sequence[Any]) -> tuple[list[Any], Any]:
        outer, self.rows = self.rows, [jnp.zeros((0, 4 + 3 * len(self.formats)), jnp.float32)]
        results = self.run(closed, args)
        rows, self.rows = jnp.concatenate(self.rows), outer
        return results, rows

    def combined(self, rows: Any) -> Any:
        most = rows[..., -1:].max(0, initial=0.0)
        ratio = jnp.where(most > 0, rows[..., -1:] / most, 0.0)
        sums = rows.at[..., 1:2].multiply(ratio**2).sum(0)
        return sums.at[..., -1:].set(most)

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name, inner = eqn.primitive.name, inner_program(eqn)
        if name == "cond" and (platforms := eqn.params.get("branches_platforms")):
            # Run only the branch of this platform, as JAX compiles no other.
            own = jax.default_backend()
            index = next(i for i, names in enumerate(platforms) if names is None or own in names)
            return self.run(eqn.params["branches"][index], operands[1:])
        if inner is not None and name != "shard_map":
            if eqn.params.get("differentiated"):
                # The barrier keeps `jax.checkpoint`'s recomputation separate from the forward pass.
                operands = list(lax.optimization_barrier(tuple(operands)))
            return self.run(inner, operands)
        if is_control := name in ("scan", "while", "cond"):
            results, rows = self._control(eqn, operands)
            self.rows.append(rows)
        elif name in ("pallas_call", "shard_map"):  # need to be compiled
            results = jax.jit(lambda *xs: bind(eqn, xs, eqn.params))(*operands)
        else:
            results = bind(eqn, operands, eqn.params)
        for value in results:  # a new value may have the id of a deleted one
            self.noted.pop(id(value), None)
        if is_control:
            return results
        if all(
            isinstance(atom, Literal) or id(x) in self.constants
            for atom, x in zip(eqn.invars, operands, strict=True)
        ):
            self.constants.update((id(x), x) for x in results)
        elif name not in _VIEWS:
            self.note(eqn, results)
        return results

    def note(self, eqn: Any, results: list[Any]) -> None:
        """Measure the floating results of an equation."""
        if (where := tuple(self.calls)) not in self.memory:
            scope = "/".join(part for e in where if (part := str(e.source_info.name_stack)))
            self.memory[where] = source_of(*reversed(where)), eqn.primitive.name, scope
        for var, value in zip(eqn.outvars, results, strict=True):
            if is_floating(var.aval) and jnp.size(value) and type(var).__name__ != "DropVar":
                self.noted[id(value)] = len(self.records)
                self.measure(value, _about(var.aval, *self.memory[where]))

    def _control(self, eqn: Any, operands: list[Any]) -> Any:
        """Execute control flow; programs with the same text are compiled once."""

        def run(*xs: Any) -> tuple[list[Any], Any]:
            before = len(self.records)
            results, rows = self.control(eqn, [*xs])
            del self.records[before + len(rows) :]  # JAX may have traced a body several times
            return results, rows

        if any(isinstance(x, Tracer) for x in operands):
            return run(*operands)
        if (where := tuple(self.calls)) not in self.memory:
            before = len(self.records)
            lowered = jax.jit(run).lower(*operands)
            key = lowered.as_text(), *(getattr(x, "sharding", None) for x in operands)
            if key not in self.memory:
                self.memory[key] = lowered.compile()
            self.memory[where] = self.memory[key], self.records[before:]
            del self.records[before:]
        program, records = self.memory[where]
        self.records += records
        return program(*operands)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _row(x: Any, sample: int | None, formats: tuple[Format, ...]) -> Any:
    """Return statistics (1, width) of an array, estimated from a sample.

    Count; squares relative to amax, so as not to overflow; zeros; shares by format; amax.
    """
    mesh, measure = jax.typeof(x).sharding.mesh, functools.partial(_measure, sample, formats)
    if AxisType.Explicit in mesh.axis_types:
        # With automatic axes, so that the compiler chooses how to gather.
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.sharding.auto_axes(measure, out_sharding=whole)(x)
    return measure(x)


def _measure(sample: int | None, formats: tuple[Format, ...], x: Any) -> Any:
    step = x.size // sample if sample is not None and x.size >= 2 * sample else 1
    # An odd stride visits every column of a matrix whose width is a power of two.
    part = x.reshape(-1)[:: step - 1 + step % 2]
    elements, most = jnp.abs(part.astype(jnp.float32)), amax(x).astype(jnp.float32)
    terms = [jnp.where(most > 0, elements / most, 0) ** 2, elements == 0]
    for f in formats:
        terms += [elements <= f.smallest_subnormal / 2, elements < f.smallest_normal]
        terms += [elements > f.max]
    operands = tuple(term.astype(jnp.float32) for term in terms)
    # A single reduction reads the sample once.
    zeros = (np.zeros((), np.float32),) * len(operands)
    sums = lax.reduce(operands, zeros, lambda a, b: tuple(map(lax.add, a, b)), (0,))
    share = x.size / max(part.size, 1)
    return jnp.stack([jnp.float32(x.size), *(total * share for total in sums), most])[None]


def _record(about: Any, row: np.ndarray, formats: tuple[Format, ...]) -> ScaleRecord:
    *_, shape, _ = about
    count, squares, zeros, *rest, most = row.tolist()
    safe = max(count, 1.0)
    shares = {}
    for index, fmt in enumerate(formats):
        lost, below, above = (part / safe for part in rest[3 * index : 3 * index + 3])
        shares[fmt.name] = FormatShares(zero=lost, subnormal=below - lost, saturated=above)
    return ScaleRecord(
        *about,
        executions=round(count / max(math.prod(shape), 1)),
        rms=most * math.sqrt(squares / safe) if math.isfinite(most) else most,
        amax=most,
        zeros=zeros / safe,
        formats=shares,
    )
