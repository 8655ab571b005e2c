"""Compile programs for an NVIDIA H200 on a machine without one, and project their run time.

`roofline` reads the text of a compiled program. The time of a kernel is the maximum of four: its
matmuls at the speed of their format, its other arithmetic, its memory traffic, and the time of the
smallest kernel. Kernels run one after another, without gaps, overlap or caches.
"""

import collections
import functools
import importlib.util
import math
import re
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.extend.backend
from jax.experimental import topologies

from unitscale.core import cudnn_of
from unitscale.quant import HloInstruction, HloProgram, bits, contracted, parse_hlo, user_line

from .wire import collective, devices_of, size_of

# XLA uses FP8 kernels only if the target states a runtime version.
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

_B200 = _TARGET.replace("major: 9", "major: 10").replace("core_count: 132", "core_count: 148")
_B200 = _B200.replace("H200 141GB HBM3e", "B200") + "dnn_version_info { major: 9 minor: 12 }"

# Speeds measured on an H200 with JAX 0.11.2: matmuls of 8,192 x 8,192, attention of GPT-2 small,
# XLA's copy of 1 GB, and the smallest kernel. TF32, exact float32, float64, other arithmetic and
# NVLink are 70 to 80% of the data sheet's speeds.
FLOPS = {"FP8 products": 1.32e15, "16-bit products": 0.70e15, "32-bit products": 0.35e15}
FLOPS |= {"exact 32-bit products": 0.05e15, "64-bit products": 0.05e15}
ATTENTION_FLOPS, VECTOR_FLOPS = 0.25e15, 0.80 * 33.5e12
BANDWIDTH, LINK, SMALLEST = 3.3e12, 0.80 * 450e9, 1.2e-6

ATTENTION, MEMORY, ARITHMETIC = "attention", "memory-bound", "arithmetic-bound"
COLLECTIVES, LIBRARY = "collectives", "library calls"
Type = tuple[str, tuple[int, ...]]
_COLLECTIVE = re.compile(r"(all-|reduce-scatter|ragged-all|collective-)")
# Instructions that run no kernel.
_FREE = frozenset({"parameter", "tuple", "get-tuple-element", "constant", "bitcast", "after-all"})
_FREE |= {"partition-id", "replica-id", "opt-barrier", "optimization-barrier", "domain"}
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand with the update
_VIEWS = frozenset({"bitcast", "reshape"})
# Float32 operations per element of the result, by instruction: 0 to move data, 1 by default.
_MOVES = _FREE | _SLICES | _VIEWS
_MOVES |= {"iota", "copy", "broadcast", "transpose", "concatenate", "pad", "reverse", "copy-start"}
_MOVES |= {"bitcast-convert", "dynamic-update-slice", "fusion", "custom-call", "dot", "scaled-dot"}
_OPERATIONS: dict[str, int] = dict.fromkeys(("exponential", "log", "rsqrt", "sqrt", "divide"), 8)
_OPERATIONS |= dict.fromkeys(("exponential-minus-one", "log-plus-one", "logistic", "cbrt"), 16)
_OPERATIONS |= dict.fromkeys(("erf", "tanh", "sine", "cosine", "tan", "power", "remainder"), 24)
# Integer operations count 2, as a GPU has half as many units for them. A rotation, which is one
# operation, appears as these three.
_ROTATION = {"shift-left": 2 / 3, "shift-right-logical": 2 / 3, "or": 2 / 3}


