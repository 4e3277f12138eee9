"""The commands, their options and the values of options; the examples of ``--help`` are in examples.py.

Each option is one line in the function of its group. The file of its command reads it from the Namespace.
"""

import argparse
import re
import shutil
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastcross._version import __version__
from fastcross.cli.examples import DESCRIPTION, EXAMPLES
from fastcross.data.columns import TASKS
from fastcross.data.formats import FORMATS
from fastcross.defaults import FOLLOW, PRESETS
from fastcross.fields import LARGEST, layer_sizes
from fastcross.models import CROSS_TYPES, MODELS
from fastcross.training.config import (
    EMBEDDINGS,
    GENERATED_LOG_OPTIONS,
    GENERATED_LOG_TRAINING,
    GENERATED_ROWS,
    GRAPHS,
    LOGGERS,
    METRICS,
    OPTIMIZERS,
    SCHEDULES,
    SHARDINGS,
    TrainingConfig,
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command. A parsing error ends the process with one line and exit code 2."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if rest:
        files = [text for text in rest if not text.startswith("-")]
        hint = f"; did you mean --data {files[0]}?" if files and args.command in ("train", "compare", "tune") else ""
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return args


def refuse(args: argparse.Namespace, what: str, names: Iterable[str]) -> None:
    """Raise if one of these options was given, that is, if it differs from its default.

    An option that is silently ignored would mislead the user.
    """
    given = sorted(flag(name) for name in names if getattr(args, name) != args.parser.get_default(name))
    if given:
        raise ValueError(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect on {what}")


def flag(name: str) -> str:
    """The option's name on the command line."""
    return "--cross" if name == "crosses" else f"--{name.replace('_', '-')}"


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastcross", description=DESCRIPTION, formatter_class=_Format)
    parser.add_argument("--version", action="version", version=f"fastcross {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        about = f"{help[0].upper()}{help[1:]}."
        sub = commands.add_parser(name, help=help, description=about, epilog=EXAMPLES[name], formatter_class=_Format)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        sub.set_defaults(parser=sub)
        return sub

    prepare = command("prepare", "convert a log or table to a cache, which training reads faster")
    prepare.add_argument("data", nargs="+", metavar="FILE", help="input files, in order of time")
    prepare.add_argument("--cache", required=True, metavar="FOLDER", help="the cache to write")
    _preparation(prepare)

    train = command("train", "train a model, by default DCN on a generated click log")
    _data(train)
    add = train.add_argument
    add("--run", metavar="FOLDER", help="run folder (default: runs/MODEL-DATE-TIME)")
    about = "continue this run with its own options; only --cache may be given too, if its data has moved"
    add("--resume", type=run_folder, metavar="FOLDER", help=about)
    add("--model", default="dcn", choices=MODELS, help="the model (default: %(default)s)")
    add("--seed", type=SEED, default=0, help="seed of weights, order of rows and dropout (default: 0)")
    add("--log", choices=LOGGERS, help="also send the metrics of each evaluation there")
    _model(train)
    _training(train)
    _distributed(train)

    evaluate = command("evaluate", "compute the metrics of a trained model on a part of its data or on a new file")
    add = evaluate.add_argument
    add("run", type=run_folder, metavar="RUN", help=CHECKPOINT)
    add("--part", default="test", help="train, validation or test (default: %(default)s)")
    add("--data", metavar="FILE", help="a cache, or a labelled file like the one trained on")
    add("--output", metavar="FILE", help="also write the metrics to this JSON file")
    _on_error(add)
    add("--cache", metavar="FOLDER", help=MOVED)

    predict = command("predict", "predict probabilities for the rows of a file")
    add = predict.add_argument
    add("run", type=run_folder, metavar="RUN", help=CHECKPOINT)
    add("data", metavar="FILE", help="a file like the one trained on, with or without labels")
    add("--output", required=True, metavar="FILE", help="where to write: .csv, .parquet or .npy")
    add("--id-column", metavar="NAME", help="a column of FILE to copy to the output, to identify the rows")
    _on_error(add)
    add("--cache", metavar="FOLDER", help=MOVED)

    explain = command("explain", "show which crosses a trained DCN has learned, exactly, as a page with figures")
    add = explain.add_argument
    add("run", metavar="RUN", help="run folder")
    add("--data", metavar="FILE", help="rows to explain (default: the test part it was trained with)")
    add("--row", type=at_least(1), default=1, metavar="N", help="number of the row to explain in detail (default: 1)")
    add(
        "--class",
        dest="class_",
        type=at_least(0),
        default=0,
        metavar="N",
        help="class whose logit is explained (default: 0)",
    )
    add(
        "--top",
        type=at_least(1),
        default=10,
        metavar="N",
        help="number of crosses to list with their values (default: 10)",
    )
    add("--output", metavar="FOLDER", help="where to write the page (default: RUN/explanation)")

    export = command("export", "write a trained model to a file that serves without fastcross")
    add = export.add_argument
    add("run", type=run_folder, metavar="RUN", help=CHECKPOINT)
    add("--output", required=True, metavar="FILE", help="where to write: .onnx or .pt2")
    about = "ONNX from ids to logits, with the encoder in a folder beside it"
    add("--encoded", action="store_true", help=about)
    add("--fold", action="store_true", help="the cross network as L + 1 numbers per id in place of its embeddings")

    serve = command("serve", "answer requests over HTTP: predictions of rows, and rankings of items")
    add = serve.add_argument
    add("run", type=run_folder, metavar="RUN", help=f"{CHECKPOINT}; SIGHUP reads it again")
    add("--items", metavar="FILE", help="items to rank: a CSV or Parquet file, or what Ranker.save wrote")
    add("--key", metavar="NAME", help="the column of FILE that names the items (default: numbers from 0)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: %(default)s, this machine)")
    add("--port", type=at_least(0, 65535), default=8080, metavar="N", help="0 for a free one (default: %(default)s)")
    add("--max-batch", type=at_least(1, 4096), default=64, metavar="N", help="rows computed together (default: 64)")
    about = "time that a request waits for others, where nothing else is to be done (default: 0)"
    add("--max-delay-ms", type=at_least(0, 1000), default=0, metavar="MS", help=about)
    about = "requests that may wait; beyond, the answer is 429 (default: %(default)s)"
    add("--queue", type=at_least(1), default=256, metavar="N", help=about)
    add("--threads", type=at_least(1), metavar="N", help="CPU threads of a batch (default: all cores but one)")

    extend = command("extend", "add the new ids of new data to a trained model and continue training")
    add = extend.add_argument
    add("run", type=run_folder, metavar="RUN", help="folder of a finished run")
    add("--data", nargs="+", required=True, metavar="FILE", help="labelled files like those it was trained on")
    about = "folder of the extended run (default: runs/MODEL-DATE-TIME); may be RUN"
    add("--run", dest="target", metavar="FOLDER", help=about)
    add("--cache", metavar="FOLDER", help=KEPT)
    group = extend.add_argument_group("reading the input", "Columns, classes and statistics are the ones of RUN.")
    _division(group.add_argument, "values that are rarer get no id (default: that of RUN's data, or 10)")
    _training(extend)

    compare = command("compare", "train several models on the same split: the paper's table 1 for your data")
    _data(compare)
    add = compare.add_argument
    about = f"names of {', '.join(MODELS)} (default: all)"
    add("--models", type=names, default=list(MODELS), metavar="NAMES", help=about)
    add("--seeds", type=integers, default=[0], metavar="N,N,…", help="one run per seed (default: 0)")
    add("--output", metavar="FOLDER", help="folder to write (default: runs/compare-DATE-TIME)")
    _model(compare)
    about = "give wide_deep and lr the N strongest crosses (default: 42) that a DCN finds in the training part"
    add("--crosses", dest="auto_crosses", type=auto_crosses, metavar="auto[:N]", help=about)
    _training(compare)

    tune = command("tune", "search for the best setting of one or several models: layers, sizes, learning rate")
    _data(tune)
    _search(tune)
    _model(tune)
    _training(tune)

    paper = command("paper", "the paper's tables 1 to 4 and figure 3, from a study of tune or from runs")
    add = paper.add_argument
    add("--study", metavar="STUDY", help="folder of a study, or a results.json that this command wrote")
    add("--runs", nargs="+", default=[], metavar="RUN", help="folders of finished runs; seeds are averaged")
    add("--output", metavar="FOLDER", help="folder to write (default: STUDY/paper, or paper)")
    add("--title", default="The paper's tables", help="title of the page")
    add("--beside", choices=("criteo", "covertype", "higgs"), help="also show the paper's numbers for these data")

    convert = command("convert", "convert the checkpoints of a run from one file to shards, or back")
    add = convert.add_argument
    add("run", type=run_folder, metavar="RUN", help="run folder")
    add("output", metavar="OUT", help="run folder to write")
    add("--to", required=True, choices=("single", "sharded"), help="single: one file, as without --distributed")

    doctor = command("doctor", "check whether the kernels are right and fast on this machine, with or without a GPU")
    add = doctor.add_argument
    add("--quick", action="store_true", help="fewer shapes and no torch.compile: under a minute")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    add("--output", metavar="FOLDER", help="write report.md, report.json and roofline.png there")
    add("--tune", nargs="*", metavar="BxDxL", help="instead time tiles of the GPU kernels, and keep the fastest")
    add("--run", metavar="RUN", help="--tune at the shape of this run")

    info = command("info", "show versions and backends, or the content of a run or a cache")
    info.add_argument("path", nargs="?", metavar="RUN|CACHE")
    return parser


class _Format(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(120, shutil.get_terminal_size((100, 24)).columns))


class _Parser(argparse.ArgumentParser):
    """Prints an error as one line that points to ``--help``, without the usage text."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


BY_THE_DATA = "A default in brackets with an asterisk is the paper's; without --preset paper it follows from the data."
CHECKPOINT = "run folder, or its best.safetensors"
MOVED = "the cache that the model was trained on, if it has moved"
KEPT = "folder for prepared data (default: ~/.cache/fastcross)"
Add = Callable[..., argparse.Action]  # add_argument of a parser or of a group


def _data(parser: argparse.ArgumentParser) -> None:
    defaults = {**GENERATED_LOG_OPTIONS, **GENERATED_LOG_TRAINING}
    spelt = {name: ",".join(map(str, v)) if isinstance(v, list) else v for name, v in defaults.items()}
    about = "a cache, or files to prepare first; default: a generated click log with planted crosses, with "
    about += " ".join(f"{flag(name)} {value}" for name, value in spelt.items())
    parser.add_argument("--data", nargs="+", metavar="PATH", help=about)
    parser.add_argument(
        "--rows", type=at_least(1), metavar="N", help=f"rows of the generated log (default: {GENERATED_ROWS:,})"
    )
    parser.add_argument("--cache", metavar="FOLDER", help=KEPT)
    _preparation(parser)


def _preparation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("reading the input").add_argument
    add(
        "--format",
        default="auto",
        choices=("auto", *FORMATS),
        help="file format (default: auto, by the beginning of the file)",
    )
    add(
        "--time-column", metavar="NAME", help="column that orders the rows for --split time, if the file is not ordered"
    )
    add("--hash-buckets", type=at_least(1), metavar="N", help="hash values into N ids instead of vocabularies")
    _division(add, "values that are rarer share one id (default: 3 to 10, by the number of rows)")
    about = "Types that are not given are inferred from the rows, and printed with the reason."
    add = parser.add_argument_group("columns of csv and parquet files", about).add_argument
    add("--label", metavar="NAME", help="column of the label (default: label, click, clicked, target or y)")
    about = "type of the label: classes, a quantity (regression), or inferred (auto, the default)"
    add("--task", choices=TASKS, default="auto", help=about)
    add("--weight", metavar="NAME", help="column of row weights; it is not a feature")
    add("--group", metavar="NAME", help="column, such as the user, for the AUC within its rows (gauc)")
    several: dict[str, Any] = {"type": names, "action": "extend", "metavar": "A,B"}
    add("--categorical", **several, help="columns whose values are names or ids")
    add("--dense", **several, help="columns whose values are quantities")
    about = "a column with several values per row and their separator, as in 'genres:|'; may be repeated"
    add("--multi", type=multi_valued, action="append", metavar="NAME:SEP", help=about)
    add("--datetime", **several, help="columns of date and time")
    add("--drop", **several, help="columns to leave out")
    add("--columns", metavar="JSON", help="JSON file with label, dense, categorical, bags, classes …")


def _division(add: Add, about_frequency: str) -> None:
    about = (
        "time (the first 6/7 of the rows train, the rest is divided between validation and test), random, random with "
        "fractions as in random:0.8,0.1,0.1, files, or the fraction that trains, with the rest for test (default: time)"
    )
    add("--split", metavar="SPLIT", help=about)
    add("--split-seed", type=SEED, default=0, metavar="N", help="seed of a random split (default: 0)")
    add("--min-frequency", type=at_least(0), metavar="N", help=about_frequency)
    _on_error(add)


def _on_error(add: Add) -> None:
    about = "what to do at a bad row: stop, or skip and count it (default: stop)"
    add("--on-error", default="stop", choices=("stop", "skip"), help=about)


def _search(parser: argparse.ArgumentParser) -> None:
    """Of tune."""
    about = "All trials share the options of model and training that are given."
    add = parser.add_argument_group("search", about).add_argument
    add("--model", type=model_names, default=["dcn"], metavar="A,B", help="models to search (default: dcn)")
    add("--trials", type=at_least(1), metavar="N", help="number of trials per model, including those of earlier calls")
    add("--budget", type=duration, metavar="TIME", help="start no trial after this time, as in 2h or 30m")
    add("--grid", action="store_true", help="try every point of the grid once")
    about = (
        "JSON file with the search space (default: sizes, dropout, batch size, rate; with --preset paper the paper's)"
    )
    add("--space", metavar="JSON", help=about)
    about = (
        "which trials stop early, by validation logloss: halving, those not in the better half at the 4th, 8th, 16th … "
        "evaluation; median, those worse than the median; or none (default: halving; with --grid none)"
    )
    add("--pruner", choices=("halving", "median", "none"), help=about)
    add("--seeds", type=at_least(1), metavar="N", help="number of further runs of each model's best setting")
    add("--search-seed", type=SEED, default=0, metavar="N", help="seed of the search (default: 0)")
    add("--study", metavar="FOLDER", help="folder of the study (default: runs/tune-DATE-TIME)")
    about = "continue this study, also beside another process; only --trials, --budget and --seeds may be given too"
    add("--resume", metavar="FOLDER", help=about)


def _model(parser: argparse.ArgumentParser) -> None:
    about = (
        "where options that are not given come from: the number of rows and the columns (data), or the paper "
        "(default: data)"
    )
    parser.add_argument("--preset", choices=PRESETS, help=about)
    add = parser.add_argument_group("model", BY_THE_DATA).add_argument
    add("--cross-layers", type=at_least(0), metavar="N", help="number of cross layers of DCN (default: 6*)")
    add(
        "--cross-type",
        metavar="TYPE",
        help=f"cross layers of DCN: {', '.join(CROSS_TYPES)} (default: vector, the paper's)",
    )
    add(
        "--rank",
        type=at_least(1),
        metavar="R",
        help="rank of low_rank and mixture (default: a quarter of the features)",
    )
    add("--experts", type=at_least(1), metavar="K", help="number of experts of mixture (default: 4)")
    add(
        "--deep-layers",
        type=layers,
        metavar="SIZES",
        help="sizes of the deep layers, as in 1024,1024 or 292x6; 0 for none (default: 1024,1024*)",
    )
    add("--embedding-dim", type=at_least(1), metavar="N", help="size of an embedding (default: 6 · cardinality^(1/4)*)")
    add("--structure", choices=("parallel", "stacked"), help="cross and deep network of DCN (default: parallel)")
    add("--dropout", type=float, metavar="P", help="dropout in the deep network (default: 0*)")
    add(
        "--batch-norm",
        action=argparse.BooleanOptionalAction,
        help="batch normalisation in the deep network (default: yes*)",
    )
    add("--l2", type=float, metavar="λ", help="weight of the regularisation term (default: 0)")
    about = "a cross of columns for wide_deep and lr; may be repeated"
    add("--cross", dest="crosses", type=names, action="append", metavar="A,B", help=about)
    add(
        "--residual-units", type=at_least(1), metavar="N", help="number of residual units of deep_crossing (default: 3)"
    )
    add("--input-dim", type=at_least(1), metavar="N", help="input size of the residual units (default: 512*)")
    add("--cross-dim", type=at_least(1), metavar="N", help="size of the residual units' inner layer (default: 512*)")
    add("--backend", help="auto, triton, cpu, torch or reference (default: auto)")


def _training(parser: argparse.ArgumentParser) -> None:
    paper = TrainingConfig()
    add = parser.add_argument_group("training", BY_THE_DATA).add_argument

    def number(name: str, kind: type, help: str, metavar: str = "N") -> None:
        default = getattr(paper, name.replace("-", "_"))
        mark = "*" if name.replace("-", "_") in FOLLOW else ""
        text = help if default is None else f"{help} (default: {default:g}{mark})"
        add(f"--{name}", type=kind, metavar=metavar, help=text)

    number("batch-size", int, "rows per step")
    number("epochs", int, "largest number of passes over the training part")
    number("max-steps", int, "largest number of steps")
    number("lr", float, "learning rate", "RATE")
    add("--schedule", choices=SCHEDULES, help="schedule of the learning rate (default: constant)")
    number("warmup-steps", int, "steps of linear warm-up")
    add("--optimizer", metavar="NAME", help=f"optimiser: {', '.join(OPTIMIZERS)} (default: adam)")
    number("clip-norm", float, "largest gradient norm; 0 for no clipping", "NORM")
    number("evaluate-every", int, "steps between evaluations (default: once per epoch)")
    number("patience", int, "stop after this many evaluations without a better validation metric; 0 for never")
    about = f"metric for early stopping and for the best model: {', '.join(METRICS)} (default: logloss, or rmse)"
    add("--monitor", metavar="METRIC", help=about)
    number("positive-weight", float, "weight of the loss of positive rows", "W")
    number("max-loss", float, "stop when the training loss exceeds this", "LOSS")
    number("checkpoint-seconds", float, "time between checkpoints", "S")
    add("--bf16", action=argparse.BooleanOptionalAction, help="bfloat16 autocast (default: on GPUs that have it)")
    about = (
        "auto: on a GPU, record the step as a CUDA graph and replay it, unless there are multi-valued columns or "
        "several processes; off: do not (default: auto)"
    )
    add("--graph", choices=GRAPHS, help=about)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    add("--threads", type=at_least(1), metavar="N", help="CPU threads (default: all cores)")


def _distributed(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("embedding tables, and several processes").add_argument
    about = "implementation of the tables: fastcross's, or fbgemm's through TorchRec (default: auto, the faster one)"
    add("--embedding", default="auto", choices=EMBEDDINGS, help=about)
    add("--distributed", action="store_true", help="shard the embedding tables over several processes")
    about = "number of processes on this machine; torchrun starts its own"
    add("--processes", type=at_least(1, 4096), metavar="N", help=about)
    add(
        "--max-restarts",
        type=at_least(0),
        default=0,
        metavar="N",
        help="number of restarts after a process has died (default: 0)",
    )
    about = "how to divide the tables: whole tables, rows, columns, or by TorchRec's planner (default: auto)"
    add("--sharding", default="auto", choices=SHARDINGS, help=about)


def names(text: str) -> list[str]:
    """a,b,c"""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise ArgumentTypeError(f"expected names with commas between them, as in a,b; got {text!r}")
    if twice := [name for name in found if found.count(name) > 1]:
        raise ArgumentTypeError(f"{twice[0]} is named twice in {text!r}")
    return found


def run_folder(text: str) -> str:
    """A run, by its folder or the checkpoint in it."""
    path = Path(text)
    if not path.exists():
        raise ArgumentTypeError(f"there is no {text}")
    if path.is_file() and path.suffix != ".safetensors":
        raise ArgumentTypeError(f"expected a run folder, or the best.safetensors in it; got the file {text}")
    return text


def at_least(smallest: int, largest: int = LARGEST) -> Callable[[str], int]:
    """A whole number that is not below ``smallest``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ArgumentTypeError(f"expected a whole number; got {text!r}") from None
        if number < smallest:
            raise ArgumentTypeError(f"must be at least {smallest}; got {number}")
        if number > largest:
            raise ArgumentTypeError(f"must be at most {largest}; got {number}")
        return number

    return parse


SEED = at_least(0, 2**63 - 1)


def integers(text: str) -> list[int]:
    """0,1,2"""
    try:
        return [int(number) for number in names(text)]
    except ValueError:
        raise ArgumentTypeError(f"expected whole numbers with commas between them, as in 0,1,2; got {text!r}") from None


def auto_crosses(text: str) -> int:
    """auto or auto:N: how many crosses; by default as many as the paper's logistic regression had."""
    match = re.fullmatch(r"auto(?::(\d+))?", text)
    if not match or (match[1] and not int(match[1])):
        raise ArgumentTypeError(f"expected auto or auto:N with N at least 1 (--cross A,B names one); got {text!r}")
    return int(match[1] or 42)


def duration(text: str) -> float:
    """2h, 30m, 90s, 1h30m: in seconds."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text)
    seconds = (
        sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0
    )
    if not seconds:
        raise ArgumentTypeError(f"expected a time as in 2h, 30m, 90s or 1h30m; got {text!r}")
    return seconds


def model_names(text: str) -> list[str]:
    """Names of models."""
    found = names(text)
    if unknown := [name for name in found if name not in MODELS]:
        raise ArgumentTypeError(f"there is no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    return found


def layers(text: str) -> list[int]:
    """1024,1024 or 292x6; 0 for no layers."""
    try:
        return layer_sizes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def multi_valued(text: str) -> tuple[str, str]:
    """genres:| is the column genres, with | between its values; genres alone is the same."""
    name, colon, separator = text.partition(":")
    if not name or (colon and not separator):
        raise ArgumentTypeError(f"expected a column and its separator as in genres:|; got {text!r}")
    return name, separator or "|"
