"""Draw the weights of `tests/recipes/pretrained_fixtures`, tiny Hugging Face folders.

Run it from the root of the repository:

    pip install -e ".[peers]"
    python -m tests.recipes.make_pretrained_fixtures

The folder's config.json describes the model. All parameters are random, also biases and norms, so
that one that is missing or transposed changes the logits. `reference.npz` has inputs and the
float32 logits of `transformers`. The folders here are from torch 2.13.0 and transformers 5.23.0;
windows and caps in them are small enough to count in a sequence of 11 tokens.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tests.recipes.pretrained import FIXTURES, FOLDERS, SHARDS

BATCH, TIME = 3, 11


def make_model(folder: Path, seed: int) -> Any:
    """Make the model of a folder with random parameters, in evaluation mode."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(folder)
    (architecture,) = config.architectures
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = any(word in name for word in ("ln_", "norm", "LayerNorm"))
            ones = norm and name.endswith("weight") and not architecture.startswith("Gemma")
            parameter.copy_(0.15 * torch.randn(parameter.shape) + (1.0 if ones else 0.0))
    return model


def reference(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Return inputs and a model's logits; BERT's inputs have padding and two segments."""
    import torch

    draw, kind = np.random.default_rng(seed), model.config.model_type
    inputs = {"input_ids": draw.integers(0, model.config.vocab_size, (BATCH, TIME))}
    if "bert" in kind:
        # A ModernBERT's padding is near a token, as softmax of nothing is no number to compare.
        shorter = (0, 1, 2) if kind == "modernbert" else (0, 4, 9)
        lengths = TIME - np.asarray(shorter)[:, None]
        inputs["attention_mask"] = (np.arange(TIME) < lengths).astype(np.int64)
        if kind == "bert":
            inputs["token_type_ids"] = (np.arange(TIME) >= lengths // 2).astype(np.int64)
        else:  # an id of its own, which positions are counted without
            padding = inputs["attention_mask"] == 0
            inputs["input_ids"] = np.where(padding, model.config.pad_token_id, inputs["input_ids"])
    with torch.no_grad():
        out = model(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    ends = "start_logits" in out
    logits = torch.stack([out.start_logits, out.end_logits], dim=-1) if ends else out.logits
    return {**inputs, "logits": logits.numpy()}


if __name__ == "__main__":
    for seed, name in enumerate(FOLDERS):
        model = make_model(FIXTURES / name, seed)
        model.save_pretrained(FIXTURES / name, max_shard_size="20KB" if name in SHARDS else "1GB")
        np.savez(FIXTURES / name / "reference.npz", **reference(model, seed))
