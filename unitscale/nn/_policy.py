"""Policies (the number formats of layers), and rules that assign them to layers by path."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core import ScaledArray, cast, check_choice, format_of, upcast
from ..ops import ArrayLike
from ..quant import PRESETS, Block, MatmulConfig, is_stateful
from ..rules import ROLES

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The number formats of a layer.

    Parameters are stored in ``param_dtype`` and cast to ``compute_dtype`` where they are used;
    activations and their cotangents have ``compute_dtype``. If ``matmul`` is set, matmuls with
    weights quantize both operands; weights are quantized directly from ``param_dtype``.

    Attributes:
        param_dtype: dtype of parameters, of 16 bits or more.
        compute_dtype: dtype of activations, of 16 bits or more.
        matmul: config of quantized matmuls, or None.
        exempt: roles of weights whose matmuls are not quantized; by default the readout.
        readout: config of the readout's matmuls, regardless of ``exempt``; None follows ``exempt``
            and ``matmul``. See `with_quantized_readout`.
        loss: config of the two backward matmuls of ``cross_entropy`` methods if the readout is not
            otherwise quantized; None does not quantize them. See `with_quantized_readout`.

    Example:
        >>> Policy(compute_dtype="float16").compute_dtype
        dtype('float16')
    """

    param_dtype: Any = "float32"
    compute_dtype: Any = "float32"
    matmul: MatmulConfig | None = None
    exempt: frozenset[str] = frozenset({"readout"})
    readout: MatmulConfig | None = None
    loss: MatmulConfig | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype"):
            dtype = format_of(getattr(self, name)).dtype
            if dtype is None or dtype.itemsize < 2:
                raise ValueError(
                    f"unitscale.nn.Policy: {name} must have 16 bits or more; got "
                    f"{getattr(self, name)!r}. For FP8 give matmul=MatmulConfig(...)."
                )
            object.__setattr__(self, name, dtype)
        exempt = frozenset(self.exempt)
        if unknown := exempt - set(ROLES):
            raise ValueError(
                f"unitscale.nn.Policy: exempt must be among {', '.join(ROLES)}; got "
                f"{', '.join(sorted(unknown))}"
            )
        object.__setattr__(self, "exempt", exempt)

    def __repr__(self) -> str:
        """Return the name of a preset, or the fields that differ from their defaults."""
        for name, preset in POLICIES.items():
            if self == preset:
                return f"as_policy({name!r})"
        values = {f.name: (f.default, getattr(self, f.name)) for f in dataclasses.fields(self)}
        changed = {k: v for k, (default, v) in values.items() if v != default}
        names = {k: v.name if isinstance(v, np.dtype) else v for k, v in changed.items()}
        return f"Policy({', '.join(f'{k}={v!r}' for k, v in names.items())})"

    def matmul_for(self, role: str) -> MatmulConfig | None:
        """Return the config of matmuls with a weight of this role; None if not quantized."""
        if role == "readout" and self.readout is not None:
            return self.readout
        return None if role in self.exempt else self.matmul

    def activation(self, x: ArrayLike) -> ArrayLike:
        """Return an activation in the compute dtype.

        Finite values beyond the range of float16 saturate, as they do in FP8 matmuls; infinity and
        NaN stay. Pass inputs that are far from unit size as ScaledArrays.
        """
        if not isinstance(x, ScaledArray):
            x = jnp.asarray(x)
        if x.dtype == self.compute_dtype or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        narrower = format_of(self.compute_dtype).exponent_bits < format_of(x.dtype).exponent_bits
        return cast(x, self.compute_dtype) if narrower else upcast(x, self.compute_dtype)

    def operands(
        self, x: ArrayLike, weight: ArrayLike, role: str
    ) -> tuple[ArrayLike, ArrayLike, MatmulConfig | None]:
        """Return both operands of a matmul with a weight of this role, and its config.

        Quantized matmuls take the weight in its own dtype, so that it is rounded once.
        """
        config = self.matmul_for(role)
        return self.activation(x), self.activation(weight) if config is None else weight, config

    def in_loss(self, kernel: ArrayLike) -> tuple[ArrayLike, dict[str, Any]]:
        """Return a readout's kernel and the formats that `ops.readout_cross_entropy` takes."""
        config = self.matmul_for("readout")
        if config is not None:
            return kernel, {"config": config}
        if self.loss is not None:
            return kernel, {"config": self.loss, "logits_dtype": self.compute_dtype}
        return self.activation(kernel), {"config": None}

    def with_quantized_readout(self, *, gradients_only: bool = False) -> "Policy":
        """Return the policy with the readout's matmuls quantized as well.

        The gradient of logits has one large entry per token, and most others are below the
        smallest number of E4M3, so it is rounded to E5M2 unless the strategy is `Block`.
        ``gradients_only`` computes logits in the compute dtype, and quantizes only the two backward
        matmuls of `Readout.cross_entropy` and `Embed.cross_entropy`.

        Raises:
            ValueError: if the policy quantizes no matmuls, or with ``gradients_only`` its strategy
                has a state.
        """
        if self.matmul is None:
            raise ValueError(
                "unitscale.nn.Policy.with_quantized_readout: matmul must be a MatmulConfig; got "
                "None. Start from a policy such as 'fp8'."
            )
        config = self.matmul
        if not isinstance(config.strategy, Block):
            config = dataclasses.replace(config, cotangent="float8_e5m2")
        if not gradients_only:
            return dataclasses.replace(self, readout=config)
        if is_stateful(config.strategy):
            raise ValueError(
                "unitscale.nn.Policy.with_quantized_readout: gradients_only needs a strategy that "
                f"keeps no scales, such as Unit or Dynamic; got {config.strategy}. Leave it False, "
                "or start from another policy."
            )
        return dataclasses.replace(self, loss=config)


