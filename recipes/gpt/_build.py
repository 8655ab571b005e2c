"""From a config to a model."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
from flax import nnx

from unitscale.quant import convert

from ..errors import RecipeError
from ..hf import plain
from ..run.monitor import monitored
from . import model
from .config import GPTConfig

GPT = model.GPT | plain.GPT


def build(config: GPTConfig) -> GPT:
    """The GPT that a config describes, its parameters drawn from `config.seed`.

    Raises:
      RecipeError: `model.products` is qwix, which is not installed.
    """
    rngs = nnx.Rngs(config.seed)
    shape = config.model.model_copy(update={"context": config.context})
    if config.model.library != "plain":
        return model.GPT(shape, policy=monitored(config), rngs=rngs)
    gpt = plain.GPT(shape, dtype=jnp.dtype(config.policy), scalify=config.scalify, rngs=rngs)
    if config.model.products == "qwix":
        return _through_qwix(gpt, config.data.sequence_length)
    if config.model.products is not None:
        convert(gpt, {"layers.*": config.model.products})
    return gpt


def _through_qwix(gpt: plain.GPT, length: int) -> Any:
    """The products that `convert` takes, by qwix: E4M3, cotangents E5M2, scales by channel."""
    try:
        qwix: Any = importlib.import_module("qwix")  # optional
    except ModuleNotFoundError as error:
        raise RecipeError(
            "model.products: expected qwix to be installed; it is not; pip install qwix, or set "
            "model.products fp8_dynamic"
        ) from error
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    rule = qwix.QtRule(
        # The path of a layer with a weight: attention's own products are left alone.
        module_path=r"layers/\d+/\w+/\w+",
        weight_qtype=e4m3,
        act_qtype=e4m3,
        bwd_qtype=e5m2,
    )
    return qwix.quantize_model(gpt, qwix.QtProvider([rule]), jnp.zeros((1, length), jnp.int32))
