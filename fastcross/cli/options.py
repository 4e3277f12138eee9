"""Options that several commands share, in groups."""

import argparse

from fastcross.cli.values import at_least, duration, layers, model_names, multi_valued, names
from fastcross.data.columns import TASKS
from fastcross.data.formats import FORMATS
from fastcross.training.config import (
    EMBEDDINGS,
    GENERATED_LOG_OPTIONS,
    GENERATED_LOG_TRAINING,
    GENERATED_ROWS,
    GRAPHS,
    METRICS,
    OPTIMIZERS,
    SCHEDULES,
    SHARDINGS,
    TrainingConfig,
)


def add_preparation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading the input")
    group.add_argument("--format", default="auto", choices=("auto", *FORMATS), help="default: by the file's beginning")
    group.add_argument("--time-column", metavar="NAME", help="orders the rows for --split time, if the file does not")
    group.add_argument("--hash-buckets", type=at_least(1), metavar="N", help="hash values into N ids, no vocabularies")
    _add_division(group, "rarer values share one id (default: 10)")
    group = parser.add_argument_group(
        "columns of csv and parquet files", "What is not said here is inferred from the rows, and printed with reasons."
    )
    group.add_argument("--label", metavar="NAME", help="default: label, click, clicked, target or y")
    group.add_argument(
        "--task",
        choices=TASKS,
        default="auto",
        help="what the label is: classes, a quantity (regression), or (auto) whichever it looks like",
    )
    group.add_argument("--weight", metavar="NAME", help="column that says how much each row counts; no feature")
    group.add_argument(
        "--group", metavar="NAME", help="column such as the user, within whose rows AUC is measured too (gauc)"
    )

    def add(flag: str, help: str) -> None:
        group.add_argument(flag, type=names, action="extend", metavar="A,B", help=help)

    add("--categorical", "columns whose values are names or ids")
    add("--dense", "columns whose values are quantities")
    group.add_argument(
        "--multi",
        type=multi_valued,
        action="append",
        metavar="NAME:SEP",
        help="a column with several values per row and what is between them, as in 'genres:|'; repeat it for more",
    )
    add("--datetime", "columns that become the hour and the weekday")
    add("--drop", "columns to leave out")
    group.add_argument("--columns", metavar="JSON", help="a file with label, dense, categorical, bags, classes …")


def add_growth(parser: argparse.ArgumentParser) -> None:
    """Of files whose columns a run knows already."""
    group = parser.add_argument_group("reading the input", "Columns, classes and statistics are those of RUN.")
    _add_division(group, "rarer values get no id (default: as when RUN's data was prepared, or 10)")


def _add_division(group: argparse._ActionsContainer, about_frequency: str) -> None:
    group.add_argument(
        "--split",
        metavar="SPLIT",
        help="time (first 6/7 train, the rest halved), random, with fractions as in random:0.8,0.1,0.1, files, or one "
        "fraction for training, the rest for test (default: time)",
    )
    group.add_argument(
        "--split-seed", type=at_least(0, 2**63 - 1), default=0, metavar="N", help="of a random split (default: 0)"
    )
    group.add_argument("--min-frequency", type=at_least(0), metavar="N", help=about_frequency)
    add_reading(group)


