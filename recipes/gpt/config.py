"""Config of a GPT."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ..config import TOKENIZER_FILE, GPTModelConfig, LanguageConfig, LoraConfig, filled_from
from ..run.folder import earlier_run, is_run


class GPTConfig(LanguageConfig):
    """A whole run of a GPT."""

    recipe: Literal["gpt"] = Field(default="gpt", description="which recipe this config is of")
    model: GPTModelConfig = Field(
        default_factory=GPTModelConfig, description="the shape of the model"
    )
    init: str | None = Field(
        default=None,
        description="a run of recipe gpt to start from, or a Hugging Face folder of GPT-2 or the "
        "Llama family; null for none",
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="low-rank updates to train in place of the weights of init; null for none",
    )

    @classmethod
    def filled(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """With the shape and the tokenizer of the run or the folder in `init`."""
        init = tree.get("init")
        if not isinstance(init, str):
            return tree
        if is_run(init) or not (Path(init) / "config.json").is_file():
            return earlier_run(init, cls, other=", or a Hugging Face folder").passed_on(tree)
        # It imports JAX, which a wrong key need not wait for.
        from ..hf import shape_of_decoder  # noqa: PLC0415

        shape = shape_of_decoder(init).model_dump(mode="json")
        return filled_from(tree, shape, {"kind": "file", "path": str(Path(init) / TOKENIZER_FILE)})

    @property
    def pretrained(self) -> str | None:
        """The Hugging Face folder in `init`, if it is one."""
        return None if self.init is None or is_run(self.init) else self.init

    @property
    def settled(self) -> Self:
        if self.lora is not None:
            from ..hf import updated_tensors  # noqa: PLC0415

            updated_tensors(self.model, self.lora)  # which says what is wrong with lora.targets
        return self

    @property
    def loss_unit(self) -> str:
        return "token"

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        plain, precision = self.model.library == "plain", self.precision
        if plain and "fp8" in precision.policy:
            raise ValueError(
                f"precision.policy {precision.policy} needs model.library unitscale; got plain; "
                "use policy float32, bfloat16 or float16, with precision.matmuls for FP8 matmuls, "
                "or model.library unitscale"
            )
        if (precision.matmuls or precision.scalify) and not plain:
            raise ValueError(
                "precision.matmuls and precision.scalify need model.library plain; got unitscale; "
                "set them null, and precision.policy instead, or model.library plain"
            )
        if precision.scalify and precision.policy != "float32":
            raise ValueError(
                "precision.scalify needs policy float32: the program is plain float32; got policy "
                f"{precision.policy}; set precision.policy float32"
            )
        if self.lora and precision.matmuls not in (None, "fp8"):
            raise ValueError(
                f"precision.matmuls {precision.matmuls} needs lora null; got {self.lora}; set "
                "precision.matmuls null"
            )
        if precision.matmuls == "qwix" and self.init:
            raise ValueError(
                f"precision.matmuls qwix needs init null; got {self.init}; set precision.matmuls "
                "fp8_dynamic"
            )
        if self.lora and self.pretrained is None:
            raise ValueError(
                "lora needs init, the Hugging Face folder whose model it updates; got "
                f"{self.init}; set init"
            )
        if plain and self.optimizer.umup:
            raise ValueError(
                "optimizer.umup needs model.library unitscale; got model.library plain; "
                "set optimizer.umup false"
            )
        if self.lora and precision.weights is not None:
            raise ValueError(
                "precision.weights is for models all of whose weights are trained; got lora; set "
                "it null (precision.moments works with both)"
            )
        return self
