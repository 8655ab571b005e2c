"""Strategies and `MatmulConfig` compare by value; functions refuse bad input."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.refusals import refuses
from unitscale.quant import (
    Block,
    Contraction,
    Delayed,
    Dynamic,
    MatmulConfig,
    Multiplier,
    QuantState,
    Static,
    Unit,
    contract,
    dot_general,
    einsum,
    fake_quantize_operands,
    grouped,
    is_stateful,
    quantize,
    scaled_matmul,
)

STRATEGIES = [Unit(), Dynamic("channel", 1), Delayed(2), Static((0.5, 4.0, 1.0)), Block(4, 2)]


def test_strategies_and_configs_are_hashable_values_in_canonical_form() -> None:
    for strategy in STRATEGIES:
        same = dataclasses.replace(strategy)
        assert (hash(same), same) == (hash(strategy), strategy)
        assert hash(MatmulConfig(strategy=strategy)) == hash(MatmulConfig(strategy=same))
        assert is_stateful(strategy) == isinstance(strategy, Delayed)
    config = MatmulConfig(lhs="e4m3fn", cotangent="e5m2")
    assert (config.lhs, config.rhs, config.cotangent) == ("float8_e4m3fn",) * 2 + ("float8_e5m2",)
    assert (config, config.strategy) == (MatmulConfig(cotangent=ml_dtypes.float8_e5m2), Unit())
    assert MatmulConfig(lhs="E4M3", rhs="bfloat16").lhs == "E4M3"
    # float16 has as many bits of exponent as E5M2, of which a matmul takes one.
    assert MatmulConfig(lhs="float16", rhs="float16").rhs == "float16"
    assert Block() == Block(32, (1, 1, 1), "e8m0")
    assert Static(4.0) == Static((4, 4.0, 4)) == Static(np.float32(4)) == Static(np.int64(4))
    assert Static(2.0**126).scales[0] == 1 / Static(2.0**-126).scales[0]
    assert is_stateful(Static())


SPEC, X = Contraction("bk", "kn", "bn"), jnp.ones((2, 2))
DELAYED = MatmulConfig(strategy=Delayed())
STATE = QuantState.create(Delayed())
STACKED = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), STATE)
multiplier = partial(Multiplier, X, SPEC, (1.0, 1.0, 1.0), DELAYED, "float32", 1)
BAD = [
    (lambda: Dynamic("row"), r"Dynamic: granularity .* got 'row'"),
    (lambda: Dynamic(margin=-1), r"Dynamic: margin .* got -1"),
    (lambda: Delayed(history=0), r"Delayed: history .* got 0"),
    (lambda: Delayed(history=True), r"Delayed: history .* got True"),
    (lambda: Delayed(use="mean"), r"Delayed: use .* got 'mean'"),
    (lambda: Static(3.0), r"Static: scales .* got 3.0"),
    (lambda: Static((1.0, 2.0)), r"Static: scales .* got \(1.0, 2.0\)"),
    (lambda: Static((1.0, 2.0, math.nan)), r"Static: scales .* nan"),
    (lambda: Static(margin=-1), r"Static: margin .* got -1"),
    (lambda: Block(0), r"Block: size .* got 0"),
    (lambda: Block(32, 3), r"Block: dims .* got 3"),
    (lambda: Block(32, (1, 2)), r"Block: dims .* got \(1, 2\)"),
    (lambda: Block(tensor_scale=True), r"Block: tensor_scale .* got True"),
    (lambda: Block(adaptive=True), r"Block: adaptive .* got True"),
    (lambda: quantize(X, "e4m3fn", Block(32, (1, 2, 1))), r"Block: dims .* \(1, 2, 1\)"),
    (lambda: MatmulConfig(accumulation="slow"), r"MatmulConfig: accumulation .* got 'slow'"),
    (lambda: MatmulConfig(hadamard=True), r"MatmulConfig: hadamard .* got True"),
    (
        lambda: MatmulConfig(strategy=Block(), hadamard=True, wide_weight_gradient=True),
        r"MatmulConfig: hadamard .* wide_weight_gradient",
    ),
    (lambda: Block(scale_format="bfloat16"), r"Block: scale_format .* got 'bfloat16'"),
    (lambda: MatmulConfig(lhs="e5m2", rhs="e5m2"), r"MatmulConfig: lhs and rhs are both E5M2"),
    (lambda: MatmulConfig(rhs="e5m2", cotangent="e5m2"), r"rhs and cotangent are both"),
    (lambda: MatmulConfig(rhs="e4m2"), r"e4m2"),
    (lambda: MatmulConfig(rhs="e5m2fnuz"), r"MatmulConfig: rhs .* got 'float8_e5m2fnuz'"),
    (lambda: MatmulConfig(rhs="e8m0"), r"MatmulConfig: rhs .* got 'float8_e8m0fnu'"),
    (lambda: MatmulConfig(rhs="e2m1", strategy=Dynamic()), r"MatmulConfig: rhs .*FP4 .* Block"),
    (lambda: MatmulConfig(strategy="unit"), r"MatmulConfig: strategy .* got 'unit'"),
    (lambda: Contraction("bkm", "kn", "bn"), r"Contraction: .* got 'm' in"),
    (lambda: Contraction("bk", "kn", "bz"), r"Contraction: .* got 'n' in"),
    (lambda: Contraction("bb", "bn", "n"), r"Contraction: .* got 'b' in"),
    (lambda: scaled_matmul(X, X[0], SPEC, 1.0, "float32"), r"'bk' and 'kn', .* and \(2,\)"),
    (lambda: contract(X, X[:1], SPEC, config=MatmulConfig()), r"'bk' and 'kn', .* \(1, 2\)"),
    (lambda: einsum(MatmulConfig())("...ab,bc->...ac", X[0], X), r"'ab' and 'bc', .* \(2,\)"),
    (lambda: quantize(X, "e4m4fn"), r"e4m4fn"),
    (lambda: quantize(X, "e4m3fn", "dynamic"), r"quantize: strategy .* got 'dynamic'"),
    (lambda: quantize(X.astype(int), "e4m3fn"), r"got dtype int32"),
    (lambda: quantize(X, "e4m3fn", Delayed()), r"a scale; got Delayed"),
    (lambda: quantize(X, "e4m3fn", Static((1.0, 2.0, 4.0))), r"a scale; got Static"),
    (lambda: quantize(X, "e4m3fn", Dynamic("channel"), axis=2), r"axis .* got 2"),
    (lambda: dot_general("fp8"), r"dot_general: config .* got 'fp8'"),
    (lambda: dot_general(DELAYED), r"dot_general: Delayed.*QuantState.create"),
    (lambda: dot_general(DELAYED, QuantState.create(Static())), r"strategy Delayed.*for Static"),
    (lambda: dot_general(MatmulConfig(), STATE), r"strategy Unit.*for Delayed"),
    (lambda: contract(X, X, SPEC, config=DELAYED), r"contract: Delayed.*keeps its scales"),
    (lambda: contract(X, X, SPEC, state=STATE), r"contract: state needs config"),
    (lambda: contract(X, X, SPEC, config=DELAYED, state=STACKED), r"state\.scale .* \(2, 3\)"),
    (lambda: contract(X, X, SPEC, config=DELAYED, state={}), r"state .* got dict"),
    (lambda: fake_quantize_operands(X, X, DELAYED), r"fake_quantize_operands: .* keeps its"),
    (lambda: multiplier(), r"Multiplier: Delayed.*keeps its scales"),
    (lambda: multiplier(QuantState.create(Delayed(margin=1))), r"for the strategy"),
    (lambda: grouped(X, X[None], jnp.array([2]), config=DELAYED), r"grouped: .* keeps its"),
    (lambda: grouped(X, X[None], jnp.array([1, 1])), r"grouped: .* sizes \(2,\)"),
    (lambda: grouped(X, X[None, :1], jnp.array([2])), r"grouped: .* rhs \(1, 1, 2\)"),
    (lambda: grouped(X, X[None], jnp.ones(1)), r"grouped: sizes .* got float32"),
    (lambda: QuantState.create(Dynamic()), r"QuantState: strategy .* got Dynamic"),
    (lambda: QuantState.create(Static(1.0)), r"QuantState: strategy .* got Static"),
    (lambda: einsum(MatmulConfig())("ij,jk", X, X), r"einsum: subscripts .* 'ij,jk': .* no ->"),
    (lambda: einsum(MatmulConfig())("ij,jk,k->i", X, X, X[0]), r"einsum: .* needs two operands"),
]


test_bad_input = refuses([((TypeError, ValueError), *row) for row in BAD])
