"""Turn text into batches of token windows: documents, tokenizers, a cache, and windows."""

import functools
import glob
import hashlib
import itertools
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import filelock
import grain
import jax
import numpy as np
import platformdirs
import tokenizers

from .config import BYTES, TOKENIZER_FILE, DataConfig, largest_id, read_tokenizer
from .errors import RecipeError, clipped, refused, write_whole
from .recipe import Data, Examples

# Folders in the standard library to leave out: installed packages, and test suites, which some
# distributions lack and which contain files that are broken on purpose.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# Files by which to recognize what `save_to_disk` of `DatasetDict` or `Dataset` wrote.
_DATASET_MARKS = ("dataset_dict.json", "state.json")

# Documents of a text file: the whole file; paragraphs with the blank lines after them; lines.
_DOCUMENT = {
    "file": r"(?s).+",
    "blank_line": r"(?sa)\s*\S.*?(?:\n(?:[^\S\n]*\n)+|\Z)",
    "line": r".*\n|.+",
}

PIECE = 16 * 2**20  # characters after which a text file is split, at the end of a line
_BATCH = 4 * 2**20  # characters of documents to encode in one call
_LONG = 2**20  # most characters to encode as one string, as each token takes hundreds of bytes
_PART = 2**16  # most characters per string for tokenizer training, which holds 256 strings
_MEASURED = 2**20  # tokens from which to measure bytes per token

BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""Special tokens of a trained WordPiece tokenizer, with ids 0 to 4."""
# Tokens that may end a document; the first one that a tokenizer has is used. Gemma has both <eos>
# and </s>, but the latter is an HTML tag there.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "[SEP]")
_ALPHABET = 1000  # most distinct characters of a trained WordPiece tokenizer


def documents(config: DataConfig, row_end: str = "") -> Iterator[str]:
    """Stream the documents of a config's texts, up to `max_bytes` each; `row_end` ends rows."""
    for one in config.texts:
        left = one.max_bytes
        found = ((text, kind) for path, kind in _sources(one) for text in _read(path, kind, one))
        for text, kind in found:
            if left is not None:
                raw = text.encode("utf-8")[:left]
                text, left = raw.decode("utf-8", errors="ignore"), left - len(raw)
            if text:
                yield text if kind == "text" else text + row_end
            if left == 0:
                break


def _sources(config: DataConfig) -> list[tuple[Path, str]]:
    """List the files of one text, or a dataset's folder, each with its format."""
    if config.path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = sorted(file.relative_to(root) for file in root.rglob("*.py"))
        return [(root / name, "text") for name in names if not _NOT_LIBRARY & set(name.parts)]
    path, kind = Path(config.path), config.format
    if kind == "auto" and any((path / mark).is_file() for mark in _DATASET_MARKS):
        kind = "dataset"
    if kind == "dataset":
        return [(path, kind)]
    if path.is_dir():
        found = [path / name for name in glob.glob(config.pattern, root_dir=path, recursive=True)]
    else:
        found = [path] if path.exists() else map(Path, glob.glob(config.path, recursive=True))
    files = sorted(filter(Path.is_file, found))
    if not files:
        none = f"has no {config.pattern} (data.pattern)" if path.is_dir() else "does not exist"
        todo = "give a file, a folder, a glob pattern, or null for Python's standard library"
        raise RecipeError(f"data.path: {path} {none}; {todo}")
    formats = _FORMATS if kind == "auto" else {}
    other = "text" if kind == "auto" else kind
    return [(file, formats.get(file.suffix.lower(), other)) for file in files]


def _read(path: Path, kind: str, config: DataConfig) -> Iterator[str]:
    try:
        if kind == "text":
            with path.open(encoding="utf-8", newline="\n") as file:
                while piece := file.read(PIECE) + file.readline(PIECE):
                    yield from re.findall(_DOCUMENT[config.documents], piece)
            return
        for number, text in enumerate(_rows(path, kind, config), 1):
            if not isinstance(text, str):
                where = f"data.path: {path} row {number}: expected text in {config.text_key!r}"
                raise RecipeError(f"{where}; got {clipped(text)}; set data.text_key to its field")
            yield text
    except UnicodeDecodeError as error:
        todo = "convert it, or leave it out by data.pattern"
        raise RecipeError(f"data.path: {path} is not UTF-8 text: {error}; {todo}") from error
    # pyarrow raises Python's own errors for missing or damaged files.
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise RecipeError(
            f"data.path: {path} cannot be read: {error}; check it, data.pattern, data.format, "
            "data.split and data.text_key; Parquet and datasets need pip install 'unitscale[hf]'"
        ) from error


