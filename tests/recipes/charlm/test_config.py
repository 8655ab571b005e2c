import pytest

from recipes.charlm.residual import branch_taus
from recipes.registry import load_config
from recipes.sweep import make_points

from ..characters import make, write
from ..configs import CONFIGS, refuses_configs

WRONG = [
    ("model.kind=mlp", r"model\.kind .*: expected 'conv', 'rnn' or 'attention'; got 'mlp'"),
    ("model.cell=gruu", r"model\.cell .*; did you mean gru\?"),
    ("precision.policy=fp8", r"policy fp8 needs model\.library unitscale: .*; set"),
    ("optimizer.umup=true", r"optimizer\.umup and .* need model\.library unitscale; .*; set"),
    ("model.cell=rhn", r"model: cell rhn needs library unitscale: .*; use gru or lstm"),
    ("model.heads=3", r"model: heads must divide width; got 3 and 8"),
    ("data.tokenizer={kind: bpe}", r"data\.tokenizer .* needs kind byte; got kind bpe; remove"),
    ("precision=scalify_float16", r"are not for character models, .*; set both null"),
    (
        "model.precision=fp8",
        r"model\.precision is no longer a key of the config; set precision\.policy",
    ),
    ("sweep.factor=1.0", r"sweep\.factor .*greater than 1; got 1\.0"),
    ("sweep.rates=2", r"sweep\.rates .*got 2"),
    ("sweep.seeds=[]", r"sweep\.seeds .*at least 1"),
]


test_what_is_wrong_is_named = refuses_configs(WRONG)


@pytest.fixture
def config_file(tmp_path):
    plain = {"library": "plain", "kind": "rnn"}
    return write(tmp_path, model=plain, optimizer={"umup": False})


def test_the_optimizer_s_defaults_are_the_recipe_s_own(tmp_path) -> None:
    for section in ({}, {"optimizer": {"b1": 0.5}}):
        found = make(tmp_path, **section).optimizer
        settings = (found.name, found.learning_rate, found.schedule, found.final_fraction, found.b2)
        assert settings == ("adam", 1.0, "linear", 0.0, 0.999)


@pytest.mark.parametrize(("name", "points"), [("small", 180), ("full", 360)])
def test_the_studies_are_the_paper_s_grid(name, points) -> None:
    found = make_points(load_config(CONFIGS / "charlm" / f"{name}.yaml"))
    assert len(found) == points
    starts = {}
    for point in found:
        library, settings = point.values["model.library"], point.config.optimizer
        assert (library, point.values["precision.policy"]) != ("plain", "fp8")
        assert settings.multipliers.readout == (1.0 if library == "plain" else 4.0)
        starts[library, settings.name] = settings.learning_rate
    assert starts == {
        ("plain", "sgd"): 0.25,
        ("plain", "adam"): 0.03,
        ("unitscale", "sgd"): 0.004,
        ("unitscale", "adam"): 1.0,
    }


def test_branches_of_attention_have_a_tau_of_their_own(tmp_path) -> None:
    shape = {"layers": 2, "tau": 0.5, "attention_ratio": 0.4}
    attention = make(tmp_path, model={**shape, "kind": "attention"}).model
    assert branch_taus(attention) == [0.2, 0.5, 0.2, 0.5]
    conv, mean = (
        make(tmp_path, model={**shape, **changes}).model
        for changes in ({"kind": "conv"}, {"residual": "running_mean"})
    )
    assert branch_taus(conv) == [0.5] * 4
    assert branch_taus(mean) == pytest.approx([0.4, 2**-0.5, 0.4 * 3**-0.5, 0.5])
