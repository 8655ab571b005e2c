"""Optimizer state and weights in 16 and 8 bits, around any optax transformation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import export
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..core import CastRounding, check_choice, is_float8, is_scaled, storage_of, to_array, widen
from ._roles import Moments, check_first_steps, formats_of, path_name, store_state
from ._storage import (
    WITHIN_SCALIFY,
    add_updates,
    gather_scales,
    inspect,
    is_floating,
    is_stored,
    load,
    moment_of,
    scale_weight,
    store,
    store_all,
)


class ScaledState(NamedTuple):
    """State of `scaled`: the inner state with stored moments, and the key of rounding."""

    inner: Any
    key: jax.Array | None


class SkipState(NamedTuple):
    """State of `skip_nonfinite`: counts of all skipped steps, and of the latest ones in a row."""

    inner: Any
    skipped: jax.Array
    consecutive: jax.Array


for _state in (ScaledState, SkipState):
    export.register_namedtuple_serialization(
        _state, serialized_name=f"unitscale.optim.{_state.__name__}"
    )


@jax.tree_util.register_static  # JAX would flatten it as a tuple, and lose the added attributes
class ScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation for parameters that are ScaledArrays, made by `scaled`.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(grads, state, params, **extra) -> updates, state``; updates are plain
            float32 arrays of values, for `apply_updates`.
        scale_params: ``scale_params(params, *, stack_axes=None) -> params`` as ScaledArrays, small
            ones as float32 arrays. Each item along the first ``stack_axes`` axes (a number or a
            tree of numbers; None: all but the last two) has its own scale, for `jax.lax.scan`.
        step: ``step(params, state, grads, **extra) -> params, state``: `update` followed by
            `apply_updates`, with the rounding of the transformation.
    """

    scale_params: Callable[..., Any]
    step: Callable[..., tuple[Any, Any]]

    # The defaults are for `copy`, which passes two arguments and restores the attributes later.
    def __new__(cls, init: Any, update: Any, scale_params: Any = None, step: Any = None) -> Any:
        self = super().__new__(cls, init, update)
        self.scale_params, self.step = scale_params, step
        return self


def _is_leaf(x: Any) -> bool:
    return x is None or is_scaled(x)


def values(tree: Any) -> Any:
    """Return a tree as plain arrays in float32, or float64 where an array has that dtype."""

    def wide(x: Any) -> Any:
        x = to_array(x, jnp.float32) if is_scaled(x) else x
        return widen(jnp.asarray(x)) if is_floating(x) else x

    return jax.tree.map(wide, tree, is_leaf=is_scaled)


def apply_updates(params: Any, updates: Any, *, key: jax.Array | None = None) -> Any:
    """Add updates to parameters: `optax.apply_updates` for ScaledArrays.

    Scaling:
        value + update is computed in float32 and rounded once to the format of the parameter. If
        the RMS of a ScaledArray's old data (of a sample in large arrays) is outside of [1/2, 2],
        the new data gets a scale that brings its RMS near 1.

        Rounding to nearest loses updates below half the distance between neighboring numbers: in
        float16, 2^-12 to 2^-11 of the entry. Stochastic rounding is exact on average.

    Args:
        params: tree of ScaledArrays and arrays.
        updates: tree of plain arrays to add to the values, with the structure of ``params``; None
            leaves a parameter unchanged.
        key: `jax.random` key for stochastic rounding; None rounds to nearest.

    Returns:
        The new parameters, in the same formats. An infinite sum becomes NaN.

    Raises:
        ValueError: if the trees differ.

    Example:
        >>> from unitscale import ScaledArray
        >>> w = ScaledArray(jnp.ones(2, jnp.float16), 4.0)
        >>> apply_updates(w, jnp.array([0.5, -0.25])).value
        Array([4.5 , 3.75], dtype=float32)

    References:
        Balanca et al., "Scalify", 2024, arXiv 2407.17353, section 4 (float16 master weights);
        Croci et al., "Stochastic rounding", 2022, arXiv 2103.13445.
    """
    found, structure = jax.tree.flatten_with_path(params, is_leaf=_is_leaf)
    changes, other = jax.tree.flatten(updates, is_leaf=_is_leaf)
    if structure != other:
        raise ValueError(
            "unitscale.optim.apply_updates: updates must have the structure of params; got "
            f"{other}, expected {structure}"
        )
    return jax.tree.unflatten(structure, add_updates(dict(found), changes, key))


