"""Where text comes from, and what is said when there is none."""

import sysconfig
from pathlib import Path

import pytest

from recipes.config import DataConfig
from recipes.errors import RecipeError
from recipes.text import ByteTokenizer, documents


def read(config: DataConfig) -> str:
    return "".join(text for text, _ in documents(config))


def test_default_is_the_standard_library() -> None:
    text = read(DataConfig())
    source = Path(sysconfig.get_paths()["stdlib"], "textwrap.py").read_text(encoding="utf-8")
    assert source in text
    assert len(text) > 2_000_000
    assert text == read(DataConfig())


def test_default_leaves_out_installed_packages() -> None:
    assert Path(pytest.__file__).read_text(encoding="utf-8") not in read(DataConfig())


def test_max_bytes_cuts_at_a_character(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab€", encoding="utf-8")
    (tmp_path / "b").write_text("cd", encoding="utf-8")
    path = str(tmp_path)
    assert read(DataConfig(path=path, max_bytes=4)) == "ab"
    assert read(DataConfig(path=path, max_bytes=5)) == "ab€"
    assert read(DataConfig(path=path, max_bytes=6)) == "ab€c"
    assert read(DataConfig(path=path, max_bytes=99)) == "ab€cd"


def test_folder_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name, text in {"b.txt": "3", "a/z.txt": "2", "a/b.txt": "1", ".git/x": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert read(DataConfig(path=str(tmp_path))) == "123"
    assert read(DataConfig(path=str(tmp_path), pattern="*.txt")) == "3"


def test_files_that_are_not_text_are_named_with_the_offset(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("fine", encoding="utf-8")
    (tmp_path / "wrong.txt").write_bytes(b"caf\xe9 au lait")
    message = r"wrong\.txt is not UTF-8 text: byte 0xe9 at offset 3 .*convert the file to UTF-8"
    for path in (tmp_path, tmp_path / "wrong.txt"):
        with pytest.raises(RecipeError, match=message):
            read(DataConfig(path=str(path)))


def test_a_byte_order_mark_names_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "wide.txt").write_text("fine", encoding="utf-16")
    with pytest.raises(RecipeError, match=r"byte 0xff at offset 0 .*`iconv -f utf-16 -t utf-8`"):
        read(DataConfig(path=str(tmp_path / "wide.txt")))


def test_missing_empty_and_unmatched(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.path: .*none\.txt does not exist; give a text"):
        read(DataConfig(path=str(tmp_path / "none.txt")))
    with pytest.raises(RecipeError, match=r"has no file that matches data\.pattern '\*\*/\*'"):
        read(DataConfig(path=str(tmp_path)))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(RecipeError, match=r"empty\.txt holds no text \(0 bytes\)"):
        read(DataConfig(path=str(tmp_path / "empty.txt")))
    with pytest.raises(RecipeError, match=r"data\.pattern: '/\*' is not a glob pattern"):
        read(DataConfig(path=str(tmp_path), pattern="/*"))


@pytest.mark.parametrize("text", ["", "plain", "naïve € 🦊\n\0"])
def test_byte_tokenizer_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.size == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_tokenizer_shows_broken_characters() -> None:
    assert ByteTokenizer().decode([0xE2, 0x82, 65]) == "\ufffdA"
