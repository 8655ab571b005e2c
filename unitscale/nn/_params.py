"""Parameters of layers: initializers, metadata and padding."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..core import ScaledArray, reshard
from ..rules import ROLES
from ._policy import Policy

Initializer: TypeAlias = Callable[..., Any]
"""A function of key, shape and dtype, like those in `nnx.initializers`."""
Metadata: TypeAlias = Mapping[str, Any]
"""Metadata of a parameter's Variable, such as ``{"out_sharding": (None, "model")}``."""
OutSharding: TypeAlias = NamedSharding | PartitionSpec | None

NO_METADATA: Metadata = MappingProxyType({})
unit_normal = nnx.initializers.normal(1.0)
zeros, ones = nnx.initializers.zeros_init(), nnx.initializers.ones_init()


def read(variable: nnx.Variable | None) -> Any:
    """Return the value of a variable; None stays None."""
    return None if variable is None else variable.get_value()


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    policy: Policy,
    *,
    role: str = "weight",
    fan_in: int,
    fan_out: int,
    padding: tuple[int, ...] = (),
    init: Initializer = unit_normal,
    metadata: Metadata = NO_METADATA,
    kind: type[nnx.Param] = nnx.Param,
) -> nnx.Param:
    """Return a weight with its role, fan-in, fan-out and residual depth as metadata.

    ``depth`` is the number of residual branches of the stack that the weight is in (`set_depth`),
    and 1 outside of stacks. ``padding`` is the number of zeros appended along each dimension. They
    do not count toward fan-in and fan-out, and must get no gradient.
    """
    assert role in ROLES, f"unknown role {role}"
    value = _as_stored(init(rngs.params(), shape, jnp.float32), policy, padding)
    more: dict[str, Any] = {"padding": padding} if any(padding) else {}
    return kind(value, role=role, fan_in=fan_in, fan_out=fan_out, depth=1, **more, **metadata)


def vector(
    init: Initializer,
    rngs: nnx.Rngs | None,
    shape: tuple[int, ...],
    policy: Policy,
    *,
    role: str,
    metadata: Metadata = NO_METADATA,
) -> nnx.Param:
    """Return a bias or gain. The initializers zeros and ones do not use up a random key."""
    assert role in ROLES, f"unknown role {role}"
    if rngs is None and init not in (zeros, ones):
        raise ValueError("unitscale.nn: an initializer other than zeros and ones needs rngs=")
    key = None if rngs is None or init in (zeros, ones) else rngs.params()
    value = _as_stored(init(key, shape, jnp.float32), policy)
    return nnx.Param(value, role=role, fan_in=1, fan_out=shape[-1], depth=1, **metadata)


def _as_stored(drawn: Any, policy: Policy, padding: tuple[int, ...] = ()) -> Any:
    """Cast and pad the result of an initializer, which may be wrapped in metadata."""
    if isinstance(drawn, nnx.VariableMetadata):  # from nnx.with_partitioning
        return dataclasses.replace(drawn, raw_value=_as_stored(drawn.raw_value, policy, padding))
    value = drawn.astype(policy.param_dtype)
    return jnp.pad(value, [(0, n) for n in padding]) if any(padding) else value


def set_depth(module: nnx.Module, depth: int) -> None:
    """Set the residual depth of every parameter of a module."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            node.set_metadata(depth=depth)


def padding_of(owner: str, vocab: int, multiple: int) -> int:
    """Return the number of zeros that pad a vocabulary to the next multiple."""
    if multiple < 1:
        raise ValueError(
            f"unitscale.nn.{owner}: pad_to_multiple_of must be at least 1; got {multiple}"
        )
    return -vocab % multiple


def unpadded(parameter: nnx.Variable) -> Any:
    """Return a variable's value without the zeros that `Embed` and `Readout` pad it with.

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


def reshard_output(y: ScaledArray, out_sharding: OutSharding) -> ScaledArray:
    """Reshard the data of a layer's output as the caller asks; None leaves it unchanged."""
    return y if out_sharding is None else y.map_data(lambda data: reshard(data, out_sharding))


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None.

    `nnx.tabulate` fails if a layer is called with a ScaledArray and a keyword argument None.
    """
    return {name: value for name, value in options.items() if value is not None}
