"""Checks of every op against references in NumPy.

The result of an op must be `fwd * reference`, with a reference in float64 NumPy, and each gradient
`bwd * derivative`, with the derivative as a central difference of the reference.
"""

import functools
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale.core import ScaledArray, to_float

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
DTYPES = ("float32", "float16", "bfloat16")
# float32 accumulates, and is compared with a finite difference; 16-bit types round the operand of a
# factor, the factor and the result.
_ROUNDINGS = {"float64": 64, "float32": 64, "float16": 2, "bfloat16": 2}

Reference = Callable[..., np.ndarray]


def normal(name: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Draw independent standard normal arrays, the same in every run."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return [rng.standard_normal(shape) for shape in shapes]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round an array to a dtype; return float64."""
    return np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float64)


def assert_close(
    actual: Any, expected: np.ndarray, dtype: str, what: str, slack: float = 1
) -> None:
    """Compare up to a few roundings, relative to the entry and to a typical term."""
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    eps = float(jnp.finfo(jnp.dtype(dtype)).eps) * _ROUNDINGS[dtype] * slack
    bound = eps * (np.abs(expected) + np.mean(np.abs(expected)) + 1e-30)
    error = np.abs(actual - expected)
    assert (error <= bound).all(), f"{what}: {actual} is not {expected}; error {error.max()}"


def gradients(
    f: Reference, args: Sequence[np.ndarray], cotangent: np.ndarray, steps: Sequence[Any]
) -> list[np.ndarray]:
    """Return central differences of `sum(cotangent * f(*args))` by each argument."""
    grads = []
    for index, (arg, step) in enumerate(zip(args, steps, strict=True)):
        h = np.broadcast_to(np.asarray(step, np.float64), arg.shape)
        grad = np.empty(arg.shape)
        for position in np.ndindex(arg.shape):
            sides = []
            for sign in (1, -1):
                moved = arg.copy()
                moved[position] += sign * h[position]
                values = f(*args[:index], moved, *args[index + 1 :])
                sides.append((values * cotangent).sum())
            grad[position] = (sides[0] - sides[1]) / (2 * h[position])
        grads.append(grad)
    return grads


def data_and_scale(y: Any) -> tuple[jax.Array, jax.Array]:
    data, scale = y.pair if isinstance(y, ScaledArray) else (y, 1)
    return data, jnp.broadcast_to(to_float(scale), data.shape)


def pulled(f: Callable[..., Any], *args: Any, cotangent: Any = 1.0) -> tuple[Any, Any]:
    """Compute the data of an op's result and the gradients by its arguments, in one program."""

    def program(cotangent: Any, *args: Any) -> tuple[Any, Any]:
        y, vjp = jax.vjp(lambda *args: data_and_scale(f(*args))[0], *args)
        return y, vjp(jnp.broadcast_to(cotangent, y.shape).astype(y.dtype))

    return jax.jit(program)(cotangent, *args)


def _prepare(
    op: Callable[..., Any],
    reference: Reference,
    args: Sequence[np.ndarray],
    *,
    fwd: float,
    bwd: Sequence[float],
    dtype: str = "float32",
    scales: Sequence[Any] | None = None,
    mapped: bool = False,
    slack: float | Mapping[str, float] = 1,
    step: float = 1e-5,
) -> tuple[Callable[..., Any], Sequence[Any], Callable[[Any], None]]:
    """The program of a check, its arguments, and the comparison of its results."""
    scales = (None,) * len(args) if scales is None else scales
    slack = slack[dtype] if isinstance(slack, Mapping) else slack
    # Two examples, for vmap and scan.
    pairs = [np.stack([rounded(a, dtype), rounded(a[..., ::-1], dtype)]) for a in args]
    factors = [1.0 if s is None else np.asarray(s, np.float64) for s in scales]
    given = [None if s is None else jnp.asarray(s, jnp.float32) for s in scales]

    def apply(given: Sequence[Any], *data: jax.Array) -> tuple[jax.Array, jax.Array]:
        wrapped = (d if s is None else ScaledArray(d, s) for d, s in zip(data, given, strict=True))
        return data_and_scale(op(*wrapped))

    def scanned(*stacked: jax.Array) -> Any:
        step = jax.checkpoint(functools.partial(apply, given))
        return jax.lax.scan(lambda carry, data: (carry, step(*data)), 0, stacked)[1]

    def true(*data: np.ndarray) -> np.ndarray:
        return reference(*(d * v for d, v in zip(data, factors, strict=True)))

    def pull(f: Callable[..., Any], ct: jax.Array, *args: Any) -> Any:
        (y, scale), vjp = jax.vjp(f, *args)
        return y, scale, vjp((ct.astype(y.dtype), jnp.ones_like(scale)))

    def program(given: Sequence[Any], ct: jax.Array, *stacked: jax.Array) -> Any:
        if mapped:
            vmapped = jax.vmap(functools.partial(pull, functools.partial(apply, given)))
            return {"vmap": vmapped(ct, *stacked), "scan": pull(scanned, ct, *stacked)}, ()
        y, scale, (by_scales, *grads) = pull(apply, ct[0], given, *(x[0] for x in stacked))
        return {"jit": jax.tree.map(lambda x: x[None], (y, scale, grads))}, by_scales

    expected = [true(*(p[i] for p in pairs)) for i in ((0, 1) if mapped else (0,))]
    cotangents = rounded(normal("cotangent", (2, *expected[0].shape))[0], dtype)

    def compare(found: Any) -> None:
        results, by_scales = found
        for cotangent in jax.tree.leaves(by_scales):
            np.testing.assert_array_equal(cotangent, 0)
        for i, wanted in enumerate(expected):
            true_grads: list[np.ndarray] = []
            for name, result in results.items():
                y, scale, grads = jax.tree.map(lambda x, i=i: np.asarray(x[i], np.float64), result)
                what = f"under {name}, example {i}"
                assert_close(y * scale, fwd * wanted, dtype, f"value {what}", slack)
                divisor = np.where(scale > 0, scale, 1)
                true_grads = true_grads or gradients(
                    lambda *data, divisor=divisor: true(*data) / divisor,
                    [p[i] for p in pairs],
                    cotangents[i],
                    [step / np.where(v > 0, v, 1) for v in factors],
                )
                for j, (grad, derivative) in enumerate(zip(grads, true_grads, strict=True)):
                    assert_close(grad, bwd[j] * derivative, dtype, f"gradient {j} {what}", slack)

    stacked = [jnp.asarray(p, dtype) for p in pairs]
    return program, [given, jnp.asarray(cotangents, jnp.float32), *stacked], compare


