"""A small WordPiece tokenizer like that of a BERT checkpoint."""

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PIECES = "abcdefghijklmnopqrstuvwxyz0123456789.,?'"
WORDS = ("the", "copper", "mine", "opened", "in", "closed", "when", "did", "open")


def make_tokenizer() -> Tokenizer:
    """Make a lowercasing tokenizer with a token for each of `WORDS`; other words become letters."""
    tokens = [*SPECIAL, *WORDS, *PIECES, *(f"##{piece}" for piece in PIECES)]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer
