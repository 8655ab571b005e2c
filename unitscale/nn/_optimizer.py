"""An optimizer beside its model, whose parameters may be ScaledArrays."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..core import is_scaled


class Optimizer(nnx.Optimizer):
    """`flax.nnx.Optimizer` for the transformations of `unitscale.optim.scaled` too.

    Scaling:
        The model's parameters become ScaledArrays in the format of ``tx``, small ones float32;
        layers of `unitscale.nn` take them as they are. Gradients are those of `nn.grad` and
        `nn.value_and_grad`, by value. `update` is ``tx.step``: each weight is rounded once, at
        random where ``tx`` says so. Any other optax transformation works as in
        `flax.nnx.Optimizer`.

    Args:
        model: module whose parameters are trained; with a scaled ``tx`` they are replaced.
        tx: optax transformation.
        wrt: filter of the variables that are trained, as for `nnx.Optimizer`.
        stack_axes: for a scaled ``tx``, the number of leading axes along which `nnx.vmap` has
            stacked layers, or a prefix of the state with such numbers: each layer then has its own
            scales, so that `nnx.scan` maps over them. None counts all axes but the last two.

    Raises:
        TypeError: if wrt is missing, or the model has ScaledArrays for parameters and ``tx`` is not
            of `unitscale.optim.scaled`.

    Example:
        >>> import optax
        >>> from unitscale import nn, optim
        >>> model = nn.Dense(64, 64, rngs=nnx.Rngs(0))
        >>> optimizer = nn.Optimizer(model, optim.scaled(optax.adamw(0.1)), wrt=nnx.Param)
        >>> model.kernel.get_value()
        ScaledArray(float16[64,64], scale=1)
        >>> def loss(model):
        ...     return jnp.sum(model(jnp.ones((1, 64))).value)
        >>> _, grads = nn.value_and_grad(loss)(model)
        >>> _ = optimizer.update(model, grads)
        >>> int(optimizer.step[...])
        1

    References:
        Peng et al., "FP8-LM: Training FP8 Large Language Models", 2023, arXiv 2310.18313,
        section 2.2.
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
                    "unitscale.nn.Optimizer: tx must be of unitscale.optim.scaled for parameters "
                    f"that are ScaledArrays, such as {'.'.join(map(str, scaled[0]))}; got "
                    f"{type(tx).__name__}, which would add to data and scale alike. A chain goes "
                    "inside: scaled(optax.chain(clip, inner))."
                )
            super().__init__(model, tx, wrt=wrt)
            return
        self.graph, self.tx, self.wrt = None, tx, wrt
        self.step = nnx.OptState(jnp.array(0, jnp.uint32))
        params = tx.scale_params(nnx.state(model, wrt), stack_axes=stack_axes)
        nnx.update(model, params)
        # One variable holds all of the state: with one per array, as in flax, a ScaledArray would
        # be a node of the graph and no ScaledArray any more.
        self.opt_state = nnx.OptState(tx.init(nnx.as_pure(params)))

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Moves the parameters of the model by one step; returns them.

        Args:
            model: the module.
            grads: gradients of ``wrt``, as `nn.grad` returns them.
            **kwargs: passed to ``tx``.

        Returns:
            The new parameters, or for a plain optax transformation the updates.
        """
        step = getattr(self.tx, "step", None)
        if step is None:
            return super().update(model, grads, **kwargs)
        params, gradients = (nnx.as_pure(nnx.state(x, self.wrt)) for x in (model, grads))
        params, state = step(params, self.opt_state.get_value(), gradients, **nnx.as_pure(kwargs))
        nnx.update(model, params)
        self.opt_state.set_value(state)
        self.step[...] += 1
        return params
