"""The sections that configs are made of; a recipe's own are in its `config` module."""

from .data import (
    BYTES as BYTES,
    BatchConfig as BatchConfig,
    DataConfig as DataConfig,
    SequenceConfig as SequenceConfig,
    TokenizerConfig as TokenizerConfig,
)
from .decoder import DecoderConfig as DecoderConfig, RopeConfig as RopeConfig
from .keys import (
    describe_problems as describe_problems,
    entry_of as entry_of,
    section_of as section_of,
    unknown_key as unknown_key,
    valid_keys as valid_keys,
)
from .language import LanguageConfig as LanguageConfig, filled_from as filled_from
from .lora import LoraConfig as LoraConfig
from .optimizer import MultipliersConfig as MultipliersConfig, OptimizerConfig as OptimizerConfig
from .run import (
    MeshConfig as MeshConfig,
    MonitorConfig as MonitorConfig,
    RunConfig as RunConfig,
    ScalifyConfig as ScalifyConfig,
    TrainConfig as TrainConfig,
)
from .schema import (
    Count as Count,
    Flag as Flag,
    Fraction as Fraction,
    Name as Name,
    NonNegative as NonNegative,
    Positive as Positive,
    Section as Section,
    Whole as Whole,
)
from .shapes import (
    GPTModelConfig as GPTModelConfig,
    ResidualConfig as ResidualConfig,
    TransformerConfig as TransformerConfig,
)
from .sweep import SweepConfig as SweepConfig
from .tokenizer import TOKENIZER_FILE as TOKENIZER_FILE