PolicyLike: TypeAlias = Policy | str

POLICIES: Mapping[str, Policy] = {
    **{dtype: Policy(compute_dtype=dtype) for dtype in ("float32", "bfloat16", "float16")},
    **{name: Policy(compute_dtype="bfloat16", matmul=config) for name, config in PRESETS.items()},
}
"""The policies that a layer accepts by name: see `as_policy`."""


def as_policy(policy: PolicyLike, *, dtype: Any = None, param_dtype: Any = None) -> Policy:
    """Return the preset of a name; a Policy is returned unchanged.

    | preset | activations | matmuls with weights, except the readout's |
    |---|---|---|
    | "float32", "bfloat16", "float16" | as named | as activations |
    | "fp8" | bfloat16 | E4M3, cotangents too; no scales are measured |
    | "fp8_e5m2" | bfloat16 | E4M3, cotangents E5M2, for models that are not unit scaled |
    | "fp8_dynamic" | bfloat16 | E4M3, cotangents E5M2; scales from the amax of this step |
    | "fp8_delayed" | bfloat16 | same, from the amax of earlier steps; needs `nn.value_and_grad` |
    | "fp8_static" | bfloat16 | same, but with scales that `nn.calibrate` sets once |
    | "fp8_channel" | bfloat16 | E4M3, one scale per row and output channel; wide weight gradients |
    | "fp8_block" | bfloat16 | E4M3, one scale per 128 elements, per 128 x 128 of a weight |
    | "mxfp8" | bfloat16 | E4M3, cotangents too; one scale for each block of 32 elements |
    | "nvfp4" | bfloat16 | E2M1, one E4M3 scale per 16 elements |
    | "nvfp4_dynamic" | bfloat16 | same, with one more scale per tensor, for plain models |

    Parameters are float32, and the readout computes in the dtype of activations.

    Args:
        policy: a Policy or the name of a preset.
        dtype: replaces the compute dtype; None keeps it.
        param_dtype: replaces the dtype of parameters; None keeps it.

    Example:
        >>> as_policy("fp8", dtype="float16").compute_dtype.name
        'float16'
    """
    if isinstance(policy, str):
        check_choice("unitscale.nn", "policy", policy, POLICIES)
        policy = POLICIES[policy]
    if not isinstance(policy, Policy):
        raise TypeError(f"unitscale.nn: policy must be a Policy or a preset's name; got {policy!r}")
    given = {"compute_dtype": dtype, "param_dtype": param_dtype}
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(policy, **given) if given else policy


