"""Which parameters each tensor of Hugging Face files contains."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ._config import Task


class Place(NamedTuple):
    """Dotted paths of the parameters that a tensor of a file holds, joined on its last axis.

    `tied` tensors may be missing from files; `head` is True for tensors of a task's head.
    """

    paths: tuple[str, ...]
    transposed: bool = False
    tied: bool = False
    head: bool = False

    @property
    def is_linear(self) -> bool:
        """Return whether this is the weight (out, in) of one linear layer, outside of heads."""
        path, *others = self.paths
        return self.transposed and not others and not self.head and path.endswith("kernel")

    def shape_of(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the tensor's shape, given those of its parameters."""
        joined = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        return joined[::-1] if self.transposed else joined

    def pack(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """Make the tensor from parameters."""
        joined = np.concatenate([parameters[path] for path in self.paths], axis=-1)
        return joined.T if self.transposed else joined

    def unpack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parameters in a tensor."""
        return self.split(array.T if self.transposed else array)

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Split an array (..., out), not transposed, into its parameters."""
        return dict(zip(self.paths, np.split(array, len(self.paths), axis=-1), strict=True))


Table = dict[str, Place]
Modules = dict[str, str]

# Modules in files, and ours. "#" is the number of a layer; {a,b} are modules in one tensor.
_GPT2: Modules = {
    "transformer.wte": "embed",
    "transformer.wpe": "positions",
    "transformer.h.#.ln_1": "layers.#.attention_norm",
    "transformer.h.#.attn.c_attn": "layers.#.attention.{query,key,value}",
    "transformer.h.#.attn.c_proj": "layers.#.attention.out",
    "transformer.h.#.ln_2": "layers.#.mlp_norm",
    "transformer.h.#.mlp.c_fc": "layers.#.mlp.up",
    "transformer.h.#.mlp.c_proj": "layers.#.mlp.down",
    "transformer.ln_f": "norm",
}
_LLAMA: Modules = {
    "model.embed_tokens": "embed",
    "model.layers.#.input_layernorm": "layers.#.attention_norm",
    "model.layers.#.self_attn.q_proj": "layers.#.attention.query",
    "model.layers.#.self_attn.k_proj": "layers.#.attention.key",
    "model.layers.#.self_attn.v_proj": "layers.#.attention.value",
    "model.layers.#.self_attn.o_proj": "layers.#.attention.out",
    "model.layers.#.self_attn.q_norm": "layers.#.attention.query_norm",
    "model.layers.#.self_attn.k_norm": "layers.#.attention.key_norm",
    "model.layers.#.post_attention_layernorm": "layers.#.mlp_norm",
    "model.layers.#.mlp.gate_proj": "layers.#.mlp.gate",
    "model.layers.#.mlp.up_proj": "layers.#.mlp.up",
    "model.layers.#.mlp.down_proj": "layers.#.mlp.down",
    "model.norm": "norm",
}
_GEMMA: Modules = _LLAMA | {
    "model.layers.#.post_attention_layernorm": "layers.#.post_attention_norm",
    "model.layers.#.pre_feedforward_layernorm": "layers.#.mlp_norm",
    "model.layers.#.post_feedforward_layernorm": "layers.#.post_mlp_norm",
}
_BERT: Modules = {
    "bert.embeddings.word_embeddings": "encoder.embed",
    "bert.embeddings.position_embeddings": "encoder.positions",
    "bert.embeddings.token_type_embeddings": "encoder.segments",
    "bert.embeddings.LayerNorm": "encoder.norm",
    "bert.encoder.layer.#.attention.self.query": "encoder.layers.#.attention.query",
    "bert.encoder.layer.#.attention.self.key": "encoder.layers.#.attention.key",
    "bert.encoder.layer.#.attention.self.value": "encoder.layers.#.attention.value",
    "bert.encoder.layer.#.attention.output.dense": "encoder.layers.#.attention.out",
    "bert.encoder.layer.#.attention.output.LayerNorm": "encoder.layers.#.attention_norm",
    "bert.encoder.layer.#.intermediate.dense": "encoder.layers.#.up",
    "bert.encoder.layer.#.output.dense": "encoder.layers.#.down",
    "bert.encoder.layer.#.output.LayerNorm": "encoder.layers.#.mlp_norm",
}
_MODERNBERT: Modules = {
    "model.embeddings.tok_embeddings": "encoder.embed",
    "model.embeddings.norm": "encoder.norm",
    "model.layers.#.attn_norm": "encoder.layers.#.attention_norm",
    "model.layers.#.attn.Wqkv": "encoder.layers.#.attention.{query,key,value}",
    "model.layers.#.attn.Wo": "encoder.layers.#.attention.out",
    "model.layers.#.mlp_norm": "encoder.layers.#.mlp_norm",
    "model.layers.#.mlp.Wi": "encoder.layers.#.mlp.{gate,up}",
    "model.layers.#.mlp.Wo": "encoder.layers.#.mlp.down",
    "model.final_norm": "encoder.last_norm",
}
_BODIES: dict[str, Modules] = {
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "bert": _BERT,
    "roberta": {name.replace("bert.", "roberta.", 1): ours for name, ours in _BERT.items()},
    "modernbert": _MODERNBERT,
}
_MODERN_HEAD: Modules = {"head.dense": "head.transform", "head.norm": "head.norm"}
# Heads by model type and task. "" is the model itself, which holds the bias of the logits.
_HEADS: dict[str, dict[Task, Modules]] = {
    **{kind: {"lm": {"lm_head": "readout"}} for kind in _BODIES if "bert" not in kind},
    "bert": {
        "masked_lm": {
            "cls.predictions": "",
            "cls.predictions.transform.dense": "head.transform",
            "cls.predictions.transform.LayerNorm": "head.norm",
            "cls.predictions.decoder": "readout",
        },
        "question_answering": {"qa_outputs": "ends"},
        "classification": {"bert.pooler.dense": "pooler", "classifier": "classes"},
    },
    "roberta": {
        "masked_lm": {
            "lm_head": "",
            "lm_head.dense": "head.transform",
            "lm_head.layer_norm": "head.norm",
            "lm_head.decoder": "readout",
        },
        "question_answering": {"qa_outputs": "ends"},
        "classification": {"classifier.dense": "pooler", "classifier.out_proj": "classes"},
    },
    "modernbert": {
        "masked_lm": {**_MODERN_HEAD, "decoder": "readout"},
        "question_answering": {**_MODERN_HEAD, "classifier": "ends"},
        "classification": {**_MODERN_HEAD, "classifier": "classes"},
    },
}
# Buffers that old versions saved (masks, position ids), and tensors of encoders' heads.
_BUFFER = re.compile(
    r".*\.(rotary_emb\.inv_freq|attn\.(masked_)?bias|embeddings\.(position|token_type)_ids)"
)
_HEAD = re.compile(r"(cls|qa_outputs|classifier|lm_head|head|decoder|\w+\.pooler)\..*")


def table_of(kind: str, task: Task, parameters: Collection[str]) -> Table:
    """Return the tensors of a model, by name, given the dotted paths of its parameters."""
    table: Table = {}
    held: set[str] = set()
    found = (re.match(r".*layers\.(\d+)\.", path) for path in parameters)
    layers = sorted({int(match[1]) for match in found if match})
    head = _HEADS[kind][task]
    for theirs, ours in (_BODIES[kind] | head).items():
        for number in layers if "#" in theirs else [0]:
            name, modules = (text.replace("#", str(number)) for text in (theirs, ours))
            for part in ("weight", "bias"):
                if paths := _paths(modules, part, parameters):
                    transposed = paths[0].endswith("kernel") and (kind != "gpt2" or theirs in head)
                    tied = paths[0] in held
                    table[f"{name}.{part}"] = Place(paths, transposed, tied, theirs in head)
                    held.update(paths)
    return table


def _paths(modules: str, part: str, parameters: Collection[str]) -> tuple[str, ...]:
    """Return the parameter paths of modules such as "a.{b,c}"; () if there are none."""
    top, *inner = re.split(r"[{},]", modules)
    names = [top + name for name in inner if name] or [top]
    leaves = ("kernel", "scale", "embedding") if part == "weight" else ("bias",)
    candidates = [tuple(f"{name}.{leaf}".lstrip(".") for name in names) for leaf in leaves]
    if modules == "readout":  # tied to the embedding; the bias is the model's own
        candidates += [("embed.embedding",), ("encoder.embed.embedding",)]
        candidates = candidates if part == "weight" else [("bias",)]
    return next((paths for paths in candidates if all(p in parameters for p in paths)), ())


def full_name(name: str, kind: str) -> str:
    """Return the name of a tensor in the table, given its name in a file of any version."""
    tables = (_BODIES[kind], *_HEADS[kind].values())
    tops = [known.split(".")[0] for table in tables for known in table]
    if name.split(".")[0] not in tops:  # a bare model leaves the first part out
        name = f"{tops[0]}.{name}"
    name = re.sub(r"\.LayerNorm\.gamma$", ".LayerNorm.weight", name)
    return re.sub(r"\.LayerNorm\.beta$", ".LayerNorm.bias", name)


def head_part(name: str) -> str:
    """Return the part of a head that a tensor belongs to; files have all of a part or nothing."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "bert" else first


def is_unused(name: str, kind: str) -> bool:
    """Return True for buffers, and for tensors of an encoder's heads for other tasks."""
    return bool(_BUFFER.fullmatch(name) or ("bert" in kind and _HEAD.fullmatch(name)))
