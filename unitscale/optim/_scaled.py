"""Optimizer state and weights in 16 and 8 bits, around any optax transformation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import CastRounding, format_of, is_scaled
from ._gradients import wide_gradients
from ._moments import WITHIN_SCALIFY, is_stored, load, look_at, moment_of, storable, store
from ._roles import Moments, formats_of, store_state
from ._states import starts_tiny
from ._values import is_floating, values
from ._weights import apply_updates, scale_weight


class ScaledState(NamedTuple):
    """State of `scaled`: the inner state with its moments stored, and a key for rounding.

    Example:
        >>> tx = scaled(optax.sgd(0.1), weights=None, rounding="stochastic")
        >>> tx.init({"w": jnp.ones(2)}).key.shape
        ()
    """

    inner: Any
    key: jax.Array | None


@jax.tree_util.register_static  # as a tuple it would be a tree, rebuilt without what is added here
class ScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation of parameters that are ScaledArrays; `scaled` makes it.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(grads, state, params, **extra) -> updates, state``; updates are plain
            float32 arrays of values, for `apply_updates`.
        scale_params: ``scale_params(params, *, stack_axes=None) -> params`` as ScaledArrays of the
            chosen format, small ones as plain float32 arrays. Each item of the leading
            ``stack_axes`` axes has its own scale, so that `jax.lax.scan` and `jax.vmap` map over
            data and scale together; moments follow. None counts all axes but the last two; or a
            tree of numbers, a prefix of ``params``.
        step: ``step(params, state, grads, **extra) -> params, state``: update and apply_updates in
            one, with the rounding, and for it the key, of the transformation.

    Example:
        >>> tx = scaled(optax.sgd(0.5), min_size=0)
        >>> params = tx.scale_params({"w": jnp.full(2, 4.0)})
        >>> params, _ = tx.step(params, tx.init(params), {"w": jnp.ones(2)})
        >>> print(params["w"].value)
        [3.5 3.5]
    """

    scale_params: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]

    def __new__(
        cls, init: Any, update: Any, scale_params: Any, step: Any
    ) -> "ScaledTransformation":
        """Makes the pair that optax knows, and adds what it does not."""
        self = super().__new__(cls, init, update)
        self.scale_params, self.step = scale_params, step
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What a copy is made of; `copy` knows the two that optax has."""
        return (*self, self.scale_params, self.step)


def _check_params(params: Any, weights: Any, min_size: int) -> None:
    if params is None:
        raise ValueError(
            "unitscale.optim.scaled: update needs params, whose scales it divides gradients by; "
            "got None. Call update(grads, state, params)."
        )
    leaves = jax.tree.leaves(params, is_leaf=is_scaled)
    floating = [x for x in leaves if (is_scaled(x) or is_floating(x)) and jnp.size(x) >= min_size]
    if weights is not None and floating and not any(map(is_scaled, floating)):
        raise ValueError(
            "unitscale.optim.scaled: params must hold ScaledArrays; got plain arrays only. Call "
            "params = tx.scale_params(params) first, or pass weights=None to keep plain weights. "
            "nn.Optimizer does the first where scaled is outermost: clip inside scaled, as in "
            f"scaled(optax.chain(clip, inner)). {WITHIN_SCALIFY}"
        )


def _check_steps(state: Any, weights: Any) -> None:
    if weights is None or format_of(weights).eps <= format_of(jnp.float32).eps:
        return
    tiny = [x for x in jax.tree.leaves(state, is_leaf=starts_tiny) if starts_tiny(x)]
    if tiny:
        raise ValueError(
            f"unitscale.optim.scaled: inner keeps a {type(tiny[0]).__name__}: it learns its step "
            "size from how far the weights have come, in steps that begin near 1e-6 of them, which "
            f"weights in {format_of(weights).name} lose in rounding. Keep them wide: weights=None."
        )


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
    """Keeps parameters and the moments of any optax transformation in 16 or 8 bits.

    The default takes 5 bytes per parameter with Adam: a float16 weight, an FP8 first moment, and
    the root of the second in float16. With ``moments=(e4m3fn, e4m3fn), rounding="stochastic"`` it
    is 4. Scales add 4 bytes per array. Adam in float32 takes 12, and so do arrays of fewer than
    ``min_size`` entries, such as the gains and biases of a model less than 4,096 wide: these are
    few bytes but most of its arrays, and the scales of each would cost a GPU ten small kernels. A
    stack of layers counts as one array.

    Scaling:
        Everything is a ScaledArray with a power-of-two scale. In an update, gradients (by value, as
        `unitscale.grad` returns them), parameters and state are float32 values, ``inner`` computes
        in float32, and each result is rounded once: moments as `Moment` says, weights as
        `apply_updates` does. Scales of large moments come from a sample and from what was stored
        before, so that a step is one pass over all arrays; see `Moment` for what that leaves of a
        format, and for what saturates. However a value is split into data and scale its gradient is
        the same, so a parameter that is rescaled leaves the moments alone.

        Rounded to nearest, a mean that moves by a share of 1 - b per step stands still where that
        is less than half the distance of neighbours. On gradients from N(0, 1) the root of a second
        moment in float16 is right up to b2 = 0.99 and 4% too large, so steps 4% too small, at
        0.999; in e4m3fn at 0.95 it is 1.5 times too large. Rounded at random its mean is right to
        1% in both, with a spread of 1% in float16 and 15% in e4m3fn: an 8-bit second moment wants
        ``rounding="stochastic"``.

    Args:
        inner: an optax transformation: Adam, Lion, momentum, chains with clipping and schedules,
            `optax.MultiSteps`, `optax.inject_hyperparams`, `optax.partition`, ... It sees gradients
            and parameters as float32 values.
        weights: format of the parameters that ``scale_params`` returns; None keeps them as they
            are. Those that are all zero do not tell how large they will be and get the scale 2^-8:
            in float16 updates below 2^-33 (1e-10) leave them zero.
        moments: formats of the first and second moments, each a dtype, a `Moment` or None (as
            ``inner`` keeps it). What an array is comes from the type of the state of optax that
            holds it: "first" where the root of a second moment divides it (Adam), "second" for a
            mean of squares, "trace" for momentum that is the step itself (SGD, Lion, Muon), which
            takes the finer of the two formats. All other state, and that of transformations of
            your own, stays as it is: sums, averages of parameters, differences. Or a function of
            path (``"0.mu.kernel"``) and role ("first", "second", "trace" or None), called for
            every floating array of the state, that returns one of these; with it you say what
            states of your own hold.
        rounding: "nearest" or "stochastic", of weights and moments alike.
        key: seed or `jax.random` key of stochastic rounding; kept in the state.
        block: number of entries along the last axis that share a scale in the moments; None for
            one scale per array.
        min_size: parameters and moments of fewer entries are plain float32 arrays, whatever
            ``weights`` and ``moments`` say; 0 stores all.

    Returns:
        ScaledTransformation: ``init`` and ``update`` as optax has them, ``scale_params``, and
        ``step``, which updates and applies in one.

    Raises:
        TypeError: if inner is no transformation, its state no tree of arrays, or moments neither a
            pair nor a function.
        ValueError: if a format is none to store in or cannot hold squares, if min_size is below 0,
            if ``update`` is called without params or with plain ones, or gradients differ from
            params; in ``init``, if ``inner`` starts with steps that are lost in rounded weights
            (D-Adaptation, DoG, Mechanic, Prodigy).
            ``update`` raises a TypeError for gradients that are ScaledArrays.

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
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            "unitscale.optim.scaled: inner must be an optax transformation, with init and update; "
            f"got {type(inner).__name__}"
        )
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"unitscale.optim.scaled: rounding must be 'nearest' or 'stochastic'; got {rounding!r}"
        )
    if not (isinstance(min_size, int) and min_size >= 0):
        raise ValueError(
            "unitscale.optim.scaled: min_size must be a number of entries, 0 or more; got "
            f"{min_size!r}"
        )
    weights = None if weights is None else storable("scaled", "weights", weights)
    formats_of(moments, block)  # complains at once
    extra = isinstance(inner, (optax.GradientTransformationExtraArgs, optax.MultiSteps))

    def scale_params(params: Any, *, stack_axes: Any = None) -> Any:
        if weights is None:
            return params

        def convert(axes: int | None, subtree: Any) -> Any:
            return jax.tree.map(
                lambda x: _wide(x) if jnp.size(x) < min_size else scale_weight(x, weights, axes),
                subtree,
                is_leaf=is_scaled,
            )

        return jax.tree.map(convert, stack_axes, params, is_leaf=lambda axes: axes is None)

    def init(params: Any) -> ScaledState:
        _check_params(params, weights, min_size)
        state = inner.init(values(params))
        _check_steps(state, weights)
        state = store_state(state, params, moments, block, min_size)
        start = None
        if rounding == "stochastic":
            # A copy of a key: a step that takes the state's memory leaves the caller's alone.
            start = jax.random.key(key) if _is_seed(key) else jax.random.clone(key)
        return ScaledState(state, start)

    def advance(grads: Any, state: ScaledState, params: Any, extra_args: dict[str, Any]) -> Any:
        _check_params(params, weights, min_size)
        following = keys = for_weights = None
        if state.key is not None:
            following, keys, for_weights = jax.random.split(state.key, 3)
        found, structure = jax.tree.flatten_with_path(state.inner, is_leaf=is_stored)
        looked = [look_at(leaf) for _, leaf in found]
        updates, new = inner.update(
            wide_gradients(grads, params),
            jax.tree.unflatten(structure, [load(leaf) for leaf, _ in looked]),
            values(params),
            **(extra_args if extra else {}),
        )
        stored = {path: x for (path, _), x in zip(found, looked, strict=True) if is_stored(x[0])}
        new = _stored_again(stored, new, keys)
        return updates, ScaledState(new, following), for_weights

    def update(grads: Any, state: ScaledState, params: Any = None, **extra_args: Any) -> Any:
        updates, state, _ = advance(grads, state, params, extra_args)
        return updates, state

    def step(params: Any, state: ScaledState, grads: Any, **extra_args: Any) -> Any:
        updates, state, for_weights = advance(grads, state, params, extra_args)
        return apply_updates(params, updates, key=for_weights), state

    return ScaledTransformation(init, update, scale_params, step)


def _wide(x: Any) -> Any:
    """A small parameter in float32: a copy, as a donated step takes its memory."""
    return jnp.array(values(x), copy=True) if is_scaled(x) or is_floating(x) else x


def _is_seed(key: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(key), jnp.integer) and not jnp.ndim(key)


def _stored_again(stored: dict[Any, tuple[Any, Any]], new: Any, key: jax.Array | None) -> Any:
    """New state with each moment rounded once, into the format of the one that had its place.

    The rest of a state may have another structure than before: what `optax.monitor` measures is
    there from the first update on.
    """
    keys = iter([None] * len(stored) if key is None else jax.random.split(key, len(stored) or 1))
    rounding = "nearest" if key is None else "stochastic"

    def one(path: Any, x: Any) -> Any:
        if path not in stored:
            return x
        before, seen = stored[path]
        return store(x, moment_of(before), rounding, next(keys), seen)

    return jax.tree.map_with_path(one, new)
