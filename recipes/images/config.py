"""Config of image classification."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..config import BatchConfig, Count, OptimizerConfig, RunConfig, Section


class ImageDataConfig(BatchConfig):
    """The idx files; each may be compressed with gzip."""

    train_images: str = Field(description="path of the idx file of the training images")
    train_labels: str = Field(description="path of the idx file of the training labels")
    test_images: str = Field(description="path of the idx file of the test images")
    test_labels: str = Field(description="path of the idx file of the test labels")
    classes: Count | None = Field(
        default=None, description="number of classes; null for the largest training label plus 1"
    )
    batch_size: Count = Field(default=128, description="images per step, over all processes")

    @property
    def step_unit(self) -> str:
        return "images"


class ImageModelConfig(Section):
    """The shape of the classifier."""

    kind: Literal["mlp", "cnn", "vit"] = Field(
        default="mlp",
        description="dense layers alone, two convolutions before them, or a Transformer over "
        "patches, which is a unitscale model",
    )
    hidden: Count = Field(
        default=256, description="units of each hidden dense layer, or of each MLP (vit)"
    )
    layers: Count = Field(
        default=2, description="hidden dense layers (a cnn has one), or Transformer layers (vit)"
    )
    channels: Count = Field(
        default=16, description="channels of the first convolution, half those of the second (cnn)"
    )
    patch: Count = Field(default=7, description="pixels of each side of a patch (vit)")
    width: Count = Field(default=64, description="size of the residual stream (vit)")
    heads: Count = Field(default=4, description="attention heads (vit); divides the width")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads must divide width; got {self.heads} and {self.width}")
        return self


class ImagesConfig(RunConfig):
    """A whole run of a classifier of images."""

    renamed: ClassVar[dict[str, str]] = {
        "format": "precision.scalify and precision.matmuls",
        "train.epochs": "train.steps",
        "optimizer.momentum": "optimizer.b1",
    }

    recipe: Literal["images"] = Field(description="which recipe this config is of")
    data: ImageDataConfig = Field(description="the images, their labels and batches")
    model: ImageModelConfig = Field(
        default_factory=ImageModelConfig, description="the shape of the model"
    )
    optimizer: OptimizerConfig = Field(
        default_factory=lambda: OptimizerConfig(
            name="sgd", learning_rate=0.05, schedule="constant", umup=False
        ),
        description="the optimizer and its schedule",
    )

    @property
    def loss_unit(self) -> str:
        return "image"

    @model_validator(mode="after")
    def _library_has_formats(self) -> Self:
        kind, precision = self.model.kind, self.precision
        if kind == "vit" and (precision.scalify or precision.matmuls):
            raise ValueError(
                "precision.scalify and precision.matmuls are for plain models; got model.kind vit, "
                "a unitscale model; set both null, and precision.policy instead"
            )
        if kind != "vit" and precision.policy != "float32":
            raise ValueError(
                f"precision.policy is of unitscale models; got {precision.policy} and model.kind "
                f"{kind}, a plain model; set policy float32, and precision.scalify instead"
            )
        if kind != "vit" and precision.matmuls not in (None, "fp8"):
            raise ValueError(
                f"precision.matmuls of model.kind {kind} must be fp8, or null; got "
                f"{precision.matmuls}; change it"
            )
        if kind != "vit" and self.optimizer.umup:
            raise ValueError(
                f"optimizer.umup is for unitscale models; got model.kind {kind}, a plain model; "
                "set optimizer.umup false"
            )
        return self
