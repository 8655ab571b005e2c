"""Pages of the raw results: the tables of `results/*.json`, one page for each topic.

MkDocs takes this file as a hook. It adds the pages to the entry "Results" of the navigation. Tables
that are too wide for a page are transposed or split, and columns of one value become a sentence.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

RESULTS = Path(__file__).parent / "results"
# Page: its title, its first sentence, and its files.
TOPICS = {
    "speed": (
        "Speed and memory",
        "Time and memory of training steps, measured on an H200 or projected for one; "
        "[What will I get?](../performance.md) explains them. `plain-bfloat16` is plain Flax, "
        "and `qwix` the same model with FP8 matmuls by qwix. `bfloat16` and `fp8` are models of "
        "`unitscale.nn`. `-scaled` adds optimizer state of 5 bytes per parameter. `-readout` also "
        "runs the output layer in FP8, `-readout-gradients` only its gradients. `converted` is "
        "the plain model after `nn.convert` to `fp8_dynamic`.",
        ("gpu", "h200", "h200-scalify", "h200-sizes", "h200-fit"),
    ),
    "parity": (
        "FP8 and float16 against float32",
        "Validation loss of the GPT in `configs/gpt/parity.yaml` by number format. Differences are "
        "relative to the first row, paired by seed and text; [Results](../results.md) explains the "
        "terms. `fp8-readout-gradients` also has the gradients of the output layer in FP8.",
        (
            *("parity", "parity-1200", "parity-rate-3", "parity-rate-3-1200", "parity-drift"),
            *("parity-texts", "parity-texts-1200", "parity-texts-rate-3", "parity-encyclopedia"),
            *("parity-nvfp4", "parity-blocks", "parity-narrow-gradients", "parity-gradients"),
        ),
    ),
    "libraries": (
        "Unit scaling against plain Flax",
        "Validation loss of the same model in `unitscale.nn` and in plain `flax.nnx`.",
        ("libraries", "libraries-rates", "libraries-bert", "libraries-bert-rates"),
    ),
    "formats": (
        "Which matmuls cost loss in FP8",
        "Trained float32 models, evaluated with some of their matmuls or operands in FP8 or NVFP4.",
        ("formats", "formats-nvfp4", "formats-128", "formats-256", "formats-512"),
    ),
    "methods": (
        "Ways to train in float16",
        "Plain models with and without a loss scale, scalify and unit scaling.",
        ("methods", "scalify"),
    ),
    "state": (
        "Optimizer state",
        "Bytes, time and validation loss of weights and optimizer state in 16 and 8 bits.",
        ("optim",),
    ),
    "devices": (
        "Several devices",
        "Gradients exchanged in 8 bits, and the traffic of training steps on eight devices.",
        ("parallel", "parallel-steps", "parallel-wire"),
    ),
    "models": (
        "BERT, fine-tuning, LoRA and character models",
        "Losses and scores of BERT, tasks tuned from it, LoRA on weights in 8 and 4 bits, and 36 "
        "kinds of character models.",
        ("lms", "lora", "charlm"),
    ),
    "rms": (
        "RMS at initialization",
        "The RMS of every tensor of a GPT before its first step, as a power of two. Numbers below "
        "2^-9 are smaller than any number of FP8 (E4M3).",
        ("rms",),
    ),
}
# Benchmarks that have another name since a file was written.
RENAMED = {
    "formats": "parity --rounding",
    "methods": "libraries --methods",
    "gpu": "step --on gpu",
}
HEADINGS = {
    "asked": "goal",
    "within": "goal met",
    "verdict": "goal met",
    "over reference": "difference",
    "above reference": "difference",
    "standard error above": "standard error",
    "over plain": "relative to plain",
    "over projected": "relative to projection",
    "amax": "amax reductions",
    "FP8 of Dense": "FP8 share of Dense",
    "FP8 of readout": "FP8 share of the readout",
    "of it in 8 bits": "share sent in 8 bits",
    "without absent": "share lost, absent tokens aside",
    "without absent at first": "lost at first, absent tokens aside",
    "without absent at the end": "lost at the end, absent tokens aside",
    "without absent times smaller": "times smaller, absent tokens aside",
}
VERDICTS = {"within": "yes", "outside": "**no**", False: "**no**", True: "yes", None: ""}
SHARES = re.compile(
    r"(heavy-tailed|normal) |(share|without absent|of it in|FP8 of|plain float16|scalify float16)"
    r"|lost at|over reference$|standard error$"
)
WIDEST = 7  # columns of a table


def page(title: str, intro: str, stems: tuple[str, ...]) -> str:
    parts = [f"# {title}", intro]
    for stem in stems:
        if (path := RESULTS / f"{stem}.json").exists():
            parts += section(stem, json.loads(path.read_text("utf-8")))
    return "\n\n".join(parts) + "\n"


def section(stem: str, document: dict[str, Any]) -> list[str]:
    """A heading, where and how it was measured, and the tables of a file."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    parts = [f"## {stem}", f"{document['date']}, {document['machine']}; {versions}."]
    lines = map(wrapped, document["command"].split("; "))
    parts.append("```bash\n" + "\n".join(lines) + "\n```")
    if new := RENAMED.get(document["benchmark"]):
        parts.append(f"This benchmark is now `python -m recipes bench {new}`.")
    for table in document["tables"]:
        name = table["title"].replace("What is asked of", "Goals for")
        parts.append(f"### {name.replace('Products', 'Matmuls').replace('products', 'matmuls')}")
        parts += tables(table["rows"])
    return parts + document["notes"]


