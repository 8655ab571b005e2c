"""Measurements behind the figures of README.md and the page of results.

`python -m recipes bench NAME` prints one: tables as text, with `--json FILE` also as JSON with
command, versions, machine and commit. Each is the `main` of a module of its name, or `ELSEWHERE`.
"""

BENCHMARKS = {
    "parity": "validation loss in float16 and FP8 against float32, and underflow of gradients",
    "libraries": "validation loss of unit scaling and of plain flax.nnx, each at its best rate",
    "step": "time, memory and kernels of training steps on this CPU or GPU",
    "h200": "time, memory and FP8 kernels of training steps on an H200, projected without one",
    "optim": "bytes, step time and validation loss of 16- and 8-bit optimizer state",
    "scalify": "losses and cost of plain programs under unitscale.scalify",
    "parallel": "bytes, error and validation loss of gradients exchanged in 8 bits",
    "lms": "losses and scores of BERT by number format, and counts of character models",
    "fuzz": "random programs on ScaledArrays that agree with float64, values and gradients",
}
"""Name to what it measures. Modules are imported when asked for."""
ELSEWHERE = {"h200": ("step", "main", "--on", "h200")}
"""Module, function and options, of a benchmark that is no module of its name."""
