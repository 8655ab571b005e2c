"""What is wrong in a config file is said with the key, what was expected, what came, what to do."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.registry import RECIPES, load_config, valid_keys
from recipes.run.folder import dump_config

from .configs import CONFIGS, FILES, refuses_configs
from .pretrained import FIXTURES

# overrides, and what the message has to say
WRONG = [
    (["train.step=5"], r"train\.step is not a key of the config; did you mean train\.steps\?"),
    (["steps=5"], r"steps is not a key of the config; did you mean train\.steps\?"),
    (["precison=fp8"], r"precison is not a key of the config; did you mean precision\?"),
    (["policy=fp8"], r"policy is no longer a key of the config; set precision\.policy"),
    (["scalify.storage=float16"], r"storage is no longer a key .*; set precision\.scalify"),
    (["monitor.limit=0.1"], r"monitor\.limit is no longer a key .*; set precision\.monitor"),
    (["optimizer.moments=null"], r"moments is no longer a key .*; set precision\.moments"),
    (["train.lr=1"], r"train\.lr is not a key .*; train has the keys steps, eval_every"),
    (["zzz=1"], r"zzz is not a key .*; the top-level keys are recipe, name, seed, precision"),
    (["optimizer={lr: 1}"], r"optimizer\.lr is not a key of the config"),
    (["train.steps=0"], r"train\.steps \(optimizer steps\): expected greater than 0; got 0"),
    (["train.steps=true"], r"train\.steps .*expected a valid integer; got True"),
    (["train.steps='5'"], r"train\.steps .*expected a valid integer; got '5'"),
    (["train.steps=1.5"], r"train\.steps .*expected .*integer.*; got 1\.5"),
    (["optimizer.learning_rate=.nan"], r"optimizer\.learning_rate .*finite number; got nan"),
    (["optimizer.learning_rate=-1"], r"optimizer\.learning_rate .*greater than 0; got -1"),
    (["data.validation_fraction=1"], r"data\.validation_fraction .*less than 1; got 1"),
    (["data.tokenizer={kind: bpe, path: x}"], r"data\.tokenizer: path is set when kind is file"),
    (["data.tokenizer={lowercase: true}"], r"data\.tokenizer: vocab and lowercase are of kind bpe"),
    (["data.tokenizer={kind: bpe}", "model.vocab=300"], r"the 8192 ids of the bpe .*; got 300"),
    (["data.tokenizer={kind: file, path: gone}"], r"tokenizer\.path: gone cannot be read: No such"),
    (
        ["precision.readout=gradient"],
        r"readout \(.*: expected true, false or 'gradients'; .*; did you mean gradients\?",
    ),
    (["precision.readout=null"], r"readout \(.*'gradients'; got None; correct the value"),
    (
        ["precision.loss_scale=-1"],
        r"loss_scale \(.*\): expected greater than 0 or 'dynamic'; got -1",
    ),
    (
        ["precision.moments=[float16]"],
        r"moments \(.*\): expected at least 2 of them; got \['float16'\]",
    ),
    (["data.pattern=**/*.txt"], r"data\.pattern=.*not valid YAML.*; put quotes around what begins"),
    (["precision.layers={'*.a': fp8"], r"layers=.*not valid YAML.*; correct the line"),
    (["optimizer.b2=1.5"], r"b2 \(decay of the (second|mean).*\): expected less than 1; got 1\.5"),
    (["precision=fp9"], r"policy .*'fp8'.*; got 'fp9'; did you mean fp8\?"),
    (["model.residual.scheme=runing_mean"], r"residual\.scheme .*did you mean running_mean\?"),
    (["model.residual.scheme=fixed"], r"model\.residual: tau is set when scheme is fixed.*set tau"),
    (["model.residual.tau=0.5"], r"model\.residual: tau is set when scheme is fixed.*remove tau"),
    (["model.heads=3"], r"model: heads must divide width; got heads 3 and width 16; use heads 4"),
    (["model.kv_heads=3"], r"model: kv_heads must divide heads; got kv_heads 3 and heads 2"),
    (["model.heads=16"], r"model: rope needs an even head size.*got width 16 and heads 16"),
    (["model.mlp_ratio=0.01"], r"model: mlp_ratio \* width must be at least 1; got .* 0\.01"),
    (
        ["precision.policy=fp8"],
        r"policy fp8 needs model\.library unitscale; got plain",
    ),
    (["model.vocab_multiple=128"], r"model: vocab_multiple 128 needs library unitscale; got"),
    (["model.vocab_multiple=0"], r"model\.vocab_multiple .*expected greater than 0; got 0"),
    (
        ["precision.policy=mxfp8"],
        r"policy mxfp8 needs model\.library unitscale; got plain",
    ),
    (["precision.weights=fp16"], r"precision\.weights .*expected .*'float16'; got 'fp16'"),
    (["optimizer.multipliers.norm=0.1"], r"multipliers need umup true.*; got umup false"),
    (["optimizer.multipliers.norms=0.1"], r"multipliers\.norms .*did you mean norm\?"),
    (["optimizer.multipliers.norm=-1"], r"multipliers\.norm .*expected greater than or equal to 0"),
    (["optimizer.umup=true"], r"optimizer\.umup needs model\.library unitscale"),
    (["model.library=unitscale", "model.norm_eps=1e-5"], r"norm_eps 1e-05 needs library plain"),
    (["optimizer.name=adam", "optimizer.weight_decay=0.1"], r"weight_decay needs name adamw"),
    (["optimizer.name=muon", "optimizer.umup=false"], r"muon needs umup true"),
    (
        ["model.attention_implementation=chunked"],
        r"model: attention_implementation chunked needs library unitscale",
    ),
    (["model.attention_implementation=xla"], r"expected .*'chunked', 'cudnn' or 'splash'"),
    (["model.vocab=255"], r"model\.vocab must be at least the 256 ids of the byte .*; got 255"),
    (["model.context=8"], r"model\.context must be at least data\.sequence_length; got 8 and 16"),
    (["optimizer.warmup_steps=6"], r"warmup_steps must be less than train\.steps; got 6 and 6"),
    (["seed=4294967296"], r"seed .*expected less than or equal to 4294967295; got 4294967296"),
    (["precision=fp16"], r"got 'fp16'; did you mean float16\?"),
    (
        ["name=a/b"],
        r"name .*expected a name of ASCII letters, digits, dots, dashes, underscores; got 'a/b'",
    ),
    (["name=café"], r"expected a name of ASCII letters.* got 'café'"),
    (["name=12"], r"name .*expected a valid string; got 12"),
    (["data=7"], r"data .*expected a mapping of keys to values; got 7"),
    (["train.steps"], r"override 'train\.steps': expected key=value"),
    (["=5"], r"override '=5': expected key=value"),
    (["train=[1, 2]"], r"train .*expected a mapping of keys to values; got \[1, 2\]"),
    (["name=${foo}"], r"override 'name=\$\{foo\}': expected a value; .*write the value itself"),
    (["name=${name}"], r"override 'name=\$\{name\}': expected a value"),
    (["data.path=???"], r"override 'data\.path=\?\?\?': expected a value"),
    (["train.steps=[5"], r"override 'train\.steps=\[5'.*not valid YAML"),
]


@pytest.mark.parametrize("name", ["gpt/quickstart.yaml", "configs/gpt/quickstart.yaml"])
def test_configs_that_come_along_are_found_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(name).name == "quickstart"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("name: own\ndata: {path: text.txt}\n", encoding="utf-8")
    assert load_config(name).name == "own"
    with pytest.raises(
        RecipeError, match=r"quickstar.yaml does not exist.*did you mean gpt/quicks"
    ):
        load_config("gpt/quickstar.yaml")


@pytest.mark.parametrize("vocab", ["", "vocab: null,", "vocab: 300,"])
def test_vocab_is_the_tokenizers_unless_given(config_file: Path, vocab: str) -> None:
    words = [f"model={{{vocab} width: 8, heads: 2}}", "data.tokenizer={kind: bpe, vocab: 280}"]
    words += ["precision.policy=float32"]
    assert load_config(config_file, words).model.vocab == (300 if "300" in vocab else 280)


test_wrong_value = refuses_configs(WRONG)
WRONG_FILES = [
    ("", r"expected a mapping of keys to values; got nothing"),
    ("- 1\n- 2\n", r"expected a mapping of keys to values; got a list"),
    ("name: x\nmodel: {layers: [\n", r"line 3, column 1: not valid YAML"),
    (
        "name: x\nseed: 1\nseed: 2\n",
        r"line 3, column 1: not valid YAML: found duplicate key seed",
    ),
    ("seed: 1\n", r"name: expected a value; got none; set it: names the run's folder"),
    ("name: x\nmodel: {layer: 3}\n", r"model\.layer is not a key .*did you mean model\.layers\?"),
    (b"name: \xff\n", r"is not UTF-8 text: .* position 6"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_FILES)
def test_wrong_file(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecipeError, match=message):
        load_config(path)


def test_every_problem_is_reported_at_once(config_file: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_config(config_file, ["train.steps=0", "seed=-1", "precision=x"])
    assert len(str(caught.value).splitlines()) == 3
    # A vocabulary that is left to the tokenizer is not wrong where its tokenizer is unknown.
    with pytest.raises(RecipeError) as caught:
        load_config(config_file, ["data.batch_size=abc", "model.vocab=null"])
    assert str(caught.value).count("expected") == 1


def test_a_list_of_wrong_entries_is_not_called_too_short(config_file: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_config(config_file, ["lora={targets: [foo]}"])
    (line,) = str(caught.value).splitlines()
    assert "lora.targets.0 (linear layers" in line
    assert "got 'foo'" in line


def test_another_tokenizer_than_that_of_init_is_refused(config_file: Path) -> None:
    words = [f"init={FIXTURES / 'gpt2'}", "data.sequence_length=32"]
    with pytest.raises(RecipeError, match=r"data\.tokenizer\.kind: expected file, .*got 'byte'"):
        load_config(CONFIGS / "gpt2/finetune.yaml", [*words, "data.tokenizer.kind=byte"])
    own = load_config(CONFIGS / "gpt2/finetune.yaml", words).data.tokenizer
    moved = [*words, f"data.tokenizer.path={own.path}"]
    assert load_config(CONFIGS / "gpt2/finetune.yaml", moved).data.tokenizer == own


def test_a_wrong_key_need_not_wait_for_jax() -> None:
    code = "import sys, recipes.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_file_suggests_a_neighbour(config_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"does not exist.*did you mean .*tiny\.yaml\?"):
        load_config(config_file.with_name("tinny.yaml"))


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"expected a YAML file; got .*, a folder; give the path of one"
    ):
        load_config(tmp_path)


def test_overrides_are_yaml(config_file: Path) -> None:
    config = load_config(
        config_file,
        ["optimizer.learning_rate=1e-4", "data.path=null", "model.residual={scheme: running_mean}"],
    )
    assert config.optimizer.learning_rate == 1e-4
    assert config.data.path is None
    assert config.model.residual.scheme == "running_mean"


def test_keys_of_a_section_that_is_null(config_file: Path) -> None:
    assert load_config(config_file).mesh is None
    mesh = load_config(config_file, ["mesh.data=2", "mesh.tensor=4"]).mesh
    assert mesh is not None
    assert (mesh.data, mesh.fsdp, mesh.tensor) == (2, 1, 4)
    with pytest.raises(RecipeError, match=r"mesh\.tensors is not a key.*mesh\.tensor\?"):
        load_config(config_file, ["mesh.tensors=4"])


def test_a_section_override_keeps_its_other_keys(config_file: Path) -> None:
    config = load_config(config_file, ["model={layers: 3}"])
    assert (config.model.layers, config.model.width) == (3, 16)


def test_an_empty_mapping_empties_a_section(config_file: Path) -> None:
    words = ["optimizer.multipliers={readout: 2.0}", "optimizer.multipliers={}"]
    assert load_config(config_file, words).optimizer == load_config(config_file).optimizer


def test_a_mapping_takes_the_place_of_the_files(config_file: Path) -> None:
    text = config_file.read_text("utf-8").replace("data:", "data:\n  mixture: {a.txt: 3, b.txt: 1}")
    config_file.write_text(f"precision: {{layers: {{'*.query': bfloat16}}}}\n{text}", "utf-8")
    config = load_config(
        config_file, ["precision.layers={}", "data.mixture={b.txt: 1}", "data.path=null"]
    )
    assert (config.precision.layers, config.data.mixture) == ({}, {"b.txt": 1.0})


def test_an_entry_of_a_mapping_is_set_by_its_name(config_file: Path) -> None:
    words = [
        "sweep.grid.model.width=[16, 32]",
        "precision.layers.*.query=bfloat16",
        "sweep.grid.seed=[0]",
    ]
    config = load_config(config_file, ["sweep.grid={model.layers: [1], seed: [7]}", *words])
    assert config.sweep.grid == {"model.layers": [1], "seed": [0], "model.width": [16, 32]}
    assert config.precision.layers == {"*.query": "bfloat16"}
    mixed = load_config(config_file, ["data.path=null", "data.mixture.a/b.txt=2"])
    assert mixed.data.mixture == {"a/b.txt": 2.0}
    with pytest.raises(RecipeError, match=r"grid\.seed \(lists of .*expected a valid list; got 3"):
        load_config(config_file, ["sweep.grid.seed=3"])


def test_dumped_config_reads_back_the_same(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file, ["optimizer.eps=1e-12"])
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_is_described(recipe: str) -> None:
    assert not [key for key, field in valid_keys(RECIPES[recipe]) if not field.description]


def test_shipped_configs_are_valid() -> None:
    shipped = {file: OmegaConf.load(file) for file in CONFIGS.rglob("*.yaml")}
    assert len(shipped) > 16
    for file, tree in shipped.items():
        init = FIXTURES / ("llama3" if tree.get("init") == "llama" else "gpt2")
        own = ["data.sequence_length=32", f"init={init}"] if "init" in tree else []
        load_config(file, FILES.get(tree.get("recipe"), own))


def test_valid_keys_are_dotted() -> None:
    keys = dict(valid_keys(GPTConfig))
    assert {"name", "data.path", "model.residual.tau", "train.runs_dir"} <= keys.keys()
