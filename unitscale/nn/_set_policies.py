"""Policies of single layers, by their paths in a model."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..quant import is_stateful
from ._conversion_rules import assign
from ._embed import Embed
from ._hooks import nodes_of
from ._policy import PolicyLike, as_policy


def set_policies(model: nnx.Module, rules: Mapping[str, PolicyLike]) -> dict[str, str]:
    """Gives layers of unit-scaled models other policies, in place.

    Layers are those with a product: `Dense`, `Readout`, `Embed`, `Conv`, `Einsum`, also inside of
    other modules. Parameters stay as they are. So a product that a format does not suit is left in
    16 bits, and all others are in 8.

    Args:
        model: the model, which is changed.
        rules: maps patterns of dotted paths (`fnmatch`: "*.attention.query") to a `Policy` or the
            name of a preset. The first pattern that matches a layer counts.

    Returns:
        The pattern that decided for each layer that has another policy now, by its path.

    Raises:
        ValueError: if a pattern matches no layer, or none that an earlier one leaves; if a policy
            is unknown, stores parameters in another dtype than the layer does, or keeps scales
            ("fp8_delayed", "fp8_static"), which a layer has from its constructor alone. The model
            is then unchanged.

    Example:
        >>> from unitscale.nn import MLP
        >>> model = MLP(16, 64, policy="fp8", rngs=nnx.Rngs(0))
        >>> set_policies(model, {"down": "bfloat16"})
        {'down': 'down'}
        >>> model.up.policy.matmul is None, model.down.policy.matmul is None
        (False, True)

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, FP8 training: some products stay in 16 bits.
    """
    policies = {pattern: as_policy(policy) for pattern, policy in rules.items()}
    layers = {path: node for path, node in nodes_of(model) if _has_formats(node)}
    assigned = assign(policies, layers, "set_policies")
    for path, (pattern, policy) in assigned.items():
        layer = layers[path]
        matmul = policy.matmul_for(_role(layer))
        if matmul is not None and is_stateful(matmul.strategy):
            raise ValueError(
                f"unitscale.nn.set_policies: the policy of {pattern!r} must keep no scales; got "
                f"{policy!r}. Give it to the constructor of {path}"
            )
        if policy.param_dtype != layer.policy.param_dtype:
            raise ValueError(
                f"unitscale.nn.set_policies: the policy of {pattern!r} must store parameters in "
                f"{layer.policy.param_dtype}, as {path} does; got {policy.param_dtype}"
            )
    for path, (_, policy) in assigned.items():
        layers[path].policy, layers[path].amax = policy, nnx.data(None)
    return {path: pattern for path, (pattern, _) in assigned.items()}


def _has_formats(node: Any) -> bool:
    """Whether it is a layer with a product and formats of its own."""
    return hasattr(node, "amax") and hasattr(node, "policy")


def _role(layer: Any) -> str:
    return "readout" if isinstance(layer, Embed) else getattr(layer, "role", "weight")
