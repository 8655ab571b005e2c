"""Benchmarks behind the figures of README.md and of the results page.

`python -m recipes bench NAME` prints tables; `--json FILE` also writes them with command, versions,
machine and commit. A benchmark is the function `main` of the module of its name, or in `ELSEWHERE`.
"""

BENCHMARKS = {
    "parity": "validation loss in float16 and FP8 against float32, and underflow of gradients",
    "libraries": "validation loss of unit scaling and plain flax.nnx, at best learning rates",
    "step": "time, memory and kernels of training steps on this CPU or GPU",
    "h200": "time, memory and FP8 kernels of training steps on an H200, projected without one",
    "optim": "bytes, step time and validation loss of 16- and 8-bit optimizer state",
    "scalify": "losses, step time and compile time of plain programs under unitscale.scalify",
    "parallel": "bytes, error and validation loss of gradients exchanged in 8 bits",
    "lms": "losses and scores of BERT by number format, and a study of character models",
    "fuzz": "how many random programs on ScaledArrays agree with float64",
}
"""Descriptions of the benchmarks, by name."""
ELSEWHERE = {"h200": ("step", "main", "--on", "h200")}
"""Module, function and options of benchmarks that have no module of their own."""
