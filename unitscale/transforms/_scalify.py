"""`scalify`: the same function with a scale for every array."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ..core import is_scaled
from ._boundary import from_input, to_output, traced_aval
from ._decouple import Branch, Branches
from ._interpreter import Interpreter, Settings
from ._report import Report
from ._settle import leaving
from ._strategies import ScaleRounding, StaticScaling, growth_of
from ._values import known_atoms


class Scalified:
    """A function whose float arrays carry scales; see `scalify`.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import as_scaled
        >>> double = scalify(lambda x: 2 * x)
        >>> isinstance(double, Scalified), double(as_scaled(jnp.ones(2))).scale
        (True, Array(2., dtype=float32))
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static_argnums: Sequence[int],
        static_argnames: Sequence[str],
        strategy: StaticScaling,
        rounding: ScaleRounding,
        decouple: bool = False,
    ):
        """Wraps a function; see `scalify`."""
        self._function = function
        self._static_argnums = frozenset(static_argnums)
        self._static_argnames = frozenset(static_argnames)
        self._scaling = strategy, rounding, decouple
        self._decouple = decouple
        self._growth = growth_of(strategy, rounding)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the scaled function."""
        return self._run(args, kwargs)[0]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        bound = functools.partial(self._function, instance)
        argnums = [n - (n > 0) for n in self._static_argnums]
        return Scalified(bound, argnums, tuple(self._static_argnames), *self._scaling)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Lists every default rule that a call takes, and every scale known at run time only.

        Args:
            *args: as for a call; nothing is computed.
            **kwargs: as for a call.

        Returns:
            One entry per primitive that left scale propagation, in program order, with the line of
            the user's code; empty if all was propagated. An inner function that is called
            repeatedly on the same types counts once. Its ``exponents`` are the run-time scales.

        Example:
            >>> import jax.numpy as jnp
            >>> from unitscale import as_scaled
            >>> scalify(jnp.linalg.cholesky).report(as_scaled(jnp.eye(2)))[0].primitive
            'cholesky'
            >>> print(scalify(lambda x, y: x * y).report(as_scaled(jnp.ones(2)), jnp.ones(2)))
            exponent: argument at [0]: given
        """
        found: list[Report] = []

        def function(leaves: list[Any]) -> None:
            replaced = iter(leaves)
            inner_args, inner_kwargs = jax.tree.map(
                lambda x: next(replaced) if _is_array(x) else x,
                (args, kwargs),
                is_leaf=is_scaled,
            )
            found.append(self._run(inner_args, inner_kwargs)[1].report)

        leaves = [x for x in jax.tree.leaves((args, kwargs), is_leaf=is_scaled) if _is_array(x)]
        jax.eval_shape(function, leaves)
        return found[-1]

    def branches(self, *args: Any, **kwargs: Any) -> list[Branch]:
        """Calls a decoupled function, and counts how often each place ran in float16.

        Args:
            *args: as for a call, concrete arrays.
            **kwargs: as for a call.

        Returns:
            One entry per place that may run either way, in program order, with the line of the
            user's code and the error against float32, which is computed beside it.

        Example:
            >>> import jax.numpy as jnp
            >>> from unitscale import as_scaled
            >>> f = scalify(jnp.exp, decouple=True)
            >>> [(b.narrow, b.wide) for b in f.branches(as_scaled(jnp.ones(2), dtype=jnp.float16))]
            [(1, 0)]
        """
        if not self._decouple:
            raise ValueError(
                "unitscale.scalify: branches are those of a decoupled function; call "
                "transforms.decoupled(fn), or scalify(fn, decouple=True)"
            )
        counted = Branches()
        jax.block_until_ready(self._run(args, kwargs, counted)[0])
        return counted.found()

    def _static_positions(self, count: int) -> set[int]:
        positions = {i % count if i < 0 else i for i in self._static_argnums if -count <= i < count}
        if self._static_argnames:  # a call without them need not look at the signature
            names = list(_parameters(self._function))
            positions |= {names.index(n) for n in self._static_argnames if n in names}
        return {i for i in positions if i < count}

    def _run(
        self, args: Sequence[Any], kwargs: dict[str, Any], branches: Branches | None = None
    ) -> tuple[Any, Settings]:
        static = self._static_positions(len(args))
        fixed = {k: v for k, v in kwargs.items() if k in self._static_argnames}
        moving = [a for i, a in enumerate(args) if i not in static]
        named = {k: v for k, v in kwargs.items() if k not in fixed}
        leaves, tree = jax.tree.flatten((moving, named), is_leaf=is_scaled)
        traced = [x for x in leaves if _is_array(x)]
        structure: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            # What is no array is part of the program, as for `jax.grad`.
            replaced = [next(given) if _is_array(x) else x for x in leaves]
            inner, inner_named = jax.tree.unflatten(tree, replaced)
            rest = iter(inner)
            full = [args[i] if i in static else next(rest) for i in range(len(args))]
            result = self._function(*full, **inner_named, **fixed)
            flattened, out_tree = jax.tree.flatten(result)
            structure.append(out_tree)
            return flattened

        functools.update_wrapper(flat, self._function, updated=())
        closed = jax.make_jaxpr(flat)(*map(traced_aval, traced))
        settings = Settings(self._growth, self._decouple, branches)
        values = list(map(from_input, traced))
        for value, path in zip(values, _paths((moving, named), skip=1), strict=True):
            settings.see("argument", path, known_atoms([value]))
        results = Interpreter(settings).run(closed.jaxpr, closed.consts, values)
        left = [leaving(v) for v in results]
        returned = jax.tree.unflatten(structure[-1], map(to_output, left))
        inside, paths = known_atoms(results), _paths(returned)
        for value, path in zip(left, paths, strict=True):
            settings.see("result", path, known_atoms([value]) - inside)
        return returned, settings


