"""Compare values and gradients of random programs on ScaledArrays with float64.

    python -m recipes bench fuzz --programs 1000 --seed 0

Programs of six kinds are drawn as Python source (`fuzz.yaml`): operators and ops on ScaledArrays,
FP8 matmuls, steps of scaled optimizers, and plain programs under scalify, also with control flow.
A program whose results differ by more than rounding explains is shortened and printed.

To measure the effect of rounding, the float64 program also runs several times with random errors,
of the size of the format's rounding, added to every result. Programs with numbers near the limits
of the range of scales are left out.
"""

import functools
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import typer
import yaml
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from unitscale import ScaledArray, ops, optim, quant, to_array
from unitscale.transforms import scalify

from . import runs


def main(
    programs: Annotated[int, typer.Option(min=1, help="number of programs")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="seed of all programs")] = 0,
    json: runs.JsonPath = None,
) -> None:
    """Print how many programs of each kind agree, and shortened versions of those that differ."""
    # Cached, because after some hundred programs nearly all compiled operations repeat.
    jax.config.update("jax_compilation_cache_dir", "runs/fuzz/compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    counts: dict[str, dict[str, int]] = {}
    for number in range(programs):
        program = draw(seed, number)
        verdict = check(program)
        row = counts.setdefault(program.kind, dict.fromkeys(("agree", "left out", "differ"), 0))
        row["left out" if verdict == "" else "agree" if verdict is None else "differ"] += 1
        if verdict:
            small = smaller(program, check)
            print(f"# seed {seed}, program {number}: {check(small) or verdict}\n{listing(small)}\n")
        if number % 1000 == 999:
            jax.clear_caches()  # to free some GiB
    found = sorted(counts.items())
    rows = [{"programs": kind, **row} | runs.asked(row["differ"], 0) for kind, row in found]
    runs.publish("fuzz", [runs.Table(f"Random programs, seed {seed}", rows)], json)


_LISTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


def _expressions(*parts: str) -> list[str]:
    return re.split(r" \| |\n", "\n".join(_LISTED["parts"][part].strip() for part in parts))


# For each kind, its share of all programs, and the expressions of its lines.
KINDS = {k: (share, _expressions(*parts)) for k, (share, *parts) in _LISTED["kinds"].items()}
DIRECT = ("operators", "ops", "optim")  # run on ScaledArrays directly, without scalify
SCALIFIED = ("scalify", "control")
FORMATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
FORMAT_SHARES = np.array([5, 3, 3, 1, 1]) / 13
# Few shapes, because operations are compiled for each.
SHAPES = [(), (3,), (3,), (2, 3), (2, 3), (3, 3), (3, 3), (2, 1), (1, 3), (1,), (0, 3)]


def _step(optimizer: Any, params: Any, grads: Any, scaled: bool = False) -> Any:
    """Take two steps of an optimizer, or of its `optim.scaled` version with float32 moments."""
    if scaled:
        optimizer = optim.scaled(optimizer, weights=None, moments=(None, None))
    grads = jnp.broadcast_to(to_array(grads), params.shape)
    grads = grads if scaled else grads.astype(params.dtype)
    state = optimizer.init(params)
    for factor in (1.0, -0.5):
        updates, state = optimizer.update(grads * factor, state, params)
        params = (optim if scaled else optax).apply_updates(params, updates)
    return params


def _newton(x: Any) -> Any:
    """Compute the root of x^2 + 2 by Newton's method, with a loop that stops on a tolerance."""
    square = lax.stop_gradient(x * x) + 2

    def better(root: Any) -> Any:
        return (root + square / root) / 2

    def far(carry: Any) -> Any:  # bounded, as it may not converge with random errors
        return jnp.any(abs(carry[0] ** 2 - square) > 1e-3 * square) & (carry[1] < 1000)

    root, _ = lax.while_loop(far, lambda carry: (better(carry[0]), carry[1] + 1), (square, 0))
    return better(better(root))


def _q8(x: Any, dtype: str = "e4m3fn") -> ScaledArray:
    return quant.quantize(x, dtype, quant.Dynamic())


def _rounded(x: Any, dtype: str = "e4m3fn") -> Any:
    """Return x through a no-op that `Evaluation` rounds; in E4M3, infinity becomes NaN."""
    x = lax.reduce_precision(x, 11, 52)
    return jnp.where(jnp.isinf(x), jnp.nan, x) if dtype == "e4m3fn" else x


def _plain_product(x: Any, y: Any) -> Any:
    (_, _), (_, _) = x.shape, y.shape  # of matrices only
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())))


