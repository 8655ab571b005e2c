"""Which number formats and shapes the state of a run is in, as its config says."""

from typing import Any

from ..config import RunConfig

_OPTIMIZER = ("weights", "moments", "rounding", "min_size", "skip_nonfinite")

# What was always so before there was a key for it.
_NEWER = {"policies": {}, "fp8_readout": False, "scan": False, "vocab_multiple": 1}
_NEWER_OPTIMIZER = {"min_size": 0}
_SHAPE = ("scan", "vocab_multiple")

FORMAT_KEYS = (
    "policy",
    "policies",
    "fp8_readout",
    "scalify",
    "mesh.gradients",
    "model.scan",
    "model.vocab_multiple",
    *(f"optimizer.{name}" for name in _OPTIMIZER),
)
"""The keys of a config that may change, on request, when a run is resumed."""


def is_same(facts: dict[str, Any], config: RunConfig) -> bool:
    """Whether a checkpoint with these facts was saved in the formats of a config."""
    own = formats(config)
    return _filled(facts.get("formats", own)) == own  # older ones lack some, or all


def _filled(saved: dict[str, Any]) -> dict[str, Any]:
    return _NEWER | saved | {"optimizer": _NEWER_OPTIMIZER | saved["optimizer"]}


def formats(config: RunConfig) -> dict[str, Any]:
    """What decides the shape of a run's state beside its model, as JSON values."""
    tree = config.model_dump(mode="json")
    return {
        "policy": tree["policy"],
        "policies": tree["policies"],
        "scalify": tree["scalify"],
        "gradients": None if config.mesh is None else config.mesh.gradients,
        "fp8_readout": tree["fp8_readout"],
        **{name: _shape(tree).get(name, _NEWER[name]) for name in _SHAPE},
        "optimizer": {name: tree["optimizer"][name] for name in _OPTIMIZER},
    }


def _shape(tree: dict[str, Any]) -> dict[str, Any]:
    """The section of the model; what starts from a pretrained one has none, or null."""
    return tree.get("model") or {}


def with_formats(config: RunConfig, saved: dict[str, Any]) -> RunConfig:
    """The config as it was when a state was saved."""
    saved = _filled(saved)
    top = ("policy", "policies", "scalify", "fp8_readout")
    tree = config.model_dump(mode="json") | {name: saved[name] for name in top}
    tree["optimizer"] |= saved["optimizer"]
    for name in _SHAPE:
        if name in _shape(tree):
            tree["model"][name] = saved[name]
    if tree["mesh"] or saved["gradients"]:
        # Devices that shared gradients divided the batch alone; a mesh of one can be that of any.
        tree["mesh"] = {"gradients": saved["gradients"]}
    return type(config).model_validate(tree)


def is_reshaped(written: RunConfig, config: RunConfig) -> bool:
    """Whether parameters have other shapes: layers are stacked or not, a vocabulary is padded."""
    before, after = formats(written), formats(config)
    return any(before[name] != after[name] for name in _SHAPE)


def between(written: RunConfig, config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """Configs that lead from parameters of some shapes to others, in plain float32 arrays.

    In other formats a stack has scales per layer where a layer has one, or one for all layers.
    """
    own, shape = formats(written), {name: formats(config)[name] for name in _SHAPE}
    optimizer = own["optimizer"] | {"weights": None, "moments": None, "rounding": "nearest"}
    wide = own | {"scalify": None, "gradients": None, "optimizer": optimizer}
    return with_formats(written, wide), with_formats(written, wide | shape)
