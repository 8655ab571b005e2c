"""Attention in a local window and within segments, against attention with a mask."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops, rules
from unitscale.ops import _attention_kernels as kernels

BATCH, TIME, HEADS, DIM = 2, 14, 4, 8
IDS = np.repeat([[5, 2, 7, 7], [1, 3, 3, 0]], [4, 3, 2, 5], axis=1)
PADDED = np.random.default_rng(0).random((BATCH, 1, 1, TIME)) < 0.8
TABLE: list[dict[str, Any]] = [
    {"local_window_size": 3},
    {"local_window_size": (5, 1)},
    {"local_window_size": (4, 2), "is_causal": True},
    {"local_window_size": (0, 0)},
    {"local_window_size": (TIME, 2)},
    {"segment_ids": IDS},
    {"segment_ids": IDS, "is_causal": True},
    {"segment_ids": IDS, "is_causal": True, "local_window_size": 2, "mask": PADDED},
]


def allowed(
    local_window_size: Any = None,
    segment_ids: Any = None,
    is_causal: bool = False,
    mask: Any = True,
) -> np.ndarray:
    behind = np.arange(TIME)[:, None] - np.arange(TIME)
    seen = np.broadcast_to(np.asarray(mask), (BATCH, 1, TIME, TIME))
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2)
        seen = seen & (behind <= left) & (-behind <= right)
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return seen & (behind >= 0) if is_causal else seen


@pytest.mark.parametrize("implementation", ["plain", "chunked"])
def test_values_and_gradients(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CHUNK", {"cpu": 4})  # the last chunks are not full
    shapes = [(BATCH, TIME, n, DIM) for n in (HEADS, 2, 2, HEADS)]
    q, k, v, ct = map(jax.random.normal, jax.random.split(jax.random.key(0), 4), shapes)

    @jax.jit
    def program(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        found = []
        for options in TABLE:
            seen = jnp.asarray(allowed(**options))
            sees = jnp.any(seen, -1).swapaxes(1, 2)[..., None]  # others have a convention of ours

            def ours(*args: Any, options: Any = options) -> Any:
                return ops.dot_product_attention(
                    *args, implementation=implementation, **options
                ).data

            def theirs(*args: Any, seen: Any = seen) -> Any:
                return jax.nn.dot_product_attention(*args, mask=seen, scale=1 / DIM)

            both = []
            for attend in (ours, theirs):
                y, vjp = jax.vjp(attend, q, k, v)
                both.append((y * sees, *vjp(ct * sees)))
            found.append(both)
        return found

    for options, (ours, theirs) in zip(TABLE, program(q, k, v), strict=True):
        window = options.get("local_window_size")
        left, right = (TIME, TIME) if window is None else np.broadcast_to(window, 2)
        right = 0 if options.get("is_causal") else right
        factor = rules.dot_product_attention(
            DIM,
            TIME,
            is_causal=options.get("is_causal", False),
            keys_per_query=int(left + 1 + right) if left < TIME - 1 else None,
        ).fwd
        for a, e in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, factor * e, atol=2e-5, err_msg=str(options))


def test_a_window_has_unit_variance() -> None:
    q, k, v = (
        jax.random.normal(key, (8, 256, 4, 16)) for key in jax.random.split(jax.random.key(1), 3)
    )
    options: Any
    for options in ({"is_causal": True}, {}):
        y = ops.dot_product_attention(q, k, v, local_window_size=(15, 15), **options).data
        assert abs(float(jnp.mean(y**2)) - 1) < 0.1, options  # ends of the sequence see fewer keys


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"local_window_size": -1}, ValueError, "local_window_size"),
        ({"local_window_size": (2, -1)}, ValueError, "local_window_size"),
        ({"segment_ids": np.zeros((BATCH, 3), int)}, ValueError, "segment_ids"),
        ({"segment_ids": np.zeros((BATCH, TIME))}, TypeError, "segment_ids"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type, name: str) -> None:
    x = jnp.ones((BATCH, TIME, HEADS, DIM))
    with pytest.raises(error, match=name):
        ops.dot_product_attention(x, x, x, **options)
    if "local_window_size" in options:
        with pytest.raises(error, match=name):
            ops.dot_product_attention(x, x[:, :3], x[:, :3], local_window_size=2)
