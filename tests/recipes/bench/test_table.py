"""Tables of the benchmarks: what is printed, and what is written as JSON."""

import json
from pathlib import Path

import pytest

from recipes.bench._table import FORMATS, Table, asked, command_line, publish, within
from recipes.errors import RecipeError

TABLE = Table(
    "Speeds",
    [
        {"what": "fast", "ratio": 1.2345, "within": True},
        {"what": "slow", "ratio": float("inf"), "within": False, "parameters": 1234},
        {"what": "none"},
    ],
)


def test_a_table_shows_rounded_values_by_the_names_of_columns() -> None:
    assert TABLE.columns == ["what", "ratio", "parameters", "within"]  # the judgement last
    assert [TABLE.text(row) for row in TABLE.rows] == [
        ["fast", "1.234", "", "yes"],
        ["slow", "inf", "1,234", "no"],
        ["none", "", "", ""],
    ]


def test_formats_are_of_numbers() -> None:
    assert all(format(1, form) for form in FORMATS.values())


def test_publish_prints_tables_and_notes(capsys: pytest.CaptureFixture) -> None:
    publish("demo", [TABLE], None, ["a note"])
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Speeds", "ratio", "1.234", "a note"))


def test_publish_writes_unrounded_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "demo.json"
    publish("demo", [TABLE], path)
    document = json.loads(path.read_text())
    assert document["benchmark"] == "demo"
    assert document["date"] >= "2026"
    assert set(document["versions"]) == {"python", "jax", "jaxlib", "flax", "optax"}
    rows = document["tables"][0]["rows"]
    assert rows[0] == {"what": "fast", "ratio": 1.2345, "within": True}
    assert rows[1]["ratio"] == "inf"
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"--json: cannot write .*file/demo\.json"):
        publish("demo", [TABLE], tmp_path / "file" / "demo.json")


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (1.0, (1.0, 2.0), True),
        (2.0, (1.0, 2.0), True),
        (0.9, (1.0, 2.0), False),
        (2.1, (1.0, 2.0), False),
        (-5.0, (None, 2.0), True),
        (5.0, (1.0, None), True),
        (float("nan"), (None, None), False),
    ],
)
def test_within(value: float, bounds: tuple, expected: bool) -> None:
    assert within(value, bounds) is expected
    low, high = bounds
    assert asked(value, least=low, most=high)["within"] is expected


def test_a_command_is_told_without_places() -> None:
    words = [
        "bench",
        "optim",
        "--large",
        "/a/b/c.yaml",
        "--json=x.json",
        "--dump",
        "hlo",
        "train.runs_dir=/tmp",
        "data.cache_dir=c",
    ]
    assert command_line(words) == "python -m recipes bench optim --large c.yaml"
    words = ["bench", "mnist", "data.train_images=/images/train.gz", "--rates=0.1", "data.path=a/b"]
    told = "data.train_images=train.gz --rates=0.1 data.path=a/b"
    assert command_line(words) == f"python -m recipes bench mnist {told}"
