"""Pairs are laid out as the tokenizer itself lays them out."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from recipes.errors import RecipeError
from recipes.finetune.layout import layout_of_pairs, working_copy

from .wordpiece import make_tokenizer

CLS, SEP = ("[CLS]", 2), ("[SEP]", 3)
TEMPLATES = {
    "bert": processors.BertProcessing(SEP, CLS),
    "roberta": processors.RobertaProcessing(SEP, CLS),
    "template": processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A:1 [SEP]:1 [SEP]:0 $B:2 [SEP]:3 [CLS]:1",
        special_tokens=[CLS, SEP],
    ),
}


def with_processor(processor: object) -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processor  # type: ignore[assignment]
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_layout_is_the_tokenizers_own(name: str) -> None:
    tokenizer, _ = working_copy(with_processor(TEMPLATES[name]))
    layout = layout_of_pairs(tokenizer)
    assert layout.special == tokenizer.num_special_tokens_to_add(True)
    text, pair = "when did the mine open?", "in 1878"
    expected = tokenizer.encode(text, pair)
    ids = [
        np.array(tokenizer.encode(one, add_special_tokens=False).ids, np.int32)
        for one in (text, pair)
    ]
    found, segments = layout.lay_out(*ids)
    assert found.tolist() == expected.ids
    assert segments.tolist() == expected.type_ids
    assert layout.first_of_pair(ids[0]) == expected.sequence_ids.index(1)


# the pair's template, and what the message has to say
PAIRS = [
    (
        "[CLS] $B [SEP] $A [SEP]",
        r"expected the second text of a pair to follow the first; got \[CLS",
    ),
    (
        "[CLS] $A [SEP] $B [SEP] $A",
        r"expected the second text .* got \[CLS\] a \[SEP\] a \[SEP\] a",
    ),
]


@pytest.mark.parametrize(("template", "message"), PAIRS)
def test_other_orders_are_refused(template: str, message: str) -> None:
    processor = processors.TemplateProcessing(
        single="[CLS] $A", pair=template, special_tokens=[CLS, SEP]
    )
    with pytest.raises(RecipeError, match=message):
        layout_of_pairs(with_processor(processor))


def test_a_tokenizer_without_a_special_token_first() -> None:
    last = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B", special_tokens=[SEP]
    )
    for tokenizer in (with_processor(last), Tokenizer(make_tokenizer().model)):
        with pytest.raises(
            RecipeError, match=r"tokenizer: expected a special token, such as \[CLS"
        ):
            working_copy(tokenizer)


def test_settings_of_the_tokenizer_are_left_alone() -> None:
    tokenizer = make_tokenizer()
    assert working_copy(tokenizer)[1] == tokenizer.token_to_id("[PAD]")
    tokenizer.enable_padding(length=30, pad_id=7, pad_token="[PAD]")
    tokenizer.enable_truncation(2)
    copy, pad = working_copy(tokenizer)
    assert pad == 7
    assert len(copy.encode("the mine")) == 4
    assert tokenizer.padding is not None
    assert tokenizer.truncation is not None
