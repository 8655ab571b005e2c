"""Records are padded sequences that grain can batch, laid out as the tokenizer itself does."""

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from recipes.errors import RecipeError
from recipes.finetune.records import Records, make_records, padding_copy

from ..wordpiece import make_tokenizer

TEXTS = ["the mine", "the copper mine", ""]


def make(texts=TEXTS, labels=(1, 0, 2), name: str = "label", length: int = 5) -> Records:
    tokenizer = padding_copy(make_tokenizer(), length)
    return make_records(map(tokenizer.encode, texts), {name: list(labels)}, mark=False)


def test_records_are_padded() -> None:
    records, tokenizer = make(), make_tokenizer()
    assert len(records) == 3
    assert records.arrays["segments"].dtype == np.int8
    tokens = [*tokenizer.encode("the mine").ids, tokenizer.token_to_id("[PAD]")]
    found = {name: array.tolist() for name, array in records[0].items()}
    expected = {"ids": tokens, "segments": [0] * 5, "mask": [1, 1, 1, 1, 0], "label": 1}
    assert found == expected
    assert {array.dtype for array in records[0].values()} == {np.dtype(np.int32)}
    assert [int(record["mask"].sum()) for record in records] == [4, 5, 2]


def test_the_last_batch_is_filled_with_its_last_record() -> None:
    first, last = make().batches(2)
    assert first["label"].tolist() == [1, 0]
    assert last["label"].tolist() == [2, 2]
    assert last["mask"].tolist() == [[1, 1, 0, 0, 0]] * 2
    (whole,) = make().batches(3)
    assert whole["label"].tolist() == [1, 0, 2]


def test_the_digest_tells_records_apart() -> None:
    others = [
        make(["the mine", "the copper mine", "the"]),
        make(["the mine", "the copper open", ""]),
        make(labels=(1, 1, 2)),
        make(name="start"),
        make(length=6),
    ]
    assert make().digest == make().digest
    assert len({records.digest for records in (make(), *others)}) == 6


def test_what_two_texts_share_has_the_segment_of_the_first() -> None:
    tokenizer = padding_copy(make_tokenizer(), 14)
    pair = tokenizer.encode("did the copper mine open", "the mine opened")
    encodings = [pair, tokenizer.encode("the mine")]  # of one text nothing is marked
    plain, marked = (
        make_records(encodings, {"label": [0, 1]}, mark=mark).arrays for mark in (False, True)
    )
    # [CLS] did the copper mine open [SEP] the mine opened [SEP]
    assert plain["segments"][0].tolist() == [0] * 7 + [1] * 4 + [0] * 3
    assert marked["segments"][0].tolist() == [0] * 9 + [1] * 2 + [0] * 3
    assert marked["segments"][1].sum() == 0
    for name in ("ids", "mask", "label"):
        np.testing.assert_array_equal(plain[name], marked[name])


CLS, SEP = ("[CLS]", 2), ("[SEP]", 3)


def template(single: str, pair: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[CLS, SEP])


# what a tokenizer adds to texts, and what is said of it; None where it can be used
LAYOUTS = {
    "bert": (processors.BertProcessing(SEP, CLS), None),
    "roberta": (processors.RobertaProcessing(SEP, CLS), None),
    "other segments": (template("[CLS] $A", "[CLS] $A:1 [SEP]:0 $B:2 [SEP]:3"), None),
    "the other order": (template("[CLS] $A", "[CLS] $B [SEP] $A"), r"got \[CLS\] a \[SEP\] a;"),
    "twice": (template("[CLS] $A", "[CLS] $A [SEP] $B [SEP] $A"), "the second text behind the f"),
    "nothing first": (template("$A [SEP]", "[CLS] $A [SEP] $B"), r"expected a special token, such"),
    "nothing": (None, r"such as \[CLS\], before the texts, .* got a; use"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case: str) -> None:
    processor, message = LAYOUTS[case]
    tokenizer = make_tokenizer() if processor else Tokenizer(make_tokenizer().model)
    if processor:
        tokenizer.post_processor = processor  # type: ignore[assignment]
    if message is not None:
        with pytest.raises(RecipeError, match=message):
            padding_copy(tokenizer, 8)
        return
    expected = tokenizer.encode("the mine", "open")
    found = padding_copy(tokenizer, 8).encode("the mine", "open")
    count = len(expected)
    assert (found.ids[:count], found.type_ids[:count]) == (expected.ids, expected.type_ids)


def test_settings_of_the_tokenizer_are_left_alone() -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_padding(length=30, pad_id=7, pad_token="[PAD]")
    tokenizer.enable_truncation(2)
    encoding = padding_copy(tokenizer, 6).encode("the mine")
    assert encoding.ids[4:] == [7, 7]
    assert sum(encoding.attention_mask) == 4
    assert tokenizer.padding is not None
    assert tokenizer.truncation is not None
