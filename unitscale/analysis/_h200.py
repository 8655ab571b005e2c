"""Programs for an NVIDIA H200, compiled on a machine that has none: to be read, not run.

XLA's compiler asks for a description of the GPU, and needs the packages that write its machine
code, but neither the GPU nor its driver.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

from ..core import cudnn_of
from ..ops._attention_path import for_nvidia

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
_CAPABILITY, _CUDNN = (9, 0), 91200


def h200_available() -> bool:
    """Whether the CUDA plugin for JAX is installed, so that `compile_h200` works.

    Example:
        >>> if not h200_available():
        ...     reason = "no jax-cuda13-plugin"
    """
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def h200_topology(devices: int = 1) -> topologies.TopologyDescription:
    """Describes one host with this many H200s, as a mesh for `compile_h200` needs them.

    Args:
        devices: how many, at least 1.

    Returns:
        The description; its ``devices`` make a `jax.sharding.Mesh`.

    Raises:
        ValueError: if there is no device.
        ImportError: if the CUDA plugin is not installed, saying how to.

    Example:
        >>> if h200_available():
        ...     mesh = jax.sharding.Mesh(h200_topology(8).devices, ("data",))
    """
    if devices < 1:
        raise ValueError(
            f"unitscale.analysis.h200_topology: devices must be at least 1; got {devices}"
        )
    if not h200_available():
        raise ImportError(
            "unitscale.analysis: compiling for an H200 needs the CUDA plugin for JAX, which is not "
            f'installed; run pip install "jax-cuda13-plugin=={jax.__version__}" '
            '"nvidia-cuda-nvcc==13.*" nvidia-nvvm'
        )
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x{devices}x1", target_config=_TARGET
    )


def compile_h200(f: Callable[..., Any], *args: Any, triton: bool = False) -> jax.stages.Compiled:
    """Compiles a function for an H200, which this machine need not have.

    Run with ``JAX_PLATFORMS=cpu``, which keeps the plugin from looking for a driver. The attention
    of cuDNN compiles as well, and `ops.dot_product_attention` takes it where it would on that GPU:
    JAX's checks are answered for an H200 with cuDNN 9.12. Jitted functions that were traced for
    these shapes before stay as they were.

    Args:
        f: the function, jitted or not.
        args: its arguments: arrays or `jax.ShapeDtypeStruct`, of which shape and dtype count. What
            has no sharding lies on one H200; for several, shard every argument over the devices of
            `h200_topology`.
        triton: Whether XLA may choose its own kernels for products too small to be worth a call of
            cuBLAS. False compiles a small example as XLA does a large model.

    Returns:
        The program: its text, what `quant.check_fp8` says of it, and its ``memory_analysis()``.

    Raises:
        ImportError: if the CUDA plugin is not installed, saying how to.

    Example:
        >>> from unitscale import ops, quant
        >>> x = jax.ShapeDtypeStruct((512, 512), "bfloat16")
        >>> if h200_available():
        ...     config = quant.MatmulConfig()
        ...     program = compile_h200(lambda x: ops.dense(x, x, config=config).data, x)
        ...     assert quant.check_fp8(program)
    """

    @functools.wraps(f)
    def unseen(*args: Any) -> Any:  # by JAX, so that it is traced anew
        return f(*args)

    jitted: Any = f if hasattr(f, "lower") else jax.jit(unseen)
    options = {"xla_gpu_enable_triton_gemm": triton}
    with cudnn_of(_CAPABILITY, _CUDNN), for_nvidia():
        lowered = jitted.lower(*jax.tree.map(_on_one, args))
    return lowered.compile(compiler_options=options)


def _on_one(leaf: Any) -> Any:
    placed = isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
    if placed or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_one())


@functools.cache
def _one() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(h200_topology().devices[0])
