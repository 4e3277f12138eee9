"""What others do while a model trains: a protocol of three events, and the loggers of other packages in its terms.

    experiment.run("runs/first", callbacks=[TensorBoard("runs/first")])

A logger imports its package when it is made, so that one that is missing is an error before the training.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastcross.extras import needs

Row = Mapping[str, float]


class Callback:
    """Told of a training, in the process that writes its run folder; what a method raises ends the training."""

    def on_evaluate(self, row: Row) -> None:
        """After each evaluation: what is a line of metrics.csv, with its step."""

    def on_checkpoint(self, path: Path, name: str) -> None:
        """After a checkpoint, "best" or "last", was written in the run folder ``path``."""

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        """When the training has ended: what result.json holds, None where it was interrupted or failed."""


class TensorBoard(Callback):
    """Scalars in the folder ``tensorboard`` of the run folder."""

    def __init__(self, run: Path | str) -> None:
        package("tensorboard")
        self.writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(Path(run) / "tensorboard"))

    def on_evaluate(self, row: Row) -> None:
        for name, value in metrics(row):
            self.writer.add_scalar(name, value, int(row["step"]))

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        self.writer.close()


class MLflow(Callback):
    """A run of MLflow, named as the run folder, where MLFLOW_TRACKING_URI says; the best model is its artifact."""

    def __init__(self, run: Path | str) -> None:
        self.mlflow = package("mlflow")
        self.path = Path(run)
        self.mlflow.start_run(run_name=self.path.name)

    def on_evaluate(self, row: Row) -> None:
        self.mlflow.log_metrics(dict(metrics(row)), step=int(row["step"]))

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None and (self.path / "best.safetensors").exists():
            self.mlflow.log_artifact(str(self.path / "best.safetensors"))
        self.mlflow.end_run("FAILED" if result is None else "FINISHED")


class WeightsAndBiases(Callback):
    """A run of Weights & Biases, named as the run folder; WANDB_PROJECT and WANDB_MODE are its own settings."""

    def __init__(self, run: Path | str) -> None:
        self.run = package("wandb").init(name=Path(run).name)

    def on_evaluate(self, row: Row) -> None:
        self.run.log(dict(metrics(row)), step=int(row["step"]))

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        self.run.finish(exit_code=1 if result is None else 0)


KINDS: dict[str, Callable[[Path], Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


class Logger(Callback):
    """One of LOGGERS, by its name. It begins at the first evaluation: a start that is refused leaves nothing there."""

    def __init__(self, name: str, run: Path) -> None:
        package(name)
        self.name, self.run = name, run
        self.logger: Callback | None = None

    def on_evaluate(self, row: Row) -> None:
        self.logger = self.logger or KINDS[self.name](self.run)
        self.logger.on_evaluate(row)

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        if self.logger is not None:
            self.logger.on_end(result)


def package(name: str) -> Any:
    """The package of a logger; an error says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(needs(f"--log {name}", name)) from None


def metrics(row: Row) -> Iterator[tuple[str, float]]:
    """What there is to draw over the steps; train_loss and validation_auc are called train/loss and validation/auc."""
    for name, value in row.items():
        if name != "step":
            part, _, rest = name.partition("_")
            yield (f"{part}/{rest}" if part in ("train", "validation") else name), value