def _check_transformation(where: str, inner: Any) -> None:
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"unitscale.optim.{where}: inner must be an optax transformation; got "
            f"{type(inner).__name__}"
        )


def _check_params(params: Any, weights: Any, min_size: int) -> None:
    if params is None:
        raise ValueError(
            "unitscale.optim.scaled: update needs params. Call update(grads, state, params)."
        )
    leaves = jax.tree.leaves(params, is_leaf=is_scaled)
    floating = [x for x in leaves if (is_scaled(x) or is_floating(x)) and jnp.size(x) >= min_size]
    if weights is not None and floating and not any(map(is_scaled, floating)):
        raise ValueError(
            "unitscale.optim.scaled: params must hold ScaledArrays; got plain arrays only. Call "
            "params = tx.scale_params(params) first, or pass weights=None. nn.Optimizer calls it "
            "if scaled is outermost: clip inside scaled, as in scaled(optax.chain(clip, inner)). "
            f"{WITHIN_SCALIFY}"
        )


def _wide_gradients(gradients: Any, params: Any) -> Any:
    """Return gradients in float32, after checking that they are values and fit the parameters."""
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_leaf)
    stored = {x.dtype for x in leaves if is_scaled(x)}

    def wide(path: Any, x: Any, weight: Any) -> Any:
        where = f"grads{jax.tree_util.keystr(path)}"
        if x is not None and jnp.shape(x) != jnp.shape(weight):
            raise ValueError(
                "unitscale.optim: gradients must have the shapes of params; got "
                f"{jnp.shape(x)} for {jnp.shape(weight)} at {where}"
            )
        if not is_scaled(x):
            is_array = hasattr(x, "dtype") and is_floating(x)
            return widen(_row_major_p.bind(jnp.asarray(x))) if is_array else x
        # `value_and_grad` returns ScaledArrays in FP8, `jax.grad` in the formats of parameters.
        if is_float8(x.dtype) and x.dtype not in stored:
            return load(x.map_data(_row_major_p.bind))
        raise TypeError(
            f"unitscale.optim: gradients must be arrays, or in FP8; got a ScaledArray at {where}. "
            "Differentiate with unitscale.grad or unitscale.nn.grad, or convert results of "
            "scalify with to_array(grads)."
        )

    if structure != (other := jax.tree.structure(gradients, is_leaf=_is_leaf)):
        raise ValueError(
            f"unitscale.optim: gradients must have the structure of params; got {other}, expected "
            f"{structure}"
        )
    return jax.tree.map_with_path(wide, gradients, params, is_leaf=_is_leaf)


# Force a row-major layout of gradients on a single device (on several this would gather shards).
# Otherwise XLA lets a GPU's matmul write a transposed gradient, and transposes everything that the
# optimizer reads and writes: 46 bytes per parameter instead of 28.
_row_major_p = Primitive("unitscale_row_major")
_row_major_p.def_impl(lambda x: x)
_row_major_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[_row_major_p] = lambda args, dims: (_row_major_p.bind(*args), dims[0])
ad.primitive_jvps[_row_major_p] = lambda x, tangents: (_row_major_p.bind(*x), *tangents)