def _rows(path: Path, kind: str, config: DataConfig) -> Iterator[Any]:
    key = config.text_key
    if kind == "jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    text = row.get(key) if isinstance(row, dict) else row
                    str(text).encode("utf-8")  # fails for a lone surrogate
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number}: {error}") from error
                yield text
    elif kind == "parquet":
        import pyarrow.parquet  # noqa: PLC0415 - optional

        with pyarrow.parquet.ParquetFile(path) as file:
            for rows in file.iter_batches(batch_size=1024, columns=[key]):
                yield from rows[key].to_pylist()
    else:
        import datasets  # noqa: PLC0415 - optional

        found: Any = datasets.load_from_disk(str(path))
        found = found[config.split] if isinstance(found, datasets.DatasetDict) else found
        yield from (row[key] for row in found.select_columns([key]))


def _digest_of(path: Path) -> str | list[Any]:
    """Return the SHA-256 of a file, or those of all files of a folder, in order."""
    if path.is_dir():
        return [_digest_of(file) for file in sorted(filter(Path.is_file, path.rglob("*")))]
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_key(config: DataConfig, settings: Mapping[str, Any]) -> str:
    """Hash the bytes of all texts, the keys that select from them, and other settings."""
    with refused(f"data.path: {config.path} cannot be read", "check its permissions"):
        texts = [[[kind, _digest_of(path)] for path, kind in _sources(one)] for one in config.texts]
    keys = {"max_bytes", "text_key", "split", "documents"}
    everything = [texts, config.model_dump(include=keys), settings]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:24]


