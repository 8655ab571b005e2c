"""From `rope_parameters` or `rope_scaling` of a config.json to rotary positions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ..config import Count, Flag, NonNegative, Positive, RopeConfig
from ..errors import RecipeError, clipped
from ._folder import CONFIG
from ._schema import validated
from .rope import attention_factor


class _RopeFile(BaseModel):
    """`rope_parameters`, or the older `rope_scaling`."""

    model_config = ConfigDict(extra="forbid")

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: NonNegative | None = None
    mscale_all_dim: NonNegative | None = None
    truncate: Flag = True


_SCALED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""What each kind of scaling needs to be told."""


def _yarn(file: _RopeFile) -> dict[str, Any]:
    """What YaRN is told beside its factor and context; the defaults are those of the paper."""
    factor = file.factor or 1.0
    attention = file.attention_factor or attention_factor(factor)
    if file.attention_factor is None and file.mscale and file.mscale_all_dim:
        attention = attention_factor(factor, file.mscale)
        attention /= attention_factor(factor, file.mscale_all_dim)
    return {
        "fast": file.beta_fast or 32.0,
        "slow": file.beta_slow or 1.0,
        "truncate": file.truncate,
        "attention_factor": attention,
    }


def read_rope(
    values: Mapping[str, Any], base: float, context: int, path: Path, key: str
) -> RopeConfig:
    """Rotary positions; `base` and `context` are for what the section `key` leaves out."""
    kind = values.get("rope_type", values.get("type", "default"))
    given = {name: value for name, value in values.items() if name != "type"}
    file = validated(_RopeFile, given | {"rope_type": kind}, path, key)
    if missing := [name for name in _SCALED[file.rope_type] if getattr(file, name) is None]:
        raise RecipeError(
            f"{path / CONFIG}: {key}: expected rope_type {kind} with {', '.join(missing)}; got "
            f"{clipped(dict(values))}; copy the file again"
        )
    first = file.original_max_position_embeddings or context
    shape = {"base": file.rope_theta or base}
    if file.rope_type != "default":
        shape |= {"scaling": file.rope_type, "factor": file.factor}
    if file.rope_type == "llama3":
        shape |= {"low_factor": file.low_freq_factor, "high_factor": file.high_freq_factor}
        shape |= {"context": first}
    if file.rope_type == "yarn":
        shape |= {"context": first, **_yarn(file)}
    if file.rope_type == "dynamic":  # up to here all versions of `transformers` scale nothing
        shape |= {"context": min(first, context)}
    return validated(RopeConfig, shape, path, key)


def rope_of(
    given: Mapping[str, Any] | None, bases: Mapping[str, float], context: int, path: Path
) -> dict[str, RopeConfig]:
    """Rotary positions of each kind of layer, from `rope_parameters` that has a part for each."""
    given = given or {}
    if extra := given.keys() - bases.keys():
        raise RecipeError(
            f"{path / CONFIG}: rope_parameters: expected {' and '.join(bases)}; got "
            f"{min(extra)}; copy the file again"
        )
    return {
        kind: read_rope(given.get(kind) or {}, base, context, path, f"rope_parameters.{kind}")
        for kind, base in bases.items()
    }
