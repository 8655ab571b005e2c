"""Errors in config files name the key, what was expected, the value, and what to do."""

import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipes.bert.config import BertConfig
from recipes.config import valid_keys
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.images.config import ImagesConfig
from recipes.registry import RECIPES, load_config

from .pretrained import FIXTURES
from .support import CONFIGS, REQUIRED, refuses_configs

# overrides, and what the message has to say
WRONG = [
    # unknown keys
    ("train.step=5", r"override 'train\.step=5': train\.step is not a key .* mean train\.steps\?"),
    ("steps=5", r"steps is not a key of the config; did you mean train\.steps\?"),
    ("policy=fp8", r"policy is no longer a key of the config; set precision\.policy"),
    ("scalify.gradients=true", r"gradients is no longer a key .*; set precision\.matmuls"),
    ("train.lr=1", r"train\.lr is not a key .*; train has the keys steps, eval_every"),
    ("classification={}", r"classification is not a key .*; the config has the keys recipe, name"),
    ("optimizer={lr: 1}", r"optimizer\.lr is not a key of the config"),
    # values of the wrong type or size, with the meaning of the key
    ("train.steps=0", r"train\.steps \(Optimizer steps\): expected greater than 0; got 0"),
    ("train.steps=true", r"train\.steps .*expected a valid integer; got True"),
    ("optimizer.learning_rate=.nan", r"optimizer\.learning_rate .*finite number; got nan"),
    ("precision.loss_scale=-1", r"loss_scale .*expected greater than 0 or 'dynamic'; got -1"),
    ("precision.moments=[float16]", r"moments \(.*\): .*at least 2 .*; got \['float16'\]"),
    ("precision.moments=[fp8, float16]", r"\.moments\.0 \(Stor.*'float8_e5m2'; got 'fp8'$"),
    ("precision=fp9", r"precision\.policy .*'fp8'.*; got 'fp9'"),
    ("optimizer.multipliers.norms=0.1", r"multipliers\.norms .*'norm'; got 'norms'"),
    ("name=a/b", r"name .*letters, digits, dot, dash and underscore.* got 'a/b'"),
    ("data=7", r"data .*expected a mapping of keys to values; got 7"),
    ("lora={targets: [foo]}", r"lora\.targets\.0 \(Linear layers .*got 'foo'"),
    ("sweep.grid.seed=3", r"grid\.seed \(Lists of .*expected a valid list; got 3"),
    # keys that do not agree
    ("data.tokenizer={kind: bpe, path: x}", r"data\.tokenizer: kind file needs path"),
    ("data.tokenizer={lowercase: true}", r"data\.tokenizer: vocab and lowercase need kind bpe"),
    (["data.tokenizer={kind: bpe}", "model.vocab=300"], r"model\.vocab .* 8192; got 300"),
    ("model.heads=3", r"model: heads must divide width; got heads 3 and width 16"),
    ("model.kv_heads=3", r"model: kv_heads must divide heads; got kv_heads 3, heads 2"),
    ("model.heads=16", r"model: rope needs an even head size.*got 1"),
    ("model.vocab_multiple=128", r"model: vocab_multiple 128 needs library unitscale; got"),
    ("model.vocab=255", r"model\.vocab must be at least the tokenizer's 256; got 255"),
    ("model.context=8", r"model\.context must be at least data\.sequence_length; got 8 and 16"),
    ("optimizer.multipliers.norm=0.1", r"multipliers need umup true.*; got umup false"),
    ("optimizer.umup=true", r"plain models need optimizer\.umup false"),
    ("precision=nvfp4", r"precision\.matmuls in place of an FP8 precision\.policy"),
    (["optimizer.name=adam", "optimizer.weight_decay=0.1"], r"weight_decay needs name adamw"),
    ("optimizer.name=muon", r"muon needs umup true"),
    ("optimizer.warmup_steps=6", r"warmup_steps 6 must be below train\.steps 6"),
    # files and folders
    (f"init={FIXTURES}", r"pretrained_fixtures; train one.*quickstart\.yaml`$"),
    ("init=runs/x", r"got runs/x; train one, such as `python -m recipes train gpt/quickstart"),
    ("init=org/Some-1B", r"org/Some-1B: expected .*`hf download org/Some-1B --local-dir Some"),
    # YAML
    ("data.pattern=**/*.txt", r"data\.pattern=.*not valid YAML.*in quotes"),
    ("mesh={data:", r"'mesh=\{data:'.*not valid YAML.*in quotes, as in 'mesh=\{data: 4, fsdp"),
    ("train.steps", r"override 'train\.steps': expected key=value"),
    ("=5", r"override '=5': expected key=value"),
    ("name=${foo}", r"override 'name=\$\{foo\}': .*'foo' not found"),
    ("data.path=???", r"override 'data\.path=\?\?\?': .*issing"),
]


