"""Compiling for an NVIDIA H200 on a machine that has none; nothing is run.

Needs `jax-cuda13-plugin` (of jax's version), `nvidia-cuda-nvcc` and `nvidia-nvvm`, and
`JAX_PLATFORMS=cpu`, which skips the plugin's search for a driver.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

NEEDS = "the packages jax-cuda13-plugin (of jax's version), nvidia-cuda-nvcc and nvidia-nvvm"

# Without a runtime version XLA leaves FP8 products alone.
_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048   core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  runtime_version: "13.0.0"
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200 141GB HBM3e"
"""


def available() -> bool:
    """Whether the plugin is installed."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def topology(devices: int) -> topologies.TopologyDescription:
    """One host with this many H200s."""
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x{devices}x1", target_config=_TARGET
    )


@functools.cache
def _sharding() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(topology(1).devices[0])


def spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An abstract argument that lies on the H200."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding())


def specs_like(tree: Any) -> Any:
    """The abstract twin, on the H200, of a tree of arrays or shapes."""
    return jax.tree.map(lambda leaf: spec(leaf.shape, leaf.dtype), tree)


def compile_program(f: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    """Compiles a function, jitted or not; small products go to cuBLAS as large ones do."""
    jitted: Any = f if hasattr(f, "lower") else jax.jit(f)
    options = {"xla_gpu_enable_triton_gemm": False}
    return jitted.lower(*args).compile(compiler_options=options)
