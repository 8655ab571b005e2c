"""Random programs on ScaledArrays against the same programs on float64, values and gradients.

    python -m recipes bench fuzz --programs 1000 --seed 0

Programs of six kinds are drawn from the grammar: operators and ops on ScaledArrays, products of 8
bits, steps of scaled optimizers, and plain programs under scalify, with and without control flow,
loops that stop on a tolerance, shard_map and optimizers. Where one differs by more
than rounding can explain, it is made smaller and printed, ready to run.

What rounding can explain is measured: the float64 program is run again with every arithmetic result
moved by as much as the format rounds, at random, and the largest of those changes is the unit. What
comes near the ends of the range of scales is left out, since no law holds there.
"""

import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

from ._environments import PLAIN, SCALED
from ._grammar import Input, Program, is_float, random_program
from ._noise import Spread, spread_of
from ._shrink import smaller
from ._table import JsonPath, Table, asked, publish

# How many units of measured rounding a result may be off, and of the rounding of that result alone.
MEASURED, LAST = 8.0, 4.0
SAMPLES, MORE = 4, 64
DIRECT = ("operators", "ops", "optim")


def main(
    programs: Annotated[int, typer.Option(min=1, help="how many are drawn")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="number of the first")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="of the first; each has a seed of its own")] = 0,
    only: Annotated[int | None, typer.Option(help="number of the one program to run")] = None,
    json: JsonPath = None,
) -> None:
    """Prints how many programs of each kind agree, and those that do not, made small."""
    with suppress(RuntimeError):  # the devices are known already
        jax.config.update("jax_num_cpu_devices", 2)
    _keep_compiled(Path("runs/fuzz/compiled"))
    counts: dict[str, dict[str, int]] = {}
    for number in [only] if only is not None else range(first, first + programs):
        program = draw(seed, number)
        verdict = check(program)
        row = counts.setdefault(program.kind, dict.fromkeys(("agree", "left out", "differ"), 0))
        row["left out" if verdict == "" else "agree" if verdict is None else "differ"] += 1
        if verdict:
            small = smaller(program, check)
            print(f"# seed {seed}, program {number}: {check(small) or verdict}\n{listing(small)}\n")
        if number % 50 == 49:
            print(f"# up to program {number}: {counts}", flush=True)
        if number % 1000 == 999:
            jax.clear_caches()  # what is kept in memory of 1,000 programs takes some GiB
    rows = [
        {"programs": kind, **row, **asked(float(row["differ"]), most=0)}
        for kind, row in sorted(counts.items())
    ]
    publish("fuzz", [Table(f"Random programs, seed {seed}", rows)], json, [])


