"""Parameters of layers: initializers, metadata, padding, and the base of layers with a kernel."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Required, TypeAlias, TypedDict

import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from .. import core, ops
from ..core import ScaledArray, reshard
from ..rules import ROLES, Constraint
from ._amax import amax_state, read as read
from ._policy import Policy, PolicyLike, as_policy

Initializer: TypeAlias = Callable[..., Any]
"""A function of key, shape and dtype, as those of `nnx.initializers`."""
Metadata: TypeAlias = Mapping[str, Any]
"""Metadata of a parameter's Variable, such as ``{"out_sharding": (None, "model")}``."""
OutSharding: TypeAlias = NamedSharding | PartitionSpec | None

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
    padding: tuple[int, ...] = (),
    init: Initializer = unit_normal,
    metadata: Metadata = NO_METADATA,
    kind: type[nnx.Param] = nnx.Param,
) -> nnx.Param:
    """Return a weight with its role, fan-in, fan-out and residual depth as metadata.

    ``depth`` is the number of residual branches of the stack that the weight is in (`set_depth`),
    1 outside of any. ``padding`` is the number of zeros after each dimension, which fans do not
    count and which must get no gradient.
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
    """Return a bias or gain. Zeros and ones draw no key, so they do not change other draws."""
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
    """Return how many zeros pad a vocabulary to a multiple that matmul kernels prefer."""
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
    """Reshard the data of a layer's output as the caller asks; None leaves it as it is."""
    return y if out_sharding is None else y.map_data(lambda data: reshard(data, out_sharding))


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None.

    `nnx.tabulate` fails if a layer is called with a ScaledArray and a keyword argument that is
    None, so layers pass on only what they were given.
    """
    return {name: value for name, value in options.items() if value is not None}


def check_choice(owner: str, name: str, value: str, literal: Any) -> None:
    """Raise a ValueError unless a value is one of a Literal's."""
    core.check_choice(f"unitscale.nn.{owner}", name, value, literal)


class KernelOptions(TypedDict, total=False):
    """Keyword arguments of every layer with a kernel: see `unitscale.nn`."""

    dtype: Any
    param_dtype: Any
    kernel_init: Initializer
    bias_init: Initializer
    policy: PolicyLike
    rngs: Required[nnx.Rngs]
    kernel_metadata: Metadata
    bias_metadata: Metadata


class _KernelLayer(nnx.Module):
    """Base of layers with a kernel, an optional bias, and the amax state of their matmul."""

    role = "weight"

    def __init__(
        self,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None,
        *,
        fan_in: int,
        fan_out: int,
        constraint: Constraint = "to_output_scale",
        padding: tuple[int, ...] = (),
        dtype: Any = None,
        param_dtype: Any = None,
        kernel_init: Initializer = unit_normal,
        bias_init: Initializer = zeros,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        self.constraint: Constraint = constraint
        self.policy = policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)
        self.kernel = weight(
            rngs,
            kernel_shape,
            policy,
            role=self.role,
            fan_in=fan_in,
            fan_out=fan_out,
            padding=padding,
            init=kernel_init,
            metadata=kernel_metadata,
        )
        bias = None
        if bias_shape is not None:
            bias = vector(bias_init, rngs, bias_shape, policy, role="bias", metadata=bias_metadata)
        self.bias = nnx.data(bias)
        self.amax = nnx.data(amax_state(policy.matmul_for(self.role)))

    def _apply(
        self,
        op: Callable[..., ScaledArray],
        x: ops.ArrayLike,
        out_sharding: OutSharding = None,
        **options: Any,
    ) -> ScaledArray:
        """Call an op with the layer's parameters, formats and constraint."""
        kernel = unpadded(self.kernel) if self.role == "readout" else self.kernel.get_value()
        x, kernel, config = self.policy.operands(x, kernel, self.role)
        y = op(
            x,
            kernel,
            None if self.bias is None else self.bias.get_value(),
            constraint=self.constraint,
            config=config,
            state=None if self.amax is None else self.amax.get_value(),
            **options,
        )
        return y if out_sharding is None else reshard_output(y, out_sharding)