def _cached(config: DataConfig, name: str, build: Callable[[Path], None]) -> Path:
    """Return the path of a cached file; the first process that needs it calls `build`."""
    root = Path(config.cache_dir or platformdirs.user_cache_dir("unitscale", appauthor=False))
    path, draft = root / name, root / f"{name}.tmp"
    todo = "free space, change its permissions, or set data.cache_dir to another folder"
    with refused(f"data.cache_dir: cannot write {root}", todo, exit_code=1):
        if not path.exists():  # else write nothing, as the folder may be read-only
            root.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(root / f"{name}.lock"):
                if not path.exists():
                    build(draft)
                    draft.replace(path)
    return path


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte."""

    vocab = BYTES
    dtype = np.dtype(np.uint8)
    eos: int | None = None
    identity = "byte"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode ids; invalid bytes become U+FFFD."""
        return np.asarray(ids, np.uint8).tobytes().decode("utf-8", errors="replace")


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library: BPE, WordPiece, or any tokenizer.json."""

    def __init__(self, inner: tokenizers.Tokenizer):
        self.inner = inner
        inner.no_padding()
        inner.no_truncation()
        self.vocab = largest_id(inner) + 1
        self.dtype = np.min_scalar_type(self.vocab - 1)
        found = (inner.token_to_id(token) for token in _ENDS)
        self.eos = next((index for index in found if index is not None), None)

    @classmethod
    def read(cls, path: str | Path, key: str = "data.tokenizer.path") -> Self:
        return cls(read_tokenizer(path, key))

    @property
    def start(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer puts before a text, such as Llama's <s>."""
        encoded = self.inner.encode("a")
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        return tuple(index for index, _ in itertools.takewhile(lambda pair: pair[1], pairs))

    @property
    def identity(self) -> str:
        text = f"{tokenizers.__version__}|{self.inner.to_str()}"
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def id(self, token: str) -> int:
        """Return the id of a token such as "[CLS]"; raise an error if there is none."""
        index = self.inner.token_to_id(token)
        if index is None:
            raise RecipeError(
                f"data.tokenizer: expected a tokenizer with the token {token}; got one of "
                f"{self.vocab} ids without it; use kind wordpiece, or a tokenizer.json that has it"
            )
        return index

    def encode(self, text: str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts on all processor cores; long texts are first split at line breaks."""
        parts = [list(_cut_at_lines(text, _LONG)) for text in texts]
        flat = [part for one in parts for part in one]
        encoded = iter(self.inner.encode_batch_fast(flat, add_special_tokens=False))
        return [
            np.concatenate([np.asarray(next(encoded).ids, self.dtype) for _ in one])
            for one in parts
        ]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.inner.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


Tokenizer: TypeAlias = ByteTokenizer | SubwordTokenizer
"""`vocab` is the largest id plus one; `eos` is the id that ends a document, or None."""


def _cut_at_lines(text: str, most: int) -> Iterator[str]:
    start = 0
    while len(text) - start > most:
        end = text.rfind("\n", start, start + most) + 1 or start + most
        yield text[start:end]
        start = end
    yield text[start:]


def require_vocab(tokenizer: Tokenizer, vocab: int, where: str = "the model") -> None:
    if tokenizer.vocab > vocab:
        raise RecipeError(
            f"data.tokenizer: expected at most the {vocab} ids that {where} has; got a tokenizer "
            f"of {tokenizer.vocab}; use the one of {where}, or train with more data.tokenizer.vocab"
        )


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """Open a config's tokenizer; one that is trained on the text is cached."""
    settings = config.tokenizer
    if settings.kind == "byte":
        return ByteTokenizer()
    if settings.kind == "file":
        return SubwordTokenizer.read(str(settings.path))

    def build(path: Path) -> None:
        print(f"training a {settings.kind} tokenizer of {settings.ids} ids on the text")
        path.write_text(train_tokenizer(config).to_str(pretty=True), encoding="utf-8")

    key = _cache_key(config, {"train": settings.model_dump()})
    return SubwordTokenizer.read(_cached(config, f"tokenizer-{key}.json", build))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    if isinstance(tokenizer, SubwordTokenizer):
        write_whole(folder / TOKENIZER_FILE, tokenizer.inner.to_str(pretty=True))


def train_tokenizer(config: DataConfig) -> tokenizers.Tokenizer:
    """Train a byte-level BPE like GPT-2's, or a WordPiece like BERT's, on a config's documents."""

    def parts() -> Iterator[str]:
        return (part for text in documents(config) for part in _cut_at_lines(text, _PART))

    ids, lowercase = config.tokenizer.ids, config.tokenizer.lowercase
    options: dict[str, Any] = {"min_frequency": 0, "show_progress": False}
    if config.tokenizer.kind == "bpe":
        bpe = tokenizers.ByteLevelBPETokenizer(lowercase=lowercase)
        bpe.train_from_iterator(parts(), ids, special_tokens=[_ENDS[0]], **options)
        return tokenizers.Tokenizer.from_str(bpe.to_str())
    # To make training deterministic, give the trainer the characters inside words as special
    # tokens. Otherwise it numbers them in random order, and it joins equally frequent pieces by
    # number. The tokenizer that is then made from its vocabulary has them as usual tokens.
    wordpiece = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
    counts: Counter[str] = Counter()
    inside: set[str] = set()
    for part in parts():
        normal = wordpiece.normalize(part)
        for word, _ in wordpiece.pre_tokenizer.pre_tokenize_str(normal):
            counts.update(word)
            inside.update(word[1:])
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:_ALPHABET]
    continued = [f"##{character}" for character in sorted(inside.intersection(alphabet))]
    wordpiece.train_from_iterator(
        parts(),
        ids,
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        special_tokens=[*BERT_TOKENS, *continued],
        **options,
    )
    trained = tokenizers.BertWordPieceTokenizer(wordpiece.get_vocab(), lowercase=lowercase)
    return tokenizers.Tokenizer.from_str(trained.to_str())


