"""Text in, batches of token windows out."""

from ._pipeline import Batches as Batches
from ._pipeline import Corpus as Corpus
from ._pipeline import load_corpus as load_corpus
from ._text import read_text as read_text
from ._tokenizer import ByteTokenizer as ByteTokenizer
from ._tokenizer import Tokenizer as Tokenizer
