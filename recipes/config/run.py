"""The keys that the configs of all recipes have, and messages for wrong keys and values.

Sections are frozen pydantic models; error messages quote the docstring of a field.
"""

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator, model_validator
from pydantic.fields import FieldInfo

# Strict: `layers: true` and `layers: "4"` are mistakes, as YAML has integers and booleans.
Count = Annotated[int, Strict(), Field(gt=0)]
Whole = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Strict(), Field(ge=0, lt=1)]
Share = Annotated[float, Strict(), Field(gt=0, lt=1)]
Flag = Annotated[bool, Strict()]

Policy = Literal[
    "float32",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_dynamic",
    "fp8_delayed",
    "fp8_channel",
    "fp8_block",
    "mxfp8",
    "nvfp4",
]
WideFormat = Literal["float32", "bfloat16", "float16"]
NarrowFormat = Literal["float8_e4m3fn", "float8_e5m2"]
Format = WideFormat | NarrowFormat
_POSITIONS = re.compile(r"(\.\d+)+$")  # of list elements, at the end of a key


class Section(BaseModel):
    """A part of a config. Unknown keys are errors, so that misspelled keys are not ignored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )


PRESETS: dict[str, dict[str, Any]] = {
    "fp8_5_bytes": {
        "policy": "fp8",
        "weights": "float16",
        "moments": ["float8_e4m3fn", "float16"],
        "rounding": "stochastic",
        "min_size": 16384,
    },
    "scalify_bfloat16": {"scalify": "bfloat16"},
    "scalify_float16": {"scalify": "float16"},
    "scalify_fp8": {"scalify": "float16", "matmuls": "fp8"},
}
"""Presets of the section `precision`, by name."""


def expand_preset(precision: Any) -> Any:
    """Expand the name of a preset or a policy to keys of the section `precision`."""
    is_name = isinstance(precision, str)
    return PRESETS.get(precision, {"policy": precision}) if is_name else precision


class PrecisionConfig(Section):
    """Number formats of computation and storage."""

    policy: Policy = "float32"
    """Number formats of the layers' computations."""
    layers: dict[str, Policy] = Field(default_factory=dict)
    """Policies of single layers, by path pattern (see nn.set_policies)."""
    readout: Flag | Literal["gradients"] = False
    """FP8 also in the output layer: true for all its matmuls, gradients for backward ones only."""
    matmuls: Literal["fp8", "fp8_dynamic", "fp8_delayed", "qwix"] | None = None
    """FP8 matmuls in a plain model: fp8 with scalify, else fp8_dynamic, fp8_delayed or qwix."""
    scalify: WideFormat | None = None
    """Train a plain model under scalify, with parameters and activations stored in this format."""
    weights: WideFormat | None = None
    """Storage format of weights, with scales; null for float32."""
    moments: Annotated[list[Format], Field(min_length=2, max_length=2)] | None = None
    """Storage formats of the first and second moment, with scales; null for float32."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of stored weights and moments."""
    min_size: Whole = 0
    """Parameters with fewer elements than this, and their moments, stay in float32."""
    frozen: NarrowFormat | Literal["float4_e2m1fn"] | None = None
    """Storage format of weights that LoRA freezes (8 or 4 bits); null for the policy's."""
    exchange: Format | None = None
    """Format in which devices exchange gradients; null to let XLA choose."""
    initial: NarrowFormat | None = None
    """Round dense layers' initial weights to this format, so that compared runs start the same."""
    gradients: Literal["bfloat16", "float8_e4m3fn", "float8_e5m2"] | None = None
    """Storage format of gradients (see unitscale.value_and_grad); null for float32."""
    loss_scale: Positive | Literal["dynamic"] | None = None
    """Loss scale: a constant, or dynamic to halve it when gradients overflow."""
    monitor: Fraction | None = None
    """Log the share of elements of FP8 tensors that saturate; above this share rebalance acts."""
    rebalance: Flag = False
    """At log steps, double the scale of each tensor that saturates more than monitor allows."""

    @property
    def scaled_state(self) -> bool:
        """True if weights or moments are stored in other formats than float32."""
        return self.weights is not None or self.moments is not None

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, precision: Any) -> Any:
        return expand_preset(precision)

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        policy, monitor, matmuls = self.policy, self.monitor, self.matmuls
        if self.rounding != "nearest" and not self.scaled_state:
            raise ValueError("rounding stochastic needs weights or moments; set one of them")
        if monitor is not None and policy not in ("fp8", "fp8_delayed"):
            raise ValueError(f"monitor needs policy fp8 or fp8_delayed; got policy {policy}")
        if self.rebalance and (monitor is None or policy != "fp8"):
            raise ValueError(f"rebalance needs monitor and policy fp8; got {monitor} and {policy}")
        if self.readout and "fp8" not in policy:
            raise ValueError(f"readout needs an FP8 policy, such as fp8; got policy {policy}")
        if self.readout == "gradients" and policy == "fp8_delayed":
            raise ValueError("readout gradients needs a policy without delayed scales, such as fp8")
        if self.scalify and (self.gradients or self.scaled_state):
            raise ValueError("scalify needs weights, moments and gradients null, as it stores them")
        if matmuls is not None and (matmuls == "fp8") != (self.scalify is not None):
            need = "scalify" if matmuls == "fp8" else "scalify null"
            raise ValueError(f"matmuls {matmuls} needs {need}; got scalify {self.scalify}")
        return self


