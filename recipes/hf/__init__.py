"""Load local Hugging Face folders as plain Flax models, and write them back.

Decoders: GPT-2, Llama 2 and 3, Mistral, Qwen 2 and 3, Gemma 2 and 3 (text). Encoders: BERT, RoBERTa
and ModernBERT.

`load` reads a folder and `save` writes one. `adapt` freezes a decoder's weights and adds low-rank
updates (LoRA); `save_adapter` writes these.
"""

from ._bert import Bert as Bert
from ._config import shape_of as shape_of
from ._folder import chat_prompt as chat_prompt, write_tensors as write_tensors
from ._load import Pretrained as Pretrained, load as load, save as save
from ._lora import (
    Frozen as Frozen,
    adapt as adapt,
    save_adapter as save_adapter,
    start_from as start_from,
    updated_tensors as updated_tensors,
)