def _lower_row_major(context: Any, x: Any) -> Any:
    if getattr(context.module_context.axis_context, "num_devices", None) != 1:
        return [x]

    def constrain(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return mlir.lower_fun(constrain, multiple_results=False)(context, x)


mlir.register_lowering(_row_major_p, _lower_row_major)


def scaled(
    inner: optax.GradientTransformation,
    *,
    weights: Any = jnp.float16,
    moments: Moments = (jnp.float8_e4m3fn, jnp.float16),
    rounding: CastRounding = "nearest",
    key: int | jax.Array = 0,
    block: int | None = None,
    min_size: int = 4096,
) -> ScaledTransformation:
    """Keep parameters and the moments of any optax transformation in 16 or 8 bits.

    With Adam the default takes 5 bytes per parameter instead of 12: a float16 weight, an FP8 first
    moment, and the root of the second moment in float16. ``moments=(e4m3fn, e4m3fn)`` with
    stochastic rounding takes 4. Small arrays (gains and biases) stay in float32: they take few
    bytes, and each scale costs a GPU small kernels, which arrays of equal shape share.

    Scaling:
        ``inner`` computes in float32, on plain gradients (as `unitscale.grad` returns them). Each
        result is rounded once: moments as in `Moment`, weights as in `apply_updates`.

        With rounding to nearest a moving average stops changing once its steps are below half the
        distance between neighboring numbers: with gradients from N(0, 1) and b2 = 0.95, the root of
        a second moment in e4m3fn is 1.5 times too large. Use "stochastic" for such moments.

    Args:
        inner: any optax transformation.
        weights: format of the parameters that ``scale_params`` returns; None leaves parameters
            unchanged. All-zero parameters get the scale 2^-8: float16 loses updates below 2^-33.
        moments: formats of the first and second moments, each a dtype, a `Moment` or None (stored
            as ``inner`` does). optax's type of a state determines the `Role` of its arrays; a
            "trace" takes the more precise format of the two, and arrays without a role do not
            change. Or a function from path (``"0.mu.kernel"``) and role (or None) to a format.
        rounding: "nearest" or "stochastic", for both weights and moments.
        key: seed or `jax.random` key for stochastic rounding; kept in the state.
        block: number of entries along the last axis of a moment that share a scale; None for one
            scale per array.
        min_size: parameters with fewer entries, and their moments, are plain float32 arrays. A
            stack of layers counts as one array, but as one per layer if ``stack_axes`` leaves only
            vectors, such as gains.

    Raises:
        TypeError: for a wrong type of ``inner``, its state, ``moments`` or gradients.
        ValueError: for an invalid argument; in ``init``, if rounded weights would lose the first
            steps of ``inner`` (D-Adaptation, DoG, Mechanic, Prodigy); in ``update``, if params are
            not scaled, or gradients do not fit them.

    Example:
        >>> tx = scaled(optax.adamw(1e-3))
        >>> params = tx.scale_params({"w": jnp.full((64, 64), 0.25), "b": jnp.ones(64)})
        >>> state = tx.init(params)
        >>> params["w"], state.inner[0].mu["w"].dtype.name, params["b"].dtype.name
        (ScaledArray(float16[64,64], scale=0.25), 'float8_e4m3fn', 'float32')
        >>> grads = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
        >>> updates, state = tx.update(grads, state, params)
        >>> print(apply_updates(params, updates)["w"].value[0, :2].round(4))
        [0.249 0.249]

    References:
        Peng et al., "FP8-LM: Training FP8 Large Language Models", 2023, arXiv 2310.18313,
        section 2.2; Balanca et al., "Scalify", 2024, arXiv 2407.17353, section 4.
    """
    _check_transformation("scaled", inner)
    check_choice("unitscale.optim.scaled", "rounding", rounding, CastRounding)
    if not (isinstance(min_size, int) and min_size >= 0):
        raise ValueError(
            f"unitscale.optim.scaled: min_size must be a number of entries; got {min_size!r}"
        )
    weights = None if weights is None else storage_of("optim.scaled: weights", weights).dtype
    formats_of(moments, block)  # raises for invalid formats
    extra = isinstance(inner, (optax.GradientTransformationExtraArgs, optax.MultiSteps))

    def scale_params(params: Any, *, stack_axes: Any = None) -> Any:
        def convert(axes: int | None, x: Any) -> Any:
            if axes is not None and axes < 0:
                raise ValueError(
                    f"unitscale.optim.scale_params: stack_axes must be 0 or more; got {axes}"
                )
            if not (is_scaled(x) or is_floating(x)):
                return x
            are_vectors = axes is not None and jnp.ndim(x) == axes + 1
            if (x.shape[-1] if are_vectors else jnp.size(x)) >= min_size:
                return scale_weight(x, weights, axes)
            # A copy, because a step that donates its arguments reuses the memory of parameters.
            return jnp.array(values(x), copy=True)

        def subtree(axes: int | None, tree: Any) -> Any:
            return jax.tree.map(lambda x: convert(axes, x), tree, is_leaf=is_scaled)

        if weights is None:
            return params
        return jax.tree.map(subtree, stack_axes, params, is_leaf=lambda axes: axes is None)

    def init(params: Any) -> ScaledState:
        _check_params(params, weights, min_size)
        state = inner.init(values(params))
        check_first_steps(state, weights)
        state = store_state(state, params, moments, block, min_size)
        is_seed = jnp.issubdtype(jnp.result_type(key), jnp.integer) and not jnp.ndim(key)
        own = jax.random.key(key) if is_seed else jax.random.clone(key)  # a copy, as above
        return ScaledState(state, own if rounding == "stochastic" else None)

    def advance(grads: Any, state: ScaledState, params: Any, extra_args: dict[str, Any]) -> Any:
        _check_params(params, weights, min_size)
        following = for_moments = for_weights = None
        if state.key is not None:
            following, for_moments, for_weights = jax.random.split(state.key, 3)
        found, structure = jax.tree.flatten_with_path(state.inner, is_leaf=is_stored)
        before = inspect(dict(found))
        wide_state = jax.tree.unflatten(structure, [load(x) for x, _ in before.values()])
        wide = _wide_gradients(grads, params), wide_state, values(params)
        with jax.numpy_dtype_promotion("standard"):  # optax takes powers of floats by integers
            updates, new = inner.update(*wide, **(extra_args if extra else {}))
        # Moments keep their formats. Other state may change its structure: optax.monitor adds
        # measurements in the first update.
        found, structure = jax.tree.flatten_with_path(new)
        total = dict(found)
        before = {path: x for path, x in before.items() if is_stored(x[0]) and path in total}
        new = jax.tree.unflatten(
            structure, (total | store_all(before, total, for_moments)).values()
        )
        return updates, ScaledState(new, following), for_weights

    def update(grads: Any, state: ScaledState, params: Any = None, **extra_args: Any) -> Any:
        updates, state, _ = advance(grads, state, params, extra_args)
        return updates, state

    def step(params: Any, state: ScaledState, grads: Any, **extra_args: Any) -> Any:
        params, state = gather_scales((params, state))
        updates, state, for_weights = advance(grads, state, params, extra_args)
        return apply_updates(params, updates, key=for_weights), state

    return ScaledTransformation(init, update, scale_params, step)


def skip_nonfinite(inner: optax.GradientTransformation) -> ScaledTransformation:
    """Leave weights and state unchanged in a step whose gradients are not finite.

    Like `optax.apply_if_finite`, but also for ScaledArrays, without a branch (so that a compiled
    update runs in place), and without a limit on skipped steps: check ``state.consecutive``.

    Args:
        inner: an optax transformation, such as one from `scaled`.

    Example:
        >>> tx = skip_nonfinite(optax.sgd(0.5))
        >>> updates, state = tx.update([jnp.inf], tx.init([1.0]), [1.0])
        >>> print(updates[0], state.skipped)
        0.0 1
    """
    _check_transformation("skip_nonfinite", inner)
    own = inner if isinstance(inner, ScaledTransformation) else None
    inner_update = optax.with_extra_args_support(inner).update

    def init(params: Any) -> SkipState:
        return SkipState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def select(grads: Any, state: SkipState, new: Any, result: Any, otherwise: Any) -> Any:
        leaves = jax.tree.leaves(values(grads))
        leaves = [x for x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in leaves]))
        result, new = jax.tree.map(
            lambda n, o: jnp.where(finite, n, o), (result, new), (otherwise, state.inner)
        )
        skipped = state.skipped + jnp.where(finite, 0, 1)
        return result, SkipState(new, skipped, jnp.where(finite, 0, state.consecutive + 1))

    def update(grads: Any, state: SkipState, params: Any = None, **extra_args: Any) -> Any:
        own_grads = grads if own else values(grads)
        updates, new = inner_update(own_grads, state.inner, params, **extra_args)
        return select(grads, state, new, updates, jax.tree.map(jnp.zeros_like, updates))

    def step(params: Any, state: SkipState, grads: Any, **extra_args: Any) -> Any:
        if own is None:
            updates, state = update(grads, state, params, **extra_args)
            return apply_updates(params, updates), state
        moved, new = own.step(params, state.inner, grads, **extra_args)
        return select(grads, state, new, moved, params)

    scale_params = own.scale_params if own else lambda params, **_: params
    return ScaledTransformation(init, update, scale_params, step)