def tokenize(config: DataConfig, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens (tokens,) of a config's documents, memory-mapped from the cache."""
    # Documents end with `eos`. If the tokenizer has none, rows end with a newline.
    end = np.array([] if tokenizer.eos is None else [tokenizer.eos], tokenizer.dtype)

    def build(path: Path) -> None:
        texts = documents(config, "\n" if tokenizer.eos is None else "")
        with path.open("wb") as file:
            for batch in _batches(texts):
                for ids in tokenizer.encode_many(batch):
                    file.write(np.append(ids, end).tobytes())

    key = _cache_key(config, {"tokenizer": tokenizer.identity})
    path = _cached(config, f"tokens-{key}", build)
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, tokenizer.dtype)
    return np.memmap(path, tokenizer.dtype, mode="r")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def windows(tokens: np.ndarray, length: int, stride: int) -> grain.MapDataset:
    """Return a dataset whose element i is the int32 tokens (length,) from token i * stride."""
    count = max(0, (tokens.size - length) // stride + 1)
    return grain.MapDataset.range(count).map(
        lambda index: tokens[index * stride : index * stride + length].astype(np.int32)
    )


class Text(NamedTuple):
    """Training and validation tokens (tokens,) of one text, its mixture weight, and its path."""

    train: np.ndarray
    validation: np.ndarray
    weight: float = 1.0
    path: str = "the text"


@dataclass(frozen=True)
class Corpus(Data):
    """One text or a mixture of texts, cut into windows of tokens."""

    texts: Sequence[Text]
    sequence_length: int
    batch_size: int
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)

    def __post_init__(self) -> None:
        for part in ("training", "validation"):
            examples = self.examples(training=part == "training")
            for text, (source, *_) in zip(self.texts, examples, strict=True):
                if not len(source):
                    size = (text.train if part == "training" else text.validation).size
                    few = (
                        f"data.sequence_length: {size} tokens of {text.path} for {part} are too few"
                    )
                    todo = "lower it, add text, or change data.validation_fraction"
                    raise RecipeError(f"{few} for {self.sequence_length}; {todo}")

    @property
    def summary(self) -> str:
        size, count = sum(text.train.size for text in self.texts), len(self.texts)
        return f"{size:,} training tokens" + (f" of {count} texts" if count > 1 else "")

    @functools.cached_property
    def token_size(self) -> float | None:
        if isinstance(self.tokenizer, ByteTokenizer):
            return None
        parts = [text.validation[:_MEASURED] for text in self.texts]
        sizes = [len(self.tokenizer.decode(part).encode("utf-8")) / part.size for part in parts]
        return float(np.average(sizes, weights=[text.validation.size for text in self.texts]))

    @functools.cached_property
    def digest(self) -> str:
        digests = []
        for text in self.texts:
            found = hashlib.sha256(text.train.data)
            found.update(b"|")
            found.update(text.validation.data)
            digests.append(found.hexdigest()[:16])
        if len(digests) == 1:
            return digests[0]
        pairs = zip(digests, self.texts, strict=True)
        parts = "\n".join(f"{digest} {text.weight}" for digest, text in pairs)
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        save_tokenizer(self.tokenizer, folder)

    def examples(self, *, training: bool) -> Sequence[Examples]:
        """Return windows of each text, one token longer than a sequence, to include targets."""
        found = []
        for text in self.texts:
            tokens = text.train if training else text.validation
            # Training windows start at any token, but Grain shuffles at most 2**32 elements.
            stride = 1 + tokens.size // 2**32 if training else self.sequence_length
            source = windows(tokens, self.sequence_length + 1, stride)
            found.append(Examples(source, weight=text.weight))
        return found


def load_corpus(config: DataConfig, vocab: int | None = None) -> Corpus:
    """Tokenize a config's texts, with a tokenizer of at most `vocab` ids."""
    tokenizer = open_tokenizer(config)
    if vocab is not None:
        require_vocab(tokenizer, vocab)
    weights = [1.0] if config.mixture is None else config.mixture.values()
    texts = []
    for one, weight in zip(config.texts, weights, strict=True):
        tokens = tokenize(one, tokenizer)
        split = tokens.size - round(tokens.size * one.validation_fraction)
        texts.append(Text(tokens[:split], tokens[split:], weight, one.path or "Python's library"))
    return Corpus(texts, config.sequence_length, config.batch_size, tokenizer)


def abstract_batch(config: Any) -> jax.ShapeDtypeStruct:
    shape = config.data.batch_size, config.data.sequence_length + 1
    return jax.ShapeDtypeStruct(shape, np.int32)
