"""Compiling for an NVIDIA H200 on a machine that has none, and reading what became of the products.

Needs `jax-cuda13-plugin` (of jax's version), `nvidia-cuda-nvcc` and `nvidia-nvvm`. Nothing is run:
a test reads the optimized program. Tests that use it carry the mark `h200`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

FP8_GEMM = "__cublas$lt$matmul$f8"

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


@functools.cache
def _sharding() -> jax.sharding.Sharding:
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=_TARGET
    )
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An abstract argument that lies on the H200."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding())


def compile_h200(f: Callable[..., Any], *args: Any) -> str:
    """Returns the optimized program; small products go to cuBLAS as large ones do."""
    lowered = jax.jit(f).lower(*args)
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()


def library_calls(program: str) -> list[str]:
    """Targets of the library calls, in order."""
    return re.findall(r'custom_call_target="([^"]+)"', program)


def gemms(program: str) -> list[tuple[str, list[str], float]]:
    """Each FP8 product: type of its result, types of its operands, and the alpha folded into it."""
    found = []
    for line in program.splitlines():
        if FP8_GEMM not in line or "custom-call(" not in line:
            continue
        result = re.search(r"= \(?(\w+)\[", line)
        alpha = re.search(r'"alpha_real":([-\d.eE+]+)', line)
        operands = re.search(r"custom-call\((.*?)\), custom_call_target", line)
        if result is None or alpha is None or operands is None:
            raise ValueError(f"XLA prints its products in another way: {line}")
        names = [o.split()[-1].lstrip("%") for o in operands.group(1).split(", ") if o.strip()]
        found.append(
            (result.group(1), [_type(program, n) for n in names[:2]], float(alpha.group(1)))
        )
    return found


def _type(program: str, name: str) -> str:
    match = re.search(rf"%?{re.escape(name)} = \(?(\w+)\[", program)
    return match.group(1) if match else "?"