def add_reading(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--on-error",
        default="stop",
        choices=("stop", "skip"),
        help="at a bad row: stop, or skip and count it (default: stop)",
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="a cache, or files to prepare first; default: a generated click log with planted crosses, and for it "
        + " ".join(
            f"--{name.replace('_', '-')} {_spelt(value)}"
            for name, value in {**GENERATED_LOG_OPTIONS, **GENERATED_LOG_TRAINING}.items()
        ),
    )
    parser.add_argument("--rows", type=at_least(1), metavar="N", help=f"of that log (default: {GENERATED_ROWS:,})")
    parser.add_argument("--cache", metavar="FOLDER", help="where to keep prepared data (default: ~/.cache/fastcross)")
    add_preparation(parser)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Of tune."""
    group = parser.add_argument_group(
        "search", "Options of the model and of training that are given below are the same in all trials."
    )
    group.add_argument(
        "--model", type=model_names, default=["dcn"], metavar="A,B", help="models to search (default: dcn)"
    )
    group.add_argument("--trials", type=at_least(1), metavar="N", help="of each model, with those of earlier calls")
    group.add_argument(
        "--budget", type=duration, metavar="TIME", help="start no trial after this time, as in 2h or 30m"
    )
    group.add_argument("--grid", action="store_true", help="every point of the grid, and no others")
    group.add_argument("--space", metavar="JSON", help="a file with other spaces than the paper's (section 4.2)")
    group.add_argument(
        "--pruner",
        choices=("halving", "median", "none"),
        help="which trials are given up, by validation logloss: those not in the better half at the 2nd, 4th, 8th, … "
        "evaluation, those worse than the median, or none (default: halving; with --grid none)",
    )
    group.add_argument("--seeds", type=at_least(1), metavar="N", help="then N more runs of each model's best setting")
    group.add_argument(
        "--search-seed", type=at_least(0, 2**63 - 1), default=0, metavar="N", help="of the choices (default: 0)"
    )
    group.add_argument("--study", metavar="FOLDER", help="where to keep it (default: runs/tune-DATE-TIME)")
    group.add_argument(
        "--resume",
        metavar="FOLDER",
        help="go on with this study, or help another process with it; with --trials, --budget and --seeds alone",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--cross-layers", type=at_least(0), metavar="N", help="of DCN (default: the model's own)")
    group.add_argument("--deep-layers", type=layers, metavar="SIZES", help="as in 1024,1024 or 292x6; 0 for none")
    group.add_argument("--embedding-dim", type=at_least(1), metavar="N", help="default: 6 · cardinality^(1/4)")
    group.add_argument("--structure", choices=("parallel", "stacked"), help="of DCN (default: parallel)")
    group.add_argument("--dropout", type=float, metavar="P", help="in the deep network (default: 0)")
    group.add_argument("--batch-norm", action=argparse.BooleanOptionalAction, help="in the deep network (default: yes)")
    group.add_argument("--l2", type=float, metavar="λ", help="weight of the regularisation term (default: 0)")
    group.add_argument(
        "--cross",
        dest="crosses",
        type=names,
        action="append",
        metavar="A,B",
        help="of wide_deep and lr; repeat for more",
    )
    group.add_argument("--residual-units", type=at_least(1), metavar="N", help="of deep_crossing (default: 3)")
    group.add_argument("--input-dim", type=at_least(1), metavar="N", help="of its residual units (default: 512)")
    group.add_argument("--cross-dim", type=at_least(1), metavar="N", help="of their inner layer (default: 512)")
    group.add_argument("--backend", help="auto, triton, cpu, torch or reference (default: auto)")


def add_training(parser: argparse.ArgumentParser) -> None:
    paper = TrainingConfig()
    group = parser.add_argument_group("training")

    def add(name: str, kind: type, help: str, metavar: str = "N") -> None:
        default = getattr(paper, name.replace("-", "_"))
        text = help if default is None else f"{help} (default: {default:g})"
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)

    add("batch-size", int, "rows per step")
    add("epochs", int, "passes over the training part, at most")
    add("max-steps", int, "stop after this many steps at the latest")
    add("lr", float, "learning rate", "RATE")
    group.add_argument("--schedule", choices=SCHEDULES, help="of the rate (default: constant)")
    add("warmup-steps", int, "steps of linear warm-up")
    group.add_argument("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default: adam)")
    add("clip-norm", float, "largest gradient norm; 0 for no clipping", "NORM")
    add("evaluate-every", int, "steps between evaluations (default: once per epoch)")
    add("patience", int, "stop after this many evaluations without a better validation metric; 0 for never")
    group.add_argument(
        "--monitor",
        metavar="METRIC",
        help=f"that metric, by which the best model is chosen too: {', '.join(METRICS)} (default: logloss, or rmse)",
    )
    add("positive-weight", float, "how much the loss of a positive row counts", "W")
    add("max-loss", float, "stop when the training loss exceeds this", "LOSS")
    add("checkpoint-seconds", float, "time between checkpoints", "S")
    group.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="bfloat16 autocast (default: if it gains)")
    group.add_argument(
        "--graph",
        choices=GRAPHS,
        help="auto: on a GPU record the step once as a CUDA graph and replay it with one launch, unless columns are "
        "multi-valued or processes several; off: do not (default: auto)",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    group.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads (default: all cores)")


def add_distributed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("embedding tables, and several processes")
    group.add_argument(
        "--embedding",
        default="auto",
        choices=EMBEDDINGS,
        help="whose tables: fastcross's, or fbgemm's through TorchRec (default: auto, the faster one)",
    )
    group.add_argument("--distributed", action="store_true", help="shard the embedding tables over several processes")
    group.add_argument(
        "--processes",
        type=at_least(1, 4096),
        metavar="N",
        help="on this machine, for --distributed; torchrun starts its own",
    )
    group.add_argument(
        "--max-restarts", type=at_least(0), default=0, metavar="N", help="of processes that died (default: 0)"
    )
    group.add_argument(
        "--sharding",
        default="auto",
        choices=SHARDINGS,
        help="how tables are divided: whole tables, rows, columns, or as TorchRec's planner sees fit (default: auto)",
    )


def add_trained_on(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", metavar="FOLDER", help="the cache the model was trained on, if it has moved")


def _spelt(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
