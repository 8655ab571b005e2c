"""Character models: configs, all kinds of models, and a training run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.charlm.config import CharlmConfig
from recipes.charlm.task import branch_taus, build
from recipes.cli import main
from recipes.recipe import loss_inputs
from recipes.registry import load_config
from recipes.run.folder import read_metrics
from recipes.sweep.points import make_points
from tests.gradients import jit
from unitscale import rules

from ..support import CONFIGS, charlm_config, refuses_configs, write_charlm

WRONG = [
    ("model.kind=mlp", r"model\.kind .*'conv', 'rnn' or 'attention'; got 'mlp'"),
    ("precision.policy=fp8", "policy"),
    ("model.cell=rhn", "cell rhn needs library unitscale"),
    ("model.heads=3", "heads must divide width"),
    ("data.tokenizer={kind: bpe}", r"data\.tokenizer"),
    ("precision=scalify_float16", "precision"),
    ("sweep.factor=1.0", r"sweep\.factor"),
    ("sweep.seeds=[]", r"sweep\.seeds"),
]
test_what_is_wrong_is_named = refuses_configs(WRONG)


@pytest.fixture
def config_file(tmp_path):
    plain = {"library": "plain", "kind": "rnn"}
    return write_charlm(tmp_path, model=plain, optimizer={"umup": False})


@pytest.mark.slow
def test_the_study_is_the_paper_s_grid() -> None:
    assert len(make_points(load_config(CONFIGS / "charlm" / "full.yaml"))) == 360


def test_branches_of_attention_have_a_tau_of_their_own(tmp_path) -> None:
    def taus(kind: str, **residual) -> list[float]:
        own = {"tau": 0.5, "attention_ratio": 0.4, **residual}
        shape = {"layers": 2, "kind": kind, "residual": own}
        return branch_taus(charlm_config(tmp_path, model=shape).model)

    assert taus("attention") == [0.2, 0.5, 0.2, 0.5]
    assert taus("conv") == [0.5] * 4
    mean = [0.4, 2**-0.5, 0.4 * 3**-0.5, 0.5]
    assert taus("attention", scheme="running_mean") == pytest.approx(mean)
    depth = rules.residual_taus("depth", 4, mult=2.0, attn_ratio=0.4)
    assert taus("attention", scheme="depth", mult=2.0) == list(depth)


def test_the_config_of_an_earlier_version_is_read(tmp_path) -> None:
    config = charlm_config(
        tmp_path, model={"residual": {"scheme": "running_mean", "attention_ratio": 0.4}}
    )
    old = config.model_dump(mode="json")
    old["model"] |= {"residual": "running_mean", "tau": 0.5, "attention_ratio": 0.4}
    assert CharlmConfig.model_validate(CharlmConfig.upgraded(old)) == config
    assert CharlmConfig.upgraded(config.model_dump()) == config.model_dump()


MODELS = [(kind, "plain", "float16") for kind in ("conv", "gru", "attention")]
MODELS += [(kind, "unitscale", "fp8") for kind in ("conv", "lstm", "rhn", "attention")]


@pytest.mark.parametrize(("kind", "library", "policy"), MODELS)
def test_every_model_has_a_float32_loss_and_float32_parameters(
    kind, library, policy, tmp_path
) -> None:
    mixing = {"kind": kind} if kind in ("conv", "attention") else {"cell": kind, "kind": "rnn"}
    norm = {"conv": "pre", "gru": "post"}.get(kind, "none")
    shape = {"library": library, **mixing, "norm": norm, "residual": {"scheme": "running_mean"}}
    umup = {"umup": library == "unitscale"}
    config = charlm_config(tmp_path, precision=policy, model=shape, optimizer=umup)
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: build(config)), nnx.Param, ...)

    def loss(params, rest, text):
        return nnx.merge(graphdef, params, rest).loss(*loss_inputs(text), deterministic=False)

    text = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    value, grads = jax.eval_shape(jax.value_and_grad(loss), params, rest, text)
    assert (value.shape, value.dtype) == ((), jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
    names = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    assert any("norm" in name for name in names) == (norm != "none")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["plain", "unitscale"])
def test_a_model_sees_no_later_character(library, tmp_path) -> None:
    text = np.arange(1, 8, dtype=np.int32)[None]
    changed = np.where(np.arange(7) == 4, 200, text)
    for kind in ("conv", "rnn", "attention"):
        umup = {"umup": library == "unitscale"}
        config = charlm_config(tmp_path, model={"kind": kind, "library": library}, optimizer=umup)

        @jit
        def losses(*texts, config=config):
            model = build(config)
            # The first three predictions have the same inputs and the same targets.
            return [model.loss(*loss_inputs(t)) for x in texts for t in (x[:, :4], x)]

        first, whole, first_changed, whole_changed = losses(text, changed)
        assert first == first_changed
        assert whole != whole_changed


@pytest.mark.slow
def test_a_run_is_one_of_the_loop(tmp_path, capsys) -> None:
    path = write_charlm(tmp_path, model={"kind": "rnn"})
    assert main(["train", str(path)]) == 0
    assert "bits" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    assert main(["evaluate", str(path)]) == 0
    assert main(["generate", str(path)]) == 2
    assert "recipe charlm" in capsys.readouterr().err
