"""Kernels of a GPU by what they do, and their times."""

import jax.numpy as jnp
import pytest

from recipes.bench._profile import kernel_times, kind_of, measured_kinds

# As the profiler of an H200 names them, and seconds.
KERNELS = {
    ("nvjet_sm90_qqtst_176x128_128x5_1x2_h_bz_TNN", 2e-5): "FP8 products",
    ("nvjet_sm90_qrsss_128x128_128x6_1x2_h_bx_TNT", 1e-6): "FP8 products",
    ("nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT", 4e-5): "16-bit products",
    ("gemm_fusion_dot_145", 1e-4): "16-bit products",
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x", 1e-4): "attention",
    ("wrapped_transpose_78", 1.6e-4): "transposes",
    ("input_convert_transpose_fusion_24", 1e-6): "transposes",
    ("input_reduce_fusion_673", 1.1e-6): "small kernels",
    ("memcpy32_post", 1.1e-6): "small kernels",
    ("loop_convert_fusion_4", 7.6e-5): "other kernels",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel(kernel: tuple[str, float]) -> None:
    assert kind_of(*kernel) == KERNELS[kernel]


def test_times_add_up() -> None:
    row = measured_kinds([*KERNELS, *KERNELS])
    assert row.pop("kernels run") == 2 * len(KERNELS)
    assert set(row) == {f"measured {kind} ms" for kind in KERNELS.values()}
    assert sum(row.values()) == pytest.approx(2e3 * sum(seconds for _, seconds in KERNELS))
    assert row["measured FP8 products ms"] == pytest.approx(2 * 0.021)
    assert measured_kinds([]) == {}


@pytest.mark.slow
def test_a_cpu_runs_no_kernels() -> None:
    assert kernel_times(lambda: jnp.ones(8) + 1) == []
