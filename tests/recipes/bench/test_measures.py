"""What benchmarks measure beside losses: gradients lost, operations, times, bytes, scales."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.bench import methods, optim, parallel, quant, scales, scalify
from recipes.bench._compare import comparison, configs_of
from recipes.bench._runs import Told
from recipes.bench._timing import interleaved, ratio
from recipes.bench._underflow import Underflow, counted, gradient
from recipes.bench.overhead import flattened, flops, flops_of, plain as in_plain_flax, unfactored
from recipes.bench.scalify import Program, error, programs
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.gpt.task import build
from recipes.registry import load_config
from tests.recipes.conftest import write_config
from unitscale import nn, ops, rules
from unitscale.quant import Fp8Report, Matmul

MakeConfig = Callable[..., GPTConfig]
# In float16: kept, zero, subnormal, zero in float32 as well, infinite.
SLOPES = (1.0, 1e-9, 1e-6, 0.0, 1e6)


class Linear(nnx.Module):
    """A loss whose gradient is `SLOPES`, rounded to a dtype."""

    def __init__(self, dtype: Any):
        self.readout = nnx.Param(jnp.ones(len(SLOPES)))
        self.dtype = dtype

    def loss(self, ids, targets, *, deterministic):
        slopes = jnp.asarray(np.array(SLOPES, np.float32)).astype(self.dtype)
        return jnp.sum(self.readout.get_value().astype(self.dtype) * slopes).astype(jnp.float32)


def gradient_of(dtype: Any, scale: float | None = None) -> Any:
    graphdef, params, rest = nnx.split(Linear(dtype), nnx.Param, ...)
    return gradient(graphdef)(params, rest, np.zeros((1, 3), np.int32), scale)[1]


def test_underflow_counts_what_float16_loses() -> None:
    wide, narrow = gradient_of(jnp.float32), gradient_of(jnp.float16)
    nothing, absent = np.zeros(len(SLOPES), bool), np.arange(len(SLOPES)) == 1
    found = counted([(wide, narrow)] * 2, nothing)
    assert found == Underflow(entries=10, lost=2, subnormal=2, not_finite=2, lost_absent=0)
    assert found.lost_share == found.lost_occurring_share == 0.2
    assert counted([(wide, wide)], nothing).lost == 0
    apart = counted([(wide, narrow)], absent)
    assert (apart.lost, apart.lost_absent, apart.lost_occurring_share) == (1, 1, 0.0)


def test_a_loss_scale_keeps_what_float16_would_lose() -> None:
    graphdef, params, rest = nnx.split(Tiny(), nnx.Param, ...)
    batch = np.zeros((1, 3), np.int32)
    kept = [
        jax.tree.leaves(gradient(graphdef)(params, rest, batch, s)[1])[0] for s in (None, 2**12)
    ]
    assert [float(x) for x in kept] == [0.0, 2.0**-26]


class Tiny(nnx.Module):
    """Its gradient, 2^-26, passes through float16."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(()))

    def loss(self, ids, targets, *, deterministic):
        return (self.weight.get_value().astype(jnp.float16) * 1).astype(jnp.float32) * 2.0**-26


def method(name: str, config_file: Path) -> GPTConfig:
    words = ["model.library=unitscale", "model.dropout=0.0", "train.steps=2"]
    (config,) = configs_of(comparison("methods"), Told(str(config_file), words), name)
    assert isinstance(config, GPTConfig)
    return config


def test_an_automatic_scale_reduces_each_gradient(config_file: Path) -> None:
    names = ["plain-float16", "auto-loss-scale"]
    none, auto = (method(name, config_file) for name in names)
    costs = {name: methods.cost_of(one) for name, one in zip(names, (none, auto), strict=True)}
    rows = methods.added(names, costs).rows
    parameters = len(jax.tree.leaves(nnx.state(build(none), nnx.Param)))
    assert [row["reductions"] for row in rows] == [0, parameters]
    assert rows[0]["FLOPs"] == 0 < rows[1]["FLOPs"]
    assert [row["numbers kept"] for row in rows] == [0, 2]
    assert [row["to choose"] for row in rows] == ["nothing", "first scale, interval, factor"]


