"""The layers of an `flax.nnx` model that multiply by a weight, and what stands in their hooks."""

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..core import ScaledArray, reshard
from ..quant import (
    Contraction,
    MatmulConfig,
    contraction_of,
    einsum_contraction,
    einsum_problem,
    multiply,
    product,
    quantize,
    quantize_at,
)
from ._amax_state import amax_state, read_state


class StaticWeight(nnx.Variable):
    """A weight in FP8, or a scale, of a model that `to_static` made; it is no `nnx.Param`.

    Example:
        >>> StaticWeight(jnp.ones(2, jnp.float8_e4m3fn)).get_value().dtype.name
        'float8_e4m3fn'
    """


class Hook(nnx.Module):
    """What stands in a layer's hook: the config of its product, and what stood there before.

    Scales that are kept get the leading dimensions ``stack`` that a stacked layer's kernel has.
    With a ``weight_scale`` the right operand is an FP8 kernel already; ``input_scale`` is then the
    left one's, if it does not come from the data.
    """

    def __init__(self, config: MatmulConfig, original: Any, stack: tuple[int, ...] = ()) -> None:
        self.config, self.original = config, nnx.static(original)
        self.state = nnx.data(amax_state(config))
        if self.state is not None:
            spread = partial(_repeated, stack=stack)
            self.state.set_value(jax.tree.map(spread, self.state.get_value()))
        self.weight_scale: Any = nnx.data(None)
        self.input_scale: Any = nnx.data(None)

    def _multiply(self, lhs, rhs, spec: Contraction, dtype: Any, out_sharding: Any) -> jax.Array:
        if self.weight_scale is None:
            state = read_state(self.state)
            return multiply(
                lhs, rhs, spec, self.config, state, out_dtype=dtype, out_sharding=out_sharding
            )
        y = self._multiply_static(lhs, rhs, spec, lhs.dtype if dtype is None else dtype)
        return reshard(y, out_sharding)

    def _multiply_static(self, lhs, rhs, spec: Contraction, out_dtype: Any) -> jax.Array:
        if self.input_scale is None:
            axes = tuple(axis for axis, label in enumerate(spec.lhs) if label in spec.summed)
            x = quantize(lhs, self.config.lhs, self.config.strategy, axis=axes)
        else:
            x = quantize_at(lhs, self.config.lhs, self.input_scale.get_value())
        return product(x, ScaledArray(rhs, self.weight_scale.get_value()), spec, 1.0, out_dtype)


class DotGeneralHook(Hook):
    """A `lax.dot_general`."""

    def __call__(
        self,
        lhs,
        rhs,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding=None,
    ):
        del precision
        spec = contraction_of(dimension_numbers, lhs.ndim, rhs.ndim)
        return self._multiply(lhs, rhs, spec, preferred_element_type, out_sharding)


class EinsumHook(Hook):
    """A `jnp.einsum` of two operands."""

    def __call__(
        self,
        subscripts,
        lhs,
        rhs,
        *,
        precision=None,
        preferred_element_type=None,
        out_sharding=None,
    ):
        del precision
        if problem := einsum_problem(subscripts):  # a call may have an equation of its own
            raise ValueError(
                f"unitscale.nn.convert: {subscripts!r} is not one product of two matrices: "
                f"{problem}. Leave the layer out, by a rule with None"
            )
        spec = einsum_contraction(subscripts, lhs.ndim)
        return self._multiply(lhs, rhs, spec, preferred_element_type, out_sharding)


