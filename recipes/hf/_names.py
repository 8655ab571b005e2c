"""Which parameter each tensor of a Hugging Face file holds.

GPT-2's projections are (in, out), as ours; those of others are (out, in). GPT-2 keeps query, key
and value in one tensor.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..config import GPTModelConfig
from ._config import BertConfig, ModernBertConfig, Task
from ._decoders import FAMILY


class Tensor(NamedTuple):
    """A tensor of a file and the parameters in it.

    Attributes:
      paths: Parameters, as dotted paths in the model; several lie side by side on the last axis.
      transposed: Whether the file has the transpose.
      tied: Whether another tensor holds the same parameter, so that this one may be left out.
      head: Whether it belongs to the head of a task.
    """

    paths: tuple[str, ...]
    transposed: bool = False
    tied: bool = False
    head: bool = False

    def pack(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """The tensor of a model's parameters."""
        joined = np.concatenate([parameters[path] for path in self.paths], axis=-1)
        return joined.T if self.transposed else joined

    def unpack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """The parameters in a tensor."""
        array = array.T if self.transposed else array
        pieces = np.split(array, len(self.paths), axis=-1)
        return dict(zip(self.paths, pieces, strict=True))


Table = dict[str, Tensor]


def gpt2_table(shape: GPTModelConfig) -> Table:
    """The tensors of GPT2LMHeadModel by name."""
    table = {
        "transformer.wte.weight": Tensor(("embed.embedding",)),
        "transformer.wpe.weight": Tensor(("positions.embedding",)),
        **_norm("transformer.ln_f", "norm"),
    }
    for index in range(shape.layers):
        theirs, ours = f"transformer.h.{index}", f"layers.{index}"
        table |= _norm(f"{theirs}.ln_1", f"{ours}.attention_norm")
        table |= _norm(f"{theirs}.ln_2", f"{ours}.mlp_norm")
        attention = tuple(f"{ours}.attention.{name}" for name in _QKV)
        table |= _linear(f"{theirs}.attn.c_attn", *attention, transposed=False)
        table |= _linear(f"{theirs}.attn.c_proj", f"{ours}.attention.out", transposed=False)
        table |= _linear(f"{theirs}.mlp.c_fc", f"{ours}.mlp.up", transposed=False)
        table |= _linear(f"{theirs}.mlp.c_proj", f"{ours}.mlp.down", transposed=False)
    return table | _readout(shape)


def family_table(shape: GPTModelConfig) -> Table:
    """The tensors of LlamaForCausalLM and of its family, by name."""
    own, biases = shape.variant, shape.biases
    table = {
        "model.embed_tokens.weight": Tensor(("embed.embedding",)),
        "model.norm.weight": Tensor(("norm.scale",)),
    }
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    if own.post_norms:
        norms |= {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "post_mlp_norm",
        }
    if own.query_key_norms:
        norms |= {
            "self_attn.q_norm": "attention.query_norm",
            "self_attn.k_norm": "attention.key_norm",
        }
    products = [
        *((f"self_attn.{name[0]}_proj", f"attention.{name}", "qkv") for name in _QKV),
        ("self_attn.o_proj", "attention.out", "out"),
        *((f"mlp.{name}_proj", f"mlp.{name}", "mlp") for name in ("gate", "up", "down")),
    ]
    for index in range(shape.layers):
        top, ours = f"model.layers.{index}", f"layers.{index}"
        for theirs, name in norms.items():
            table[f"{top}.{theirs}.weight"] = Tensor((f"{ours}.{name}.scale",))
        for theirs, name, bias in products:
            linear = _linear(f"{top}.{theirs}", f"{ours}.{name}")
            table |= _without(linear, () if bias in biases else (".bias",))
    return table | _readout(shape)


_QKV = ("query", "key", "value")


def _readout(shape: GPTModelConfig) -> Table:
    if shape.tied_readout:
        return {"lm_head.weight": Tensor(("embed.embedding",), tied=True)}
    return {"lm_head.weight": Tensor(("readout.kernel",), transposed=True, head=True)}


