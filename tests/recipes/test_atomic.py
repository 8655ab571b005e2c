"""A file is replaced whole, and stays as it was where that fails."""

from pathlib import Path

import pytest

from recipes.atomic import write_whole


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for text in ("first é\n", "second"):
        write_whole(path, text)
        assert path.read_bytes() == text.encode("utf-8")
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text(encoding="utf-8") == "old"
    with pytest.raises(OSError, match="No such file"):
        write_whole(tmp_path / "gone" / "file.json", "text")
