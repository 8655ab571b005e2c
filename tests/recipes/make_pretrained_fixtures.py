"""Make `tests/recipes/pretrained_fixtures`: tiny Hugging Face folders and their logits.

Run it from the root of the repository:

    pip install -e ".[peers]"
    python -m tests.recipes.make_pretrained_fixtures

All parameters are random, also biases and norms, so that one that is missing or transposed changes
the logits. `save_pretrained` writes each folder; `reference.npz` in it has inputs and the float32
logits of `transformers`. The folders here are from torch 2.13.0 and transformers 5.23.0.
"""

from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).with_name("pretrained_fixtures")
TEXT = """The quick brown fox jumps over the lazy dog. Numbers in sixteen bits, or in eight:
a scale goes with them. What is the scale of a sum? It is the root of the squares of the scales."""
BATCH, TIME = 3, 11
_BERTS = ("ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification")
CLASSES = {
    "GPT2LMHeadModel": "GPT2Config",
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    **{
        f"{kind}{head}": f"{kind}Config"
        for kind in ("Bert", "Roberta", "ModernBert")
        for head in _BERTS
    },
}


def make_model(architecture: str, *, seed: int, **config: Any) -> Any:
    """Make a model of `transformers` with random parameters, in evaluation mode."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config_class = getattr(transformers, CLASSES[architecture])
    model = getattr(transformers, architecture)(config_class(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = any(word in name for word in ("ln_", "norm", "LayerNorm"))
            ones = norm and name.endswith("weight") and not architecture.startswith("Gemma")
            parameter.copy_(0.15 * torch.randn(parameter.shape) + (1.0 if ones else 0.0))
    return model


def reference(model: Any, *, seed: int) -> dict[str, np.ndarray]:
    """Return inputs and a model's logits; BERT's inputs have padding and two segments."""
    import torch

    draw = np.random.default_rng(seed)
    inputs = {"input_ids": draw.integers(0, model.config.vocab_size, (BATCH, TIME))}
    if "bert" in model.config.model_type:
        # A ModernBERT's padding is near a token, as softmax of nothing is no number to compare.
        modern = model.config.model_type == "modernbert"
        lengths = np.asarray([TIME, TIME - 1, TIME - 2] if modern else [TIME, TIME - 4, 2])[:, None]
        inputs["attention_mask"] = (np.arange(TIME) < lengths).astype(np.int64)
        if model.config.model_type == "bert":
            inputs["token_type_ids"] = (np.arange(TIME) >= lengths // 2).astype(np.int64)
        else:  # an id of its own, which positions are counted without
            padding = inputs["attention_mask"] == 0
            inputs["input_ids"] = np.where(padding, model.config.pad_token_id, inputs["input_ids"])
    with torch.no_grad():
        out = model(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    if "logits" in out:
        logits = out.logits
    else:
        logits = torch.stack([out.start_logits, out.end_logits], dim=-1)
    return {**inputs, "logits": logits.numpy()}


def make_tokenizer(kind: str) -> Any:
    """Make a byte-level BPE of 300 tokens like GPT-2's, or a WordPiece like BERT's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import BertProcessing

    if kind == "gpt2":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    tokenizer.train_from_iterator([TEXT], trainer)
    if kind == "bert":
        ends = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
        tokenizer.post_processor = BertProcessing(*ends)
    return tokenizer


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "n_inner": 40}
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "layer_norm_eps": 1e-5,
}


ROBERTA = {**BERT, "type_vocab_size": 1, "hidden_act": "gelu_new", "pad_token_id": 3}
MODERN = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "local_attention": 4,
    "pad_token_id": 3,
    "classifier_bias": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
POOLED = MODERN | {"classifier_pooling": "mean", "norm_bias": True, "attention_bias": True}
THREE = {"num_labels": 3}
# Heads of another size than width / heads, two of them to each key head.
FAMILY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
# Windows and caps small enough that they count in a sequence of 11 tokens.
DECODERS = {
    "llama2": ("LlamaForCausalLM", {"head_dim": None, "rope_parameters": LINEAR}),
    "llama3": (
        "LlamaForCausalLM",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "query_pre_attn_scalar": 5,
            "sliding_window": 4,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "query_pre_attn_scalar": 5,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        },
    ),
}
"""Architecture of each decoder of the Llama family and what it has beside `FAMILY`, by folder."""


def write(folder: Path, model: Any, *, seed: int, shards: str = "1GB") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=shards)
    np.savez(folder / "reference.npz", **reference(model, seed=seed))


def make_tiny(root: Path) -> None:
    tokenizers = {kind: make_tokenizer(kind) for kind in ("gpt2", "bert")}
    sizes = {kind: tokenizer.get_vocab_size() for kind, tokenizer in tokenizers.items()}
    table = [
        # folder, architecture, shape, size of a shard
        ("gpt2", "GPT2LMHeadModel", {**GPT2, "bos_token_id": 0, "eos_token_id": 0}, "1GB"),
        ("bert-mlm", "BertForMaskedLM", BERT, "1GB"),
        ("bert-qa", "BertForQuestionAnswering", BERT, "20KB"),
        ("bert-classes", "BertForSequenceClassification", {**BERT, "num_labels": 3}, "1GB"),
        *(
            (name, architecture, FAMILY | own, "20KB" if name == "llama2" else "1GB")
            for name, (architecture, own) in DECODERS.items()
        ),
        ("roberta-mlm", "RobertaForMaskedLM", ROBERTA, "1GB"),
        ("roberta-classes", "RobertaForSequenceClassification", ROBERTA | THREE, "1GB"),
        ("modernbert-mlm", "ModernBertForMaskedLM", MODERN, "1GB"),
        ("modernbert-classes", "ModernBertForSequenceClassification", POOLED | THREE, "1GB"),
    ]
    for seed, (name, architecture, shape, shards) in enumerate(table):
        kind = "bert" if "bert" in name else "gpt2"
        model = make_model(architecture, seed=seed, vocab_size=sizes[kind], **shape)
        write(root / name, model, seed=seed, shards=shards)
        tokenizers[kind].save(str(root / name / "tokenizer.json"))


if __name__ == "__main__":
    make_tiny(HERE)
