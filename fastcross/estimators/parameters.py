"""What an estimator is made with: the options of the command line, under their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastcross.extras import needs

try:
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
except ModuleNotFoundError as error:
    if error.name != "sklearn":
        raise
    raise ImportError(needs("an estimator", "sklearn")) from None

if TYPE_CHECKING:
    from fastcross.data import Columns
    from fastcross.training import TrainingConfig

MODEL_OPTIONS = (
    "cross_layers",
    "deep_layers",
    "embedding_dim",
    "structure",
    "dropout",
    "batch_norm",
    "l2",
    "crosses",
    "residual_units",
    "input_dim",
    "cross_dim",
    "backend",
)
TRAINING_OPTIONS = (
    "batch_size",
    "epochs",
    "max_steps",
    "lr",
    "schedule",
    "warmup_steps",
    "optimizer",
    "clip_norm",
    "evaluate_every",
    "patience",
    "monitor",
    "positive_weight",
    "max_loss",
    "bf16",
    "graph",
)
PREPARATION_OPTIONS = ("min_frequency", "hash_buckets", "time_column")
LARGEST_SEED = 2**31 - 1  # what NumPy draws and every platform takes


class Parameters(BaseEstimator):
    """Parameters are those of ``fastcross train``, under the same names; None is the default there.

    Args:
        model: a name among fastcross.models.MODELS; an option that it has not is an error.
        columns: what the columns are, as fastcross.data.Columns, a dict of its fields, or None to infer all of them,
            as ``fastcross prepare`` does. A dict without ``infer_rest`` leaves out what it does not name.
        split: how rows are divided where fit is given no eval_set; "random:0.9,0.1,0" trains on nine tenths and stops
            early by the last. "time" and the others are those of the command line.
        group: a column such as the user, within whose rows AUC is measured, too (gauc).
        random_state: of weights, order of rows and dropout; the command line's ``--seed`` where it is an integer.
        verbose: print what the columns were taken for, and a line for each evaluation.
    """

    def __init__(
        self,
        model: str = "dcn",
        *,
        cross_layers: int | None = None,
        deep_layers: Sequence[int] | None = None,
        embedding_dim: int | Sequence[int] | None = None,
        structure: str | None = None,
        dropout: float | None = None,
        batch_norm: bool | None = None,
        l2: float | None = None,
        crosses: Sequence[Sequence[str]] | None = None,
        residual_units: int | None = None,
        input_dim: int | None = None,
        cross_dim: int | None = None,
        backend: str | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        lr: float | None = None,
        schedule: str | None = None,
        warmup_steps: int | None = None,
        optimizer: str | None = None,
        clip_norm: float | None = None,
        evaluate_every: int | None = None,
        patience: int | None = None,
        monitor: str | None = None,
        positive_weight: float | None = None,
        max_loss: float | None = None,
        bf16: bool | None = None,
        graph: str | None = None,
        columns: Columns | Mapping[str, Any] | None = None,
        group: str | None = None,
        split: str = "random:0.9,0.1,0",
        split_seed: int = 0,
        time_column: str | None = None,
        min_frequency: int | None = None,
        hash_buckets: int | None = None,
        device: str = "auto",
        threads: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.cross_layers = cross_layers
        self.deep_layers = deep_layers
        self.embedding_dim = embedding_dim
        self.structure = structure
        self.dropout = dropout
        self.batch_norm = batch_norm
        self.l2 = l2
        self.crosses = crosses
        self.residual_units = residual_units
        self.input_dim = input_dim
        self.cross_dim = cross_dim
        self.backend = backend
        self.batch_size = batch_size
        self.epochs = epochs
        self.max_steps = max_steps
        self.lr = lr
        self.schedule = schedule
        self.warmup_steps = warmup_steps
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.evaluate_every = evaluate_every
        self.patience = patience
        self.monitor = monitor
        self.positive_weight = positive_weight
        self.max_loss = max_loss
        self.bf16 = bf16
        self.graph = graph
        self.columns = columns
        self.group = group
        self.split = split
        self.split_seed = split_seed
        self.time_column = time_column
        self.min_frequency = min_frequency
        self.hash_buckets = hash_buckets
        self.device = device
        self.threads = threads
        self.random_state = random_state
        self.verbose = verbose

    def _given(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _training(self) -> TrainingConfig:
        from fastcross.training import TrainingConfig

        seed = self.random_state
        if not isinstance(seed, int):
            seed = int(check_random_state(seed).randint(LARGEST_SEED))
        return TrainingConfig(**self._given(TRAINING_OPTIONS), seed=seed)

    def _columns(self, **facts: str | tuple[str, ...] | None) -> Columns:
        """What is declared, and facts beside it."""
        from fastcross.data import Columns

        declared = dict(self.columns.to_dict() if isinstance(self.columns, Columns) else self.columns or {})
        if self.group is not None:
            facts["group"] = self.group
        clash = [name for name, fact in facts.items() if declared.get(name, fact) not in (None, fact)]
        if clash:
            raise ValueError(f"columns names {clash[0]} {declared[clash[0]]!r}, and the call {facts[clash[0]]!r}")
        return Columns.make({**declared, **{name: fact for name, fact in facts.items() if fact is not None}})
