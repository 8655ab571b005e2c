"""The config.json of each encoder: older spellings, defaults, and that every key counts."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.errors import RecipeError
from recipes.hf import load, shape_of_bert
from recipes.hf._encoders import ENCODERS
from tests.recipes.make_pretrained_fixtures import MODERN
from tests.recipes.pretrained import FIXTURES, change_config, copied, reference

TOLERANCE = 1e-4


def test_modernbert_in_its_first_spelling() -> None:
    """As the published files have it."""
    path = FIXTURES / "modernbert-mlm"
    keys = json.loads((path / "config.json").read_text("utf-8"))
    old = {name: x for name, x in keys.items() if name not in ("layer_types", "rope_parameters")}
    old |= {"global_attn_every_n_layers": 3, "global_rope_theta": 100.0, "local_rope_theta": 20.0}
    old |= {"position_embedding_type": "absolute", "layer_norm_eps": 1e-5}
    assert ENCODERS["modernbert"](old, path) == ENCODERS["modernbert"](keys, path)


LOCAL = MODERN["rope_parameters"]["sliding_attention"]
# folder, keys that change what is computed but no tensor
COUNT = [
    ("roberta-mlm", {"pad_token_id": 5}),
    ("roberta-mlm", {"hidden_act": "relu"}),
    ("roberta-mlm", {"layer_norm_eps": 0.1}),
    ("modernbert-mlm", {"local_attention": 6}),
    ("modernbert-mlm", {"layer_types": ["full_attention"] * 3}),
    ("modernbert-mlm", {"hidden_activation": "silu"}),
    ("modernbert-mlm", {"classifier_activation": "relu"}),
    ("modernbert-mlm", {"norm_eps": 0.1}),
    (
        "modernbert-mlm",
        {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL}},
    ),
    ("modernbert-classes", {"classifier_pooling": "cls"}),
]


@pytest.mark.parametrize(("folder", "keys"), COUNT)
def test_every_key_counts(folder: str, keys: dict[str, Any], tmp_path: Path) -> None:
    changed = copied(folder, tmp_path)
    change_config(changed, **keys)
    inputs, expected = reference(changed)
    found = np.asarray(load(changed).model(*inputs))
    assert np.abs(found - expected).max() > 5 * TOLERANCE


@pytest.mark.parametrize("folder", ["roberta-classes", "modernbert-classes"])
def test_what_is_padding_changes_nothing(folder: str) -> None:
    model = load(FIXTURES / folder).model
    (ids, segments, mask), expected = reference(FIXTURES / folder)
    other = np.where(mask == 1, ids, (ids + 7) % 100)
    assert (other != ids).any()
    np.testing.assert_allclose(model(other, segments, mask), expected, atol=TOLERANCE)
    assert np.abs(np.asarray(model(other, segments, mask * 0 + 1)) - expected).max() > TOLERANCE


def test_positions_that_tokens_can_have() -> None:
    found = {name: shape_of_bert(str(FIXTURES / name)).longest for name in SHAPES}
    assert found == SHAPES
    with pytest.raises(RecipeError, match=r"bert, roberta, modernbert; got 'gpt2'; give another"):
        shape_of_bert(str(FIXTURES / "gpt2"))


SHAPES = {"bert-mlm": 32, "roberta-mlm": 28, "modernbert-mlm": 32}


@pytest.mark.peers
@pytest.mark.parametrize("kind", ENCODERS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    transformers = importlib.import_module("transformers")
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    path, read = Path("somewhere"), ENCODERS[kind]
    found = read({"model_type": kind}, path).model_dump(exclude={"pad"})
    assert found == read({k: v for k, v in theirs.items() if v is not None}, path).model_dump(
        exclude={"pad"}
    )
