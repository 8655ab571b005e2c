"""Which formats a layer stores, computes and differentiates in."""

import dataclasses
import difflib
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..core import ScaledArray, cast, format_of, upcast
from ..ops import ArrayLike
from ..quant import Block, Delayed, Dynamic, MatmulConfig, Static, Strategy, is_stateful
from ..rules import ROLES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The formats of a layer.

    Parameters are stored in ``param_dtype`` and cast to ``compute_dtype`` where they are used;
    activations and their cotangents are in ``compute_dtype``, whose range finite inputs saturate
    to. Where ``matmul`` is set, the
    operands of products with weights are quantized to its formats, weights directly from
    ``param_dtype``. Roles in ``exempt`` compute their products in ``compute_dtype``.

    Attributes:
        param_dtype: dtype of parameters.
        compute_dtype: dtype of activations.
        matmul: formats of quantized products, or None.
        exempt: roles whose products are never quantized; by default the readout.
        readout: formats of the products of the readout, whatever ``exempt`` says; None for those
            of ``matmul`` if the readout is not exempt. See `with_quantized_readout`.
        loss: formats in which `Readout.cross_entropy` and `Embed.cross_entropy` take the gradients
            of a readout that is otherwise not quantized: logits are in ``compute_dtype``. None for
            gradients in that, too: see `with_quantized_readout`.

    Raises:
        ValueError: if a dtype is not floating, a compute dtype has fewer than 16 bits, or a role
            is unknown.

    Example:
        >>> as_policy("fp8").matmul.lhs
        'float8_e4m3fn'
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
                    f"{getattr(self, name)!r}. FP8 belongs into matmul=MatmulConfig(...)."
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
        """The name of a preset, or what differs from the default."""
        for name, preset in POLICIES.items():
            if self == preset:
                return f"as_policy({name!r})"
        values = {f.name: (f.default, getattr(self, f.name)) for f in dataclasses.fields(self)}
        changed = {k: v for k, (default, v) in values.items() if v != default}
        names = {k: v.name if isinstance(v, np.dtype) else v for k, v in changed.items()}
        return f"Policy({', '.join(f'{k}={v!r}' for k, v in names.items())})"

    def matmul_for(self, role: str) -> MatmulConfig | None:
        """Returns the formats of products with a weight of this role; None for plain products."""
        if role == "readout" and self.readout is not None:
            return self.readout
        return None if role in self.exempt else self.matmul

    def in_loss(self, kernel: ArrayLike) -> tuple[ArrayLike, dict[str, Any]]:
        """Returns a readout's kernel and the formats as `ops.readout_cross_entropy` takes them.

        Example:
            >>> policy = as_policy("fp8").with_quantized_readout(gradients_only=True)
            >>> policy.in_loss(jnp.ones((2, 3)))[1]["logits_dtype"]
            dtype(bfloat16)
        """
        config = self.matmul_for("readout")
        if config is None and self.loss is not None:
            return kernel, {"config": self.loss, "logits_dtype": self.compute_dtype}
        return self.weight(kernel, "readout"), {"config": config}

    def with_quantized_readout(self, *, gradients_only: bool = False) -> "Policy":
        """Returns the policy with the products of the readout, too, in the formats of ``matmul``.

        The gradient of logits has one large entry among thousands of probabilities, most of them
        far below the smallest number of E4M3: it is in E5M2, unless its blocks have scales of
        their own. The presets leave the readout in the compute dtype.

        Args:
            gradients_only: leaves the logits in the compute dtype, and quantizes the two products
                of their gradients in `Readout.cross_entropy` and `Embed.cross_entropy`; readouts
                whose loss is taken elsewhere stay as they are.

        Raises:
            ValueError: if the policy quantizes no products, or, of gradients only, keeps scales.

        Example:
            >>> as_policy("fp8").with_quantized_readout().matmul_for("readout").cotangent
            'float8_e5m2'
        """
        if self.matmul is None:
            raise ValueError(
                "unitscale.nn.Policy.with_quantized_readout: matmul must say in which formats; got "
                "None. Begin with a policy such as 'fp8'."
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
                "or begin with another policy."
            )
        return dataclasses.replace(self, loss=config)

    def activation(self, x: ArrayLike) -> ArrayLike:
        """Returns an activation in the compute dtype.

        Values beyond the range of float16 saturate, as those beyond that of FP8 do in a quantized
        product. Infinity and NaN stay, and so does what leaves that range in a layer, as a product
        of float16 does where inputs are a thousand times unit size: give such inputs a scale.
        """
        if not isinstance(x, ScaledArray):
            x = jnp.asarray(x)
        if x.dtype == self.compute_dtype or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        narrower = format_of(self.compute_dtype).exponent_bits < format_of(x.dtype).exponent_bits
        return cast(x, self.compute_dtype) if narrower else upcast(x, self.compute_dtype)

    def weight(self, parameter: ArrayLike, role: str) -> ArrayLike:
        """Returns a weight as its product takes it: quantized products read it as stored."""
        return parameter if self.matmul_for(role) is not None else self.activation(parameter)


