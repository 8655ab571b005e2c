"""What a GPT can be told, each key declared once, with its meaning beside it."""

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
        if self.model.library == "plain" and "fp8" in self.policy:
            raise ValueError(
                f"policy {self.policy} needs model.library unitscale; got model.library plain; "
                "use policy float32, bfloat16 or float16, with model.products for FP8 products, or "
                "model.library unitscale"
            )
        if self.model.products and (self.scalify or self.lora):
            raise ValueError(
                "model.products needs scalify null and lora null; got "
                f"{self.scalify} and {self.lora}; set model.products null"
            )
        if self.model.products == "qwix" and self.init:
            raise ValueError(
                f"model.products qwix needs init null; got {self.init}; set model.products "
                "fp8_dynamic"
            )
        if self.lora and self.pretrained is None:
            raise ValueError(
                "lora needs init, the Hugging Face folder whose model it updates; got "
                f"{self.init}; set init"
            )
        if self.lora and self.lora.base and self.scalify:
            raise ValueError(
                "scalify chooses the formats of all weights; got lora.base "
                f"{self.lora.base}; set lora.base null, or scalify null"
            )
        if self.model.library == "plain" and self.optimizer.umup:
            raise ValueError(
                "optimizer.umup needs model.library unitscale; got model.library plain; "
                "set optimizer.umup false"
            )
        if self.scalify and (self.model.library != "plain" or self.policy != "float32"):
            raise ValueError(
                "scalify needs model.library plain and policy float32: the program is plain "
                f"float32, and its formats are those of scalify; got {self.model.library} and "
                f"{self.policy}; set model.library plain and policy float32"
            )
        if self.scalify and (self.optimizer.weights or self.optimizer.moments):
            raise ValueError(
                "scalify stores parameters and optimizer state itself; got optimizer.weights "
                f"{self.optimizer.weights} and optimizer.moments {self.optimizer.moments}; set "
                "both null, and scalify.storage instead"
            )
        if self.lora and self.optimizer.weights is not None:
            raise ValueError(
                "optimizer.weights is for models all of whose weights are trained; got lora; set "
                "optimizer.weights null (optimizer.moments works with both)"
            )
        return self