def _product(x: Any, y: Any) -> Any:
    contraction = quant.Contraction("ik", "kj", "ij")
    return quant.scaled_matmul(_q8(x), _q8(y), contraction, 1.0, jnp.float32)


class _PlainOps:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: to_array(getattr(ops, name)(*args, **kwargs))


# Names that programs use, on plain arrays and on ScaledArrays.
PLAIN = {"jax": jax, "jnp": jnp, "lax": lax, "optax": optax, "newton": _newton}
SCALED = PLAIN | {"ops": ops, "q8": _q8, "product": _product}
SCALED["step"] = functools.partial(_step, scaled=True)
PLAIN |= {"ops": _PlainOps(), "q8": _rounded, "product": _plain_product, "step": _step}


class Input(NamedTuple):
    """An argument: stored data, and the scale, which is None for a plain array."""

    data: np.ndarray
    scale: np.ndarray | None = None

    @property
    def value(self) -> np.ndarray:
        """Data times scale; floats in float64."""
        if not is_float(self.data.dtype):
            return self.data
        return self.data.astype(np.float64) * np.float64(1.0 if self.scale is None else self.scale)


@dataclass(frozen=True)
class Program:
    """Inputs by name, and lines `(name, expression)`; names that no line uses are the results."""

    kind: str
    inputs: Mapping[str, Input]
    lines: tuple[tuple[str, str], ...] = ()

    @property
    def results(self) -> list[str]:
        used = {word for _, text in self.lines for word in names_in(text)}
        return [name for name, _ in self.lines if name not in used]

    def source(self) -> str:
        body = [f"    {name} = {text}" for name, text in self.lines]
        head = f"def f({', '.join(self.inputs)}):"
        return "\n".join([head, *body, f"    return [{', '.join(self.results)}]"])

    def function(self, known: Mapping[str, Any]) -> Callable[..., list[Any]]:
        space = dict(known)
        exec(self.source(), space)
        return space["f"]


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def names_in(text: str) -> list[str]:
    return re.findall(r"\b[vi]\d+\b", text)


def draw(seed: int, number: int) -> Program:
    """Draw a program; lines whose shapes do not fit are drawn again."""
    rng = np.random.default_rng([seed, number])
    kind = str(rng.choice(list(KINDS), p=[share for share, _ in KINDS.values()]))
    formats = [str(x) for x in rng.choice(FORMATS, 1 + (rng.random() < 0.15), p=FORMAT_SHARES)]
    inputs = {f"i{k}": _draw_input(rng, formats, kind) for k in range(rng.integers(1, 5))}
    program, texts = Program(kind, inputs), KINDS[kind][1]
    with jax.enable_x64(True), jax.disable_jit():
        avals = {n: jax.ShapeDtypeStruct(x.value.shape, x.value.dtype) for n, x in inputs.items()}
        given, wanted = dict(avals), int(rng.integers(1, 6))
        for _ in range(40):
            if len(program.lines) == wanted:
                break
            text = filled(rng, texts[rng.integers(len(texts))], avals)
            name = f"v{len(program.lines)}"
            longer = replace(program, lines=(*program.lines, (name, text or "")))
            try:
                *_, aval = jax.eval_shape(longer.function(PLAIN), **given)
            except Exception:
                continue  # no operand of the type, or shapes that do not fit
            if getattr(aval, "size", 99) <= 64:
                program, avals[name] = longer, aval
    return program


def filled(rng: np.random.Generator, text: str, avals: Mapping[str, Any]) -> str | None:
    """Fill in the operands of an expression, preferring recent results, for deep programs."""
    kinds, chosen = {"x": "f", "y": "f", "z": "f", "n": "iu", "m": "b"}, {}
    # Not a set, whose order differs between processes.
    for hole in dict.fromkeys(re.findall(r"\{(\w)\}", text)):
        names = [name for name, a in avals.items() if a.dtype.kind in kinds[hole]]
        if not names:
            return None
        chosen[hole] = names[max(rng.integers(len(names), size=2))]
    return text.format(**chosen)