def set_policies(model: nnx.Module, rules: Mapping[str, PolicyLike]) -> dict[str, str]:
    """Change the policies of individual layers of a unit-scaled model, in place.

    Use it to run some matmuls of an FP8 model in 16 bits. It acts on layers with a matmul
    (`Dense`, `Readout`, `Embed`, `Conv`, `Einsum`), also inside other modules.

    Args:
        model: the model, which is changed. Its parameters stay the same.
        rules: maps patterns of dotted paths (`fnmatch`: "*.attention.query") to policies. The
            first pattern that matches a layer applies.

    Returns:
        The path of each layer that was changed, and the pattern that matched it.

    Raises:
        ValueError: if a pattern matches no layer, or only layers that earlier patterns match; or if
            a policy is unknown, has a ``param_dtype`` other than the layer's, or has a strategy
            with state, which only a constructor can create. The model is then unchanged.

    Example:
        >>> from unitscale.nn import MLP
        >>> model = MLP(16, 64, policy="fp8", rngs=nnx.Rngs(0))
        >>> set_policies(model, {"down": "bfloat16"})
        {'down': 'down'}
    """
    policies = {pattern: as_policy(policy) for pattern, policy in rules.items()}
    layers: dict[str, Any] = {
        path: node
        for path, node in nodes_of(model)
        if hasattr(node, "amax") and hasattr(node, "policy")
    }
    none = "the model has no layers of unitscale.nn. Use nn.convert for layers of plain Flax"
    assigned = assign(policies, layers, "set_policies", none)
    for path, (pattern, policy) in assigned.items():
        matmul = policy.matmul_for(layers[path].role)
        if matmul is not None and is_stateful(matmul.strategy):
            raise ValueError(
                f"unitscale.nn.set_policies: the policy for {pattern!r} must not store scales; got "
                f"{policy!r}. Pass that policy to the constructor of {path} instead"
            )
        if policy.param_dtype != layers[path].policy.param_dtype:
            raise ValueError(
                f"unitscale.nn.set_policies: the policy of {pattern!r} must store parameters in "
                f"{layers[path].policy.param_dtype}, as {path} does; got {policy.param_dtype}"
            )
    for path, (_, policy) in assigned.items():
        layers[path].policy, layers[path].amax = policy, nnx.data(None)
    return {path: pattern for path, (pattern, _) in assigned.items()}


def nodes_of(node: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield every module and container of a model once, with its dotted path, sorted by name."""
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    seen.add(id(node))
    yield path, node
    for name, child in children_of(node):
        yield from nodes_of(child, join(path, name), seen)


def join(path: str, name: Any) -> str:
    """Return the dotted path of a child."""
    return f"{path}.{name}" if path else str(name)


def children_of(node: Any) -> list[tuple[Any, Any]]:
    """Return the children of a module, mapping or sequence, sorted by name."""
    if isinstance(node, nnx.Pytree):
        children = [(k, v) for k, v in vars(node).items() if not k.startswith("_pytree__")]
    elif isinstance(node, Mapping):
        children = list(node.items())
    elif isinstance(node, list | tuple):
        children = list(enumerate(node))
    else:
        children = []

    def order(child: tuple[Any, Any]) -> tuple[float, str]:
        name = str(child[0])
        return (int(name), "") if name.isdecimal() else (math.inf, name)

    # Sorted, because splitting and merging a module changes the order of its attributes.
    return sorted(children, key=order)


def assign(
    rules: Mapping[str, Value], paths: Iterable[str], owner: str, none: str = "there are none"
) -> dict[str, tuple[str, Value]]:
    """Return the first rule that matches each path; ``none`` explains why there are no paths.

    Raises:
        ValueError: if a rule matches no path, or only paths that an earlier rule matches.
    """
    paths, found = list(paths), {}
    for path in paths:
        for rule in (pattern for pattern in rules if fnmatchcase(path, pattern)):
            found.setdefault(path, (rule, rules[rule]))
    used = {rule for rule, _ in found.values()}
    for pattern in (rule for rule in rules if rule not in used):
        if taken := [path for path in paths if fnmatchcase(path, pattern)]:
            raise ValueError(
                f"unitscale.nn.{owner}: an earlier rule matches every layer that {pattern!r} "
                f"does, such as {found[taken[0]][0]!r} for {taken[0]}. The first rule that "
                "matches a layer applies: move this one up?"
            )
        near = difflib.get_close_matches(pattern.strip("*."), paths, 3, cutoff=0.0)
        raise ValueError(
            f"unitscale.nn.{owner}: no layer matches {pattern!r}; "
            + (f"nearest are {', '.join(near)}" if near else none)
        )
    return found


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
