"""`bench quant`: judging losses and programs, what cannot be measured, and the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from recipes.bench import quant
from recipes.bench._converted import (
    converted,
    judged,
    losses,
    through_qwix,
    validation_loss,
)
from recipes.bench.parity import Run
from recipes.cli import main
from recipes.data import ByteTokenizer, load_corpus
from recipes.gpt import build
from unitscale.quant import Fp8Report, Matmul

TINY = ["model.library=unitscale", "model.dropout=0.0", "train.steps=2"]


def matmul(out: str, *, fp8: bool, flops: float = 1.0) -> Matmul:
    return Matmul(
        name="gemm",
        kernel="cuBLASLt FP8" if fp8 else "cuBLASLt",
        fp8=fp8,
        quantized=fp8,
        reason="" if fp8 else "operands were never FP8",
        lhs="float8_e5m2 -> bfloat16[64,32]",
        rhs="bfloat16[32,48]",
        out=out,
        flops=flops,
        op_name="",
        source="",
    )


def test_losses_are_judged_against_float32(make_config) -> None:
    def run(loss: float) -> Run:
        return Run(make_config(), None, None, loss)

    runs = {"float32": run(2.0), "fp8": run(2.008), "mxfp8": run(2.008), "fp8_delayed": run(1.98)}
    rows = {row["policy"]: row for row in quant.losses(runs).rows}
    assert rows["fp8"]["over float32"] == pytest.approx(0.004)
    assert [row.get("within") for row in rows.values()] == [None, True, False, True]


@pytest.mark.parametrize(
    ("out", "dense"),
    [
        ("bfloat16[64,48]", True),
        ("float32[48,32]", True),
        ("bfloat16[8,64,64]", False),  # attention's own
        ("bfloat16[64,257]", False),  # the readout
        ("bfloat16[64,264]", False),  # the readout, padded
    ],
)
def test_dense_products_are_told_apart(out: str, dense: bool) -> None:
    assert quant._is_dense(matmul(out, fp8=True), 257) is dense


@pytest.mark.parametrize(
    ("fp8", "amax", "within"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_the_unit_scaled_program_is_judged(make_config, fp8: bool, amax: int, within: bool) -> None:
    products = (matmul("bfloat16[64,48]", fp8=True), matmul("bfloat16[64,32]", fp8=fp8))
    attention = matmul("bfloat16[8,64,64]", fp8=False, flops=2.0)
    report = Fp8Report(matmuls=(*products, attention), amax_reductions=amax, casts=0, transposes=0)
    row = quant._row("fp8", report, make_config(), 90, 100)
    assert row["over bfloat16"] == 0.9
    assert row["within"] is within
    assert row["Dense FP8"] == (1.0 if fp8 else 0.5)
    assert row["of all FLOPs"] == (0.5 if fp8 else 0.25)
    assert "asked" not in quant._row("mxfp8", report, make_config(), 90, 100)


def test_what_cannot_be_measured_is_said(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant, "h200_available", lambda: False)
    assert main(["bench", "quant", "--no-train"]) == 0
    printed = capsys.readouterr().out
    assert "FP8 kernels and memory: not compiled; that needs the CUDA plugin" in printed
    assert "Tokens per second: not measured, no GPU; on one, run JAX_PLATFORMS=cuda" in printed


@pytest.mark.parametrize("policies", ["fp8,fp9", "bfloat16"])
def test_other_policies_are_refused(policies: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "quant", "--no-train", "--no-compile", "--policies", policies]) == 2
    assert "--policies: expected policies among fp8, fp8_dynamic" in capsys.readouterr().err


@pytest.mark.slow
def test_command_trains_the_policies(tmp_path: Path, config_file: Path) -> None:
    path = tmp_path / "out.json"
    command = ["bench", "quant", *TINY, "--config", str(config_file), "--json", str(path)]
    command += ["--no-compile", "--no-convert", "--policies", "fp8,fp8_delayed"]
    assert main(command) == 0
    (table,) = json.loads(path.read_text())["tables"]
    losses = {row["policy"]: row["validation loss"] for row in table["rows"]}
    assert list(losses) == ["float32", "fp8", "fp8_delayed"]
    # The same parameters and batches: a policy that had no effect would give the same loss.
    assert len(set(losses.values())) == 3
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {
        f"tiny-{name}" for name in losses
    }


def test_converted_models_are_judged_against_qwix() -> None:
    found = {"float32": [2.0], "converted to fp8_dynamic": [2.1], "converted to fp8_delayed": [2.3]}
    rows = {row["model"]: row for row in judged(found | {"through qwix": [2.2]}, 10).rows}
    assert rows["converted to fp8_dynamic"]["over float32"] == pytest.approx(0.05)
    assert [row.get("within") for row in rows.values()] == [None, True, False, None]
    *rows, last = judged(found, 10).rows
    assert last == {"model": "through qwix", "asked": "not installed: pip install qwix"}
    assert not any("within" in row for row in rows)


@pytest.mark.parametrize(("second", "within"), [(0.98, True), (1.021, False)])
def test_worse_than_qwix_is_more_than_seeds_explain(second: float, within: bool) -> None:
    found = {"float32": [1.0, 1.0], "through qwix": [1.0, 2.0]}
    row = judged(found | {"converted": [1.03, 2 * second]}, 10).rows[-1]
    mean, spread = (1.03 + second) / 2 - 1, abs(1.03 - second) / 2
    assert row["over qwix"] == pytest.approx(mean)
    assert row["standard error"] == pytest.approx(spread)
    assert row["within"] is within


def test_the_plain_model_trains_converted(make_config) -> None:
    config = make_config("train.steps=2")
    corpus = load_corpus(config.data, ByteTokenizer())
    losses = [
        validation_loss(config, make, corpus)
        for make in (lambda: build(config), lambda: converted(config, "fp8_delayed"))
    ]
    assert losses[0] != losses[1]
    assert all(0 < loss < 8 for loss in losses)


# qwix 0.1.8 calls what Flax has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_plain_model_trains_through_qwix(make_config) -> None:
    pytest.importorskip("qwix")
    config = make_config("train.steps=2")
    ids = jnp.zeros((1, 16), jnp.int32)
    ours, theirs = (
        str(jax.make_jaxpr(lambda ids, model=model: model(ids))(ids)).count("dtype=float8_e4m3fn")
        for model in (converted(config, "fp8_dynamic"), through_qwix(config))
    )
    # Both operands of query, key, value, out, up and down.
    assert ours == theirs == 12
    names = [row["model"] for row in losses(config).rows]
    assert names[-1] == "through qwix"


@pytest.mark.h200
def test_command_compiles_every_policy(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = config_file.read_text().replace("library: plain", "library: unitscale")
    (tmp_path / "gpt2-small.yaml").write_text(
        text.replace("width: 16", "width: 64").replace("heads: 2", "heads: 4")
    )
    shutil.copy(config_file, tmp_path / "parity.yaml")
    monkeypatch.setattr(quant, "CONFIGS", tmp_path)
    path = tmp_path / "out.json"
    assert main(["bench", "quant", "--no-train", "--json", str(path)]) == 0
    table, memory = json.loads(path.read_text())["tables"]
    rows = {row["model"]: row for row in table["rows"]}
    assert rows["fp8"]["Dense FP8"] == rows["fp8_delayed"]["Dense FP8"] == 1
    assert rows["bfloat16"]["FP8 kernels"] == rows["plain flax.nnx"]["FP8 kernels"] == 0
    # Block scales lie along the sum, which an H200 cannot apply in a kernel.
    assert rows["mxfp8"]["FP8 kernels"] == 0
    assert rows["plain, converted to fp8_dynamic"]["FP8 kernels"] > 0
    amax = {name: row["amax"] for name, row in rows.items()}
    assert amax["fp8"] == amax["bfloat16"] == 0
    assert min(amax["fp8_dynamic"], amax["fp8_delayed"]) > 0
    temporaries = {row["policy"]: row["temporaries MiB"] for row in memory["rows"]}
    assert list(temporaries) == ["bfloat16", "fp8", "fp8_dynamic", "fp8_delayed", "mxfp8"]
    assert min(temporaries.values()) > 0
