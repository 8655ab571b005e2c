"""`bench lms`: files of tasks, tuned runs, imported logits, pipelines, and the command."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.bench import _compare, lms
from recipes.bench._baselines import likest_sentence
from recipes.bench._imported import FIXTURES, REFERENCE, folders, logits_table
from recipes.bench._tasks import (
    adapted_words,
    contexts,
    pair_words,
    pairs_of,
    question_words,
    sentence_words,
    sentences,
    sentences_of,
    split_articles,
    task_words,
)
from recipes.cli import main
from recipes.config import RunConfig
from recipes.errors import RecipeError
from recipes.finetune.classification import load_classification
from recipes.finetune.config import FinetuneConfig
from recipes.finetune.squad import Answer, Question
from recipes.registry import CONFIGS, load_config
from tests.recipes.masked import bert_config, write_bert
from tests.recipes.pretrained import FOLDERS, copied
from tests.recipes.tasks import FILES, ROWS, squad, write_tasks

Captured = pytest.CaptureFixture[str]


def test_articles_are_in_one_part_or_the_other(tmp_path: Path) -> None:
    (one,) = squad(["fox"] * 17)["data"]
    paragraphs = enumerate(one["paragraphs"])
    articles = [{"title": str(index), "paragraphs": [part]} for index, part in paragraphs]
    file = tmp_path / "all.json"
    file.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    train, validation = split_articles(str(file), tmp_path / "split")
    parts = [json.loads(part.read_text("utf-8"))["data"] for part in (train, validation)]
    titles = [[article["title"] for article in part] for part in parts]
    assert titles[1] == ["7", "15"]
    assert sorted(titles[0] + titles[1], key=int) == [str(index) for index in range(17)]
    file.write_text(json.dumps({"data": articles[:7]}), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"--squad: expected at least 8 articles, .* got 7"):
        split_articles(str(file), tmp_path / "split")


def test_columns_go_by_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text("sentence\tlabel\na film\t1\n", encoding="utf-8")
    words = [f"data.train={file}", "data.validation=dev.tsv"]
    assert sentence_words(str(file), "dev.tsv") == words
    file.write_text("a film\t1\n", encoding="utf-8")
    bare = 'classification={"header": false, "text": 0, "label": 1}'
    assert sentence_words(str(file), "dev.tsv") == [*words, bare]
    assert question_words(tmp_path, tmp_path, 16)[-1] == "squad.max_question_length=5"
    with pytest.raises(RecipeError, match=r"--sst2: nowhere cannot be read"):
        sentence_words("nowhere", "dev.tsv")


def test_half_of_an_adapted_pretraining_is_on_the_texts_of_tasks(tmp_path: Path) -> None:
    write_tasks(tmp_path, tmp_path)
    questions, rows = (tmp_path / name for name in FILES.values())
    config = bert_config(write_bert(tmp_path))
    texts = {"sst2": sentences(str(rows), str(rows)), "squad": contexts(questions)}
    name, path, mixture = adapted_words(config, "books.txt", texts)
    assert (name, path) == ("name=tiny-bert-adapted", "data.path=null")
    paths = {task: tmp_path / "runs" / f"tiny-bert-{task}.txt" for task in texts}
    weights = {"books.txt": 2.0} | {str(path): 1.0 for path in paths.values()}
    assert json.loads(mixture.removeprefix("data.mixture=")) == weights
    read = paths["sst2"].read_text("utf-8").strip().split("\n\n")
    assert sorted(read) == sorted({text for text, _ in ROWS})
    assert "the quick brown dog" in paths["squad"].read_text("utf-8")


def test_the_sentence_like_the_question() -> None:
    context = "A dog ran. The fox did eat it! The fox slept. A fox did eat."
    assert likest_sentence(Question("q", "What did the fox eat?", context, ())) == (
        "The fox did eat it!"
    )
    assert likest_sentence(Question("q", "Why?", context, ())) == "A dog ran."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        ("At 3.5 m.  Then", ["At 3.5 m.", "Then"]),
        ("none", ["none"]),
        ("", [""]),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert [text[part] for part in sentences_of(text)] == expected


CONTEXT = "The mine opened in\t1878. It closed. Who knows why?"


@pytest.mark.parametrize(
    ("answers", "held", "others"),
    [
        (["1878"], "The mine opened in 1878.", {"It closed.", "Who knows why?"}),
        (["1878", "closed"], "The mine opened in 1878.", {"Who knows why?"}),
        (["1878. It"], None, set()),  # in no sentence
        ([], None, set()),
    ],
)
def test_pairs_of_a_question(answers: list[str], held: str | None, others: set[str]) -> None:
    found = tuple(Answer(text, CONTEXT.index(text)) for text in answers)
    question, seen = Question("q", "when\ndid it?", CONTEXT, found), set()
    for seed in range(20):
        rows = [row.split("\t") for row in pairs_of(question, np.random.default_rng(seed))]
        if held is None:
            assert rows == []
            continue
        assert rows[0] == ["when did it?", held, "1"]
        assert rows[1][::2] == ["when did it?", "0"]
        seen.add(rows[1][1])
    assert seen == others


@pytest.mark.parametrize("context", ["In 1878.", "In 1878. "])
def test_of_one_sentence_there_is_no_pair(context: str) -> None:
    question = Question("q", "When?", context, (Answer("1878", 3),))
    assert pairs_of(question, np.random.default_rng(0)) == []


def test_pairs_are_written_beside_the_articles(tmp_path: Path) -> None:
    asked = {"id": "q", "question": "When?", "answers": [{"text": "1878", "answer_start": 19}]}
    file = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [asked]}]}]}
    paths = [tmp_path / "train.json", tmp_path / "validation.json"]
    for path in paths:
        path.write_text(json.dumps(file), encoding="utf-8")
    words = pair_words(paths[0], paths[1])
    assert words == [f"data.{p.stem}={p.with_suffix('.tsv')}" for p in paths]
    header, *rows = paths[0].with_suffix(".tsv").read_text("utf-8").splitlines()
    assert header.split("\t") == ["question", "sentence", "label"]
    assert [row[-1] for row in rows] == ["1", "0"]
    config = load_config(CONFIGS / "bert" / "pairs.yaml", [*words, "init=runs/books"])
    assert len(load_classification(config.data, config.classification).train) == 2
    tasks = task_words(None, (paths[0], paths[1]), None, pairs=True)
    assert tasks["pairs"] == words
    assert [*tasks] == ["squad", "pairs"]


def test_the_folders_of_the_tests_are_the_default(tmp_path: Path) -> None:
    assert {folder.name for folder in folders([])} == set(FOLDERS)
    with pytest.raises(RecipeError, match="expected a folder with reference"):
        folders([FIXTURES / "gpt2", tmp_path])


def test_other_logits_are_seen(tmp_path: Path) -> None:
    folder = copied("bert-classes", tmp_path)
    stored = dict(np.load(folder / REFERENCE))
    stored["logits"] = stored["logits"] + np.float32(2e-4)
    np.savez(folder / REFERENCE, **stored)
    kept, moved = logits_table([FIXTURES / "bert-classes", folder]).rows
    assert (kept["within"], moved["within"]) == (True, False)
    assert moved["difference"] == pytest.approx(2e-4, rel=0.1)
    assert kept["task"] == "classification"


def test_a_pipeline_is_timed_beside_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, ...]] = []

    def stepper(config: RunConfig, batch: Any) -> Callable[[], None]:
        given.append(batch[0].shape)
        return lambda: time.sleep(0.01)

    monkeypatch.setattr(lms, "stepper", stepper)
    row = lms.time_pipeline(bert_config(write_bert(tmp_path)), rounds=1, batches=2)
    assert given == [(4, 16)]
    assert row["config"] == "tiny-bert"
    assert 0 < row["consumed"] < 4 * 16 / 0.01
    assert row["times ahead"] == pytest.approx(row["produced"] / row["consumed"])
    assert row["within"] is (row["times ahead"] >= 20)


def test_command_prints_what_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs whose losses and scores are given, by format and seed."""
    loss = {"float32": 2.0, "float16": 2.001, "fp8": 2.1}
    score = {"float32": 0.8, "float16": 0.79, "fp8": 0.5}
    seen: list[RunConfig] = []

    def trained(config: RunConfig, fresh: bool) -> dict[str, float]:
        seen.append(config)
        value = score[config.policy] + 0.02 * config.seed
        return {"accuracy": value, "f1": 100 * value}

    monkeypatch.setattr(_compare, "trained", trained)
    monkeypatch.setattr(_compare, "loss_of", lambda config: loss[config.policy])
    write_tasks(tmp_path, tmp_path)
    out, questions, rows = (str(tmp_path / name) for name in ("out.json", *FILES.values()))
    (article,) = json.loads(Path(questions).read_text("utf-8"))["data"]
    parts = [{"title": "one", "paragraphs": [part]} for part in article["paragraphs"]]
    Path(questions).write_text(json.dumps({"data": parts}), "utf-8")
    words = ["--config", str(write_bert(tmp_path)), "--no-pipelines", "--json", out]
    words += ["--finetune", "--sst2", rows, rows, "--squad", questions]
    words += ["--tuning", "train.steps=7", "--tuning", "optimizer.warmup_steps=0"]
    words += ["--logits", str(FIXTURES / "bert-classes")]
    assert main(["bench", "lms", *words]) == 0
    tables = [table["rows"] for table in json.loads(Path(out).read_text())["tables"]]
    assert [row.get("verdict") for row in tables[0]] == [None, "within", "outside"]
    for metric, unit, table in (("accuracy", 1, tables[1]), ("f1", 100, tables[2])):
        assert [row["variant"] for row in table[:3]] == list(score)
        for row in table[:3]:
            assert row[metric] == pytest.approx(unit * (score[row["variant"]] + 0.02))
        assert [row.get("verdict") for row in table[:3]] == [None, "within", "outside"]
    # ROWS and squad() of the tests: words tell every label, the only sentence holds every answer.
    assert [row["accuracy"] for row in tables[1][3:]] == [0.5, 1.0, 1.0]
    assert [row["variant"].split()[0] for row in tables[2][3:]] == ["random", "sentence"]
    assert tables[2][4]["f1"] == pytest.approx(100 * 2 / 8)  # 1 of 7 words, "the" not among them
    assert all(row["within"] for row in tables[3])
    tuned = [config for config in seen if isinstance(config, FinetuneConfig)]
    assert len({config.name for config in seen}) == len(seen) == 3 + 18
    for config in tuned:
        assert config.init == str(tmp_path / "runs" / f"tiny-bert-{config.policy}")
        assert (config.data.sequence_length, config.train.steps) == (16, 7)
        assert config.name.startswith(f"tiny-bert-{config.task[:2].replace('cl', 'ss')}")
    assert {config.seed for config in tuned} == {0, 1, 2}
    seen.clear()
    assert main(["bench", "lms", *words, "--seeds", "2"]) == 0
    tuned = [config for config in seen if isinstance(config, FinetuneConfig)]
    assert len(seen) == 6 + 12
    for config in tuned:  # each from the model of its own seed
        own = f"tiny-bert-{config.policy}" + ("-seed1" if config.seed else "")
        assert config.init == str(tmp_path / "runs" / own)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--finetune"], "got neither --sst2 nor --squad"),
        (["--finetune", "--no-runs", "--squad", "a"], "got --no-runs"),
        (["--finetune", "--pairs", "--sst2", "a", "b"], "--pairs: expected the file of SQuAD"),
        (["--policies", "fp4"], "--policies: expected some of float16, fp8; got fp4"),
        (["--squad", "a"], "expected beside --finetune; got them alone"),
        (["--adapt", "--finetune", "--squad", "a"], "--adapt: expected a text beside those of"),
        (["--charlm", "nowhere"], "--charlm: expected the folder of a sweep"),
        (["--logits", "nowhere"], "--logits: expected a folder with reference.npz"),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: Captured) -> None:
    assert main(["bench", "lms", *words]) == 2
    assert message in capsys.readouterr().err
