"""Text in, batches of token windows out."""

from ._pipeline import Batches as Batches, Corpus as Corpus, load_corpus as load_corpus
from ._text import read_text as read_text
from ._tokenizer import ByteTokenizer as ByteTokenizer, Tokenizer as Tokenizer