def _draw_input(rng: np.random.Generator, formats: Sequence[str], kind: str) -> Input:
    shape = SHAPES[rng.integers(len(SHAPES))]
    draw = rng.random()
    if draw < 0.08:
        return Input(rng.integers(0, 3, shape).astype(rng.choice(["int32", "uint8", "int8"])))
    if draw < 0.13:
        return Input(rng.random(shape) < 0.5)
    dtype = np.dtype(getattr(ml_dtypes, (name := str(rng.choice(formats))), None) or name)
    data = np.asarray(rng.normal(size=shape) * (rng.random() >= 0.08))
    if data.size and rng.random() < 0.12:
        # No very small ones in float16: slices keep the scale of the whole array.
        small = [2.0**-6] if dtype == np.float16 else [2.0**-14, 2.0**-20]
        data.flat[rng.integers(data.size)] = rng.choice([0, 9, *small])
    if data.size and rng.random() < 0.04:
        data.flat[rng.integers(data.size)] = rng.choice([np.inf, -np.inf, np.nan])
    data = data.astype(dtype)
    if rng.random() < 0.12 and dtype.itemsize >= 4:
        return Input(data)
    most = rng.choice([0, 2, 12, 40, 100], p=[0.25, 0.3, 0.25, 0.15, 0.05])
    if dtype == np.float16 and kind not in SCALIFIED:
        most = min(most, 2)  # in sums, the operand with the smaller scale underflows
    if not data.any():
        most = min(most, 12)  # products of zeros multiply their scales, too
    exponents = rng.integers(-most, most + 1)
    if len(shape) == 2 and rng.random() < 0.15:
        exponents = exponents + rng.integers(-3, 4, (shape[0], 1))
    return Input(data, np.exp2(exponents).astype(np.float32))


def smaller(program: Program, differs: Callable[[Program], Any]) -> Program:
    """Drop lines, last ones first, while the rest still differs, then drop unused inputs."""
    for line in reversed(program.lines):
        shorter = replace(program, lines=tuple(x for x in program.lines if x != line))
        program = shorter if differs(shorter) else program
    used = {word for _, text in program.lines for word in names_in(text)}
    return replace(program, inputs={n: x for n, x in program.inputs.items() if n in used})


def listing(program: Program) -> str:
    lines = [program.source()]
    for name, (data, scale) in program.inputs.items():
        lines.append(f"{name} = jnp.asarray({data.tolist()}, '{data.dtype}')")
        if scale is not None:
            lines.append(f"{name} = ScaledArray({name}, jnp.asarray({scale.tolist()}, 'float32'))")
    call = "scalify(f)" if program.kind in SCALIFIED else "f"
    return "\n".join([*lines, f"{call}({', '.join(program.inputs)})"])


