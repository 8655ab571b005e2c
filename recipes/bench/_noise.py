"""How far the results of a program move when each of its operations rounds: by trying."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

# Operations whose results are their operands, or some of them: nothing is rounded, and a program
# may ask whether the maximum is equal to an operand. The magnitude of complex numbers is none.
_EXACT = re.findall(
    r"\w+",
    "neg abs copy stop_gradient sign reshape transpose broadcast_in_dim squeeze rev slice split "
    "dynamic_slice gather select_n max min reduce_max reduce_min sort cummax cummin clamp "
    "convert_element_type optimization_barrier name complex conj",
)
# Sums of terms that may cancel: linear in each operand, accumulated in float32 or wider.
_SUMS = {"dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "fft"}
_ACCUMULATED = 2.0**-24
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2",
    "checkpoint", "custom_vjp_call_jaxpr",
}  # fmt: skip


class Spread(NamedTuple):
    """Exact results, the same when each operation rounds (samples first), whether some exact number
    lies beyond the range in which the law holds, and whether one that is rounded lies above it.
    """

    exact: list[np.ndarray]
    moved: list[np.ndarray]
    beyond: bool
    above: bool

    def beside(self, results: list[np.ndarray]) -> "Spread":
        """The spread with one sample more."""
        moved = [np.stack([*m, r]) for m, r in zip(self.moved, results, strict=True)]
        return self._replace(moved=moved)


def spread_of(
    function: Callable[..., Any], given: dict[str, Any], rounding: Any, samples: int
) -> Spread:
    """Runs a function of float64 arrays exactly, and with roundings drawn at random."""
    closed = jax.make_jaxpr(lambda kw: function(**kw))(given)
    arrays = jax.tree.leaves(given)
    sizes: list[float] = []

    exact = _Exact(sizes).run(closed, arrays)
    noisy = [_Noisy(np.random.default_rng(i), rounding) for i in range(samples)]
    runs = [run.run(closed, arrays) for run in noisy]
    moved = [np.stack([np.asarray(x) for x in same]) for same in zip(*runs, strict=True)]
    beyond = any(not 2.0**-rounding.reach <= size <= 2.0**rounding.reach for size in sizes)
    above = any(run.largest > 2.0**rounding.reach for run in noisy)
    return Spread([np.asarray(e) for e in exact], moved, beyond, above)


class _Run:
    """Evaluates a jaxpr operation by operation, through calls."""

    def after(self, eqn: JaxprEqn, operands: Sequence[Any], result: Any) -> Any:
        raise NotImplementedError

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        return self._run(closed.jaxpr, closed.consts, args)

    def _run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        names = [*jaxpr.constvars, *jaxpr.invars]
        env: dict[Any, Any] = dict(zip(names, [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            inner = next((eqn.params[n] for n in _INNER if n in eqn.params), None)
            if eqn.primitive.name in _CALLS and inner is not None:
                inner, known = (
                    (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
                )
                results = self._run(inner, known, operands)
            else:
                bound = _bind(eqn, operands)
                results = list(bound) if eqn.primitive.multiple_results else [bound]
                results = [self.after(eqn, operands, r) for r in results]
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def _bind(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


class _Exact(_Run):
    """Keeps the largest finite magnitude of every result that is not zero."""

    def __init__(self, sizes: list[float]):
        self.sizes = sizes

    def after(self, eqn: JaxprEqn, operands: Sequence[Any], result: Any) -> Any:
        if _inexact(result):
            x = np.abs(np.asarray(result))
            self.sizes += [float(np.max(x, where=np.isfinite(x), initial=0.0))]
            if not self.sizes[-1]:
                self.sizes.pop()
        return result


class _Noisy(_Run):
    """Moves every arithmetic result at random by as much as it may be rounded."""

    def __init__(self, rng: np.random.Generator, rounding: Any):
        self.rng, self.rounding, self.largest = rng, rounding, 0.0

    @np.errstate(over="ignore", invalid="ignore")  # far beyond the range, where no law holds
    def after(self, eqn: JaxprEqn, operands: Sequence[Any], result: Any) -> Any:
        name = eqn.primitive.name
        if not _inexact(result) or not jnp.size(result):
            return result
        x = np.asarray(result)
        is_complex = np.iscomplexobj(x)
        if name in _EXACT and (is_complex or not np.iscomplexobj(operands[0])):
            return result
        # What has a loop inside rounds more often than once.
        times = 4.0 if name in ("scan", "while", "cond") else 1.0
        relative, absolute = self.rounding.relative, self.rounding.absolute
        summed = min(relative, _ACCUMULATED)
        if is_complex:  # its parts are float32 or wider
            relative, absolute = summed, min(absolute, summed)
        size = np.abs(np.where(np.isfinite(x), x, 0))
        self.largest = max(self.largest, float(np.max(size)))
        rms = np.sqrt(np.mean(size * size))
        most = relative * size + np.where(x == 0, 0, absolute * rms)
        if name in _SUMS:
            most = most + np.where(x == 0, 0, summed * _terms(eqn, operands, size))
        return jnp.asarray(x + times * most * self._unit(x.shape, is_complex))

    def _unit(self, shape: tuple[int, ...], is_complex: bool) -> np.ndarray:
        unit = self.rng.uniform(-1, 1, shape)
        return unit + 1j * self.rng.uniform(-1, 1, shape) if is_complex else unit


def _terms(eqn: JaxprEqn, operands: Sequence[Any], size: np.ndarray) -> np.ndarray:
    """The sum of the magnitudes of what a sum adds; of a transform, about that."""
    if eqn.primitive.name == "fft":
        return np.sqrt(np.mean(size * size, axis=-1, keepdims=True))
    sizes = [jnp.abs(x).astype(jnp.result_type(x)) if _inexact(x) else x for x in operands]
    found = np.abs(np.asarray(_bind(eqn, sizes)))
    return np.where(np.isfinite(found), found, 0)