Role = Literal["weight", "readout", "embedding", "bias", "norm"]
# At the weights' best learning rate, gains and biases with u-muP's multiplier of 1 learn too fast:
# within a few thousand steps gains reach 100 and activations overflow FP8.
_MULTIPLIERS = {"weight": 1.0, "readout": 1.0, "embedding": 1.0, "bias": 0.03, "norm": 0.03}


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adam", "adamw", "sgd", "lion", "muon"] = "adamw"
    """Update rule. With muon, hidden kernels use Muon at 1/32 of the rate, the rest Adam."""
    learning_rate: Positive = 2e-3
    """Peak learning rate."""
    warmup_steps: Whole = 0
    """Steps of linear warm-up from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    final_fraction: Annotated[float, Strict(), Field(ge=0, le=1)] = 0.1
    """Final learning rate as a share of the peak (cosine, linear)."""
    b1: Fraction = 0.9
    """Decay of the first moment; momentum of sgd."""
    b2: Fraction = 0.95
    """Decay of the second moment."""
    eps: NonNegative | None = None
    """Epsilon of Adam; null for 2^-12 with umup, 1e-8 without."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (adamw, lion, muon); with umup, share of weights removed per step."""
    clip_norm: Positive | None = None
    """Global norm to clip gradients to (thousands in unit-scaled models); null for no clipping."""
    skip_nonfinite: Whole = 0
    """Number of steps in a row that may be skipped if the loss or a gradient is not finite."""
    umup: Flag = True
    """Use u-muP learning rates, by each parameter's role, fan-in and depth."""
    multipliers: dict[Role, NonNegative] = Field(default_factory=dict)
    """With umup, learning-rate multipliers by role; default 0.03 for bias and norm, else 1."""

    @property
    def adam_eps(self) -> float:
        """Epsilon of Adam; larger for unit-scaled models, whose gradients are near 1."""
        # With 1e-8, parameters whose gradients decay, such as output columns of tokens that never
        # occur, would keep taking full-size steps until those gradients underflow.
        return self.eps if self.eps is not None else 2.0**-12 if self.umup else 1e-8

    @field_validator("multipliers", mode="before")
    @classmethod
    def _every_role(cls, given: Any) -> Any:
        return _MULTIPLIERS | given if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        own = [f for role, f in self.multipliers.items() if f not in (1, _MULTIPLIERS[role])]
        if not self.umup and own:
            raise ValueError("multipliers need umup true; got umup false; remove them")
        if self.name == "muon" and not self.umup:
            raise ValueError("name muon needs umup true, which identifies hidden kernels")
        if self.weight_decay and self.name in ("adam", "sgd"):
            raise ValueError(f"weight_decay needs name adamw, lion or muon; got name {self.name}")
        return self


class TrainConfig(Section):
    """Number of steps, and outputs."""

    steps: Count = 1000
    """Optimizer steps."""
    eval_every: Count = 200
    """Steps between validation losses."""
    eval_batches: Count = 16
    """Largest number of batches per validation loss during training."""
    checkpoint_every: Count = 200
    """Steps between checkpoints."""
    keep: Count = 2
    """Number of checkpoints to keep, the newest ones."""
    log_every: Count = 20
    """Steps between log lines."""
    logger: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """Where to log metrics in addition to metrics.jsonl."""
    sample_tokens: Whole = 200
    """Tokens to generate after training; 0 for none."""
    sample_prompt: str = Field(default="\n", min_length=1)
    """Prompt of the sample."""
    runs_dir: str = "runs"
    """Folder in which the run's folder is made."""