def convert_state(state: Any, like: Any) -> Any:
    """Convert optimizer state to other formats; each moment is rounded once, to nearest.

    Args:
        state: state of an optax transformation, or of `scaled` around it.
        like: fresh state of the same transformation in the target formats:
            ``scaled(inner, ...).init(params)``, or ``inner.init(params)`` for float32.

    Returns:
        A tree with the structure and formats of ``like`` and the numbers of ``state``.

    Raises:
        ValueError: if the two do not belong to the same transformation and parameters.

    Example:
        >>> plain, params = optax.adam(1e-3), {"w": jnp.ones((64, 64))}
        >>> _, state = plain.update(params, plain.init(params), params)
        >>> ours = scaled(plain)
        >>> params = ours.scale_params(params)
        >>> convert_state(state, ours.init(params)).inner[0].mu["w"]
        ScaledArray(float8_e4m3fn[64,64], scale=0.000488281)
    """
    inner, key = map(jax.tree_util.GetAttrKey, ("inner", "key"))

    def named(tree: Any) -> dict[str, Any]:
        """Return paths and leaves by name, without the level that `scaled` adds."""
        found = jax.tree.leaves_with_path(tree, is_leaf=is_stored)
        return {path_name([k for k in path if k != inner]): (path, x) for path, x in found}

    wrong = "unitscale.optim.convert_state: state must be of the same transformation and parameters"
    source, target = named(state), named(like)
    one = {name: path for name, (path, _) in (source | target).items()}
    if other := {n for n in source.keys() ^ target.keys() if one[n][-1:] != (key,)}:
        raise ValueError(f"{wrong} as like; only one of them has {', '.join(sorted(other))}")

    def convert(name: str, path: Any, new: Any) -> Any:
        is_key = path[-1:] == (key,)
        value = load(source.get(name, (path, new))[1])
        if jnp.shape(new) != jnp.shape(value):
            got = f"got shape {jnp.shape(value)}, expected {jnp.shape(new)} at {name}"
            raise ValueError(f"{wrong} as like; {got}")
        if is_stored(new):
            return store(moment_of(new), value)
        return jnp.asarray(value, new.dtype) if hasattr(new, "dtype") and not is_key else value

    leaves = [convert(name, *found) for name, found in target.items()]
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_stored), leaves)