def bert_table(shape: BertConfig, task: Task) -> Table:
    """The tensors of BERT or RoBERTa with the head of a task, by name."""
    table: Table = {}
    top = shape.model_type
    for theirs, ours in (("word", "embed"), ("position", "positions"), ("token_type", "segments")):
        name = f"{top}.embeddings.{theirs}_embeddings.weight"
        table[name] = Tensor((f"encoder.{ours}.embedding",))
    table |= _norm(f"{top}.embeddings.LayerNorm", "encoder.norm")
    for index in range(shape.layers):
        theirs, ours = f"{top}.encoder.layer.{index}", f"encoder.layers.{index}"
        for name in _QKV:
            table |= _linear(f"{theirs}.attention.self.{name}", f"{ours}.attention.{name}")
        table |= _linear(f"{theirs}.attention.output.dense", f"{ours}.attention.out")
        table |= _norm(f"{theirs}.attention.output.LayerNorm", f"{ours}.attention_norm")
        table |= _linear(f"{theirs}.intermediate.dense", f"{ours}.up")
        table |= _linear(f"{theirs}.output.dense", f"{ours}.down")
        table |= _norm(f"{theirs}.output.LayerNorm", f"{ours}.mlp_norm")
    head = _bert_head(shape, task) if top == "bert" else _roberta_head(shape, task)
    return table | {name: tensor._replace(head=True) for name, tensor in head.items()}


def modern_table(shape: ModernBertConfig, task: Task) -> Table:
    """The tensors of ModernBERT with the head of a task, by name."""
    table: Table = {"model.embeddings.tok_embeddings.weight": Tensor(("encoder.embed.embedding",))}
    table |= _norm("model.embeddings.norm", "encoder.norm")
    table |= _norm("model.final_norm", "encoder.last_norm")
    for index in range(shape.layers):
        theirs, ours = f"model.layers.{index}", f"encoder.layers.{index}"
        if index:
            table |= _norm(f"{theirs}.attn_norm", f"{ours}.attention_norm")
        table |= _norm(f"{theirs}.mlp_norm", f"{ours}.mlp_norm")
        products = [
            ("attn.Wqkv", [f"attention.{name}" for name in _QKV], "qkv"),
            ("attn.Wo", ["attention.out"], "out"),
            ("mlp.Wi", ["mlp.gate", "mlp.up"], "mlp"),
            ("mlp.Wo", ["mlp.down"], "mlp"),
        ]
        for name, paths, bias in products:
            linear = _linear(f"{theirs}.{name}", *(f"{ours}.{path}" for path in paths))
            table |= _without(linear, () if bias in shape.biases else (".bias",))
    top = "" if task == "masked_lm" else "head."
    head = _linear("head.dense", f"{top}transform") | _norm("head.norm", f"{top}norm")
    if not shape.head_bias:
        head = _without(head, ("dense.bias",))
    if task == "masked_lm":
        head |= {"decoder.weight": _weight(shape), "decoder.bias": Tensor(("bias",))}
        head = head if shape.readout_bias else _without(head, ("decoder.bias",))
    else:
        head |= _linear("classifier", "ends" if task == "question_answering" else "classes")
    table |= {name: tensor._replace(head=True) for name, tensor in head.items()}
    return table if shape.norm_bias else _without(table, ("norm.bias",))


def _without(table: Table, ends: tuple[str, ...]) -> Table:
    """What does not end in one of these."""
    return {name: tensor for name, tensor in table.items() if not name.endswith(ends)}


def _bert_head(shape: BertConfig, task: Task) -> Table:
    if task == "question_answering":
        return _linear("qa_outputs", "ends")
    if task == "classification":
        return _linear("bert.pooler.dense", "pooler") | _linear("classifier", "classes")
    return {
        "cls.predictions.bias": Tensor(("bias",)),
        **_linear("cls.predictions.transform.dense", "transform"),
        **_norm("cls.predictions.transform.LayerNorm", "norm"),
        **_tokens(shape, "cls.predictions.decoder"),
    }


def _roberta_head(shape: BertConfig, task: Task) -> Table:
    if task == "question_answering":
        return _linear("qa_outputs", "ends")
    if task == "classification":
        return _linear("classifier.dense", "pooler") | _linear("classifier.out_proj", "classes")
    return {
        "lm_head.bias": Tensor(("bias",)),
        **_linear("lm_head.dense", "transform"),
        **_norm("lm_head.layer_norm", "norm"),
        **_tokens(shape, "lm_head.decoder"),
    }


