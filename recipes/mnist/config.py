"""Everything the image recipe can be told, each key declared once, with its meaning beside it."""

from typing import Literal

from pydantic import Field

from ..config import Count, Fraction, Name, Positive, Section, Whole

Format = Literal["plain", "float32", "bfloat16", "float16", "fp8"]


class DataConfig(Section):
    """The idx files; each may be compressed with gzip."""

    train_images: str = Field(description="path of the idx file of the training images")
    train_labels: str = Field(description="path of the idx file of the training labels")
    test_images: str = Field(description="path of the idx file of the test images")
    test_labels: str = Field(description="path of the idx file of the test labels")
    classes: Count | None = Field(
        default=None, description="number of classes; null for the largest training label plus 1"
    )
    batch_size: Count = Field(default=128, description="images per step")


class ModelConfig(Section):
    """The shape of the classifier."""

    kind: Literal["mlp", "cnn"] = Field(
        default="mlp", description="dense layers alone, or two convolutions before them"
    )
    hidden: Count = Field(default=256, description="units of each hidden dense layer")
    layers: Count = Field(default=2, description="hidden dense layers (mlp; a cnn has one)")
    channels: Count = Field(
        default=16, description="channels of the first convolution, half those of the second (cnn)"
    )


class OptimizerConfig(Section):
    """The optimizer; its learning rate is constant."""

    name: Literal["sgd", "adam"] = Field(default="sgd", description="the update rule")
    learning_rate: Positive = Field(default=0.05, description="the learning rate")
    momentum: Fraction = Field(default=0.9, description="momentum of sgd; first decay of adam")


class TrainConfig(Section):
    """How long to train and what to leave behind."""

    epochs: Count = Field(default=4, description="passes over the training images")
    log_every: Count = Field(default=50, description="steps between metric lines")
    runs_dir: str = Field(
        default="runs", description="the folder in which the run's own folder is made"
    )


class MnistConfig(Section):
    """A whole run."""

    recipe: Literal["mnist"] = Field(default="mnist", description="which recipe this config is of")
    name: Name = Field(
        description="names the run's folder: letters, digits, dot, dash and underscore"
    )
    seed: Whole = Field(default=0, description="seeds the parameters and the order of the images")
    format: Format = Field(
        default="plain",
        description="plain for the float32 program as it is; else what scalify stores parameters, "
        "optimizer state and activations in (fp8: float16, with 8-bit products)",
    )
    data: DataConfig = Field(description="the images, their labels and batches")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the shape of the model")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="the optimizer")
    train: TrainConfig = Field(default_factory=TrainConfig, description="length and outputs")
