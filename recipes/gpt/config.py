"""The config of recipe gpt."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from ..config import TOKENIZER_FILE, GPTModelConfig, LanguageConfig, LoraConfig, filled_from
from ..run.folder import downloaded, earlier_run, is_run, with_kept_scan


class GPTConfig(LanguageConfig):
    """Config of a GPT's run."""

    moved: ClassVar[dict[str, str]] = {"model.norm_eps": "model.decoder.norm_eps"}
    loss_unit = "token"

    recipe: Literal["gpt"] = "gpt"
    """Name of the recipe."""
    model: GPTModelConfig = GPTModelConfig()
    """The shape of the model."""
    init: str | None = None
    """Run of this recipe, Hugging Face folder or name (org/model) to start from; null for none."""
    lora: LoraConfig | None = None
    """Low-rank updates to train instead of the weights in init; null to train the weights."""

    @classmethod
    def filled(cls, tree: dict[str, Any]) -> dict[str, Any]:
        init = tree.get("init")
        if not isinstance(init, str):
            return tree
        init = downloaded(init)
        tree = tree | {"init": init}
        if is_run(init) or not (Path(init) / "config.json").is_file():
            return earlier_run(init, cls, other=", or a Hugging Face folder").passed_on(tree)
        from ..hf import shape_of  # noqa: PLC0415  (it imports JAX)

        shape = shape_of(init, "lm").model_dump(mode="json")
        return filled_from(tree, shape, {"kind": "file", "path": str(Path(init) / TOKENIZER_FILE)})

    @property
    def pretrained(self) -> str | None:
        """The path in `init`, if it is a Hugging Face folder."""
        return None if self.init is None or is_run(self.init) else self.init

    def continued_by(self, folder: Path) -> str:
        return f"lora.init={folder / 'adapter'}" if self.lora else super().continued_by(folder)

    @property
    def keeps_fp8(self) -> bool:
        return self.model.variant.fp8 and str(self.precision.frozen).startswith("float8")

    @property
    def settled(self) -> Self:
        if self.lora is not None:
            from ..hf import updated_tensors  # noqa: PLC0415

            updated_tensors(self.model, self.lora)  # raises if lora.targets do not fit
        return with_kept_scan(self)

    @model_validator(mode="after")
    def _lora_and_init_fit(self) -> Self:
        precision = self.precision
        if self.lora and self.pretrained is None:
            raise ValueError(f"lora needs init, a Hugging Face folder; got {self.init}; set init")
        if self.lora and precision.matmuls not in (None, "fp8"):
            raise ValueError(f"precision.matmuls {precision.matmuls} needs lora null")
        if self.lora and precision.weights is not None:
            raise ValueError("precision.weights needs lora null, as LoRA trains few weights")
        if precision.matmuls == "qwix" and self.init:
            raise ValueError("precision.matmuls=qwix cannot be combined with init; use fp8_dynamic")
        return self