def check_all(cases: Mapping[str, "Case"]) -> None:
    """Check cases in one compiled program."""
    prepared = {name: _prepare(*case.args, **case.keywords) for name, case in cases.items()}
    results = compute({name: (program, *args) for name, (program, args, _) in prepared.items()})
    for name, (*_, compare) in prepared.items():
        with entry(name):
            compare(results[name])


def check(*args: Any, **options: Any) -> None:
    """Check value and gradients of an op; if `mapped`, under vmap, scan and checkpoint.

    The value must be `fwd * reference(values)`, and the gradient of argument i `bwd[i]` times
    the derivative of `reference(values) / scale of the output`. Gradients of scales must be 0.
    `args` are rounded to the dtype first; `slack` multiplies the tolerance; `step` is the step of
    the finite differences.
    """
    check_all({"the op": functools.partial(check, *args, **options)})


# `case(op, reference, args, fwd=..., bwd=...)` is a check that is made when it is called. Central
# differences of a linear function are exact, whatever their step.
case = functools.partial(functools.partial, check)
linear = functools.partial(case, step=1.0)
Case = functools.partial[None]


def in_every_dtype(
    cases: Mapping[str, Case], *, mapped: Sequence[str], wide: Collection[str] = ()
) -> Any:
    """Make a test of cases in every dtype, some of them mapped.

    By default each case runs in float32 and in one 16-bit dtype, the first of `mapped` under vmap
    and scan. Cases in `wide`, which only differ in shapes, run in float32 alone.
    """
    narrow = [(name, i % 2) for i, name in enumerate(n for n in cases if n not in wide)]
    runs: dict[str, dict[str, dict[str, Any]]] = {
        "float32": {name: {"mapped": name == mapped[0]} for name in cases},
        "16 bits": {name: {"dtype": DTYPES[1 + odd]} for name, odd in narrow},
        "other 16 bits": {name: {"dtype": DTYPES[2 - odd]} for name, odd in narrow},
        "mapped": {name: {"mapped": True} for name in mapped[1:]},
    }

    @pytest.mark.parametrize("run", ["float32", "16 bits", slow("other 16 bits"), slow("mapped")])
    def test(run: str) -> None:
        check_all({n: functools.partial(cases[n], **how) for n, how in runs[run].items()})

    return test


def under_scales(scales: Sequence[Sequence[Any]], cases: Mapping[str, Case], **options: Any) -> Any:
    """Make a test of cases with several scales of operands."""

    def test() -> None:
        check_all(
            {
                f"{name}, scales {i}": functools.partial(
                    case, scales=given[: len(case.args[2])], **options
                )
                for name, case in cases.items()
                for i, given in enumerate(scales)
            }
        )

    return test


def scaled(args: Sequence[np.ndarray], scales: Sequence[Any], dtype: Any = jnp.float32) -> list:
    """Make arrays, or ScaledArrays if there is a scale."""
    arrays = (jnp.asarray(a, dtype) for a in args)
    return [a if s is None else ScaledArray(a, s) for a, s in zip(arrays, scales, strict=True)]


def values(args: Sequence[np.ndarray], scales: Sequence[Any]) -> list[np.ndarray]:
    """Return the values of `scaled` in float64."""
    return [a if s is None else a * s for a, s in zip(args, scales, strict=True)]
