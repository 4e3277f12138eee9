"""The configuration of training. Its defaults are those of section 4.2 of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastcross.fields import check_types

if TYPE_CHECKING:
    import torch

SCHEDULES = ("constant", "plateau", "cosine")
OPTIMIZERS = ("adam", "adamw", "adagrad", "rowwise_adagrad", "sgd")  # of optim.OPTIMIZERS, which a test compares
CAPTURABLE = ("adam", "adamw", "sgd")  # PyTorch's Adagrad reads its rate and the number of its steps on the host
EMBEDDINGS = ("auto", "fastcross", "fbgemm")  # implementation of the tables; fbgemm's runs through TorchRec
SHARDINGS = ("auto", "table", "row", "column")  # how TorchRec divides tables; "auto": its planner decides
GRAPHS = ("auto", "off")  # whether steps on a GPU are captured in a CUDA graph
LOGGERS = ("tensorboard", "mlflow", "wandb")
PLATEAU_FACTOR = 0.3

# The better direction of each task's metrics. Calibration, best at 1, has none. gauc needs groups.
BETTER: dict[str, dict[str, Callable[..., float]]] = {
    "binary": {"logloss": min, "auc": max, "gauc": max, "accuracy": max, "ece": min},
    "multiclass": {"logloss": min, "accuracy": max, "ece": min},
    "regression": {"rmse": min, "mae": min, "r2": max},
}
MONITORED = {"binary": "logloss", "multiclass": "logloss", "regression": "rmse"}  # unless another one is asked for
METRICS = tuple(dict.fromkeys(name for names in BETTER.values() for name in names))

GENERATED_ROWS = 300_000  # of the click log that is generated where no data is given
# Small enough to find the crosses of the generated log on two cores within a minute or two.
GENERATED_LOG_OPTIONS = {"cross_layers": 2, "deep_layers": [32], "embedding_dim": 4}
GENERATED_LOG_TRAINING = {"lr": 0.01, "schedule": "cosine", "epochs": 3, "evaluate_every": 100, "patience": 0}


@dataclass(frozen=True)
class TrainingConfig:
    """How to train; the defaults are the paper's.

    Args:
        schedule: of the learning rate, after ``warmup_steps`` of linear warm-up: "constant", "plateau" (times 0.3 at
            each evaluation without a better validation metric) or "cosine" (down to 0 at the last step).
        evaluate_every: steps between evaluations; None for once per epoch.
        patience: stop after this many evaluations in a row without a better validation metric; 0 for never.
        monitor: the metric of early stopping and of the best model, one of BETTER for the task; None for the logloss,
            or the RMSE of a regression.
        positive_weight: factor of the loss of positive rows, for a binary label.
        clip_norm: largest norm of all gradients together; 0 for no clipping.
        max_loss: training stops with an error at a training loss above this, or above so many times the largest loss
            that the labels and weights of a batch alone can make.
        bf16: autocast to bfloat16; None: only on GPUs with bfloat16 units.
        graph: "auto" captures the steps on a GPU in a CUDA graph, if possible; "off" does not.
        checkpoint_seconds: time between checkpoints for resuming.
    """

    batch_size: int = 512
    epochs: int = 10
    max_steps: int | None = None
    optimizer: str = "adam"
    lr: float = 1e-3
    schedule: str = "constant"
    warmup_steps: int = 0
    clip_norm: float = 100.0
    evaluate_every: int | None = None
    patience: int = 3
    monitor: str | None = None
    positive_weight: float = 1.0
    max_loss: float = 1e3
    bf16: bool | None = None
    graph: str = "auto"
    checkpoint_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        named = {"schedule": SCHEDULES, "optimizer": OPTIMIZERS, "monitor": METRICS, "graph": GRAPHS}
        for name, known in named.items():
            if (value := getattr(self, name)) is not None and value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite; got {self.lr}")
        for name in ("batch_size", "epochs", "max_steps", "evaluate_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        for name in ("warmup_steps", "clip_norm", "patience", "checkpoint_seconds", "seed"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"{name} must not be negative; got {value}")
        if not 0 < self.positive_weight < math.inf:
            raise ValueError(f"positive_weight must be positive and finite; got {self.positive_weight}")
        if not self.max_loss > 0:
            raise ValueError(f"max_loss must be positive; got {self.max_loss}")
        if self.seed >= 1 << 63:
            raise ValueError(f"seed must be below 2^63; got {self.seed}")


def learning_rate(config: TrainingConfig, step: int, total_steps: int, decays: int = 0) -> float:
    """The learning rate of step number ``step``, from 0, after ``decays`` evaluations on a plateau."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * PLATEAU_FACTOR**decays


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one."""
    import torch  # here: the command line reads the options above, and does not wait for PyTorch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use the device {name!r}: {str(error).splitlines()[0]}") from error
    return torch.device(name)