def wrapped(command: str) -> str:
    """A command in lines of at most 90 characters, broken between its words."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if len(lines[-1]) + len(word) > 88:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown, at most `WIDEST` columns a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [n for n in names if not any(isinstance(row.get(n), list) for row in rows)]
    cells = {name: [cell(name, row.get(name)) for row in rows] for name in names}
    same = {}
    if len(rows) > 1:
        same = {heading(n): c[0] for n, c in cells.items() if len(set(c)) == 1 and n != names[0]}
    cells = {heading(n): c for n, c in cells.items() if heading(n) not in same}
    found = [f"In all rows: {', '.join(f'{n} {c}' for n, c in same.items())}."] if same else []
    first, *rest = cells
    if len(cells) <= WIDEST:
        return [*found, markdown(cells)]
    if len(rows) < WIDEST:
        labels = [label or " " for label in cells[first]]
        if len(set(labels)) == len(labels):
            turned = {label: [cells[n][i] for n in rest] for i, label in enumerate(labels)}
            return [*found, markdown({first: rest, **turned})]
    step = -(-len(rest) // -(-len(rest) // (WIDEST - 1)))  # parts of equal width
    for start in range(0, len(rest), step):
        found.append(markdown({n: cells[n] for n in (first, *rest[start : start + step])}))
    return found


def markdown(cells: dict[str, list[str]]) -> str:
    rows = [list(cells), ["---"] * len(cells), *zip(*cells.values(), strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def heading(name: str) -> str:
    return HEADINGS.get(name, name.replace("products", "matmuls"))


def cell(name: str, value: Any) -> str:
    if name in ("within", "verdict"):
        return VERDICTS.get(value) or str(value or "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str({None: "", True: "yes", False: "no"}.get(value, value))
        return re.sub(r"([/.])(?=\w)", r"\1<wbr>", text) if "/" in text else text  # may break
    if SHARES.match(name) or (name == "FLOPs" and value < 1):
        if value in (0, 1):
            return f"{value:.0%}"
        sign = "+" if name == "over reference" else ""
        return f"{value:{sign}.{2 if value > 0.01 and not sign else 3}%}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if name in ("validation loss", "standard deviation", "loss"):
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4g}"


def on_config(config):
    for entry in config.nav:
        if isinstance(entry.get("Results"), list):
            pages = [{title: f"results/{slug}.md"} for slug, (title, *_) in TOPICS.items()]
            entry["Results"] = [*entry["Results"], *pages]
    return config


def on_files(files, config):
    for slug, topic in TOPICS.items():
        files.append(File.generated(config, f"results/{slug}.md", content=page(*topic)))
    listed = {stem for _, _, stems in TOPICS.values() for stem in stems}
    if missing := sorted({path.stem for path in RESULTS.glob("*.json")} - listed):
        raise ValueError(f"mkdocs_results.TOPICS: add the files {', '.join(missing)} to a page")
    return files
