"""Files that are there whole or not at all."""

import json
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes a whole UTF-8 file or, on any error, leaves the old one as it was.

    Raises:
      OSError: The file cannot be written.
    """
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_json(path: Path, tree: Any) -> None:
    """Writes a whole JSON file or, on any error, leaves the old one as it was."""
    write_whole(path, json.dumps(tree, ensure_ascii=False, indent=1) + "\n")