def test_configs_that_come_along_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt/quickstart.yaml", "configs/gpt/quickstart.yaml"):
        assert load_config(name).name == "quickstart"
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("name: own\n", encoding="utf-8")
        assert load_config(name).name == "own"
    with pytest.raises(RecipeError, match=r"does not exist.*did you mean gpt/quickstart.yaml"):
        load_config("gpt/quickstar.yaml")


test_wrong_value = refuses_configs(WRONG)
WRONG_FILES = [
    ("", r"expected a mapping of keys to values; got ''"),
    ("- 1\n- 2\n", r"expected a mapping of keys to values; got '- 1"),
    ("name: x\nmodel: {layers: [\n", r"line 3, column 1: not valid YAML"),
    (
        "name: x\nseed: 1\nseed: 2\n",
        r"line 3, column 1: not valid YAML: found duplicate key seed",
    ),
    ("recipe: imges\n", r"recipe: expected one of .*images.*got 'imges'"),
    ("seed: 1\n", r"name: expected a value; got none; set it \(Name of the run's folder"),
    ("name: x\nmodel: {layer: 3}\n", r"model\.layer is not a key .*did you mean model\.layers\?"),
    (b"name: \xff\n", r"is not UTF-8 text: .* position 6"),
]


def test_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    for content, message in WRONG_FILES:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(RecipeError, match=message):
            load_config(path)


def test_a_file_of_the_name_of_a_stored_one_is_checked_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for content, message in (
        ("recipe: finetune\nsquad: 3", r"squad .*expected a mapping"),
        ("name: a\nscalify: float16", r"scalify is no longer a key"),
        ("name: a\ntrain.steps: 100", r"train\.steps is not a key of a file: write steps in a sec"),
    ):
        path.write_text(content, "utf-8")
        with pytest.raises(RecipeError, match=message):
            load_config(path)


def test_a_section_keeps_its_other_defaults() -> None:
    tree: Any = {"recipe": "images", "name": "a", "data": {"folder": "x"}}
    images = ImagesConfig.model_validate(tree | {"optimizer": {"learning_rate": 0.5}}).optimizer
    assert (images.name, images.schedule, images.umup) == ("sgd", "constant", False)
    tree = {"recipe": "bert", "name": "a", "data": {"tokenizer": {"vocab": 4096}}}
    tokenizer = BertConfig.model_validate(tree).data.tokenizer
    assert (tokenizer.kind, tokenizer.lowercase, tokenizer.vocab) == ("wordpiece", True, 4096)


def test_every_problem_is_reported_at_once(config_file: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_config(config_file, ["train.steps=0", "seed=-1", "precision=x"])
    assert len(str(caught.value).splitlines()) == 3
    # A vocabulary that is left to the tokenizer is not wrong where its tokenizer is unknown.
    with pytest.raises(RecipeError) as caught:
        load_config(config_file, ["data.batch_size=abc", "model.vocab=null"])
    assert str(caught.value).count("expected") == 1


def test_another_tokenizer_than_that_of_init_is_refused(config_file: Path) -> None:
    words = [f"init={FIXTURES / 'gpt2'}", "data.sequence_length=32"]
    with pytest.raises(RecipeError, match=r"data\.tokenizer: expected .*'file', .*got .*'byte'"):
        load_config(CONFIGS / "gpt2/finetune.yaml", [*words, "data.tokenizer.kind=byte"])
    own = load_config(CONFIGS / "gpt2/finetune.yaml", words).data.tokenizer
    moved = [*words, f"data.tokenizer.path={own.path}"]
    assert load_config(CONFIGS / "gpt2/finetune.yaml", moved).data.tokenizer == own


def test_the_entry_point_reports_a_missing_file_without_importing_jax() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "recipes", "train", "nowhere.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONFIGS.parent, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    *imports, message = done.stderr.strip().splitlines()
    assert message.startswith("error: config file nowhere.yaml does not exist;")
    assert not [line for line in imports if line.endswith(" jax")]


def test_missing_file_suggests_a_neighbour(config_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"does not exist.*did you mean .*tiny\.yaml\?"):
        load_config(config_file.with_name("tinny.yaml"))
    for name in ("first", "second"):
        (config_file.parent / "runs" / name).mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"or a folder with a model; did you mean .*runs/first\?"):
        load_config(config_file.parent / "runs" / "frist")
    with pytest.raises(RecipeError, match=r"expected a YAML file; got .*, a folder"):
        load_config(config_file.parent)