class BatchConfig(Section):
    """Batches of any data."""

    step_unit: ClassVar[str] = "examples"
    """Unit in which `step_size` and speed are counted."""

    batch_size: Count = 16
    """Examples per step, over all processes."""
    micro_batches: Count = 1
    """Number of parts to split a batch into, accumulating their gradients, to save memory."""

    @property
    def step_size(self) -> int:
        """Size of a batch, in `step_unit`."""
        return self.batch_size


class MeshConfig(Section):
    """Sizes of the mesh axes; their product is the number of devices."""

    data: Count = 1
    """Devices to shard the batch over."""
    fsdp: Count = 1
    """Devices to shard the batch, parameters and optimizer state over."""
    context: Count = 1
    """Devices to shard the tokens of a sequence over."""
    tensor: Count = 1
    """Devices to shard kernels over, by outputs; by inputs in the last layer of each block."""


class SweepConfig(Section):
    """A grid of runs, and the learning-rate search of each."""

    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Lists of values by dotted key, such as model.kind."""
    seeds: list[Whole] = Field(default=[0], min_length=1)
    """Seeds to average over."""
    factor: Annotated[float, Strict(), Field(gt=1)] = 4.0
    """Ratio of neighboring learning rates."""
    rates: Annotated[int, Strict(), Field(ge=3)] = 5
    """Number of learning rates to train at once."""
    rounds: Count = 3
    """Largest number of rounds; the next one extends the rates if the best is at an end."""
    when: dict[str, dict[str, Any] | None] = Field(default_factory=dict)
    """Keys to set by condition, such as `model.library=plain seed=0`; null skips such points."""


class RunConfig(Section):
    """Config of a run: the keys that all recipes have."""

    moved: ClassVar[dict[str, str]] = {}
    """New names of keys of earlier versions, in addition to `MOVED`."""
    constants: ClassVar[dict[str, Any]] = {}
    """Keys of earlier versions that are constants now, with their values."""
    converts: ClassVar[bool] = True
    """True if the recipe has plain models for `precision.scalify` and `precision.matmuls`."""
    loss_unit: ClassVar[str] = "example"
    """The unit of the loss, which is in nats per `loss_unit`."""
    sequence: ClassVar[int | None] = None
    """Tokens per sequence, which mesh.context divides; None without sequences."""
    longest: ClassVar[int | None] = None
    """Length of the longest sequence that the model accepts; None if there is no limit."""
    keeps_fp8: ClassVar[bool] = False
    """True if weights stay in the FP8 of the folder in `init`, with scales of any shape."""

    recipe: str
    """Name of the recipe."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's folder: letters, digits, dot, dash and underscore."""
    seed: Whole = Field(default=0, le=2**32 - 1)
    """Seed of parameters, data order and dropout."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats: a section, or the name of a policy or of a preset."""
    data: BatchConfig = BatchConfig()
    """The batches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its schedule."""
    train: TrainConfig = TrainConfig()
    """Number of steps, and outputs."""
    mesh: MeshConfig | None = None
    """Mesh of devices; null for one device."""
    sweep: SweepConfig = SweepConfig()
    """A grid of runs, for `recipes sweep`."""

    @classmethod
    def filled(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Fill in keys of a file that follow from the model in `init`."""
        return tree

    @classmethod
    def upgraded(cls, tree: Any) -> Any:
        """Translate a config stored by an earlier version to today's keys."""
        tree = copy.deepcopy(tree)
        moved = cls.moved if "precision" in tree else MOVED | cls.moved
        fp8 = (tree.get("scalify") or {}).get("products")
        tree.setdefault("precision", {"matmuls": "fp8"} if fp8 else {})
        for old, new in moved.items():
            section, name = _section(tree, old)
            if new.startswith(f"{old}.") and isinstance(section.get(name), dict):
                continue  # today's section of the same name as the old key
            if (value := section.pop(name, None)) is not None:
                section, name = _section(tree, new, make=True)
                section.setdefault(name, value)
        for old in (*REMOVED, *cls.constants):
            section, name = _section(tree, old)
            if old in REMOVED or section.get(name, ...) == cls.constants[old]:
                section.pop(name, None)
        return tree

    @field_validator("optimizer", mode="before")
    @classmethod
    def _own_defaults(cls, given: Any) -> Any:
        """Fill in the recipe's own defaults."""
        own = cls.model_fields["optimizer"].default.model_dump(exclude_unset=True)
        return own | given if isinstance(given, dict) else given

    @property
    def settled(self) -> Self:
        """The config, checked against the files that it names and completed from them."""
        return self

    @property
    def resumed(self) -> Self:
        """The config without `init`, to rebuild a trained model without its source."""
        return self

    def continued_by(self, folder: Path) -> str | None:
        """Return an override with which another run starts from this one's folder, if there is."""
        return None

    def kept_in(self, folder: Path) -> Self:
        """Return the config with the name and parent of its run's folder, which may have moved."""
        folder = folder.absolute()
        train = self.train.model_copy(update={"runs_dir": str(folder.parent)})
        return self.model_copy(update={"name": folder.name, "train": train})

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        optimizer, precision, mesh = self.optimizer, self.precision, self.mesh or MeshConfig()
        steps, warmup = self.train.steps, optimizer.warmup_steps
        if warmup >= steps:
            raise ValueError(f"optimizer.warmup_steps {warmup} must be below train.steps {steps}")
        if precision.loss_scale == "dynamic" and optimizer.skip_nonfinite:
            raise ValueError("precision.loss_scale dynamic needs optimizer.skip_nonfinite 0")
        if precision.frozen and (getattr(self, "lora", None) is None or precision.scalify):
            raise ValueError("precision.frozen needs lora, and precision.scalify null")
        devices = mesh.data * mesh.fsdp * mesh.context * mesh.tensor
        alone = self.mesh is not None and devices == max(mesh.data, mesh.fsdp)
        if precision.exchange and (precision.scalify or not alone):
            raise ValueError(
                "precision.exchange needs a mesh of data or fsdp alone, and scalify null"
            )
        parts = mesh.data * mesh.fsdp * self.data.micro_batches
        if self.data.batch_size % parts:
            raise ValueError(
                "data.micro_batches * mesh.data * mesh.fsdp must divide data.batch_size; got "
                f"{parts} and {self.data.batch_size}; change one of them"
            )
        if mesh.context > 1 and (self.sequence is None or self.sequence % mesh.context):
            got = f"got {mesh.context} and {self.sequence}"
            raise ValueError(f"mesh.context must divide data.sequence_length (gpt, bert); {got}")
        # Recipe finetune has no `library`: its `init` decides.
        library = getattr(getattr(self, "model", None), "library", None)
        if library == "plain" and (optimizer.umup or precision.policy not in get_args(WideFormat)):
            what = "plain models need optimizer.umup false"
            raise ValueError(f"{what}, and precision.matmuls in place of an FP8 precision.policy")
        plain = library != "unitscale" and self.converts
        if (precision.scalify or precision.matmuls) and not plain:
            raise ValueError(
                "precision.scalify and precision.matmuls need a plain model of recipe gpt, images "
                "or finetune; set precision.policy instead"
            )
        no_matmuls = library == "plain" and precision.matmuls is None
        if precision.exchange and mesh.fsdp > 1 and (no_matmuls or precision.exchange == "float16"):
            raise ValueError(
                "precision.exchange over mesh.fsdp needs bfloat16 or FP8, and a unitscale model or "
                "precision.matmuls; correct it, or set it to null"
            )
        if library == "plain" and precision.initial:
            raise ValueError("precision.initial needs model.library unitscale; set it null")
        if library and precision.scalify and precision.policy != "float32":
            raise ValueError(f"precision.scalify needs policy float32; got {precision.policy}")
        return self


def _section(tree: dict[str, Any], key: str, *, make: bool = False) -> tuple[dict[str, Any], str]:
    """Return the section that holds a dotted key, {} if it is missing, and the key's last part."""
    *sections, name = key.split(".")
    for section in sections:
        inner = tree.get(section)
        if make and not isinstance(inner, dict):
            inner = tree[section] = {}
        tree = inner if isinstance(inner, dict) else {}
    return tree, name


FORMAT_KEYS = ("precision", "optimizer.skip_nonfinite")
"""Keys that may change with `--convert` when a run is resumed."""

MOVED = {
    "policy": "precision.policy",
    "policies": "precision.layers",
    "fp8_readout": "precision.readout",
    "model.products": "precision.matmuls",
    "scalify.storage": "precision.scalify",
    "lora.base": "precision.frozen",
    "mesh.gradients": "precision.exchange",
    "monitor.limit": "precision.monitor",
    "monitor.rebalance": "precision.rebalance",
    "optimizer.momentum": "optimizer.b1",
    **{
        f"optimizer.{name}": f"precision.{name}"
        for name in ("weights", "moments", "rounding", "min_size", "loss_scale")
    },
}
"""New names of keys of versions without a section `precision`."""
REMOVED = {
    "scalify": "precision.scalify",
    "scalify.products": "precision.matmuls",
    "scalify.gradients": "precision.matmuls",
    "monitor": "precision.monitor",
    "model.norm_eps": "init, whose folder has it",
    "squad.max_question_length": "data.sequence_length: a question gets a third of it, at most 64",
    "optimizer.loss_scale_interval": "precision.loss_scale dynamic, which doubles after 2000 steps",
}
"""Removed keys of earlier versions, and what to set instead."""


def valid_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key that a file may have, sections included, with its field."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = section_of(field)
        if section is not None and not field.json_schema_extra:  # else it is filled in from `init`
            yield from valid_keys(section, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the pydantic model of a section, also if it may be null."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def entry_of(key: str, schema: type[RunConfig]) -> tuple[str, str]:
    """Split a key such as `sweep.grid.model.kind` into its mapping and its entry there."""
    for name, field in valid_keys(schema):
        kinds = (field.annotation, *get_args(field.annotation))
        if key.startswith(f"{name}.") and any(get_origin(kind) is dict for kind in kinds):
            return name, key.removeprefix(f"{name}.")
    return key, ""


def describe_problems(
    problems: Sequence[Mapping[str, Any]], schema: type[RunConfig]
) -> Iterator[str]:
    """Format pydantic's errors as one line per key."""
    values = {name for name, field in valid_keys(schema) if not section_of(field)}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for problem in problems:
        parts = [str(part) for part in problem["loc"] if part != "[key]"]
        key, parent = ".".join(parts), ".".join(parts[:-1])
        # pydantic reports one error for each type of a union, located below the key.
        in_union = _POSITIONS.sub("", parent) in values and isinstance(problem["loc"][-1], str)
        merged = in_union and not entry_of(key, schema)[1]
        groups.setdefault(parent if merged else key, []).append(problem)
    return (_describe(key, group, schema) for key, group in groups.items())


def _describe(key: str, group: Sequence[Mapping[str, Any]], schema: type[RunConfig]) -> str:
    kind = group[0]["type"]
    if kind == "extra_forbidden":
        return unknown_key(key, schema)
    if kind == "value_error":
        return f"{key}: {group[0]['ctx']['error']}".removeprefix(": ")
    field = dict(valid_keys(schema)).get(entry_of(_POSITIONS.sub("", key), schema)[0])
    meaning = " ".join(((field and field.description) or "").split()).rstrip(".")
    if kind == "missing":
        return f"{key}: expected a value; got none; set it ({meaning})"
    expected = " or ".join(problem["msg"].removeprefix("Input should be ") for problem in group)
    if kind == "model_type":
        expected = "a mapping of keys to values"
    if expected[0].islower() or expected[0] == "'":
        expected = f"expected {expected}"
    named = f"{key} ({meaning})" if meaning else key
    return f"{named}: {expected}; got {group[0]['input']!r}"


def unknown_key(key: str, schema: type[RunConfig]) -> str:
    """Describe an unknown key: its new name, its constant value or the nearest key."""
    new = MOVED | schema.moved | REMOVED
    if key in new:
        return f"{key} is no longer a key of the config; set {new[key]}"
    if key in schema.constants:
        return f"{key} is no longer a key of the config; it is always {schema.constants[key]}"
    fields = dict(valid_keys(schema))
    section, _, last = key.rpartition(".")
    if key in fields:
        return f"{key} is not a key of a file: write {last} in a section {section}"
    parts = {name: name.rpartition(".") for name in fields}
    inside = {end: name for name, (start, _, end) in parts.items() if start == section}
    elsewhere = {end: n for n, (_, _, end) in parts.items() if not section_of(fields[n])}
    for names, cutoff in ((elsewhere, 1.0), (inside, 0.6), (elsewhere, 0.6)):
        if close := difflib.get_close_matches(last, names, 1, cutoff):
            return f"{key} is not a key of the config; did you mean {names[close[0]]}?"
    owner = section if section and inside else "the config"
    names = inside or schema.model_fields
    return f"{key} is not a key of the config; {owner} has the keys {', '.join(names)}"