def h200_available() -> bool:
    """Return True if the CUDA plugin for JAX is installed, which `compile_h200` needs."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def h200_topology(devices: int = 1, target: str = _TARGET) -> topologies.TopologyDescription:
    """Describe a host with this many H200s; use its `devices` for a `jax.sharding.Mesh`."""
    if not h200_available():
        packages = f'"jax-cuda13-plugin=={jax.__version__}" "nvidia-cuda-nvcc==13.*" nvidia-nvvm'
        raise ImportError(f"compiling for an H200 needs JAX's CUDA plugin: pip install {packages}")
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x{devices}x1", target_config=target
    )


def compile_h200(
    f: Callable[..., Any], *args: Any, triton: bool = False, blackwell: bool = False
) -> jax.stages.Compiled:
    """Compile a function for an H200, to inspect but not to call; needs `JAX_PLATFORMS=cpu`.

    Arguments are arrays or `jax.ShapeDtypeStruct`, on one H200 or sharded over `h200_topology`.
    With `triton`, XLA may use Triton kernels for small matmuls. With `blackwell`, compile for a
    B200 instead.
    """
    # A new function object, so that JAX traces it again.
    untraced = functools.wraps(f)(lambda *args: f(*args))
    jitted: Any = f if hasattr(f, "lower") else jax.jit(untraced)
    target, capability = (_B200, (10, 0)) if blackwell else (_TARGET, (9, 0))
    on_one = jax.sharding.SingleDeviceSharding(h200_topology(target=target).devices[0])

    def placed(leaf: Any) -> Any:
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        if (is_shape and leaf.sharding is not None) or not hasattr(leaf, "dtype"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_one)

    # Pretend to have the GPU, because the library and JAX choose attention kernels by it.
    gpu = types.SimpleNamespace(compute_capability="{}.{}".format(*capability))
    backend = types.SimpleNamespace(
        platform="gpu", platform_version="cuda 13000", local_devices=lambda: [gpu]
    )
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    devices = max((len(s.device_set) for s in shardings if s is not None), default=1)
    with (
        cudnn_of(capability, 91200),
        mock.patch.object(jax, "device_count", return_value=devices),
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.object(jax.extend.backend, "get_backend", return_value=backend),
    ):
        lowered = jitted.lower(*jax.tree.map(placed, args))
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": triton})


class Kernel(NamedTuple):
    """One kernel, with seconds, bytes and matmul FLOPs summed over all its runs."""

    name: str
    kind: str
    seconds: float
    bytes: float
    flops: float
    op_name: str
    source: str

    @property
    def place(self) -> str:
        """Name stack without layer numbers, and source line; or else the kernel's name."""
        line = f" at {self.source}" if self.source else ""
        return re.sub(r"\d+", "#", self.op_name) + line or re.sub(r"[.\d]+$", "", self.name)


class Total(NamedTuple):
    """Sums over the kernels of one kind or place."""

    label: str
    seconds: float
    bytes: float
    kernels: int


class Roofline(NamedTuple):
    """The kernels of a program; `uncounted` loops of unknown length count as one iteration."""

    kernels: tuple[Kernel, ...]
    uncounted: int = 0

    seconds = property(lambda self: sum(k.seconds for k in self.kernels))
    bytes = property(lambda self: sum(k.bytes for k in self.kernels))
    flops = property(lambda self: sum(k.flops for k in self.kernels))

    def by_kind(self) -> list[Total]:
        """Sum by kind of kernel, the longest first."""
        return _totals(self.kernels, lambda kernel: kernel.kind)

    def by_place(self) -> list[Total]:
        """Sum XLA's own element-wise kernels by their place in the source, the longest first."""
        own = [k for k in self.kernels if k.kind in (MEMORY, ARITHMETIC)]
        return _totals(own, lambda kernel: kernel.place)


def _totals(kernels: Iterable[Kernel], label: Callable[[Kernel], str]) -> list[Total]:
    groups: dict[str, list[Kernel]] = collections.defaultdict(list)
    for kernel in kernels:
        groups[label(kernel)].append(kernel)
    totals = [
        Total(name, sum(k.seconds for k in group), sum(k.bytes for k in group), len(group))
        for name, group in groups.items()
    ]
    return sorted(totals, key=lambda t: -t.seconds)


def roofline(compiled: jax.stages.Compiled | str) -> Roofline:
    """Project how long a compiled program, or its text, takes on an H200."""
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    program = parse_hlo(text)
    if not program.computations.get(program.entry):
        raise ValueError(f"expected an optimized HLO program; got {text.strip()[:60]!r}")
    projection = _Projection(program)
    kernels = tuple(projection.kernels(program.entry, 1))
    return Roofline(kernels, projection.uncounted)