def _paths(tree: Any, skip: int = 0) -> list[str]:
    """Where in a call or in what it returns each array stands, as ``[0].weights``."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_scaled)
    return [jax.tree_util.keystr(path[skip:]) for path, x in leaves if _is_array(x)]


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Those of a signature; none of a function of C without one."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def _check_static(
    function: Callable[..., Any], argnums: Sequence[int], argnames: Sequence[str]
) -> None:
    """Refuses static arguments that the function does not have, as `jax.jit` does."""
    if not (argnums or argnames):
        return
    parameters = _parameters(function)
    kinds = [p.kind for p in parameters.values()]
    count = len(kinds) - kinds.count(inspect.Parameter.KEYWORD_ONLY)
    any_name = not kinds or inspect.Parameter.VAR_KEYWORD in kinds
    any_number = not kinds or inspect.Parameter.VAR_POSITIONAL in kinds
    wrong = {
        "static_argnames": [n for n in argnames if not any_name and n not in parameters],
        "static_argnums": [n for n in argnums if not any_number and not -count <= n < count],
    }
    for option, found in wrong.items():
        if found:
            raise ValueError(
                f"unitscale.scalify: {option} must be of the function's arguments, "
                f"{', '.join(parameters)}; got {', '.join(map(str, found))}"
            )


def _is_array(x: Any) -> bool:
    """Whether a leaf is traced: arrays are; numbers, strings and functions of Python are not."""
    if is_scaled(x):
        return True
    # Types such as jnp.float32 have a dtype too, and arrays of NumPy may hold strings.
    typed = hasattr(x, "dtype") and hasattr(x, "shape")
    return typed and getattr(x.dtype, "kind", "") not in ("O", "S", "U")


def scalify(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    static_scaling: StaticScaling = "unit",
    scale_rounding: ScaleRounding = "carried",
    decouple: bool = False,
) -> Any:
    """Returns the same mathematical function with every float array a ScaledArray, end to end.

    Scaling:
        Every primitive that the function traces to, those of its gradients and of its optimizer
        included, acts on data and on scale: carriers keep the scale, products multiply data and
        scales, reductions and dots over n terms grow by sqrt(n), functions of the value see
        ``data * scale`` in float32. Scales are formulas of the arguments' scales, of which an array
        is made only where data is multiplied by it. Operands of a sum whose scales have the same
        formula meet at it. Others meet at their values, at scale 1 in float32, or at the larger
        scale where both are arguments. What has no such rule is computed on values and rescaled
        (`Scalified.report`). The law is, up to rounding,
        ``to_array(scalify(f)(*as_scaled(args))) == f(*args)``. The program is traced on values:
        float32 where data has 16 bits or fewer, so that a constant such as 1e-8 is exact; data
        keeps its own type, and chains of element-wise results and sums are rounded to it at their
        end. Static knowledge chooses the scales inside. A narrow result (float16, 8 bits) of which
        the size is not certain is brought to RMS 1 by the power of two that its data asks for,
        where it is rounded, at the end of a chain, and so is one that leaves or that a loop
        carries: certain are a product or two, sums of these and the weights of a softmax, not what
        a function, a difference, a choice or a part of an array may be. The scales of parameters
        and of optimizer state then stay where their values are, however often a step is repeated.
        Types with the range of float32, and bfloat16 is one, need that nowhere: such results are
        at scale 1, and nothing is measured. Differentiating the scaled function gives derivatives
        with respect to data, scales being constant.

        A cast to float32 in the program changes nothing, since it is traced in float32: so are all
        element-wise results and sums, such as a softmax, a loss or the variance of a large mean,
        until a chain of them ends. Not so products of matrices, whose operands and results have the
        type of the arguments, nor what leaves the program or is carried by a loop. To have these in
        float32 too, begin with ``transforms.cast_data(x, jnp.float32)``, or pass in float32.

        In float16 a number of the program from 2^22 on that is chosen, padded or set beside data
        (`where`, `maximum`, `clip`, `pad`) is taken for a mask: it becomes the largest number at
        the scale of the data, beside which a number of 2^22 times the data's size would leave
        nothing of it. What is far smaller than the rest of its array becomes 0, as the square of a
        gradient of less than 2^-12 of the others, by which Adam divides: give such an optimizer
        parameters in arrays of one size, or bfloat16; or scalify the gradients alone, and step by
        `optim.scaled`, which stores roots. Scales are numbers of float32 and stop at its largest
        and smallest ones: of a result beyond its range, such as the square of 1e30, or one of
        float64, the numbers are wrong where plain float32 has infinities or zeros.

    Args:
        fn: function of pytrees, as for `jax.jit`; it may use grad, jit, scan, vmap, shard_map, an
            optimizer. Leaves of its arguments that are ScaledArrays are scaled, plain arrays stay
            plain until they meet one; in an eager call everything else, such as numbers, strings
            and functions, is a part of the program.
        static_argnums: positions of arguments that are not traced.
        static_argnames: names of arguments that are not traced.
        static_scaling: "unit", "identity" or a function; see `growth_of`.
        scale_rounding: how expected growth becomes a power of two: "carried" along chains, or
            rounded in every primitive to "nearest", "down" or "up".
        decouple: an experiment: functions of float16 data (exp, log, tanh, erf, sin, sqrt) are
            computed in float16 where scale and data show at run time that this gives what float32
            gives, rounded, and in float32 elsewhere (`Scalified.branches` counts).

    Returns:
        The scaled function. It is traced at every call, so call it under `jax.jit`. scalify of it
        is itself. `scalify(jax.vmap(fn))` takes ScaledArrays of any scale; `jax.vmap(scalify(fn))`
        maps scales as it maps data, so one scale for all items must be left out of it:
        ``in_axes=jax.tree.map(lambda leaf: 0 if leaf.ndim else None, args)``.

    Raises:
        ValueError: if the strategy or the rounding is not registered.
        TypeError: if ``fn`` is not callable.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import as_scaled
        >>> f = scalify(lambda w, x: x @ w)
        >>> f(as_scaled(jnp.full((64, 2), 1e-6)), as_scaled(jnp.full((3, 64), 1e6))).scale
        Array(8., dtype=float32)

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353.
    """
    if not callable(fn):
        raise TypeError(f"unitscale.scalify: expected a function; got {type(fn).__name__}")
    argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    argnames = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if isinstance(fn, Scalified):
        given = (argnums, argnames, static_scaling, scale_rounding, decouple)
        if given == ((), (), "unit", "carried", False):
            return fn
        raise ValueError(
            "unitscale.scalify: the function is scalified already, and options came with it again; "
            "give them to the first call of scalify"
        )
    _check_static(fn, argnums, argnames)
    return Scalified(fn, argnums, argnames, static_scaling, scale_rounding, decouple)


def decoupled(fn: Callable[..., Any]) -> Any:
    """Returns ``scalify(fn, decouple=True)``: float16 arithmetic wherever scales show it is safe.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import as_scaled
        >>> x = as_scaled(jnp.asarray([0.5, 1.0]), dtype=jnp.float16)
        >>> print(decoupled(jnp.tanh).branches(x)[0].narrow)
        1
    """
    return scalify(fn, decouple=True)
