"""What a task's files give without pretraining: rows beside the scores of tuned models."""

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline

from ..finetune.classification import load_classification
from ..finetune.config import FinetuneConfig
from ..finetune.squad import Prediction, Question, normalize, read_squad, score_predictions
from ._tasks import sentences_of


def baselines(config: FinetuneConfig) -> list[dict[str, Any]]:
    """Rows of the baselines of a config's task, learned and scored on its files."""
    return _of_words(config) if config.task == "classification" else _of_spans(config)


def _of_words(config: FinetuneConfig) -> list[dict[str, Any]]:
    """The most frequent label, and two models of how often each word occurs in a row."""
    data = load_classification(config.data, config.classification)
    parts = data.train, data.validation
    texts = [[f"{row.text} {row.pair or ''}" for row in rows] for rows in parts]
    train, wanted = (data.ids(rows) for rows in parts)
    shares = {"most frequent label": float((wanted == np.bincount(train).argmax()).mean())}
    for name, model in (
        ("naive Bayes on word counts", MultinomialNB()),
        ("logistic regression on word counts", LogisticRegression(max_iter=1000)),
    ):
        fitted = make_pipeline(CountVectorizer(token_pattern=r"\S+"), model).fit(texts[0], train)
        shares[name] = float((fitted.predict(texts[1]) == wanted).mean())
    if data.train[0].pair is not None:
        common = [[[len(_words(row.text) & _words(row.pair))] for row in rows] for rows in parts]
        found = LogisticRegression().fit(common[0], train).predict(common[1])
        shares["number of words in common"] = float((found == wanted).mean())
    return [{"variant": name, "accuracy": share} for name, share in shares.items()]


def _words(text: str | None) -> set[str]:
    return set(normalize(text or "").split())


def _of_spans(config: FinetuneConfig) -> list[dict[str, Any]]:
    """A span at random, as long as some training answer, and the sentence like the question."""
    rng = np.random.default_rng(config.seed)
    train = read_squad(config.data.train)
    sizes = np.array([len(a.text.split()) for question in train for a in question.answers])
    questions = read_squad(config.data.validation, "data.validation")

    def span(question: Question) -> str:
        words = question.context.split()
        size = min(int(rng.choice(sizes)), len(words))
        start = int(rng.integers(len(words) - size + 1))
        return " ".join(words[start : start + size])

    rules: dict[str, Callable[[Question], str]] = {
        "random span": span,
        "sentence with most words of the question": likest_sentence,
    }
    return [{"variant": name, "f1": _f1(questions, rule, config)} for name, rule in rules.items()]


def likest_sentence(question: Question) -> str:
    """The first of the context's sentences that have most words in common with the question."""
    asked = _words(question.text)
    sentences = [question.context[own] for own in sentences_of(question.context)]
    return max(sentences, key=lambda sentence: len(asked & _words(sentence)))


def _f1(
    questions: list[Question], answer: Callable[[Question], str], config: FinetuneConfig
) -> float:
    predictions = {
        question.id: Prediction(text=answer(question), null_odds=0.0, best=())
        for question in questions
    }
    return score_predictions(questions, predictions, config.squad)["f1"]