def _repeated(x: jax.Array, stack: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(x, (*stack, *x.shape))


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the product of one type of layer is replaced."""

    attribute: str
    hook: type[Hook]
    defaults: tuple[Any, ...]  # what stands in the attribute of a layer nobody has changed


_KINDS: dict[type[nnx.Module], Kind] = {
    nnx.Linear: Kind("dot_general", DotGeneralHook, (lax.dot_general,)),
    nnx.LinearGeneral: Kind("dot_general", DotGeneralHook, (None, lax.dot_general)),
    nnx.Einsum: Kind("einsum_op", EinsumHook, (jnp.einsum,)),
}
CONVOLUTIONS = (nnx.Conv, nnx.ConvTranspose)
NORMALIZERS = (nnx.WeightNorm, nnx.SpectralNorm)
"""Modules that set the kernels of the layer that they hold before each call."""


def kind_of(layer: Any) -> Kind | None:
    return next((kind for type_, kind in _KINDS.items() if isinstance(layer, type_)), None)


def hook_of(layer: Any) -> Hook | None:
    kind = kind_of(layer)
    found = None if kind is None else getattr(layer, kind.attribute)
    return found if isinstance(found, Hook) else None


def layers_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers of `flax.nnx` with a product, as `nodes_of`."""
    for path, node in nodes_of(model):
        if kind_of(node) is not None or isinstance(node, CONVOLUTIONS):
            yield path, node


def nodes_of(node: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """What a model consists of, each once, with dotted paths, in the order of their names."""
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    seen.add(id(node))
    yield path, node
    for name, child in children_of(node):
        yield from nodes_of(child, joined(path, name), seen)


def joined(path: str, name: Any) -> str:
    """The dotted path of a child."""
    return f"{path}.{name}" if path else str(name)


def children_of(node: Any) -> list[tuple[Any, Any]]:
    """What a module, mapping or sequence holds, by name, in an order that names alone decide."""
    if isinstance(node, nnx.Pytree):
        children = [(k, v) for k, v in vars(node).items() if not k.startswith("_pytree__")]
    elif isinstance(node, Mapping):
        children = list(node.items())
    elif isinstance(node, list | tuple):
        children = list(enumerate(node))
    else:
        children = []
    # A split and merged module has its attributes in another order than a new one.
    return sorted(children, key=_natural)


def _natural(child: tuple[Any, Any]) -> tuple[int, str]:
    """Numbers by value, then names by the alphabet."""
    name = str(child[0])
    return (int(name), "") if name.isdecimal() else (sys.maxsize, name)


def features_of(layer: Any) -> tuple[int, ...]:
    """How many numbers each of a kernel's products sums over, and how many it gives."""
    if isinstance(layer, nnx.LinearGeneral):
        return math.prod(layer.in_features), math.prod(layer.out_features)
    if isinstance(layer, nnx.Linear):
        return layer.in_features, layer.out_features
    if not isinstance(layer, nnx.Einsum) or einsum_problem(layer.einsum_str):
        return ()
    spec = einsum_contraction(layer.einsum_str, 0)
    size = dict(zip(spec.rhs, layer.kernel_shape, strict=True))
    given = [size[c] for c in spec.rhs if c not in spec.lhs]
    return math.prod(size[c] for c in spec.summed), math.prod(given)


def kernel_rank(layer: Any) -> int:
    """How many dimensions the kernel of one layer has, of however many it is stacked."""
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    has_shape = isinstance(layer, nnx.Einsum | nnx.Conv | nnx.ConvTranspose)
    return len(layer.kernel_shape) if has_shape else 2


def is_stacked_elsewhere(layer: Any) -> bool:
    """Whether layers are stacked along other axes of the kernel than the leading ones."""
    if isinstance(layer, nnx.LinearGeneral):  # whose batch axes may lie anywhere
        return False
    own = layer.kernel_shape if isinstance(layer, nnx.Einsum) else features_of(layer)
    return layer.kernel.shape[-kernel_rank(layer) :] != tuple(own)


def normalized(model: Any) -> dict[str, str]:
    """Paths below which kernels are made anew in each call, by `nnx.WeightNorm`, and by what."""
    return {
        path: type(node).__name__ for path, node in nodes_of(model) if isinstance(node, NORMALIZERS)
    }
