"""Parameters: unit variance at initialisation, and the metadata that optimizers read."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import nnx

from ..rules import ROLES
from ._policy import Policy

Initializer: TypeAlias = Callable[..., Any]
"""A function of key, shape and dtype, as those of `nnx.initializers`."""
Metadata: TypeAlias = Mapping[str, Any]
"""What a parameter's Variable carries besides its value, such as ``out_sharding``."""

NO_METADATA: Metadata = MappingProxyType({})
unit_normal = nnx.initializers.normal(1.0)
zeros, ones = nnx.initializers.zeros_init(), nnx.initializers.ones_init()


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    policy: Policy,
    *,
    role: str = "weight",
    fan_in: int,
    fan_out: int,
    padding: tuple[int, ...] = (0, 0),
    init: Initializer = unit_normal,
    metadata: Metadata = NO_METADATA,
    kind: type[nnx.Param] = nnx.Param,
) -> nnx.Param:
    """Returns a weight, by default from N(0, 1), with its role, fan-in, fan-out and residual depth.

    ``depth`` is the number of residual branches of the stack that the weight belongs to, 1
    outside of any; `set_depth` sets it. ``padding`` says how many zeros follow along each
    dimension; fans do not count them, and nobody may give them a gradient.
    """
    assert role in ROLES, f"unknown role {role}"
    drawn = init(rngs.params(), shape, jnp.float32)
    more: dict[str, Any] = {"padding": padding} if any(padding) else {}
    drawn = _stored(drawn, policy, padding if more else ())
    return kind(drawn, role=role, fan_in=fan_in, fan_out=fan_out, depth=1, **more, **metadata)


def vector(
    init: Initializer,
    rngs: nnx.Rngs | None,
    shape: tuple[int, ...],
    policy: Policy,
    *,
    role: str,
    metadata: Metadata = NO_METADATA,
) -> nnx.Param:
    """Returns a bias or gain. Zeros and ones take no key, so that others are drawn without them."""
    assert role in ROLES, f"unknown role {role}"
    if rngs is None and init not in (zeros, ones):
        raise ValueError(
            "unitscale.nn: an initializer other than zeros and ones may draw; give rngs="
        )
    key = None if rngs is None or init in (zeros, ones) else rngs.params()
    drawn = _stored(init(key, shape, jnp.float32), policy)
    return nnx.Param(drawn, role=role, fan_in=1, fan_out=shape[-1], depth=1, **metadata)


def _stored(drawn: Any, policy: Policy, padding: tuple[int, ...] = ()) -> Any:
    """What an initializer drew, with its metadata if it has any, as it is stored."""
    if isinstance(drawn, nnx.VariableMetadata):  # of nnx.with_partitioning
        return dataclasses.replace(drawn, raw_value=_stored(drawn.raw_value, policy, padding))
    value = drawn.astype(policy.param_dtype)
    return jnp.pad(value, [(0, more) for more in padding]) if padding else value


def set_depth(module: nnx.Module, depth: int) -> None:
    """Sets the residual depth of every parameter below a module."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            node.set_metadata(depth=depth)


def read(parameter: nnx.Param | None) -> Any:
    """Returns a parameter's array or ScaledArray; None stays None."""
    return None if parameter is None else parameter.get_value()


def padding_of(owner: str, vocab: int, multiple: int) -> int:
    """Returns how many zeros make a vocabulary a multiple that kernels like.

    Such zeros lie at the end of a parameter, are never looked up, have no probability and no
    gradient: whatever an optimizer does with a zero and a gradient of zero, they stay.

    Raises:
        ValueError: if the multiple is not positive.

    Example:
        >>> padding_of("Embed", 50257, 128)
        47
    """
    if multiple < 1:
        raise ValueError(
            f"unitscale.nn.{owner}: pad_to_multiple_of must be at least 1; got {multiple}"
        )
    return -vocab % multiple


def unpadded(parameter: nnx.Variable) -> Any:
    """Returns what a variable holds, without the zeros that `Embed` and `Readout` pad with.

    Example:
        >>> from unitscale.nn import Readout
        >>> kernel = Readout(2, 100, pad_to_multiple_of=128, rngs=nnx.Rngs(0)).kernel
        >>> kernel.shape, unpadded(kernel).shape
        ((2, 128), (2, 100))
    """
    value, padding = parameter.get_value(), parameter.get_metadata().get("padding")
    if padding is None:
        return value
    return value[tuple(slice(n - more) for n, more in zip(value.shape, padding, strict=True))]
