"""Exact match and F1 of SQuAD, as the scripts that the data set is published with compute them.

`score_v1` gives the numbers of evaluate-v1.1.py and `score_v2` those of evaluate-v2.0.py, ties and
empty answers included, in percent.

References:
  Rajpurkar et al., SQuAD: 100,000+ Questions for Machine Comprehension of Text, section 6.1;
  Rajpurkar et al., Know What You Don't Know: Unanswerable Questions for SQuAD, section 5.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..errors import RecipeError
from .config import SquadConfig
from .squad_data import Question
from .squad_predict import Prediction

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation, then without articles, with single spaces.

    Example:
      >>> normalize("The  U.S. -- an ‘Answer’")
      'us ‘answer’'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 where both are the same text once normalized, else 0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over normalized words, each counted as often as it is.

    Two texts of which one has no words have 0 in common. So v1.1 has it; see `f1_v2`.
    """
    predicted, wanted = normalize(prediction).split(), normalize(answer).split()
    common = (Counter(predicted) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def f1_v2(prediction: str, answer: str) -> float:
    """`f1`, but 1 where both texts have no words."""
    return f1(prediction, answer) if normalize(prediction) or normalize(answer) else 1.0


def score_v1(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """`exact_match` and `f1` of evaluate-v1.1.py, in percent; the answer that is nearest counts."""
    return {
        name: 100.0
        * sum(max(metric(predictions[q.id], a.text) for a in q.answers) for q in questions)
        / len(questions)
        for name, metric in (("exact_match", exact_match), ("f1", f1))
    }


def score_v2(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    threshold: float,
) -> dict[str, float]:
    """Scores as evaluate-v2.0.py does.

    Args:
      questions: A question without answers is answered rightly by "" only.
      predictions: Texts by id, "" for no answer.
      null_odds: How much speaks for no answer, by id (`--na-prob-file`).
      threshold: Where `null_odds` is above it, no answer is given (`--na-prob-thresh`).

    Returns:
      `exact`, `f1` and `total`; the same of the questions with answers (`HasAns_exact`, ...) and of
      those without (`NoAns_exact`, ...) where there are any; and the best `exact` and `f1` that any
      threshold gives to `predictions`, with that threshold (`best_exact`, `best_exact_thresh`,
      `best_f1`, `best_f1_thresh`). As in the script, questions of equal odds can fall on both sides
      of it, and it is 0 where to answer nothing is best.
    """
    has = np.array([bool(question.answers) for question in questions])
    answered = np.array([bool(predictions[question.id]) for question in questions])
    odds = np.array([null_odds[question.id] for question in questions])
    order = np.argsort(odds, kind="stable")
    groups = {"": has | True, "HasAns_": has, "NoAns_": ~has}
    result: dict[str, float] = {}
    for name, metric in (("exact", exact_match), ("f1", f1_v2)):
        raw = np.array([_best(metric, q, predictions[q.id]) for q in questions])
        scores = np.where(odds > threshold, ~has, raw)
        for prefix, chosen in groups.items():
            if chosen.any():
                result[prefix + name] = 100.0 * scores[chosen].sum() / chosen.sum()
                result[f"{prefix}total"] = int(chosen.sum())
        # Questions are answered from the least odds on; what each of them adds to the sum.
        sums = np.cumsum([(~has).sum(), *np.where(has, raw, -1.0 * answered)[order]])
        best = int(np.argmax(sums))
        result[f"best_{name}"] = 100.0 * sums[best] / len(questions)
        result[f"best_{name}_thresh"] = odds[order][best - 1] if best else 0.0
    return {name: float(value) for name, value in result.items()}


def score_predictions(
    questions: Sequence[Question], predictions: Mapping[str, Prediction], config: SquadConfig
) -> dict[str, float]:
    """Scores what a model predicts by the rules of the config's version.

    Under v2.0 the best thresholds are those for the model's best answers, whatever the threshold
    of the config is.
    """
    texts = {name: prediction.text for name, prediction in predictions.items()}
    if version_of(questions, config) == "v1.1":
        return score_v1(questions, texts)
    odds = {name: prediction.null_odds for name, prediction in predictions.items()}
    return score_v2(questions, texts, odds, config.no_answer_threshold)


def version_of(questions: Sequence[Question], config: SquadConfig) -> str:
    """The version whose rules score these questions."""
    unanswered = next((q.id for q in questions if not q.answers), None)
    if config.version == "v1.1" and unanswered is not None:
        raise RecipeError(
            "squad.version: expected an answer to each validation question under v1.1; got none "
            f"for {unanswered!r}; set squad.version v2.0 or null"
        )
    return config.version or ("v1.1" if unanswered is None else "v2.0")


def _best(metric: Callable[[str, str], float], question: Question, prediction: str) -> float:
    """The best over the answers that have words; over "" where none has."""
    texts = [answer.text for answer in question.answers if normalize(answer.text)]
    return max(metric(prediction, text) for text in texts or [""])