PolicyLike: TypeAlias = Policy | str


def _fp8(strategy: Strategy) -> Policy:
    # Scales that follow amax leave small cotangents the range that E5M2 has.
    config = MatmulConfig(cotangent="float8_e5m2", strategy=strategy)
    return Policy(compute_dtype="bfloat16", matmul=config)


POLICIES = {
    "float32": Policy(),
    "bfloat16": Policy(compute_dtype="bfloat16"),
    "float16": Policy(compute_dtype="float16"),
    "fp8": Policy(compute_dtype="bfloat16", matmul=MatmulConfig()),
    "fp8_dynamic": _fp8(Dynamic()),
    "fp8_delayed": _fp8(Delayed()),
    "fp8_static": _fp8(Static()),
    "mxfp8": Policy(compute_dtype="bfloat16", matmul=MatmulConfig(strategy=Block())),
}
"""The policies that a layer accepts by name: see `as_policy`."""


def as_policy(policy: PolicyLike, *, dtype: Any = None, param_dtype: Any = None) -> Policy:
    """Returns a Policy from itself or from the name of a preset.

    Presets: "float32", "bfloat16", "float16" (parameters float32, activations and cotangents in
    the named type), "fp8" (as bfloat16, with E4M3 matmuls without any statistics; the readout in
    bfloat16, its gradients too). With scales from amax, E5M2 cotangents and the same readout:
    "fp8_dynamic" (of this step), "fp8_delayed" (of earlier steps; train with `nn.value_and_grad`),
    "fp8_static" (set once by `nn.calibrate`); "mxfp8" (a scale per 32 elements, all E4M3).

    Args:
        policy: a Policy or the name of a preset.
        dtype: takes the place of its compute dtype, as in the layers of `flax.nnx`; None keeps it.
        param_dtype: takes the place of its dtype of parameters; None keeps it.

    Raises:
        ValueError: if the preset is unknown.
        TypeError: if it is neither a Policy nor a name.

    Example:
        >>> as_policy("bfloat16").compute_dtype.name
        'bfloat16'
        >>> as_policy("fp8", dtype="float16").compute_dtype.name
        'float16'
    """
    given = {"compute_dtype": dtype, "param_dtype": param_dtype}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        return dataclasses.replace(as_policy(policy), **given)
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"unitscale.nn: policy must be a Policy or a preset's name; got {policy!r}")
    if policy not in POLICIES:
        near = difflib.get_close_matches(policy, POLICIES, 1)
        raise ValueError(
            f"unitscale.nn: policy must be one of {', '.join(POLICIES)} or a Policy; got "
            f"{policy!r}." + (f" Did you mean {near[0]!r}?" if near else "")
        )
    return POLICIES[policy]
