"""`scalify`: attach a scale to every floating array of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..core import ScaledArray, broadcasts, cudnn_accepts_float32, is_scaled, wide_dtype
from ._interpreter import Default, Interpreter, Settings
from ._rules_contractions import StaticScaling, growth_of
from ._values import Scale, Value, is_complex, leaving, scale_of


class Scalified:
    """A function whose float arrays carry scales; see `scalify`.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import as_scaled
        >>> double = scalify(lambda x: 2 * x)
        >>> isinstance(double, Scalified), double(as_scaled(jnp.ones(2), dtype=jnp.float16)).scale
        (True, Array(2., dtype=float32))
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static_argnums: Sequence[int],
        static_argnames: Sequence[str],
        static_scaling: StaticScaling,
        decouple: bool,
    ):
        self._function = function
        self._static_argnums = frozenset(static_argnums)
        self._static_argnames = frozenset(static_argnames)
        self._options = static_scaling, decouple
        self._growth = growth_of(static_scaling)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the scaled function."""
        return self._run(args, kwargs)[0]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        bound = functools.partial(self._function, instance)
        argnums = [n - (n > 0) for n in self._static_argnums if n]  # 0 is the instance
        return Scalified(bound, argnums, tuple(self._static_argnames), *self._options)

    def report(self, *args: Any, **kwargs: Any) -> list[Default]:
        """List every default rule that a call takes.

        Args:
            *args: as for a call; nothing is computed.
            **kwargs: as for a call.

        Returns:
            One entry per primitive that has no rule, in program order, with the line of the user's
            code. An inner function that is called repeatedly with the same types is listed once.

        Example:
            >>> import jax.numpy as jnp
            >>> from unitscale import as_scaled
            >>> scalify(jnp.linalg.cholesky).report(as_scaled(jnp.eye(2)))[0].primitive
            'cholesky'
        """
        found: list[list[Default]] = []

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

    def _static_positions(self, count: int) -> set[int]:
        positions = {i % count if i < 0 else i for i in self._static_argnums if -count <= i < count}
        if self._static_argnames:  # only these need the signature
            names = list(_parameters(self._function))
            positions |= {names.index(n) for n in self._static_argnames if n in names}
        return {i for i in positions if i < count}

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Settings]:
        static = self._static_positions(len(args))
        fixed = {k: v for k, v in kwargs.items() if k in self._static_argnames}
        moving = [a for i, a in enumerate(args) if i not in static]
        named = {k: v for k, v in kwargs.items() if k not in fixed}
        leaves, tree = jax.tree.flatten((moving, named), is_leaf=is_scaled)
        traced = [x for x in leaves if _is_array(x)]
        structure: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            # Arguments that are not arrays are constants of the program, as in `jax.grad`.
            replaced = [next(given) if _is_array(x) else x for x in leaves]
            own = inner, inner_named = jax.tree.unflatten(tree, replaced)
            before = jax.tree.leaves(own, is_leaf=is_scaled)
            rest = iter(inner)
            full = [args[i] if i in static else next(rest) for i in range(len(args))]
            result = self._function(*full, **inner_named, **fixed)
            _check_unchanged(own, before, replaced)
            flattened, out_tree = jax.tree.flatten(result)
            structure.append(out_tree)
            return flattened

        functools.update_wrapper(flat, self._function, updated=())
        with cudnn_accepts_float32():
            closed = jax.make_jaxpr(flat)(*map(_traced_aval, traced))
        settings = Settings(self._growth, self._options[1])
        values = _gathered(list(map(_from_input, traced)))
        results = Interpreter(settings).run(closed.jaxpr, closed.consts, values)
        return jax.tree.unflatten(structure[-1], map(_to_output, leaving(results))), settings


# -- arguments and results -------------------------------------------------------------------------


def _from_input(leaf: Any) -> Value:
    """Turn an argument into a value."""
    data, scale = leaf.pair if isinstance(leaf, ScaledArray) else (leaf, None)
    shape = () if scale is None else jnp.shape(scale)
    # Unflattening checks nothing, so this is the first place to see a scale of a wrong shape.
    if not broadcasts(shape, jnp.shape(data)):
        raise ValueError(
            f"unitscale.scalify: the scale of a ScaledArray must broadcast against its data; got "
            f"data {jnp.shape(data)}, scale {shape}; give it size-1 dimensions"
        )
    if scale is None:
        return Value(data)
    scale = lax.stop_gradient(lax.convert_element_type(scale, np.float32))
    if jnp.ndim(scale):
        ones = (1,) * (jnp.ndim(data) - jnp.ndim(scale))
        scale = jnp.reshape(scale, () if jnp.size(scale) == 1 else (*ones, *jnp.shape(scale)))
    return Value(data, Scale(0, scale), steps=0)


def _gathered(values: list[Value]) -> list[Value]:
    """Read scalar scales from one vector: a GPU would copy each donated one in its own kernel."""
    groups: dict[Any, list[Value]] = {}
    for v in values:
        array = scale_of(v).array
        if isinstance(array, Tracer) and not array.ndim:
            # Arrays that `jax.vmap` maps have a class of their own; do not stack them with others.
            groups.setdefault((type(array), jax.typeof(array)), []).append(v)
    for group in groups.values():
        vector = lax.optimization_barrier(jnp.stack([scale_of(v).array for v in group]))
        for i, v in enumerate(group):
            v.scale = Scale(0, vector[i], (vector, i))
    return values


def _traced_aval(leaf: Any) -> Any:
    """Return the type to trace an argument with: float32 for ScaledArrays of 16 bits or fewer.

    It has the sharding of the data, and varies over the same mesh axes.
    """
    if not isinstance(leaf, ScaledArray) or leaf.scale is None:
        return leaf.data if isinstance(leaf, ScaledArray) else leaf
    return jax.typeof(leaf.data).update(dtype=wide_dtype(leaf.dtype), weak_type=False)


def _to_output(value: Value) -> Any:
    """Turn a value into a result: a ScaledArray, or an array if it is plain or complex."""
    if value.scale is None:
        return jnp.asarray(value.data)
    if is_complex(value.data):
        return value.wide()
    return ScaledArray(value.data, jnp.asarray(value.scale.factor()))


def _check_unchanged(own: Any, before: Sequence[Any], given: Sequence[Any]) -> None:
    """Raise an error if the function changed an argument in place: the change would be lost."""
    paths, _ = jax.tree.flatten_with_path(own, is_leaf=is_scaled)
    builtin = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)
    same = [x for x, y in zip(before, given, strict=True) if x is y]
    kept = {id(x) for x in same}
    for path, leaf in paths:
        # Dictionaries and lists are copies, as under `jax.jit`.
        is_object = not all(isinstance(key, builtin) for key in path)
        if is_object and len(same) == len(before) and id(leaf) not in kept:
            raise ValueError(
                f"unitscale.scalify: the function changes its argument in place, at "
                f"{jax.tree_util.keystr(path[1:])}, and the change would be lost. For NNX models, "
                "use unitscale.nn.scalify; otherwise return the new state"
            )


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function; {} if it has no signature, as functions in C."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def _check_static(
    function: Callable[..., Any], argnums: Sequence[int], argnames: Sequence[str]
) -> None:
    """Reject static arguments that the function does not have, as `jax.jit` does."""
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
                f"unitscale.scalify: {option} must be among the function's arguments, "
                f"{', '.join(parameters)}; got {', '.join(map(str, found))}"
            )


def _is_array(x: Any) -> bool:
    """Return whether a leaf is traced: arrays are, numbers, strings and functions are not."""
    if is_scaled(x):
        return True
    # Types such as jnp.float32 also have a dtype, and NumPy arrays may hold strings.
    typed = hasattr(x, "dtype") and hasattr(x, "shape")
    return typed and getattr(x.dtype, "kind", "") not in ("O", "S", "U")


def scalify(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    static_scaling: StaticScaling = "unit",
    decouple: bool = False,
) -> Any:
    """Return a function that computes the same as ``fn``, with every float array a ScaledArray.

    Scaling:
        Every primitive of the traced function, also in its gradients and its optimizer, acts on
        data and scale. Matmuls and convolutions multiply data and scales, and divide the data by
        the static growth, sqrt(n) for n terms. Movers such as reshape, slice and negation keep the
        scale. Everything else is computed on ``data * scale`` in float32, and stored only where a
        matmul, a loop or the end of the program needs it: with scale 1 in types with the range of
        float32 (such as bfloat16); in float16 and FP8 with the power of two nearest the RMS of the
        data, measured at run time. Up to rounding in the type of the data,
        ``to_array(scalify(f)(*as_scaled(args))) == f(*args)``.

        Where data has 16 bits or fewer, the function is traced in float32. So a constant such as
        1e-8 is exact, and a cast to float32 changes nothing. Element-wise results and sums, such as
        a softmax, a loss or a variance, are float32 until they are stored. To run matmuls in
        float32 too, begin with ``transforms.cast_data(x, jnp.float32)``, or pass float32 arrays.
        Derivatives of the scaled function are with respect to the data, at constant scales.

        In float16, entries far smaller than the RMS of their array become 0. Adam's second moment
        becomes 0 for gradients below 2^-12 of the others, and Adam divides by its root: give Adam
        gradients of similar size, use bfloat16, or scalify only the gradients and update by
        `optim.scaled`.

    Args:
        fn: function of pytrees, as for `jax.jit`; it may use grad, jit, scan, vmap, shard_map and
            optimizers. ScaledArrays among its arguments are scaled; their data must be near RMS 1,
            as `as_scaled` makes it, or float16 matmuls may saturate. Plain arrays stay plain until
            combined with one. Outside of jit, everything else is a constant of the program.
        static_argnums: positions of arguments that are not traced.
        static_argnames: names of arguments that are not traced.
        static_scaling: growth of the data in matmuls and convolutions: "unit" (the root of the
            number of terms), "identity" (none), or a function of the primitive's name and the
            number of terms. It is rounded to a power of two.
        decouple: an experiment: compute functions of float16 data (exp, log, tanh, erf, sin, sqrt)
            in float16 where, as checked at run time, the result equals float32's up to rounding.

    Returns:
        The scaled function. Every call traces it, so call it under `jax.jit`. Calling scalify on it
        returns it unchanged. `scalify(jax.vmap(fn))` takes ScaledArrays with any scale.
        `jax.vmap(scalify(fn))` also maps scales, so exclude a scale that all items share:
        ``in_axes=jax.tree.map(lambda leaf: 0 if leaf.ndim else None, args)``.

    Raises:
        ValueError: if ``static_scaling`` is unknown; in a call, if ``fn`` changes an argument, such
            as an NNX model, in place.
        TypeError: if ``fn`` is not callable.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import as_scaled
        >>> f = scalify(lambda w, x: x @ w)
        >>> f(as_scaled(jnp.ones((64, 2)), dtype=jnp.float16), as_scaled(jnp.ones((3, 64)))).shape
        (3, 2)

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353.
    """
    if not callable(fn):
        raise TypeError(f"unitscale.scalify: expected a function; got {type(fn).__name__}")
    argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    argnames = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if isinstance(fn, Scalified):
        if (argnums, argnames, static_scaling, decouple) == ((), (), "unit", False):
            return fn
        raise ValueError(
            "unitscale.scalify: the function is scalified already, so options have no effect; "
            "give them to the first call of scalify"
        )
    if argnums or argnames:
        _check_static(fn, argnums, argnames)
    return Scalified(fn, argnums, argnames, static_scaling, decouple)
