"""Measure the RMS of activations and gradients of each layer, to plot it or to find NaN."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from unitscale import nn, ops, value_and_grad
from unitscale.core import is_floating, is_scaled

from .folder import read_metrics
from .step import over_amax


class Reading(NamedTuple):
    """RMS of layer outputs, of the gradients there, and of weight gradients, in layer order."""

    loss: jax.Array
    activations: dict[str, jax.Array]
    gradients: dict[str, jax.Array]
    weights: dict[str, jax.Array]

    def first_not_finite(self) -> str | None:
        """Name the first value that is not finite, in forward, then in backward order."""
        values = {f"the output of {path}": x for path, x in self.activations.items()}
        values["the loss"] = self.loss
        for path, x in reversed(self.gradients.items()):
            values[f"the gradient at the output of {path}"] = x
        values |= {f"the gradient of {path}": x for path, x in self.weights.items()}
        return next((name for name, value in values.items() if not jnp.isfinite(value)), None)


def probe(model: Any, *inputs: Any) -> Reading:
    """Run the loss and its gradient once, and measure every layer."""
    graphdef, params, rest = nnx.split(unrolled(model), nnx.Param, ...)
    # Trace once to learn which layers run, and in which order.
    paths: list[str] = []
    jax.eval_shape(lambda p, r: paths.extend(_loss(p, r, None, graphdef, inputs)[1]), params, rest)
    loss, noted, at_outputs, weights = _measure(params, rest, inputs, graphdef, tuple(paths))
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled)
    ]
    # In the order of layers, because jit sorts dictionaries by key.
    activations, gradients = ({path: by[path] for path in paths} for by in (noted, at_outputs))
    return Reading(loss, activations, gradients, dict(zip(names, weights, strict=True)))


def unrolled(model: Any) -> Any:
    """Copy the model without scans over layers and remat, which hide outputs."""
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
    """Patch `__call__` of the model's classes to record the RMS of outputs and tap cotangents."""
    modules = [(path, module) for path, module in nnx.iter_modules(model) if path]
    names = {id(module): ".".join(map(str, path)) for path, module in modules}
    calls = {type(module): type(module).__call__ for _, module in modules if callable(module)}
    noted: dict[str, jax.Array] = {}

    def watching(original: Callable) -> Callable:
        @functools.wraps(original)
        def call(self, *args, **kwargs):
            output = original(self, *args, **kwargs)
            leaves, structure = jax.tree.flatten(output)
            floats = [i for i, x in enumerate(leaves) if is_floating(x)]
            name = names.get(id(self))
            if name is None or not floats:
                return output
            while name in noted:  # a layer that is called again
                name += "'"
            first = floats[0]  # the data of a ScaledArray precedes its scale
            noted[name] = _rms(jax.lax.stop_gradient(leaves[first]))
            if taps is not None:
                leaves[first] = _tap(leaves[first], taps[name])
            return jax.tree.unflatten(structure, leaves)

        return call

    with ExitStack() as patches:
        patches.enter_context(patch.object(nn.Readout, "cross_entropy", _of_whole_logits))
        for cls, original in calls.items():
            patches.enter_context(patch.object(cls, "__call__", watching(original)))
        yield noted


def _of_whole_logits(self: nn.Readout, x: Any, labels: jax.Array, **options: Any) -> jax.Array:
    """Replacement of `nn.Readout.cross_entropy` that calls the readout, to record its logits."""
    options.pop("chunk_size", None)
    return ops.softmax_cross_entropy(self(x), labels, **options)


@jax.custom_vjp
def _tap(x: jax.Array, dummy: jax.Array) -> jax.Array:
    """Return x; the gradient with respect to `dummy` is the RMS of the cotangent of x."""
    return x


_tap.defvjp(lambda x, dummy: (x, None), lambda _, cotangent: (cotangent, _rms(cotangent)))


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def plot_loss(folder: Path, *, per: str) -> Path:
    """Plot the training and validation losses in `metrics.jsonl` by step, as `loss.png`."""
    rows = read_metrics(folder / "metrics.jsonl")
    figure = Figure(figsize=(7, 4.5), layout="constrained", dpi=120)
    axes = figure.subplots()
    for name, style in (("loss", "-"), ("validation_loss", "o-")):
        points = np.array([(row["step"], row[name]) for row in rows if name in row]).reshape(-1, 2)
        axes.plot(*points.T, style, label=name.replace("_", " "), markersize=4)
    axes.set(xlabel="step", ylabel=f"loss (nats per {per})", title=folder.name)
    axes.legend()
    figure.savefig(path := folder / "loss.png")
    return path


def plot_rms(folder: Path, readings: Mapping[str, Reading]) -> Path:
    """Plot the RMS of outputs, of gradients there, and of weight gradients in `rms.png`."""
    kinds = {
        "activations": "output of each layer",
        "gradients": "gradient at each layer's output",
        "weights": "gradient of each parameter",
    }
    first = next(iter(readings.values()))
    height = 4 + 0.16 * len(first.activations)
    figure = Figure(figsize=(16, height), layout="constrained", dpi=120)
    for axes, (kind, title) in zip(figure.subplots(1, 3), kinds.items(), strict=True):
        for (label, reading), marker in zip(readings.items(), "ox", strict=False):
            values = np.array([*getattr(reading, kind).values()], np.float64)
            drawn = np.isfinite(values) & (values > 0)  # the axis is logarithmic
            axes.plot(values[drawn], np.flatnonzero(drawn), marker, label=label, markersize=5)
        names = list(getattr(first, kind))
        axes.set_xscale("log", base=2)
        axes.axvline(1.0, color="gray", linewidth=1)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set(xlabel="RMS", title=title, ylim=(len(names) - 0.5, -0.5))
        axes.legend()
    figure.suptitle(folder.name)
    figure.savefig(path := folder / "rms.png")
    return path
