"""The config of recipe images."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..config import BatchConfig, Count, OptimizerConfig, RunConfig, Section


class ImageDataConfig(BatchConfig):
    """The images and their batches."""

    step_unit = "images"

    folder: str
    """Folder of MNIST's four idx files, train-images-idx3-ubyte and so on, as they are or .gz."""
    batch_size: Count = 128
    """Images per step, over all processes."""


class ImageModelConfig(Section):
    """The shape of the classifier."""

    kind: Literal["mlp", "cnn", "vit"] = "mlp"
    """A plain MLP, a plain CNN of two convolutions and one hidden layer, or a unit-scaled ViT."""
    hidden: Count = 256
    """Units per hidden layer, or hidden size of the MLPs (vit)."""
    layers: Count = 2
    """Number of hidden layers (mlp) or Transformer layers (vit)."""
    channels: Count = 16
    """Channels of the first convolution; the second has twice as many (cnn)."""
    patch: Count = 7
    """Height and width of a patch in pixels (vit)."""
    width: Count = 64
    """Size of the residual stream (vit)."""
    heads: Count = 4
    """Number of attention heads (vit)."""

    @property
    def library(self) -> str:
        """Library of the model."""
        return "unitscale" if self.kind == "vit" else "plain"


class ImagesConfig(RunConfig):
    """Config of an image classifier's run."""

    constants: ClassVar[dict[str, Any]] = {"data.classes": None}
    loss_unit = "image"

    recipe: Literal["images"]
    """Name of the recipe."""
    data: ImageDataConfig = Field()
    """The images and their batches."""
    model: ImageModelConfig = ImageModelConfig()
    """The shape of the model."""
    optimizer: OptimizerConfig = OptimizerConfig(
        name="sgd", learning_rate=0.05, schedule="constant", umup=False
    )
    """The optimizer and its schedule."""

    @classmethod
    def upgraded(cls, tree: Any) -> Any:
        tree = super().upgraded(tree)
        data = tree.get("data")
        if isinstance(data, dict) and "train_images" in data:
            files = [data.pop(f"{s}_{p}") for s in ("train", "test") for p in ("images", "labels")]
            data["folder"] = str(Path(files[0]).parent)
        return tree

    @model_validator(mode="after")
    def _plain_models_are_float32(self) -> Self:
        precision = self.precision
        if self.model.kind != "vit" and precision.policy != "float32":
            raise ValueError("precision.policy needs model.kind vit; set precision.scalify instead")
        if precision.matmuls not in (None, "fp8"):
            raise ValueError(f"precision.matmuls must be fp8 or null; got {precision.matmuls}")
        return self