# Operations that return operands or parts of them: nothing is rounded, and programs may compare a
# maximum with its operands for equality. `abs` of complex numbers is an exception.
_EXACT = set(_LISTED["exact"].split())
# Sums whose terms may cancel: linear in each operand, accumulated in float32 or wider.
_SUMS = {"dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "fft"}
_ACCUMULATED = 2.0**-24
_CALLS = set(_LISTED["calls"].split())


class Rounding(NamedTuple):
    """Rounding errors of a format: relative to each element, and relative to the RMS."""

    relative: float
    absolute: float
    reach: int  # programs with values outside of 2**-reach to 2**reach are left out


def rounding_of(program: Program) -> Rounding:
    names = {x.data.dtype.name for x in program.inputs.values() if is_float(x.data.dtype)}
    narrow = any(name.startswith("float8") for name in names)
    if program.kind == "quant" or (program.kind == "optim" and narrow):  # parameters in 8 bits
        return Rounding(2.0**-3, 2.0**-7, 80)
    # Scales and optimizers compute in float32. scalify treats values above 2^108 as infinity.
    # Float16 underflows at 2^-24; only scalify adapts scales to that.
    half = (2.0**-11, 12) if program.kind in DIRECT else (2.0**-20, 90)
    known = {"float16": Rounding(2.0**-11, *half), "float32": Rounding(2.0**-24, 2.0**-40, 107)}
    names |= {"float32"} if program.kind == "optim" or not names else set()
    found = [known.get(name, Rounding(2.0**-8, 0.0, 107)) for name in names]
    return Rounding(max(r[0] for r in found), max(r[1] for r in found), min(r[2] for r in found))


class Evaluation:
    """Evaluates a jaxpr operation by operation; with `rng`, adds random errors to the results."""

    def __init__(self, rounding: Rounding, rng: np.random.Generator | None = None):
        self.rounding, self.rng = rounding, rng
        self.sizes: list[float] = []  # the largest finite magnitude of each nonzero result

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands, params = [read(atom) for atom in eqn.invars], eqn.params
            inner = [params[n] for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in params]
            if eqn.primitive.name in _CALLS and inner:
                consts = getattr(inner[0], "consts", ())
                results = self.run(getattr(inner[0], "jaxpr", inner[0]), consts, operands)
            else:
                bound = _bind(eqn, operands)
                results = list(bound) if eqn.primitive.multiple_results else [bound]
                results = [self.moved(eqn, operands, r) for r in results]
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    @np.errstate(over="ignore", invalid="ignore")  # such programs are left out
    def moved(self, eqn: JaxprEqn, operands: Sequence[Any], result: Any) -> Any:
        if not _inexact(result) or not jnp.size(result):
            return result
        x, name = np.asarray(result), eqn.primitive.name
        size = np.abs(np.where(np.isfinite(x), x, 0))
        self.sizes += [float(np.max(size))] if size.any() else []
        is_complex = np.iscomplexobj(x)
        exact = name in _EXACT and (is_complex or not np.iscomplexobj(operands[0]))
        if self.rng is None or exact:
            return result
        relative, absolute, _ = self.rounding
        summed = min(relative, _ACCUMULATED)
        if is_complex:  # real and imaginary parts are float32 or wider
            relative, absolute = summed, min(absolute, summed)
        terms: Any = 0.0  # sum of the terms' magnitudes
        if name == "fft":
            terms = np.sqrt(np.mean(size * size, axis=-1, keepdims=True))
        elif name in _SUMS:
            sizes = [jnp.abs(y).astype(jnp.result_type(y)) if _inexact(y) else y for y in operands]
            terms = np.abs(np.asarray(_bind(eqn, sizes)))
        small = absolute * np.sqrt(np.mean(size * size))
        small = small + summed * np.where(np.isfinite(terms), terms, 0)
        most = relative * size + np.where(x == 0, 0, small)
        # Operations with a loop inside round more than once.
        most = most * (4.0 if name in ("scan", "while", "cond") else 1.0)
        unit = self.rng.uniform(-1, 1, (1 + is_complex, *x.shape))
        return jnp.asarray(x + most * (unit[0] + 1j * unit[1] if is_complex else unit[0]))


def _bind(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


class Spread(NamedTuple):
    """Results of a program, exact and with random rounding errors."""

    exact: list[np.ndarray]
    moved: list[np.ndarray]  # with errors, (samples, ...)
    beyond: bool  # True if an exact number is outside of the format's range
    above: bool  # True if a number with errors is above that range


def spread_of(
    function: Callable[..., Any], given: dict[str, Any], rounding: Rounding, samples: int
) -> Spread:
    """Run a function of float64 arrays exactly, and with random rounding errors."""
    with jax.enable_x64(True), jax.disable_jit():
        values = {name: jnp.asarray(x) for name, x in given.items()}
        closed = jax.make_jaxpr(lambda kw: function(**kw))(values)
        runs = [Evaluation(rounding)]
        runs += [Evaluation(rounding, np.random.default_rng(i)) for i in range(samples)]
        found = [run.run(closed.jaxpr, closed.consts, jax.tree.leaves(values)) for run in runs]
    exact, *moved = ([np.asarray(x) for x in results] for results in found)
    most = 2.0**rounding.reach
    return Spread(
        exact,
        [np.stack(same) for same in zip(*moved, strict=True)],
        any(not 1 / most <= size <= most for size in runs[0].sizes),
        any(size > most for run in runs[1:] for size in run.sizes),
    )


# Tolerances, as multiples of the measured effect of rounding and of the result's own rounding.
MEASURED, LAST = 8.0, 4.0
SAMPLES, MORE = 4, 64


def check(program: Program) -> str | None:
    """Return None if the program agrees, "" if it is left out, else a description of the error."""
    if not program.results:
        return ""
    moving, rounding = moving_of(program), rounding_of(program)
    function = with_gradient(program.function(PLAIN), moving)
    values = {name: x.value for name, x in program.inputs.items()}
    try:
        spread = spread_of(function, values, rounding, SAMPLES)
    except (TypeError, ValueError, IndexError, NameError, ArithmeticError, NotImplementedError):
        return ""  # the plain program itself fails, for example for want of a gradient
    if spread.beyond:
        return ""
    # Programs with control flow are compiled as a whole, like a user's; others run op by op.
    whole = program.kind == "control"
    jax.config.update("jax_disable_most_optimizations", not whole)
    try:
        with jax.enable_x64(False), jax.disable_jit(not whole):
            found = jax.tree.map(np.asarray, scaled(program, moving))
    except Exception as error:  # any exception is a defect
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
    if disagreement(found, spread, rounding) is None:
        return None
    spread = spread_of(function, values, rounding, MORE)
    if spread.above:
        return ""  # exact numbers cancel here, and their rounding errors may overflow
    if program.kind in SCALIFIED or not all(np.isfinite(x).all() for x in values.values()):
        # Also accept what the plain program gives in float32, where a square may overflow, and
        # where XLA may drop or spread NaN (it selects instead of adding, and multiplies padding).
        narrow = {n: np.float32(x) if is_float(x.dtype) else x for n, x in values.items()}
        with jax.enable_x64(False), jax.disable_jit(not whole):
            compiled = jax.tree.leaves(jax.jit(function)(**narrow))
        both = zip(spread.moved, compiled, strict=True)
        spread = spread._replace(moved=[np.stack([*m, np.asarray(r, m.dtype)]) for m, r in both])
    return disagreement(found, spread, rounding)


def moving_of(program: Program) -> list[str]:
    """Return the inputs to differentiate by: ScaledArrays whose format can hold gradients."""
    # Outside of scalify a cotangent has the dtype of the data and no scale.
    least = {"quant": 99, "optim": 99, "scalify": 1, "control": 1}.get(program.kind, 4)
    scaled = {n: x.data for n, x in program.inputs.items() if x.scale is not None}
    return [n for n, x in scaled.items() if is_float(x.dtype) and x.itemsize >= least]


def with_gradient(function: Callable[..., Any], moving: list[str]) -> Callable[..., Any]:
    """Make a function return its results and their gradient by the arrays named in `moving`."""

    def objective(moved: dict[str, Any], given: dict[str, Any]) -> Any:
        results, total = function(**{**given, **moved}), 0.0
        for x in (x for x in results if hasattr(x, "dtype") and is_float(x.dtype)):
            x = jnp.where(jnp.isfinite(x), x, 0)
            total += jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype))
        return total, results

    def both(**given: Any) -> Any:
        if not moving:
            return function(**given), {}
        moved = {name: given[name] for name in moving}
        return jax.grad(objective, has_aux=True)(moved, given)[::-1]

    return both


