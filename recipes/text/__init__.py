"""Text in, batches of token windows out."""

from ._corpus import (
    Corpus as Corpus,
    Mixture as Mixture,
    load_corpus as load_corpus,
    tokenize as tokenize,
)
from ._sources import cache_folder as cache_folder, documents as documents
from ._tokenizer import (
    BERT_TOKENS as BERT_TOKENS,
    ByteTokenizer as ByteTokenizer,
    SubwordTokenizer as SubwordTokenizer,
    Tokenizer as Tokenizer,
    open_tokenizer as open_tokenizer,
    require_vocab as require_vocab,
    save_tokenizer as save_tokenizer,
)
