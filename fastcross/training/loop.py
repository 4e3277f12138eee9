"""The training loop of section 4.2: Adam, batch 512, gradient clip norm 100, early stopping on a validation metric.

The state of a run is its step number, the model, the optimiser, the random generators and the history so far. The order
of the batches follows from (seed, epoch). So a killed run continues from its last checkpoint bit for bit.
"""

import contextlib
import importlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from fastcross import optim
from fastcross.batch import Batch
from fastcross.data.cache import Cache
from fastcross.extras import needs
from fastcross.models.base import Model
from fastcross.training.config import TrainingConfig, learning_rate
from fastcross.training.metrics import choose_monitor, evaluate
from fastcross.training.run_folder import History, Run
from fastcross.training.step import (
    ALONE,
    CapturedStep,
    DivergenceCheck,
    Processes,
    Show,
    Step,
    captured_step,
    make_optimizer,
    read_ahead,
    read_directly,
    read_from,
)


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived; the state of the run is saved."""


class Trainer:
    """Trains ``model`` on a cache; with a run folder it writes metrics, checkpoints and curves there.

    Args:
        model: trained on the device of its parameters.
        cache: parts "train", "validation" and "test"; without validation rows the last weights are the best.
        run: the run folder, or a function that makes it, called after all other checks; None keeps the best weights in
            memory only.
        header: further content of best.safetensors, from which the model can be rebuilt.
        facts: further content of the result.
        show: called with one line per evaluation. A progress bar is shown too if standard error is a terminal.
        processes: the processes that train together; each takes its share of every batch.
        on_evaluation: called with the metrics of each evaluation; an exception in it ends the training.
        callbacks: called at evaluations, at checkpoints and at the end.
        curves: whether to draw curves.png at the end.
        signals: end the training at SIGINT or SIGTERM, with its state saved, by :class:`Interrupted`; False leaves
            signals to the caller.
        optimizer: for a model that :func:`fastcross.optim.configure` does not know how to update.
        read_ahead: a thread reads the next batch while a step runs.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        config: TrainingConfig,
        run: Run | Callable[[], Run] | None = None,
        *,
        header: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
        show: Show | None = None,
        processes: Processes = ALONE,
        optimizer: optim.Optimizer | None = None,
        read_ahead: bool = True,
        on_evaluation: Callable[[Mapping[str, float]], None] | None = None,
        callbacks: "Sequence[Callback]" = (),
        curves: bool = True,
        signals: bool = True,
    ) -> None:
        if not cache.sizes.get("train"):
            raise ValueError(f"the cache {cache.path} has no training rows; its sizes are {cache.sizes}")
        self.model, self.cache, self.config = model, cache, config
        self.header, self.facts, self.show, self.processes = header or {}, facts or {}, show, processes
        self.on_evaluation, self.callbacks = on_evaluation, callbacks
        self.read_ahead, self.curves, self.signals = read_ahead, curves, signals
        self.device = next(model.parameters()).device
        self.optimizer = optimizer or make_optimizer(model, config)
        # A short last batch would skew batch normalisation (one row breaks it): dropped unless it is the only one.
        self.drop_last = cache.sizes["train"] >= config.batch_size
        self.rows_per_step = min(config.batch_size, cache.sizes["train"])
        if self.rows_per_step < processes.size:
            raise ValueError(f"a batch needs a row for each of {processes.size} ranks; got {self.rows_per_step} rows")
        if self.rows_per_step < 2 and any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
            raise ValueError(f"batch normalisation needs 2 rows in a batch; got {self.rows_per_step}")
        check_labels(cache, show)
        # A label far from all others, or a weight, makes a batch's loss large, and the model has not diverged.
        worst = cache.worst_loss(self.rows_per_step) * max(1.0, config.positive_weight)
        self.divergence = DivergenceCheck(model, config.max_loss * worst, self.device)
        self.monitor = choose_monitor(cache, config)
        self.one_step = Step(model, self.optimizer, cache, config, self.rows_per_step, processes)
        self.captured: CapturedStep | None = None  # chosen when the training begins
        self.steps_per_epoch = cache.num_batches("train", config.batch_size, drop_last=self.drop_last)
        self.total_steps = min(config.epochs * self.steps_per_epoch, config.max_steps or sys.maxsize)
        self.evaluate_every = config.evaluate_every or self.steps_per_epoch

        self.step = 0
        self.best_step = 0
        self.best: float | None = None  # value of the monitored metric
        self.stale = 0  # evaluations since the best one
        self.decays = 0
        self.seconds = 0.0  # of training: batches and steps, without evaluations and checkpoints
        self.history: History = []
        self.best_weights: dict[str, Tensor] = {}
        self.run = run() if callable(run) else run

    def fit(self) -> dict[str, Any]:
        """Train to the end, load the best weights into the model, and return the result (as in result.json)."""
        result = None
        try:
            result = self._fit()
        finally:
            for callback in self.callbacks:
                callback.on_end(result)
        return result

    def _fit(self) -> dict[str, Any]:
        self.captured = captured_step(self.one_step, self.show)
        saved = mark = time.perf_counter()
        stopped = stop_signals() if self.signals else contextlib.nullcontext(False)
        with stopped as stop, self._progress() as bar, contextlib.closing(self._batches()) as batches:
            while not self.finished:
                batch = next(batches)
                self._train(batch)
                self.seconds += time.perf_counter() - mark
                bar.update(len(batch))
                if self.step % self.evaluate_every == 0 or self.step == self.total_steps:
                    self._evaluate(bar)
                due = time.perf_counter() - saved >= self.config.checkpoint_seconds
                stopping, due = self.processes.any(bool(stop), due)
                if self.run and (stopping or due):
                    self.save()
                    saved = time.perf_counter()
                if stopping:
                    raise Interrupted(f"interrupted at step {self.step} of {self.total_steps}")
                mark = time.perf_counter()
        return self._finish()

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps or 0 < self.config.patience <= self.stale

    def _batches(self) -> Generator[Batch, None, None]:
        """The batches of the remaining steps, on the model's device."""
        rows = read_from(self.step, self.cache, self.config, self.processes, self.drop_last)
        read = read_ahead if self.read_ahead else read_directly
        return read(itertools.islice(rows, self.total_steps - self.step), self.device)

    def _train(self, batch: Batch) -> None:
        self.optimizer.set_lr(learning_rate(self.config, self.step, self.total_steps, self.decays))
        epoch, position = divmod(self.step, self.steps_per_epoch)
        where = f"step {self.step + 1} (epoch {epoch + 1}, batch {position + 1} of {self.steps_per_epoch})"
        if self.captured:
            self.divergence.add(where, batch, self.captured(batch))
        else:
            self.divergence.add(where, batch, self.one_step.gradients(batch))
            self.optimizer.step()
        self.step += 1

    def _evaluate(self, bar: tqdm) -> None:
        row = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "seconds": self.seconds,
            "lr": learning_rate(self.config, self.step - 1, self.total_steps, self.decays),
            "train_loss": self.divergence.mean_loss(),
        }
        if self.cache.sizes.get("validation"):
            found = evaluate(self.model, self.cache, "validation", bf16=self.one_step.bf16, processes=self.processes)
            row |= {f"validation_{name}": value for name, value in found.items()}
        self.history.append(row)
        found_value = row.get(f"validation_{self.monitor.name}")
        if found_value is None or self.monitor.is_better(found_value, self.best):  # without validation the last is best
            self.best_step, self.best, self.stale = self.step, found_value, 0
            self.keep_best(row)
        else:
            self.stale += 1
            self.decays += self.config.schedule == "plateau"
        if self.run:
            self.run.write_history(self.history)
        always = ("logloss", "auc", "accuracy", "rmse", "mae", "r2")
        shown = dict.fromkeys(("train_loss", *(f"validation_{name}" for name in (*always, self.monitor.name))))
        line = ", ".join(f"{name.replace('_', ' ')} {row[name]:.4f}" for name in shown if name in row)
        if self.show:
            with bar.external_write_mode():
                self.show(f"epoch {row['epoch']:.2f}, step {self.step}: {line}")
        if self.on_evaluation:
            self.on_evaluation(row)
        for callback in self.callbacks:
            callback.on_evaluate(row)

    def keep_best(self, row: dict[str, float]) -> None:
        """Save the present weights and their metrics as the best so far."""
        weights = self.model.state_dict()
        if self.run:
            self._save("best", {**self.header, "step": self.step, "metrics": row, "model": weights})
        else:
            self.best_weights = {name: tensor.detach().clone() for name, tensor in weights.items()}

    def _finish(self) -> dict[str, Any]:
        if self.run:
            self.save()
        weights = self.run.load("best", {"model": self.model.state_dict()})["model"] if self.run else self.best_weights
        self.model.load_state_dict(weights)
        result: dict[str, Any] = {
            **self.facts,
            "steps": self.step,
            "best_step": self.best_step,
            "stopped_early": self.step < self.total_steps,
            "seconds": self.seconds,
            "rows_per_second": self.step * self.rows_per_step / self.seconds,
        }
        for part in ("validation", "test"):
            if self.cache.sizes.get(part):
                result[part] = evaluate(self.model, self.cache, part, bf16=self.one_step.bf16, processes=self.processes)
        if self.show and is_cut_short(result):
            self.show(CUT_SHORT.format(self.step))
        if self.run:
            self.run.finish(result, self.history if self.curves else [])
        return result

    def save(self) -> None:
        """Write everything that :meth:`resume` needs to the run's checkpoint "last"."""
        assert self.run is not None
        self.divergence.read()
        self._save("last", self.state_dict())

    def _save(self, name: str, state: dict[str, Any]) -> None:
        assert self.run is not None
        self.run.save(name, state)
        for callback in self.callbacks:
            callback.on_checkpoint(self.run.path, name)

    def resume(self) -> None:
        """Continue from the checkpoint "last", or from the start if the run was killed before its first checkpoint."""
        assert self.run is not None
        self.run.remove_leftovers()
        if self.run.holds("best"):
            self.run.verify("best")  # now, and not when the training ends with it
        if self.run.holds("last"):
            self.load_state_dict(self.run.load("last", self.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "loss": [self.divergence.loss_sum, self.divergence.loss_count],
            "rng": [torch.get_rng_state(), *cuda],
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.divergence.loss_sum, self.divergence.loss_count = state["loss"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"][0])
        if self.device.type == "cuda" and len(state["rng"]) > 1:
            torch.cuda.set_rng_state(state["rng"][1], self.device)

    def _progress(self) -> tqdm:
        """A progress bar with throughput and time left; tqdm shows it only if standard error is a terminal."""
        total, done = self.total_steps * self.rows_per_step, self.step * self.rows_per_step
        quiet = None if self.show else True
        return tqdm(total=total, initial=done, unit=" rows", unit_scale=True, dynamic_ncols=True, disable=quiet)


_COUNTERS = ("step", "best_step", "best", "stale", "decays", "seconds", "history")


CUT_SHORT = "the best step, {:,}, is the last one: a longer training may do better (epochs, max_steps)"


def is_cut_short(result: Mapping[str, Any]) -> bool:
    """Whether the training ended while its validation metric was still improving."""
    return bool("validation" in result and result["best_step"] == result["steps"])


def check_labels(cache: Cache, show: Show | None = None) -> None:
    """Raise ValueError if all training rows have one label. If all validation rows do, print that they have no AUC."""
    if cache.schema.task == "regression":
        return  # `prepare` has seen that it varies
    labels = _first_labels(cache, "train")
    if len(labels) < 2:
        rows = cache.sizes["train"]
        raise ValueError(
            f"there is nothing to learn: all {rows:,} training rows of {cache.path} have label {labels[0]:g}"
        )
    if show and cache.schema.task == "binary" and len(labels := _first_labels(cache, "validation")) == 1:
        show(f"all {cache.sizes['validation']:,} validation rows have label {labels[0]:g}: they have no AUC")


def _first_labels(cache: Cache, part: str) -> list[float]:
    """The first two different labels of a part, if it has as many."""
    found: set[float] = set()
    for batch in cache.batches(part, 4096):
        assert batch.label is not None
        found |= set(batch.label.unique().tolist())
        if len(found) > 1:
            break
    return sorted(found)[:2]


class Signals:
    """True after SIGINT or SIGTERM has arrived."""

    received = False

    def __bool__(self) -> bool:
        return self.received


@contextlib.contextmanager
def stop_signals() -> Iterator[Signals]:
    """The first SIGINT or SIGTERM sets a flag, so that no step is interrupted midway. A second one acts as usual."""
    signals = Signals()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def receive(number: int, frame: object) -> None:
        signals.received = True
        restore()

    try:
        for number in previous:
            signal.signal(number, receive)
    except ValueError:  # not the main thread, where Python allows no handlers
        yield signals
        return
    try:
        yield signals
    finally:
        restore()


Row = Mapping[str, float]


class Callback:
    """Methods called during training, in the process that writes the run folder. An exception ends the training."""

    def on_evaluate(self, row: Row) -> None:
        """After each evaluation, with its line of metrics.csv."""

    def on_checkpoint(self, path: Path, name: str) -> None:
        """After the checkpoint "best" or "last" has been written to the run folder ``path``."""

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        """At the end, with the content of result.json, or None if training was interrupted or failed."""


class TensorBoard(Callback):
    """Scalars in the folder ``tensorboard`` of the run folder."""

    def __init__(self, run: Path | str) -> None:
        _package("tensorboard")
        self.writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(Path(run) / "tensorboard"))

    def on_evaluate(self, row: Row) -> None:
        for name, value in _scalars(row):
            self.writer.add_scalar(name, value, int(row["step"]))

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        self.writer.close()


class MLflow(Callback):
    """A run of MLflow with the run folder's name, at MLFLOW_TRACKING_URI. The best model is its artifact."""

    def __init__(self, run: Path | str) -> None:
        self.mlflow = _package("mlflow")
        self.path = Path(run)
        self.mlflow.start_run(run_name=self.path.name)

    def on_evaluate(self, row: Row) -> None:
        self.mlflow.log_metrics(dict(_scalars(row)), step=int(row["step"]))

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        for name in ("best.safetensors", "best.safetensors.checksum"):
            if result is not None and (self.path / name).exists():
                self.mlflow.log_artifact(str(self.path / name))
        self.mlflow.end_run("FAILED" if result is None else "FINISHED")


class WeightsAndBiases(Callback):
    """A run of Weights & Biases with the run folder's name. WANDB_PROJECT and WANDB_MODE configure it."""

    def __init__(self, run: Path | str) -> None:
        self.run = _package("wandb").init(name=Path(run).name)

    def on_evaluate(self, row: Row) -> None:
        self.run.log(dict(_scalars(row)), step=int(row["step"]))

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        self.run.finish(exit_code=1 if result is None else 0)


KINDS: dict[str, Callable[[Path], Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


class Logger(Callback):
    """One of LOGGERS, by name. It begins at the first evaluation, so a refused start logs nothing."""

    def __init__(self, name: str, run: Path) -> None:
        _package(name)
        self.name, self.run = name, run
        self.logger: Callback | None = None

    def on_evaluate(self, row: Row) -> None:
        self.logger = self.logger or KINDS[self.name](self.run)
        self.logger.on_evaluate(row)

    def on_end(self, result: Mapping[str, Any] | None) -> None:
        if self.logger is not None:
            self.logger.on_end(result)


def _package(name: str) -> Any:
    """The package of a logger; an error says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(needs(f"--log {name}", name)) from None


def _scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The scalars of an evaluation; train_loss and validation_auc become train/loss and validation/auc."""
    for name, value in row.items():
        if name != "step":
            part, _, rest = name.partition("_")
            yield (f"{part}/{rest}" if part in ("train", "validation") else name), value