def _tokens(shape: BertConfig, theirs: str) -> Table:
    """The product that gives logits of tokens; its bias has a name of its own as well."""
    return {f"{theirs}.weight": _weight(shape), f"{theirs}.bias": Tensor(("bias",), tied=True)}


def _weight(shape: BertConfig | ModernBertConfig) -> Tensor:
    if shape.tied_readout:
        return Tensor(("encoder.embed.embedding",), tied=True)
    return Tensor(("readout.kernel",), transposed=True)


def _linear(theirs: str, *ours: str, transposed: bool = True) -> Table:
    return {
        f"{theirs}.weight": Tensor(tuple(f"{path}.kernel" for path in ours), transposed),
        f"{theirs}.bias": Tensor(tuple(f"{path}.bias" for path in ours)),
    }


def _norm(theirs: str, ours: str) -> Table:
    return {
        f"{theirs}.weight": Tensor((f"{ours}.scale",)),
        f"{theirs}.bias": Tensor((f"{ours}.bias",)),
    }


# Tensors that are no parameters: masks and position numbers that old versions saved.
_BUFFERS = {
    "modernbert": re.compile(r"(?!)"),
    **dict.fromkeys(FAMILY, re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")),
    "gpt2": re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias"),
    "bert": re.compile(r"bert\.embeddings\.(position|token_type)_ids"),
    "roberta": re.compile(r"roberta\.embeddings\.(position|token_type)_ids"),
}
# What stands at the top of each model; a bare encoder's names start below the first.
_TOPS = {
    **dict.fromkeys(FAMILY, ("model", "lm_head")),
    "gpt2": ("transformer", "lm_head"),
    "bert": ("bert", "cls", "qa_outputs", "classifier"),
    "roberta": ("roberta", "lm_head", "qa_outputs", "classifier"),
    "modernbert": ("model", "head", "decoder", "classifier"),
}
# Parameters of the heads of other tasks.
_HEADS = {
    **dict.fromkeys((*FAMILY, "gpt2"), re.compile(r"(?!)")),
    "bert": re.compile(
        r"(cls\.(predictions|seq_relationship)|qa_outputs|classifier|bert\.pooler\.dense)\..*"
    ),
    "modernbert": re.compile(r"(head|decoder|classifier)\..*"),
    "roberta": re.compile(r"(lm_head|qa_outputs|classifier|roberta\.pooler\.dense)\..*"),
}


def table_of(kind: str, shape: GPTModelConfig | BertConfig | ModernBertConfig, task: Task) -> Table:
    """The tensors of a model with the head of a task, by name."""
    if isinstance(shape, ModernBertConfig):
        return modern_table(shape, task)
    if isinstance(shape, BertConfig):
        return bert_table(shape, task)
    return gpt2_table(shape) if kind == "gpt2" else family_table(shape)


def full_name(name: str, kind: str) -> str:
    """The name that a tensor has in the table, from the one that it has in a file.

    A bare encoder leaves the first part out, and BERT's first files say gamma and beta.

    Example:
      >>> full_name("embeddings.LayerNorm.gamma", "bert")
      'bert.embeddings.LayerNorm.weight'
    """
    if name.split(".")[0] not in _TOPS[kind]:
        name = f"{_TOPS[kind][0]}.{name}"
    for old, new in (("gamma", "weight"), ("beta", "bias")):
        name = re.sub(rf"\.LayerNorm\.{old}$", f".LayerNorm.{new}", name)
    return name


def head_part(name: str) -> str:
    """The part of a head that a tensor is of, which a file has whole or not at all.

    Example:
      >>> head_part("bert.pooler.dense.bias"), head_part("cls.predictions.bias")
      ('bert.pooler', 'cls')
    """
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "bert" else first


def is_buffer(name: str, kind: str) -> bool:
    """Whether a full name is that of a tensor which is no parameter."""
    return _BUFFERS[kind].fullmatch(name) is not None


def is_other_head(name: str, kind: str) -> bool:
    """Whether a full name is that of a head, of whichever task."""
    return _HEADS[kind].fullmatch(name) is not None
