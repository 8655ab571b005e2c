"""The sections that configs are made of; a recipe's own are in its `config` module."""

from .data import (
    BYTES as BYTES,
    TOKENIZER_FILE as TOKENIZER_FILE,
    DataConfig as DataConfig,
    SequenceConfig as SequenceConfig,
    TokenizerConfig as TokenizerConfig,
    largest_id as largest_id,
    read_tokenizer as read_tokenizer,
)
from .keys import (
    describe_problems as describe_problems,
    entry_of as entry_of,
    section_of as section_of,
    unknown_key as unknown_key,
    valid_keys as valid_keys,
)
from .language import LanguageConfig as LanguageConfig, filled_from as filled_from
from .model import (
    DecoderConfig as DecoderConfig,
    GPTModelConfig as GPTModelConfig,
    LoraConfig as LoraConfig,
    ResidualConfig as ResidualConfig,
    RopeConfig as RopeConfig,
    TransformerConfig as TransformerConfig,
)
from .run import (
    FORMAT_KEYS as FORMAT_KEYS,
    PRESETS as PRESETS,
    BatchConfig as BatchConfig,
    Count as Count,
    Flag as Flag,
    Fraction as Fraction,
    MeshConfig as MeshConfig,
    Name as Name,
    NonNegative as NonNegative,
    OptimizerConfig as OptimizerConfig,
    Positive as Positive,
    PrecisionConfig as PrecisionConfig,
    RunConfig as RunConfig,
    Section as Section,
    TrainConfig as TrainConfig,
    Whole as Whole,
    expand_preset as expand_preset,
    upgrade as upgrade,
)
