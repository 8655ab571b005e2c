"""What flows through each layer: the RMS of activations and gradients, and where it breaks.

A model is not changed for this. While it runs, the `__call__` of every module class in it is
replaced by one that also notes the output, and that passes it through an identity whose backward
pass hands out the RMS of the cotangent as the gradient of a dummy scalar.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import nn, ops, value_and_grad
from unitscale.core import is_scaled

from .batch import over_amax


class Reading(NamedTuple):
    """Statistics by layer path, in the order in which the layers finish.

    Each is the RMS in float32 (not finite when any element is not): `activations` of outputs,
    `gradients` of the loss's cotangents at those outputs, `weights` of each parameter's gradient.
    """

    loss: jax.Array
    activations: dict[str, jax.Array]
    gradients: dict[str, jax.Array]
    weights: dict[str, jax.Array]

    def first_not_finite(self) -> str | None:
        """Where the first value that is not finite arises: forward order, then backward order."""
        for path, value in self.activations.items():
            if not jnp.isfinite(value):
                return f"the output of {path}"
        if not jnp.isfinite(self.loss):
            return "the loss"
        for path, value in reversed(self.gradients.items()):
            if not jnp.isfinite(value):
                return f"the gradient at the output of {path}"
        for path, value in self.weights.items():
            if not jnp.isfinite(value):
                return f"the gradient of {path}"
        return None


def probe(model: Any, *inputs: Any) -> Reading:
    """Runs the loss and its gradient once, noting every layer."""
    model = _unrolled(model)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    # The layers that run, and in which order, are known only from a run.
    paths: list[str] = []
    jax.eval_shape(
        lambda params, rest: paths.extend(_loss(params, rest, None, graphdef, inputs)[1]),
        params,
        rest,
    )
    results = _measure(params, rest, inputs, graphdef, tuple(paths))
    value, noted, at_outputs, weights = results
    names = [
        _dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled)
    ]
    # jit sorts dictionaries by key; the order of the layers is what makes a first one.
    return Reading(
        value,
        {path: noted[path] for path in paths},
        {path: at_outputs[path] for path in paths},
        dict(zip(names, weights, strict=True)),
    )


def _unrolled(model: Any) -> Any:
    """The model without scans over layers and what is computed again: all outputs are in reach."""
    model = nnx.clone(model)
    parts: list[Any] = [module for _, module in nnx.iter_modules(model)]
    for module in parts:
        if hasattr(module, "remat"):
            module.remat = "none"
    for module in parts:
        for name, child in list(vars(module).items()):
            if isinstance(child, nn.TransformerStack) and child.scan:
                setattr(module, name, child.with_scan(False))
    return model


def _loss(params, rest, taps, graphdef, inputs):
    model = nnx.merge(graphdef, params, rest)
    with _watched(model, taps) as noted:
        value = model.loss(*inputs, deterministic=True)
    return value, noted


@functools.partial(jax.jit, static_argnums=(3, 4))
def _measure(params, rest, inputs, graphdef, paths):
    taps = {path: jnp.zeros(()) for path in paths}
    amax, of_amax = over_amax(
        lambda params, rest, taps: _loss(params, rest, taps, graphdef, inputs), rest
    )
    differentiate = value_and_grad(of_amax, (0, 1, 2), has_aux=True)
    (value, noted), (grads, _, at_outputs) = differentiate(params, amax, taps)
    return value, noted, at_outputs, [_rms(leaf) for leaf in jax.tree.leaves(grads)]


@contextmanager
def _watched(model: Any, taps: dict[str, jax.Array] | None) -> Iterator[dict[str, jax.Array]]:
    """Within the block, calls of the model's submodules are noted in the dictionary it yields."""
    names = {id(module): _path_name(path) for path, module in nnx.iter_modules(model) if path}
    classes = {_caller(type(module)) for _, module in nnx.iter_modules(model)} - {None}
    noted: dict[str, jax.Array] = {}

    def watching(original: Callable) -> Callable:
        @functools.wraps(original)
        def call(self, *args, **kwargs):
            output = original(self, *args, **kwargs)
            name = names.get(id(self))
            return output if name is None else _note(output, name, taps, noted)

        return call

    originals: dict[Any, Callable] = {cls: cls.__dict__["__call__"] for cls in classes}
    in_chunks = nn.Readout.cross_entropy
    for cls, original in originals.items():
        cls.__call__ = watching(original)
    nn.Readout.cross_entropy = _of_whole_logits
    try:
        yield noted
    finally:
        for cls, original in originals.items():
            cls.__call__ = original
        nn.Readout.cross_entropy = in_chunks


def _of_whole_logits(self: nn.Readout, x: Any, labels: jax.Array, **options: Any) -> jax.Array:
    """`nn.Readout.cross_entropy` by a call of the readout, so that there are logits to note."""
    options.pop("chunk_size", None)
    return ops.softmax_cross_entropy(self(x), labels, **options)


def _caller(kind: type) -> type | None:
    """The class that defines what calling an instance of `kind` does."""
    return next((cls for cls in kind.__mro__ if "__call__" in cls.__dict__), None)


def _note(output: Any, name: str, taps: dict[str, jax.Array] | None, noted: dict) -> Any:
    """Notes the first floating array of an output; for a ScaledArray that is its data."""
    leaves, structure = jax.tree.flatten(output)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating):
            while name in noted:  # a layer that is called again, such as shared weights
                name += "'"
            noted[name] = _rms(jax.lax.stop_gradient(leaf))
            if taps is not None:
                leaves[index] = _tap(leaf, taps[name])
            break
    return jax.tree.unflatten(structure, leaves)


@jax.custom_vjp
def _tap(x: jax.Array, dummy: jax.Array) -> jax.Array:
    """x; the cotangent of the dummy scalar is the RMS of the cotangent of x."""
    return x


def _tap_forward(x, dummy):
    return x, None


def _tap_backward(_, cotangent):
    return cotangent, _rms(cotangent)


_tap.defvjp(_tap_forward, _tap_backward)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def _path_name(path: tuple) -> str:
    return ".".join(str(part) for part in path)


def _dotted(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
