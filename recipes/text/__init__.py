"""Text in, batches of token windows out."""

from ._cache import cache_folder as cache_folder
from ._documents import documents as documents
from ._pipeline import Corpus as Corpus, Mixture as Mixture, load_corpus as load_corpus
from ._tokenizer import (
    ByteTokenizer as ByteTokenizer,
    SubwordTokenizer as SubwordTokenizer,
    Tokenizer as Tokenizer,
    require_vocab as require_vocab,
)
from ._tokens import tokenize as tokenize
from ._vocabulary import (
    BERT_TOKENS as BERT_TOKENS,
    open_tokenizer as open_tokenizer,
    save_tokenizer as save_tokenizer,
)
