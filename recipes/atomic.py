"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a whole UTF-8 file or, on any error, leaves the old one as it was.

    Raises:
      OSError: The file cannot be written.
    """
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
