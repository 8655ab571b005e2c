"""The sections of configs that several recipes share."""

# ruff: noqa: F401, I001
from .run import BatchConfig, OptimizerConfig, PrecisionConfig, RunConfig, Section
from .text import DataConfig, DecoderConfig, GPTModelConfig, LanguageConfig, LoraConfig
from .text import FixedResidual, RopeConfig, SequenceConfig, TokenizerConfig, TransformerConfig
from .run import Count, Flag, Fraction, NonNegative, Positive, Share, Whole
from .text import Library
from .run import FORMAT_KEYS, PRESETS, expand_preset
from .run import describe_problems, entry_of, section_of, unknown_key, valid_keys
from .text import BYTES, TOKENIZER_FILE, filled_from, largest_id, read_tokenizer