def _keep_compiled(folder: Path) -> None:
    """Keeps every compiled operation on disk: few are new once some hundred programs have run."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def draw(seed: int, number: int) -> Program:
    """The program of a number."""
    with jax.enable_x64(True), jax.disable_jit():
        return random_program(np.random.default_rng([seed, number]), PLAIN)


class Rounding(NamedTuple):
    """What a format does to a result: relative error, and absolute error over its RMS."""

    relative: float
    absolute: float
    reach: int  # values stay within 2**reach, or no law holds


def rounding_of(program: Program) -> Rounding:
    names = {x.data.dtype.name for x in program.inputs.values() if is_float(x.data.dtype)}
    names |= {"float32"} if program.kind == "optim" else set()  # in which it computes
    # An optimizer stores its parameters in the format that they came in.
    stored = program.kind == "optim" and any(name.startswith("float8") for name in names)
    if program.kind == "quant" or stored:
        return Rounding(2.0**-3, 2.0**-7, 80)
    direct = program.kind in DIRECT
    # Numbers beyond 2^108 stand for infinity where scalify reads a size.
    worst = [
        Rounding(2.0**-8, 0.0, 107) if name.startswith(("float8", "bfloat16"))
        # Outside of scalify scales do not follow the data, which has the range of float16.
        else Rounding(2.0**-11, 2.0**-11, 12) if name == "float16" and direct
        # Data lies within 2**4 of unit size, and subnormal numbers end at 2**-24.
        else Rounding(2.0**-11, 2.0**-20, 90) if name == "float16"
        else Rounding(2.0**-24, 2.0**-40, 107) if name == "float32"
        else Rounding(2.0**-40, 2.0**-60, 110)
        for name in names or {"float32"}
    ]  # fmt: skip
    # Scales are float32, and with them whatever is computed of values.
    return Rounding(*(f(r) for f, r in zip((max, max, min), zip(*worst, strict=True), strict=True)))


def _objective(results: list[Any]) -> Any:
    total = 0.0
    for x in results:
        if hasattr(x, "dtype") and is_float(x.dtype):
            x = jnp.where(jnp.isfinite(x), x, 0)
            total += jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype))
    return total


def _with_gradient(function: Callable[..., Any], moving: list[str]) -> Callable[..., Any]:
    """The results of a function of named arrays, and the gradient by those that move."""

    def both(**given: Any) -> Any:
        def objective(moved: dict[str, Any]) -> Any:
            results = function(**{**given, **moved})
            return _objective(results), results

        if not moving:
            return function(**given), {}
        gradient, results = jax.grad(objective, has_aux=True)({n: given[n] for n in moving})
        return results, gradient

    return both


def plain(program: Program, moving: list[str]) -> Callable[..., Any]:
    """The program on plain arrays."""
    return _with_gradient(program.function(PLAIN), moving)


def scaled(program: Program, moving: list[str]) -> Any:
    """Values and gradients of the program on ScaledArrays."""
    inputs = {name: _given(x) for name, x in program.inputs.items()}
    if program.kind in ("scalify", "control"):
        run = scalify(plain(program, moving))
        run = jax.jit(run) if program.kind == "control" else run
        return to_array(run(**inputs))
    function = program.function(SCALED)

    def of_data(**given: Any) -> list[Any]:
        full = {
            n: ScaledArray(d, inputs[n].scale) if isinstance(inputs[n], ScaledArray) else d
            for n, d in given.items()
        }
        return to_array(function(**full))

    data = {n: x.data if isinstance(x, ScaledArray) else x for n, x in inputs.items()}
    results, gradient = _with_gradient(of_data, moving)(**data)
    for name, g in gradient.items():
        if isinstance(inputs[name], ScaledArray):
            gradient[name] = g / inputs[name].scale
    return results, gradient


def _given(x: Input) -> Any:
    data = jnp.asarray(x.data)
    return data if x.scale is None else ScaledArray(data, jnp.asarray(x.scale))


def moving_of(program: Program) -> list[str]:
    """The inputs by which is differentiated: those that are scaled.

    Outside of scalify cotangents are those of data, in its own type, which does not hold them
    wherever the scale is far from 1. Casts to 8 bits are not differentiated.
    """
    return [
        name
        for name, x in program.inputs.items()
        if is_float(x.data.dtype) and x.scale is not None and program.kind not in ("quant", "optim")
        and not (program.kind in DIRECT and x.data.dtype.itemsize < 4)
    ]  # fmt: skip


def check(program: Program) -> str | None:
    """None if the program agrees, "" if it is left out, else what is wrong."""
    if not program.results:
        return ""
    moving, rounding = moving_of(program), rounding_of(program)
    try:
        with jax.enable_x64(True), jax.disable_jit():
            values = {n: jnp.asarray(x.value) for n, x in program.inputs.items()}
            function = plain(program, moving)
            spread = spread_of(function, values, rounding, SAMPLES)
            if any(x.is_zero for x in program.inputs.values()):
                sized = {n: jnp.asarray(x.size) for n, x in program.inputs.items()}
                spread = spread._replace(
                    beyond=spread.beyond or spread_of(function, sized, rounding, 0).beyond
                )
    except (TypeError, ValueError, IndexError, ZeroDivisionError, NotImplementedError):
        return ""  # the plain program has no such gradient, or no such shapes
    if spread.beyond:
        return ""
    # What has control flow is compiled whole, as users do; the others operation by operation.
    whole = program.kind == "control"
    jax.config.update("jax_disable_most_optimizations", not whole)
    wide = any(x.data.dtype == np.float64 for x in program.inputs.values())
    try:
        with jax.enable_x64(wide), jax.disable_jit(not whole):
            found = jax.tree.map(np.asarray, scaled(program, moving))
    except Exception as error:  # whatever is raised is a defect
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
    if disagreement(found, spread, rounding) is None:
        return None
    with jax.enable_x64(True), jax.disable_jit():
        spread = spread_of(function, values, rounding, MORE)
    if spread.above:
        return ""  # where exact numbers cancel, what rounding leaves of them may be out of range
    if whole:
        spread = spread.beside(_compiled(function, values))
    if not all(np.isfinite(value).all() for value in values.values()):
        spread = spread.beside(_in_float32(function, values))
    return disagreement(found, spread, rounding)


def _compiled(function: Callable[..., Any], values: dict[str, Any]) -> list[np.ndarray]:
    """Results of the exact program as the compiler has it, which may select where NaN is added."""
    with jax.enable_x64(True):
        return list(map(np.asarray, jax.tree.leaves(jax.jit(function)(**values))))


def _in_float32(function: Callable[..., Any], values: dict[str, Any]) -> list[np.ndarray]:
    """Results of the plain program, whose convolutions multiply NaN by the zeros of a padding."""
    arrays = {
        name: np.asarray(x, np.float32 if is_float(x.dtype) else x.dtype)
        for name, x in values.items()
    }
    with jax.enable_x64(False), jax.disable_jit():
        results = jax.tree.leaves(function(**jax.tree.map(jnp.asarray, arrays)))
    return [np.asarray(x, np.float64 if is_float(x.dtype) else x.dtype) for x in results]


def disagreement(found: Any, spread: Spread, rounding: Rounding) -> str | None:
    """The first result that is further off than rounding explains."""
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
        certain = (np.isfinite(moved) == np.isfinite(e)).all(0)  # rounding may not reach infinity
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


def listing(program: Program) -> str:
    """The program as a script."""
    inputs = []
    for name, x in program.inputs.items():
        data = f"jnp.asarray({x.data.tolist()}, '{x.data.dtype}').reshape({x.data.shape})"
        if x.scale is not None:
            scale = f"jnp.asarray({x.scale.tolist()}, 'float32').reshape({x.scale.shape})"
            data = f"ScaledArray({data}, {scale})"
        inputs.append(f"{name} = {data}")
    call = "scalify(f)" if program.kind in ("scalify", "control") else "f"
    values = "*(x.value if isinstance(x, ScaledArray) else x for x in args)"
    return "\n".join(
        [
            "import jax, jax.numpy as jnp; from jax import lax; from numpy import inf, nan",
            "from unitscale import ScaledArray, ops, scalify",
            program.source(),
            *inputs,
            f"args = ({', '.join(program.inputs)},)",
            f"print({call}(*args)); print(f({values}))",
        ]
    )