BPE = ["data.tokenizer={kind: bpe, vocab: 280}", "precision.policy=float32"]
# overrides, a key, and its value
SET: list[tuple[list[str], str, Any]] = [
    (["optimizer.learning_rate=1e-4"], "optimizer.learning_rate", 1e-4),
    (["data.path=null"], "data.path", None),
    (["model.residual={scheme: running_mean}"], "model.residual.scheme", "running_mean"),
    (["mesh.data=2", "mesh.tensor=4"], "mesh.tensor", 4),
    (["mesh.data=2", "mesh.tensor=4"], "mesh.fsdp", 1),
    (["model={layers: 3}"], "model.width", 16),
    # Mappings are replaced as a whole, and entries are set by their names.
    (["optimizer.multipliers={readout: 2.0}", "optimizer.multipliers={}"], "optimizer", ...),
    (["precision.layers={'*.out': bfloat16}", "precision.layers={}"], "precision.layers", {}),
    (["precision.layers.*.query=bfloat16"], "precision.layers", {"*.query": "bfloat16"}),
    (["data.path=null", "data.mixture.a/b.txt=2"], "data.mixture", {"a/b.txt": 2.0}),
    (
        ["sweep.grid={seed: [7]}", "sweep.grid.model.width=[16, 32]", "sweep.grid.seed=[0]"],
        "sweep.grid",
        {"seed": [0], "model.width": [16, 32]},
    ),
    # The vocabulary is the tokenizer's unless it is given.
    ([*BPE, "model={width: 8, heads: 2}"], "model.vocab", 280),
    ([*BPE, "model={vocab: null, width: 8, heads: 2}"], "model.vocab", 280),
    ([*BPE, "model={vocab: 300, width: 8, heads: 2}"], "model.vocab", 300),
]


def test_overrides(config_file: Path) -> None:
    unchanged = load_config(config_file)
    for words, key, value in SET:
        get = operator.attrgetter(key)
        expected = get(unchanged) if value is ... else value
        assert get(load_config(config_file, words)) == expected, words
    text = config_file.read_text("utf-8").replace("data:", "data:\n  mixture: {a.txt: 3, b.txt: 1}")
    config_file.write_text(text, "utf-8")  # the file's mapping is replaced, too
    mixed = load_config(config_file, ["data.mixture={b.txt: 1}", "data.path=null"])
    assert mixed.data.mixture == {"b.txt": 1.0}


def test_every_key_is_described() -> None:
    for schema in RECIPES.values():
        assert not [key for key, field in valid_keys(schema) if not field.description]


def test_the_config_of_an_earlier_version_is_read(config_file: Path) -> None:
    config = load_config(config_file, ["precision=scalify_fp8", "mesh.data=2"])
    old = config.model_dump(mode="json")
    precision = old.pop("precision")
    old |= {"policy": "float32", "policies": {"*.out": "bfloat16"}, "fp8_readout": False}
    old |= {"scalify": {"storage": "float16", "products": True}, "monitor": None}
    old["optimizer"] |= {"moments": None, "min_size": 7, "loss_scale_interval": 2000}
    old["model"] |= {"norm_eps": 0.1}
    old["mesh"]["gradients"] = "float32"
    tree = GPTConfig.upgraded(old)
    assert tree["precision"].pop("exchange") == "float32"  # scalify exchanges none now
    found = GPTConfig.model_validate(tree)
    changed = {"layers": {"*.out": "bfloat16"}, "min_size": 7}
    assert found.precision.model_dump() == precision | changed
    assert found.model.variant.norm_eps == 0.1
    untouched = {"data", "train", "optimizer", "mesh"}
    assert found.model_dump(include=untouched) == config.model_dump(include=untouched)
    assert old["mesh"]["gradients"] == "float32"  # of which `upgraded` makes a copy


def test_shipped_configs_are_valid() -> None:
    shipped = {file: OmegaConf.load(file) for file in CONFIGS.rglob("*.yaml")}
    assert len(shipped) > 16
    for file, tree in shipped.items():
        init = FIXTURES / ("llama3" if tree.get("init") == "llama" else "gpt2")
        own = ["data.sequence_length=32", f"init={init}"] if "init" in tree else []
        load_config(file, REQUIRED.get(tree.get("recipe"), own))
