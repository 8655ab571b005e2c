"""Gradients, calibration of FP8 scales, and the optimizer for NNX models."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core import (
    drop_value,
    gradient_probe,
    gradients_format,
    is_floating,
    is_scaled,
    loss_value,
    map_values,
    narrow_gradients,
    value_gradients,
    widen,
    with_probe,
)
from ..quant import TENSORS, QuantState
from ._amax import AmaxState, amax_states, map_states

Path = tuple[Any, ...]


def value_and_grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    advance: bool = True,
    gradients_dtype: Any = None,
    gradients_key: jax.Array | None = None,
) -> Callable[..., Any]:
    """Differentiate like `nnx.value_and_grad`, and update the FP8 scales of the models.

    The gradient of a ScaledArray parameter is a plain float32 array, the gradient with respect to
    its value: see `unitscale.value_and_grad`. The scales that the models at ``argnums`` hold
    (`AmaxState`) are updated in place.

    Args:
        f: function of models and other arguments. It returns a scalar loss, as an array or a
            ScaledArray. Without ``f``, the result is a decorator.
        argnums: as in `nnx.value_and_grad`.
        has_aux: whether ``f`` returns ``(loss, aux)``.
        advance: whether this call ends an optimizer step. False only accumulates amax.
        gradients_dtype: as in `unitscale.value_and_grad`.
        gradients_key: as in `unitscale.value_and_grad`.

    Returns:
        A function of the arguments of ``f`` that returns ``(value, gradients)``.

    Raises:
        TypeError: when called, if an argument is a container of models or a tree of ScaledArrays
            that is not a model.

    Example:
        >>> from unitscale import nn
        >>> model = nn.Dense(8, 4, policy="fp8_delayed", rngs=nnx.Rngs(0))
        >>> x = jnp.full((2, 8), 1000.0)
        >>> loss, grads = value_and_grad(lambda model: model(x).value.sum())(model)
        >>> sorted(grads), model.amax.get_value().scale[0]
        (['bias', 'kernel'], Array(4., dtype=float32))
    """
    if f is None:
        options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "advance": advance}
        options |= {"gradients_dtype": gradients_dtype, "gradients_key": gradients_key}
        return partial(value_and_grad, **options)
    dtype = gradients_format("nn.value_and_grad", gradients_dtype)
    single = isinstance(argnums, int | nnx.DiffState)
    asked = [
        n if isinstance(n, nnx.DiffState) else nnx.DiffState(n, nnx.Param)
        for n in ([argnums] if single else argnums)
    ]
    signature = inspect.signature(f)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        # Negative argnums count from the last argument given, without defaults.
        wanted = [nnx.DiffState(d.argnum + len(args) * (d.argnum < 0), d.filter) for d in asked]
        # The data becomes the first argument, which moves each model by one position.
        moved = [
            nnx.DiffState(d.argnum + 1, (AmaxState, nnx.All(d.filter, nnx.Not(_holds_scaled))))
            for d in wanted
        ]
        models = [bound.args[diff.argnum] for diff in wanted]
        scaled = [dict(_scaled_params(m, d)) for m, d in zip(models, wanted, strict=True)]
        data = [{k: gradient_probe(v.get_value(), dtype) for k, v in own.items()} for own in scaled]

        def by_data(data: list[dict[Path, jax.Array]], *args: Any) -> Any:
            """Call ``f`` with ScaledArrays that are differentiated with respect to ``data``."""
            replaced = [
                (variable, variable.get_value(), own[path])
                for diff, own in zip(wanted, data, strict=True)
                for path, variable in _scaled_params(args[diff.argnum], diff)
            ]
            for variable, stored, probe in replaced:
                variable.set_value(with_probe(stored, probe))
            try:
                return loss_value(f(*args, **bound.kwargs), has_aux)
            finally:
                for variable, stored, _ in replaced:
                    variable.set_value(stored)

        differentiate = nnx.value_and_grad(
            by_data,
            argnums=(0, *moved),
            has_aux=has_aux,
            graph=True,  # needed by filters, regardless of `nnx.set_graph_mode`
        )
        with narrow_gradients(dtype):
            value, (of_data, *gradients) = differentiate(data, *bound.args)
        kept = []
        for diff, model, own, cotangents, gradient in zip(
            wanted, models, scaled, of_data, gradients, strict=True
        ):
            key = None if gradients_key is None else jax.random.fold_in(gradients_key, len(kept))
            if isinstance(gradient, nnx.State):
                seen, gradient = nnx.split_state(gradient, AmaxState, ...)
                amax = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(seen)}
                for path, variable in amax_states(model):
                    if path in amax:
                        variable.set_value(variable.get_value().add(amax[path]))
                if advance:
                    map_states(model, QuantState.advance)
                flat: dict[Path, Any] = dict(nnx.to_flat_state(gradient)) | own
                values = [v.get_value() for v in flat.values()]
                found = [cotangents.get(k, value) for k, value in zip(flat, values, strict=True)]
                by_value = value_gradients(values, found, dtype, key)
                new = zip(flat.items(), by_value, strict=True)
                kept.append(nnx.from_flat_state({k: v.replace(x) for (k, v), x in new}))
                continue
            if any(map(is_scaled, jax.tree.leaves(gradient, is_leaf=is_scaled))):
                raise TypeError(
                    f"unitscale.nn.value_and_grad: argument {diff.argnum} is a tree of "
                    "ScaledArrays and not a model; use unitscale.value_and_grad"
                )
            variables = jax.tree.leaves(gradient, is_leaf=lambda x: isinstance(x, nnx.Variable))
            if own or any(isinstance(v, AmaxState) for v in variables):
                raise TypeError(
                    "unitscale.nn.value_and_grad: each model must be a separate argument; argument "
                    f"{diff.argnum} holds models in a {type(gradient).__name__}"
                )
            kept.append(value_gradients(gradient, gradient, dtype, key))
        return value, kept[0] if single else tuple(kept)

    return run


def grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    advance: bool = True,
    gradients_dtype: Any = None,
    gradients_key: jax.Array | None = None,
) -> Callable[..., Any]:
    """Differentiate as `nnx.grad`; see `value_and_grad` for arguments and errors."""
    options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "advance": advance}
    options |= {"gradients_dtype": gradients_dtype, "gradients_key": gradients_key}
    if f is None:
        return partial(grad, **options)
    return drop_value(value_and_grad(f, **options), has_aux)


def _holds_scaled(path: Path, variable: Any) -> bool:
    del path
    return isinstance(variable, nnx.Variable) and is_scaled(variable.get_value())


def _scaled_params(model: Any, diff: nnx.DiffState) -> Iterator[tuple[Path, nnx.Variable]]:
    is_wanted = nnx.filterlib.to_predicate(diff.filter)
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and _holds_scaled(path, node) and is_wanted(path, node):
            yield path, node


def calibrate(
    model: Any,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], jax.Array] | None = None,
) -> None:
    """Set the scales of `Static`, or the initial scales of `Delayed`, from data, in place.

    Each batch is run forward and backward with dynamic scales. Then the scale of each tensor is set
    from its largest amax over all batches. Nothing else in the model changes.

    Args:
        model: NNX module whose layers keep scales.
        batches: the model is called with each of them in turn; at least one.
        loss: function ``loss(model, batch)`` that returns a scalar, to set the scales of cotangents
            too. None calls ``model(batch)`` and leaves the scales of cotangents unchanged.

    Raises:
        ValueError: if there is no batch, or the model holds no `AmaxState`.

    Example:
        >>> from unitscale import nn
        >>> model = nn.Dense(8, 4, policy="fp8_static", rngs=nnx.Rngs(0))
        >>> calibrate(model, [jnp.full((2, 8), 1000.0), jnp.full((2, 8), 4000.0)])
        >>> print(model.amax.get_value().scale[::2])
        [16.  1.]
    """
    if not any(True for _ in amax_states(model)):
        raise ValueError(
            "unitscale.nn.calibrate: the model holds no scales; give its layers a strategy that "
            "keeps them, Static() or Delayed()"
        )
    # A copy, because a forward pass may change random states and statistics.
    probe = nnx.clone(model)
    map_states(probe, partial(dataclasses.replace, calibrating=True))
    step = nnx.jit(value_and_grad(_total if loss is None else loss, advance=False))
    count = 0
    for count, batch in enumerate(batches, 1):  # noqa: B007
        try:
            step(probe, batch)
        except Exception as error:
            if loss is None and isinstance(batch, (tuple, list)):
                error.add_note(
                    "unitscale.nn.calibrate: the model is called with each batch as its only "
                    f"argument; got a {type(batch).__name__} of {len(batch)}. For batches with "
                    "labels or several arguments, give loss=, a function of model and batch."
                )
            raise
    if not count:
        raise ValueError("unitscale.nn.calibrate: batches is empty; give at least one batch")
    map_states(probe, partial(_finish, loss is None))
    nnx.update(model, nnx.state(probe, AmaxState))


def _finish(forward_only: bool, state: QuantState) -> QuantState:
    if forward_only:
        cotangent = TENSORS.index("cotangent")
        state = dataclasses.replace(state, tally=state.tally.at[..., cotangent, :].set(0))
    return dataclasses.replace(state.advance(), calibrating=False)


def _total(model: Any, batch: Any) -> jax.Array:
    leaves = map(jnp.asarray, jax.tree.leaves(model(batch)))
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.sum(x.astype(jnp.float32)) for x in floating), start=jnp.float32(0))


class Optimizer(nnx.Optimizer):
    """`flax.nnx.Optimizer` that also accepts transformations of `unitscale.optim.scaled`.

    With a scaled ``tx`` the model's parameters become ScaledArrays in its format (small ones become
    float32 arrays), and `update` calls ``tx.step``, which rounds each weight once. Compute
    gradients with `unitscale.nn.grad` or `unitscale.nn.value_and_grad`.

    Args:
        model: module whose parameters are trained; a scaled ``tx`` replaces them.
        tx: optax transformation.
        wrt: filter of the variables that are trained, as for `nnx.Optimizer`.
        stack_axes: for a scaled ``tx``, the number of leading axes along which `nnx.vmap` has
            stacked layers, or a tree prefix of the state with such numbers. Each layer then has its
            own scales, so that `nnx.scan` can map over them. None: all axes but the last two.

    Raises:
        TypeError: if parameters are ScaledArrays and ``tx`` is not from `unitscale.optim.scaled`.

    Example:
        >>> import optax
        >>> from unitscale import nn, optim
        >>> model = nn.Dense(64, 64, rngs=nnx.Rngs(0))
        >>> optimizer = nn.Optimizer(model, optim.scaled(optax.adamw(0.1)), wrt=nnx.Param)
        >>> _, grads = nn.value_and_grad(lambda m: m(jnp.ones((1, 64))).value.sum())(model)
        >>> _ = optimizer.update(model, grads)
        >>> model.kernel.get_value().dtype.name, int(optimizer.step[...])
        ('float16', 1)
    """

    def __init__(self, model: Any, tx: Any, *, wrt: Any, stack_axes: Any = None) -> None:
        if not hasattr(tx, "step"):
            scaled = [
                path
                for path, variable in nnx.to_flat_state(nnx.state(model, wrt))
                if is_scaled(variable.get_value())
            ]
            if scaled:
                raise TypeError(
                    "unitscale.nn.Optimizer: tx must be from unitscale.optim.scaled for parameters "
                    f"that are ScaledArrays, such as {'.'.join(map(str, scaled[0]))}; got "
                    f"{type(tx).__name__}, which would update data and scale separately. A chain "
                    "goes inside: scaled(optax.chain(clip, inner))."
                )
            super().__init__(model, tx, wrt=wrt)
            return
        self.graph, self.tx, self.wrt = None, tx, wrt
        self.step = nnx.OptState(jnp.array(0, jnp.uint32))
        params = tx.scale_params(nnx.state(model, wrt), stack_axes=stack_axes)
        nnx.update(model, params)
        # One variable holds the whole state: with one per array, as in flax, the data and scale of
        # a ScaledArray would become separate variables.
        self.opt_state = nnx.OptState(tx.init(nnx.as_pure(params)))

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Update the model's parameters by one step, with gradients of the ``wrt`` variables.

        Gradients in fewer bits (`unitscale.value_and_grad`) are converted to float32. Keyword
        arguments are passed on to ``tx``. Returns the new parameters if ``tx`` is scaled, else the
        updates.
        """
        step = getattr(self.tx, "step", None)
        if step is None:
            grads = map_values(lambda g: widen(g) if is_floating(g) else g, grads)
            return super().update(model, grads, **kwargs)
        params, gradients = (nnx.as_pure(nnx.state(x, self.wrt)) for x in (model, grads))
        params, state = step(params, self.opt_state.get_value(), gradients, **nnx.as_pure(kwargs))
        nnx.update(model, params)
        self.opt_state.set_value(state)
        self.step[...] += 1
        return params
