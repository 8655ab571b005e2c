"""Where text comes from: one file, a folder, or the Python standard library of this machine."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ..config import DataConfig
from ..errors import RecipeError

# Folders of the standard library that are not its own text: what pip put there, and test suites,
# which some distributions leave out and which hold deliberately broken files.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def read_text(config: DataConfig) -> str:
    """Reads the whole text that a config names.

    Files of a folder are read in the order of their relative paths, so the same folder gives the
    same text on every machine, and hidden files are left out.

    Args:
      config: The `data` section.

    Returns:
      The text, cut at `max_bytes` (at a character boundary).

    Raises:
      RecipeError: Nothing is there, a file cannot be read, a file is not UTF-8 (the message has its
        name and the byte offset), or there is no text at all.
    """
    if config.path is None:
        source, files = _standard_library()
    else:
        source, files = Path(config.path), _named_files(Path(config.path), config.pattern)
    pieces: list[str] = []
    left = config.max_bytes
    for file in files:
        raw = _read(file)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if config.path is None:
                continue  # not the user's file to mend
            raise RecipeError(
                f"data.path: {file} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset "
                f"{error.start} ({error.reason}); convert the file to UTF-8, for example with "
                f"`iconv -f latin1 -t utf-8`"
            ) from error
        if left is not None and len(raw) >= left:
            pieces.append(raw[:left].decode("utf-8", errors="ignore"))
            break
        pieces.append(text)
        left = left if left is None else left - len(raw)
    joined = "".join(pieces)
    if not joined:
        raise RecipeError(f"data.path: {source} holds no text (0 bytes); give a file that has text")
    return joined


def _standard_library() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(file.relative_to(root) for file in root.rglob("*.py"))
    files = [root / name for name in names if not _NOT_LIBRARY & set(name.parts)]
    if not files:
        raise RecipeError(
            f"data.path is null, but the Python standard library at {root} has no .py files; "
            "set data.path to a text file or a folder"
        )
    return root, files


def _named_files(path: Path, pattern: str) -> list[Path]:
    if not path.exists():
        raise RecipeError(
            f"data.path: {path} does not exist; give a text file, a folder, or null for the Python "
            "standard library"
        )
    if not path.is_dir():
        return [path]
    files = sorted(_visible(path, pattern))
    if not files:
        raise RecipeError(
            f"data.path: the folder {path} has no file that matches data.pattern {pattern!r}; "
            "change data.pattern or give another folder"
        )
    return files


def _visible(folder: Path, pattern: str) -> Iterator[Path]:
    try:
        for file in folder.glob(pattern):
            hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
            if file.is_file() and not hidden:
                yield file
    except (ValueError, NotImplementedError) as error:
        raise RecipeError(
            f"data.pattern: {pattern!r} is not a glob pattern relative to data.path ({error}); "
            "use one such as '**/*.txt'"
        ) from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"data.path: {file} cannot be read: {error.strerror}; check its permissions"
        ) from error