def test_scalify_keeps_a_scale_of_each_array(config_file: Path) -> None:
    config = method("scalify-float16", config_file)
    parameters = len(jax.tree.leaves(nnx.state(build(config), nnx.Param)))
    assert methods.kept(methods.init_state(config)[2]) == 3 * parameters  # and of both moments


VOCAB, WIDTH, BATCH, TIME = 32, 8, 2, 4


class Small(nnx.Module):
    """A table, a dense layer and a loss: every factor can be counted by hand."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nn.Embed(VOCAB, WIDTH, rngs=rngs)
        self.dense = nn.Dense(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool) -> jax.Array:
        return ops.softmax_cross_entropy(self.dense(self.embed(ids)), targets)


def test_factors_are_what_a_hand_count_gives() -> None:
    model, batch = nnx.eval_shape(Small), jax.ShapeDtypeStruct((BATCH, TIME + 1), jnp.int32)
    with_factors = flops_of(model, batch)
    with unfactored():
        without = flops_of(model, batch)
    tokens = BATCH * TIME
    products = tokens * VOCAB + tokens * WIDTH + WIDTH * VOCAB  # output, input and kernel gradient
    assert with_factors - without == products + tokens * VOCAB + tokens * WIDTH  # loss, rows


def test_unfactored_leaves_the_rules_as_they_were() -> None:
    before = dict(vars(rules))
    with unfactored():
        assert rules.dense(4, 16, 64) == rules.Factors(1.0, (1.0, 1.0, 1.0))
        assert rules.residual(0.5) == rules.ResidualFactors(branch=1.0, skip=1.0)
        assert rules.normalized_weights((3.0, 4.0)) == (1.0, 1.0)
        assert rules.logit_factor(64) == 1 / 64
        # An op of one's own, whose factors are simulated or found to be those of a rule.
        for function in (jnp.cumsum, jnp.tanh):
            op = ops.unit_scaled(function, [jnp.zeros(8)], seeds=2)
            assert op.factors == rules.Factors(1.0, (1.0,))
    assert dict(vars(rules)) == before


def test_the_plain_model_has_fewer_operations(make_config: MakeConfig) -> None:
    config = make_config("model.library=unitscale")
    plain = in_plain_flax(config)
    assert (plain.model.library, plain.optimizer.umup) == ("plain", False)
    assert 0 < flops(plain) < flops(config)


def test_flattened_layers_multiply_matrices() -> None:
    layer, x = nnx.Linear(3, 5, rngs=nnx.Rngs(0)), jnp.arange(24.0).reshape(2, 4, 3)
    whole = jax.make_jaxpr(lambda x: layer(x))(x)
    with flattened():
        rows = jax.make_jaxpr(lambda x: layer(x))(x)
        flat = layer(x)
    shapes = [
        next(e.outvars[0].aval.shape for e in p.eqns if e.primitive.name == "dot_general")
        for p in (whole, rows)
    ]
    assert shapes == [(2, 4, 5), (8, 5)]
    np.testing.assert_allclose(flat, layer(x), rtol=1e-6)


def test_interleaved_takes_turns_and_drops_the_warmup() -> None:
    calls = []

    def slow() -> None:
        calls.append("slow")
        time.sleep(0.02)

    first, second = interleaved(slow, lambda: calls.append("fast"), rounds=4, warmup=1)
    assert len(calls) == 10
    rounds = [set(calls[i : i + 2]) for i in range(0, 10, 2)]
    assert rounds == [{"slow", "fast"}] * 5
    assert {calls[i] for i in range(0, 10, 2)} == {"slow", "fast"}  # either goes first in turn
    assert len(first.elapsed) == len(second.cpu) == 4
    assert min(first.elapsed) >= 0.02
    assert sum(first.cpu) < sum(first.elapsed)  # it slept


def test_ratio_is_taken_within_rounds() -> None:
    # A machine twice as slow in the last two rounds; the first program always takes 1.5 times.
    first, second = [1.5, 1.5, 3.0, 3.0, 4.5], [1.0, 1.0, 2.0, 2.0, 3.0]
    assert list(ratio(first, second).values()) == [1.5] * 4


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = write_config(tmp_path)
    text = path.read_text("utf-8").replace("library: plain", "library: unitscale")
    path.write_text(text, encoding="utf-8")
    return path


def test_bytes_of_adam(small: Path) -> None:
    rows = {row["formats"]: row for row in optim.count_bytes(str(small)).rows}
    count = rows["float32"]["parameters"]
    for name, weights, state in [("float32", 4, 8), ("6 bytes", 2, 3), ("4 bytes", 2, 2)]:
        # Scales, a counter and a key on top: 4 bytes per array and moment in so small a model.
        assert weights <= rows[name]["weights"] < weights + 100 / count
        assert state <= rows[name]["state"] < state + 200 / count
        assert rows[name]["parameters"] == count
    assert rows["6 bytes"]["within"]


def test_steps_are_timed_with_and_without_donation(small: Path) -> None:
    config: Any = load_config(small)
    rows = optim.step_times(config, 4).rows
    assert [row["buffers"] for row in rows] == ["new", "donated"]
    assert all(row["ratio"] > 0 and row["scaled ms"] > 0 for row in rows)


def test_error_is_relative_and_the_worst_leaf_counts() -> None:
    expected = {"a": jnp.full(4, 1e20), "b": jnp.full(2, 1e-20)}
    found = {"a": jnp.full(4, 1.01e20), "b": jnp.full(2, 1.5e-20)}
    assert error(found, expected) == pytest.approx(0.5, rel=1e-5)
    assert np.isnan(error({"a": jnp.full(4, jnp.inf) - jnp.inf, "b": expected["b"]}, expected))


def test_every_program_is_beyond_plain_float16() -> None:
    for name, function, arguments in programs():
        half = jax.tree.map(lambda x: x.astype(jnp.float16), arguments)
        found = error(jax.jit(function)(*half), jax.jit(function)(*arguments))
        assert not found < 0.5, f"{name}: plain float16 is within {found:.0%}"
    (row,) = scalify.extremes([Program("halved", lambda x: x / 2, (jnp.ones(3),))]).rows
    assert (row["within"], row["scalify float16"]) == (True, 0.0)


@pytest.fixture(scope="module")
def measured() -> tuple[Any, np.ndarray, scales.Values]:
    """A model and what `measure` says of it."""
    shape = {"layers": 2, "width": 32, "heads": 2, "vocab": 256}
    config = GPTConfig.model_validate({"name": "x", "model": shape})
    tokens = np.random.default_rng(1).integers(0, 256, (2, 9)).astype(np.int32)
    return build(config), tokens, scales.measure(config, tokens)


def test_every_tensor_has_one_kind(measured: tuple) -> None:
    found = measured[2]
    assert set(found[scales.STREAM]) == {"embed", "stack.layers.0", "stack.layers.1"}
    assert set(found[scales.STREAM_GRADIENT]) == set(found[scales.STREAM])
    assert len(found[scales.DENSE_OUTPUT]) == 2 * 6  # query, key, value, out, up, down
    assert set(found[scales.LOGITS]) == {"readout"}
    assert set(found[scales.WEIGHT]) == set(found[scales.WEIGHT_GRADIENT])


def test_values_are_those_of_the_model(measured: tuple) -> None:
    model, tokens, found = measured

    def rms(x: Any) -> float:
        return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))

    # Sums of up to 2,048 squares in float32.
    for kind, name, expected in [
        (scales.STREAM, "embed", model.embed(tokens[:, :-1]).data),
        (scales.LOGITS, "readout", model(tokens[:, :-1]).data),
        (scales.WEIGHT, "readout.kernel", model.readout.kernel.get_value()),
    ]:
        assert found[kind][name] == pytest.approx(rms(expected), rel=1e-4)
    assert all(math.isfinite(value) for value in found[scales.WEIGHT_GRADIENT].values())


def test_what_is_out_of_range_is_named(capsys: pytest.CaptureFixture) -> None:
    values = {kind: {"a.0.b": 1.0} for kind in scales.KINDS}
    values[scales.DENSE_OUTPUT] = {"a.0.b": 1.25, "a.1.b": 1.3, "a.2.b": 0.7, "c": 0.8}
    found = {"2 x 8": values}
    (row,) = scales.outside(found).rows
    assert (row["tensor"], row["outside"], row["of"], row["RMS"]) == ("a.*.b", 2, 3, "0.70-1.30")
    by_name = {row["tensors"]: row for row in scales.summary(found).rows}
    assert by_name["Dense outputs"]["within"] is False
    assert by_name["Dense outputs"]["at "] == "2 x 8: a.1.b"
    assert by_name["between blocks"]["within"] is True
    assert "within" not in by_name["weights"]
    assert main(["bench", "scales", "--depths", "4,x"]) == 2
    assert "--depths: expected integers above 0" in capsys.readouterr().err


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
    assert quant.is_dense(matmul(out, fp8=True), 257) is dense


@pytest.mark.parametrize(
    ("fp8", "amax", "within"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_the_unit_scaled_program_is_judged(fp8: bool, amax: int, within: bool) -> None:
    products = (matmul("bfloat16[64,48]", fp8=True), matmul("bfloat16[64,32]", fp8=fp8))
    attention = matmul("bfloat16[8,64,64]", fp8=False, flops=2.0)
    report = Fp8Report(matmuls=(*products, attention), amax_reductions=amax, casts=0, transposes=0)
    row = quant.row_of("fp8", report, 256, 90, 100)
    assert (row["over bfloat16"], row["within"]) == (0.9, within)
    assert row["Dense FP8"] == (1.0 if fp8 else 0.5)
    assert row["of all FLOPs"] == (0.5 if fp8 else 0.25)
    assert "asked" not in quant.row_of("mxfp8", report, 256, 90, 100)


def test_what_cannot_be_measured_is_said(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant, "h200_available", lambda: False)
    assert main(["bench", "quant", "--no-train"]) == 0
    printed = capsys.readouterr().out
    assert "FP8 kernels and memory: not compiled; that needs" in printed
    assert "Tokens per second: not measured, no GPU; on one, run JAX_PLATFORMS=cuda" in printed
    assert main(["bench", "quant", "--no-train", "--policies", "bfloat16"]) == 2
    assert "--policies: expected some of fp8, fp8-readout, fp8_delayed" in capsys.readouterr().err


def test_bytes_and_errors_of_an_exchange() -> None:
    rows = {row["exchange"]: row for row in parallel.exchange((64, 32)).rows}
    full = rows["float32"]["bytes per entry"]
    assert full == 2 * 4 * 7 / 8
    for dtype, share in [("bfloat16", 0.5), ("float8_e4m3fn", 0.25), ("float8_e5m2", 0.25)]:
        assert share <= rows[dtype]["over float32"] < share + parallel.SCALAR / full / (64 * 32)
        assert rows[dtype]["within"]
    assert rows["float32"]["heavy-tailed nearest"] < 1e-6
    assert 0.01 < rows["float8_e4m3fn"]["heavy-tailed nearest"] <= parallel.MOST_ERROR


def test_the_exchange_starts_itself_again_on_too_few_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def run(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
        calls.append((command[1:], env["XLA_FLAGS"], env["JAX_PLATFORMS"]))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(parallel, "DEVICES", len(jax.devices()) + 1)
    monkeypatch.setattr(parallel.subprocess, "run", run)
    monkeypatch.setitem(os.environ, "XLA_FLAGS", "--xla_other")
    assert main(["bench", "parallel", "--data", "a", "--data", "b", "seed=1"]) == 3
    ((words, flags, platform),) = calls
    assert words[:5] == ["-m", "recipes", "bench", "parallel", "seed=1"]
    assert words[5:9] == ["--data", "a", "--data", "b"]
    assert flags == f"--xla_other --xla_force_host_platform_device_count={parallel.DEVICES}"
    assert platform == "cpu"
    monkeypatch.setitem(os.environ, "XLA_FLAGS", flags)
    with pytest.raises(RecipeError, match="this benchmark needs"):
        parallel.main()


@pytest.mark.h200
def test_every_policy_is_compiled(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = config_file.read_text().replace("library: plain", "library: unitscale")
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "gpt2-small.yaml").write_text(
        text.replace("width: 16", "width: 64").replace("heads: 2", "heads: 4")
    )
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