def scaled(program: Program, moving: list[str]) -> Any:
    scales = {n: jnp.asarray(x.scale) for n, x in program.inputs.items() if x.scale is not None}
    data = {name: jnp.asarray(x.data) for name, x in program.inputs.items()}

    def whole(given: dict[str, Any]) -> dict[str, Any]:
        return {n: ScaledArray(d, scales[n]) if n in scales else d for n, d in given.items()}

    if program.kind in SCALIFIED:
        run = scalify(with_gradient(program.function(PLAIN), moving))
        run = jax.jit(run) if program.kind == "control" else run
        return to_array(run(**whole(data)))
    function = program.function(SCALED)
    of_data = with_gradient(lambda **given: to_array(function(**whole(given))), moving)
    results, gradient = of_data(**data)
    return results, {name: g / scales[name] for name, g in gradient.items()}


def disagreement(found: Any, spread: Spread, rounding: Rounding) -> str | None:
    """Describe the first result that differs by more than rounding explains, if any."""
    leaves = jax.tree.leaves_with_path(found)
    for (path, x), e, moved in zip(leaves, spread.exact, spread.moved, strict=True):
        name = jax.tree_util.keystr(path)
        if x.shape != e.shape:
            return f"{name}: shape {x.shape} for {e.shape}"
        if e.dtype.kind != "f":
            if not (x == e).all() and (moved == e).all():
                return f"{name}: {x!r} for {e!r}"
            continue
        x = x.astype(np.float64)
        certain = (np.isfinite(moved) == np.isfinite(e)).all(0)  # not changed by rounding
        finite = np.isfinite(e) & certain
        if not np.array_equal(np.isfinite(x)[certain], np.isfinite(e)[certain]):
            return f"{name}: {x.tolist()} for {e.tolist()}"
        rms = np.sqrt(np.mean(np.square(e[finite]))) if finite.any() else 0.0
        with np.errstate(invalid="ignore"):
            far = np.max(np.abs(moved - e), axis=0, initial=0.0)
            bound = MEASURED * far + LAST * (rounding.relative * abs(e) + rounding.absolute * rms)
            bad = finite & (np.abs(x - e) > bound + 2.0**-rounding.reach)
        if bad.any():
            return f"{name}: {x.tolist()} for {e.tolist()}, within {bound.tolist()}"
    return None