def global_norm(tree: Any) -> jax.Array:
    """Return `optax.global_norm` of a tree with ScaledArrays: the root of the sum of squares."""
    return optax.tree.norm(values(tree))


def incremental_update(new: Any, old: Any, step_size: Any) -> Any:
    """Return ``step_size * new + (1 - step_size) * old`` as plain float32 arrays.

    It is `optax.incremental_update` for ScaledArrays. Keep the average ``old`` in float32: 16 bits
    would lose small steps.

    Example:
        >>> from unitscale import ScaledArray
        >>> print(incremental_update(ScaledArray(jnp.ones(2), 4.0), jnp.zeros(2), 0.25))
        [1. 1.]
    """
    return optax.incremental_update(values(new), values(old), step_size)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` for ScaledArrays; its updates are plain arrays."""
    return _by_value(optax.clip_by_global_norm(max_norm))


def ema(
    decay: float, debias: bool = True, accumulator_dtype: Any = jnp.float32
) -> optax.GradientTransformation:
    """Return `optax.ema` for ScaledArrays: averages of updates or parameters, as plain arrays."""
    return _by_value(optax.ema(decay, debias, accumulator_dtype))


def _by_value(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return inner.update(values(updates), state, params)

    return optax.GradientTransformation(lambda params: inner.init(values(params)), update)