class _Projection:
    def __init__(self, program: HloProgram):
        self.program, self.uncounted = program, 0
        self.needed = functools.cache(self._needed)

    def kernels(self, computation: str, runs: int) -> list[Kernel]:
        """List the kernels that a computation runs; conditionals count their longest branch."""
        found: list[Kernel] = []
        for i in self.program.computations.get(computation, {}).values():
            if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
                continue
            if i.opcode == "while":
                self.uncounted += "known_trip_count" not in i.attributes
                body = re.search(r"\bbody=%?([\w.\-]+)", i.attributes)
                found += self.kernels(body[1], runs * i.trips) if body else []
            elif i.opcode == "conditional":
                two = re.findall(r"\b(?:true|false)_computation=%?([\w.\-]+)", i.attributes)
                branches = [self.kernels(name, runs) for name in two or i.calls]
                found += max(branches, key=lambda b: sum(k.seconds for k in b), default=[])
            elif i.opcode in ("call", "async-start") and i.calls:
                found += self.kernels(i.calls[0], runs)
            else:
                found.append(self.kernel(i, runs))
        return found

    def kernel(self, i: HloInstruction, runs: int) -> Kernel:
        """Describe an instruction as a kernel, named by the last named instruction in it."""
        kind, matmul_seconds, flops = self.work(i)
        size, vector = self.moved(i), self.operations(i) / VECTOR_FLOPS
        seconds = max(size / BANDWIDTH, vector, SMALLEST)
        if kind == COLLECTIVES:
            sent = collective(i, devices_of(self.program.header)).sent
            seconds = max(seconds, sent / LINK)
        if kind == MEMORY and vector == seconds:
            kind = ARITHMETIC
        named = i
        if i.opcode == "fusion" and not i.quoted("op_name"):
            inside = reversed(self.program.computations[i.calls[0]].values())
            has_name = (j for j in inside if j.quoted("op_name") and j.opcode != "parameter")
            named = next(has_name, i)
        seconds, source = runs * max(seconds, matmul_seconds), user_line(self.program, named)
        op_name = named.quoted("op_name")
        return Kernel(i.name, kind, seconds, runs * size, runs * flops, op_name, source)

    def operands(self, i: HloInstruction) -> list[HloInstruction]:
        body = self.program.computations[i.computation]
        return [body[name] for name in i.operands if name in body]

    def work(self, i: HloInstruction) -> tuple[str, float, float]:
        """Return the kind of a kernel, and the seconds and FLOPs of its matmuls."""
        if _COLLECTIVE.match(i.opcode):
            return COLLECTIVES, 0.0, 0.0
        inside = [i]
        if i.opcode == "fusion":
            inside = list(self.program.computations[i.calls[0]].values())
        # A fusion around a library call only slices its operands or writes into its result.
        call = next((j for j in inside if j.opcode == "custom-call"), None)
        target = call.quoted("custom_call_target") if call else ""
        if call and "fmha" in target:
            # Two matmuls over all pairs of query and key, or five backward; half if causal.
            q, k = (o.shape for o in self.operands(call)[:2])  # (batch, time, heads, d)
            weights = re.search(
                r'"intermediate_tensor_shape":\s*\{[^\]]*"(\d+)"\]', call.attributes
            )
            flops = 4.0 * math.prod(q) * (int(weights[1]) if weights else k[1])
            flops *= 0.5 if "CAUSAL" in call.attributes else 1.0
            flops *= 2.5 if "Backward" in target else 1.0
            return ATTENTION, flops / ATTENTION_FLOPS, flops
        if call and not re.search("gemm|matmul", target):
            return LIBRARY, 0.0, 0.0
        found = [call] if call else [j for j in inside if j.opcode in ("dot", "scaled-dot")]
        if not found:
            return MEMORY, 0.0, 0.0
        flops = [self.matmul_flops(j) for j in found]
        # A matmul runs in the format of its wider operand.
        matmul = found[flops.index(max(flops))]
        wide = max(bits(o.dtype) for o in self.operands(matmul)[:2])
        highest = re.search(r"operand_precision\W+highest", matmul.attributes, re.IGNORECASE)
        exact = "exact " if wide == 32 and highest else ""
        kind = "FP8 products" if wide <= 8 else f"{exact}{wide}-bit products"
        return kind, sum(flops) / FLOPS[kind], sum(flops)

    def matmul_flops(self, i: HloInstruction) -> float:
        left, right = (o.shape for o in self.operands(i)[:2])
        if summed := contracted(i):
            return 2.0 * math.prod(i.shape) * math.prod(left[d] for d in summed)
        # Without dimension numbers: (b m k) (b k n) / (b m n) = b k^2 gives k.
        batch = math.prod(i.shape[:-2])
        square = math.prod(left) * math.prod(right) / max(math.prod(i.shape) * batch, 1)
        return 2.0 * math.prod(i.shape) * math.sqrt(square)

    def moved(self, i: HloInstruction) -> float:
        """Return the bytes that a kernel reads and writes; values inside a fusion add none."""
        given = self.operands(i)
        if i.opcode == "custom-call":
            return size_of(*_results(i)) + sum(size_of(*o.types) for o in given)
        if i.opcode == "copy-start":
            return 2 * size_of(*given[0].types)
        read, results = list(zip(given, self.asked(i, _elements(i)), strict=True)), [i]
        if i.opcode == "fusion":
            inner = self.program.computations[i.calls[0]]
            counts, root = self.needed(i.calls[0]), inner[self.program.roots[i.calls[0]]]
            read = [(p, counts[p.name]) for p in inner.values() if p.opcode == "parameter"]
            results = self.operands(root) if root.opcode == "tuple" else [root]
        shares = (size_of(*p.types) * min(1.0, n / max(_elements(p), 1)) for p, n in read)
        return sum(shares) + sum(map(self.written, results))

    def _needed(self, computation: str) -> dict[str, float]:
        """Count, for each instruction in a fusion, the elements that the fusion's result needs."""
        counts: dict[str, float] = collections.defaultdict(float)
        counts[self.program.roots[computation]] = math.inf
        for i in reversed(self.program.computations[computation].values()):  # users come later
            count = counts[i.name] = min(counts[i.name], _elements(i))
            for operand, asked in zip(self.operands(i), self.asked(i, count), strict=True):
                counts[operand.name] += asked
        return counts

    def asked(self, i: HloInstruction, count: float) -> list[float]:
        """Count the elements of each operand that `count` elements of the result need."""
        whole = [_elements(operand) for operand in self.operands(i)]
        if i.opcode in _SLICES:
            return [min(count, whole[0]), *whole[1:]]
        if i.opcode in _UPDATES:
            update = whole[_UPDATES[i.opcode]]
            own = max(count - update, 0.0)
            if self.in_place(i):  # a scatter reads the elements that it adds to
                own = update if i.opcode == "scatter" else 0.0
            return [own, *whole[1:]]
        share = 1.0 if i.opcode == "tuple" or not _elements(i) else count / _elements(i)
        return [share * n for n in whole]

    def written(self, i: HloInstruction) -> float:
        """Return the bytes written: of the result, or of the part that is updated in place."""
        while i.opcode in _VIEWS:
            (i,) = self.operands(i)
        if i.opcode in _UPDATES and self.in_place(i):
            return size_of(*self.operands(i)[_UPDATES[i.opcode]].types)
        if i.opcode == "get-tuple-element":
            (call,), index = self.operands(i), re.search(r"\bindex=(\d+)", i.attributes)
            workspace = call.opcode == "custom-call" and index and int(index[1]) > 0
            return 0.0 if workspace and _is_workspace(i.types[0]) else size_of(*i.types)
        return size_of(*(_results(i) if i.opcode == "custom-call" else i.types))

    def in_place(self, i: HloInstruction) -> bool:
        """Return True if an update changes an input of its kernel in place."""
        caller = self.program.callers.get(i.computation)
        if caller is None or caller.opcode != "fusion":
            return True
        while i.opcode in _VIEWS or i.opcode in _UPDATES:
            i = self.operands(i)[0]
        return i.opcode == "parameter"

    def operations(self, i: HloInstruction) -> float:
        """Count the simple float32 operations of a kernel, without matmuls."""
        if i.opcode != "fusion":
            return self.cost(i, _elements(i))
        counts, inner = self.needed(i.calls[0]), self.program.computations[i.calls[0]]
        return sum(self.cost(j, counts[j.name]) for j in inner.values())

    def cost(self, i: HloInstruction, count: float) -> float:
        if i.opcode in _MOVES:
            return 0.0
        if i.opcode in ("reduce", "reduce-window", "scatter", "sort", "map"):
            bodies = (self.program.computations.get(name, {}) for name in i.calls)
            each = sum(self.cost(j, 1.0) for body in bodies for j in body.values()) or 1.0
            given = max(map(_elements, self.operands(i)), default=0.0)
            return each * given * count / max(_elements(i), 1)
        if i.dtype[:1] in ("u", "s"):
            return _ROTATION.get(i.opcode, 2) * count
        return _OPERATIONS.get(i.opcode, 1) * count


def _elements(i: HloInstruction) -> float:
    return sum(math.prod(dims) for _, dims in i.types)


def _is_workspace(array: Type) -> bool:
    """Return True if a library call's result, not its first, is workspace: a vector of bytes."""
    return array[0] in ("s8", "u8") and len(array[1]) == 1


def _results(call: HloInstruction) -> list[Type]:
    return [t for index, t in enumerate(call.types) if not index or not _is_workspace(t)]
