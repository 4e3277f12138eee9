"""The commands and their options: what a user may type, the values in it, and what ``--help`` says.

An option is one line in the function of its group; the file of its command reads it from the Namespace.
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
from fastcross.data.columns import TASKS
from fastcross.data.formats import FORMATS
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
    """The arguments of a command; what cannot be parsed ends the process with one line and exit code 2."""
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
    """Raise where one of these options was given, that is, where it differs from its default.

    A user who gives an option expects it to matter.
    """
    given = sorted(flag(name) for name in names if getattr(args, name) != args.parser.get_default(name))
    if given:
        raise ValueError(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect on {what}")


def flag(name: str) -> str:
    """How a user writes an option."""
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

    prepare = command("prepare", "turn a log or table into a cache that training reads at full speed")
    prepare.add_argument("data", nargs="+", metavar="FILE", help="input file or files, in order of time")
    prepare.add_argument("--cache", required=True, metavar="FOLDER", help="the cache to write")
    _preparation(prepare)

    train = command("train", "train a model, by default DCN on a generated click log")
    _data(train)
    add = train.add_argument
    add("--run", metavar="FOLDER", help="run folder (default: runs/MODEL-DATE-TIME)")
    about = "continue this run; all other options come from it, but for --cache if its data has moved"
    add("--resume", type=run_folder, metavar="FOLDER", help=about)
    add("--model", default="dcn", choices=MODELS, help="which model (default: %(default)s)")
    add("--seed", type=SEED, default=0, help="of weights, order of rows, dropout (default: 0)")
    add("--log", choices=LOGGERS, help="send the metrics of each evaluation there, too")
    _model(train)
    _training(train)
    _distributed(train)

    evaluate = command("evaluate", "metrics of a trained model on a part of its data or on a new file")
    add = evaluate.add_argument
    add("run", type=run_folder, metavar="RUN", help=CHECKPOINT)
    add("--part", default="test", help="train, validation or test (default: %(default)s)")
    add("--data", metavar="FILE", help="a cache, or a labelled file like the one trained on")
    add("--output", metavar="FILE", help="write the metrics to this JSON file too")
    _on_error(add)
    add("--cache", metavar="FOLDER", help=MOVED)

    predict = command("predict", "probabilities for the rows of a file")
    add = predict.add_argument
    add("run", type=run_folder, metavar="RUN", help=CHECKPOINT)
    add("data", metavar="FILE", help="a file like the one trained on, with or without labels")
    add("--output", required=True, metavar="FILE", help="where to write: .csv, .parquet or .npy")
    add("--id-column", metavar="NAME", help="a column of FILE to carry over, to know the rows by")
    _on_error(add)
    add("--cache", metavar="FOLDER", help=MOVED)

    explain = command("explain", "which crosses a trained DCN uses, exactly, as a page with figures")
    add = explain.add_argument
    add("run", metavar="RUN", help="run folder")
    add("--data", metavar="FILE", help="rows to explain (default: the test part it was trained with)")
    add("--row", type=at_least(1), default=1, metavar="N", help="the example that is taken apart (1)")
    add("--class", dest="class_", type=at_least(0), default=0, metavar="N", help="which logit (0)")
    add("--top", type=at_least(1), default=10, metavar="N", help="crosses with their values (10)")
    add("--output", metavar="FOLDER", help="where to write the page (default: RUN/explanation)")

    export = command("export", "write a trained model to a file for serving that does without fastcross")
    add = export.add_argument
    add("run", type=run_folder, metavar="RUN", help=CHECKPOINT)
    add("--output", required=True, metavar="FILE", help="where to write: .onnx or .pt2")
    about = "ONNX that takes ids and gives logits, with the encoder in a folder beside it"
    add("--encoded", action="store_true", help=about)

    extend = command("extend", "let a trained model learn the ids that new data brings, and go on training with it")
    add = extend.add_argument
    add("run", type=run_folder, metavar="RUN", help="run folder, finished")
    add("--data", nargs="+", required=True, metavar="FILE", help="labelled files like those trained on")
    about = "the extended run (default: runs/MODEL-DATE-TIME); may be RUN"
    add("--run", dest="target", metavar="FOLDER", help=about)
    add("--cache", metavar="FOLDER", help=KEPT)
    group = extend.add_argument_group("reading the input", "Columns, classes and statistics are those of RUN.")
    _division(group.add_argument, "rarer values get no id (default: as when RUN's data was prepared, or 10)")
    _training(extend)

    compare = command("compare", "train several models on the same split: the paper's table 1 for your data")
    _data(compare)
    add = compare.add_argument
    about = f"of {', '.join(MODELS)} (default: all)"
    add("--models", type=names, default=list(MODELS), metavar="NAMES", help=about)
    add("--seeds", type=integers, default=[0], metavar="N,N,…", help="one run each (default: 0)")
    add("--output", metavar="FOLDER", help="where to save (default: runs/compare-DATE-TIME)")
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
    add("--study", metavar="STUDY", help="the folder of a study, or a results.json that this command wrote")
    add("--runs", nargs="+", default=[], metavar="RUN", help="finished run folders, seeds told apart")
    add("--output", metavar="FOLDER", help="where to write (default: STUDY/paper, or paper)")
    add("--title", default="The paper's tables", help="of the page")
    add("--beside", choices=("criteo", "covertype", "higgs"), help="the paper's numbers for these data, too")

    convert = command("convert", "the checkpoints of a run from one file to shards, or back")
    add = convert.add_argument
    add("run", type=run_folder, metavar="RUN", help="run folder")
    add("output", metavar="OUT", help="run folder to write; resume and evaluate it like the other")
    add("--to", required=True, choices=("single", "sharded"), help="single: as without --distributed")

    doctor = command("doctor", "whether the kernels are right and fast on this machine; with or without a GPU")
    add = doctor.add_argument
    add("--quick", action="store_true", help="fewer shapes and no torch.compile: under a minute")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    add("--output", metavar="FOLDER", help="write report.md, report.json and roofline.png there")

    info = command("info", "versions and backends, or what a run or a cache holds")
    info.add_argument("path", nargs="?", metavar="RUN|CACHE")
    return parser


class _Format(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(120, shutil.get_terminal_size((100, 24)).columns))


class _Parser(argparse.ArgumentParser):
    """An error is one line that says where help is, without the usage of every option before it."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


CHECKPOINT = "run folder, or its best.safetensors"
MOVED = "the cache the model was trained on, if it has moved"
KEPT = "where to keep prepared data (default: ~/.cache/fastcross)"
Add = Callable[..., argparse.Action]  # add_argument of a parser or of a group


def _data(parser: argparse.ArgumentParser) -> None:
    defaults = {**GENERATED_LOG_OPTIONS, **GENERATED_LOG_TRAINING}
    spelt = {name: ",".join(map(str, v)) if isinstance(v, list) else v for name, v in defaults.items()}
    about = "a cache, or files to prepare first; default: a generated click log with planted crosses, and for it "
    about += " ".join(f"{flag(name)} {value}" for name, value in spelt.items())
    parser.add_argument("--data", nargs="+", metavar="PATH", help=about)
    parser.add_argument("--rows", type=at_least(1), metavar="N", help=f"of that log (default: {GENERATED_ROWS:,})")
    parser.add_argument("--cache", metavar="FOLDER", help=KEPT)
    _preparation(parser)


def _preparation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("reading the input").add_argument
    add("--format", default="auto", choices=("auto", *FORMATS), help="default: by the file's beginning")
    add("--time-column", metavar="NAME", help="orders the rows for --split time, if the file does not")
    add("--hash-buckets", type=at_least(1), metavar="N", help="hash values into N ids, no vocabularies")
    _division(add, "rarer values share one id (default: 10)")
    about = "What is not said here is inferred from the rows, and printed with reasons."
    add = parser.add_argument_group("columns of csv and parquet files", about).add_argument
    add("--label", metavar="NAME", help="default: label, click, clicked, target or y")
    about = "what the label is: classes, a quantity (regression), or (auto) whichever it looks like"
    add("--task", choices=TASKS, default="auto", help=about)
    add("--weight", metavar="NAME", help="column that says how much each row counts; no feature")
    add("--group", metavar="NAME", help="column such as the user, within whose rows AUC is measured too (gauc)")
    several: dict[str, Any] = {"type": names, "action": "extend", "metavar": "A,B"}
    add("--categorical", **several, help="columns whose values are names or ids")
    add("--dense", **several, help="columns whose values are quantities")
    about = "a column with several values per row and what is between them, as in 'genres:|'; repeat it for more"
    add("--multi", type=multi_valued, action="append", metavar="NAME:SEP", help=about)
    add("--datetime", **several, help="columns that become the hour and the weekday")
    add("--drop", **several, help="columns to leave out")
    add("--columns", metavar="JSON", help="a file with label, dense, categorical, bags, classes …")


def _division(add: Add, about_frequency: str) -> None:
    about = "time (first 6/7 train, the rest halved), random, with fractions as in random:0.8,0.1,0.1, files, or one "
    add("--split", metavar="SPLIT", help=about + "fraction for training, the rest for test (default: time)")
    add("--split-seed", type=SEED, default=0, metavar="N", help="of a random split (default: 0)")
    add("--min-frequency", type=at_least(0), metavar="N", help=about_frequency)
    _on_error(add)


def _on_error(add: Add) -> None:
    about = "at a bad row: stop, or skip and count it (default: stop)"
    add("--on-error", default="stop", choices=("stop", "skip"), help=about)


def _search(parser: argparse.ArgumentParser) -> None:
    """Of tune."""
    about = "Options of the model and of training that are given below are the same in all trials."
    add = parser.add_argument_group("search", about).add_argument
    add("--model", type=model_names, default=["dcn"], metavar="A,B", help="models to search (default: dcn)")
    add("--trials", type=at_least(1), metavar="N", help="of each model, with those of earlier calls")
    add("--budget", type=duration, metavar="TIME", help="start no trial after this time, as in 2h or 30m")
    add("--grid", action="store_true", help="every point of the grid, and no others")
    add("--space", metavar="JSON", help="a file with other spaces than the paper's (section 4.2)")
    about = (
        "which trials are given up, by validation logloss: those not in the better half at the 2nd, 4th, 8th, … "
        "evaluation, those worse than the median, or none (default: halving; with --grid none)"
    )
    add("--pruner", choices=("halving", "median", "none"), help=about)
    add("--seeds", type=at_least(1), metavar="N", help="then N more runs of each model's best setting")
    add("--search-seed", type=SEED, default=0, metavar="N", help="of the choices (default: 0)")
    add("--study", metavar="FOLDER", help="where to keep it (default: runs/tune-DATE-TIME)")
    about = "go on with this study, or help another process with it; with --trials, --budget and --seeds alone"
    add("--resume", metavar="FOLDER", help=about)


def _model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--cross-layers", type=at_least(0), metavar="N", help="of DCN (default: the model's own)")
    add("--cross-type", metavar="TYPE", help=f"of DCN: {', '.join(CROSS_TYPES)} (default: vector, the paper's)")
    add("--rank", type=at_least(1), metavar="R", help="of low_rank and mixture (default: a quarter of x0's columns)")
    add("--experts", type=at_least(1), metavar="K", help="of mixture (default: 4)")
    add("--deep-layers", type=layers, metavar="SIZES", help="as in 1024,1024 or 292x6; 0 for none")
    add("--embedding-dim", type=at_least(1), metavar="N", help="default: 6 · cardinality^(1/4)")
    add("--structure", choices=("parallel", "stacked"), help="of DCN (default: parallel)")
    add("--dropout", type=float, metavar="P", help="in the deep network (default: 0)")
    add("--batch-norm", action=argparse.BooleanOptionalAction, help="in the deep network (default: yes)")
    add("--l2", type=float, metavar="λ", help="weight of the regularisation term (default: 0)")
    about = "of wide_deep and lr; repeat for more"
    add("--cross", dest="crosses", type=names, action="append", metavar="A,B", help=about)
    add("--residual-units", type=at_least(1), metavar="N", help="of deep_crossing (default: 3)")
    add("--input-dim", type=at_least(1), metavar="N", help="of its residual units (default: 512)")
    add("--cross-dim", type=at_least(1), metavar="N", help="of their inner layer (default: 512)")
    add("--backend", help="auto, triton, cpu, torch or reference (default: auto)")


def _training(parser: argparse.ArgumentParser) -> None:
    paper = TrainingConfig()
    add = parser.add_argument_group("training").add_argument

    def number(name: str, kind: type, help: str, metavar: str = "N") -> None:
        default = getattr(paper, name.replace("-", "_"))
        text = help if default is None else f"{help} (default: {default:g})"
        add(f"--{name}", type=kind, metavar=metavar, help=text)

    number("batch-size", int, "rows per step")
    number("epochs", int, "passes over the training part, at most")
    number("max-steps", int, "stop after this many steps at the latest")
    number("lr", float, "learning rate", "RATE")
    add("--schedule", choices=SCHEDULES, help="of the rate (default: constant)")
    number("warmup-steps", int, "steps of linear warm-up")
    add("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default: adam)")
    number("clip-norm", float, "largest gradient norm; 0 for no clipping", "NORM")
    number("evaluate-every", int, "steps between evaluations (default: once per epoch)")
    number("patience", int, "stop after this many evaluations without a better validation metric; 0 for never")
    about = f"that metric, by which the best model is chosen too: {', '.join(METRICS)} (default: logloss, or rmse)"
    add("--monitor", metavar="METRIC", help=about)
    number("positive-weight", float, "how much the loss of a positive row counts", "W")
    number("max-loss", float, "stop when the training loss exceeds this", "LOSS")
    number("checkpoint-seconds", float, "time between checkpoints", "S")
    add("--bf16", action=argparse.BooleanOptionalAction, help="bfloat16 autocast (default: if it gains)")
    about = (
        "auto: on a GPU record the step once as a CUDA graph and replay it with one launch, unless columns are "
        "multi-valued or processes several; off: do not (default: auto)"
    )
    add("--graph", choices=GRAPHS, help=about)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    add("--threads", type=at_least(1), metavar="N", help="CPU threads (default: all cores)")


def _distributed(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("embedding tables, and several processes").add_argument
    about = "whose tables: fastcross's, or fbgemm's through TorchRec (default: auto, the faster one)"
    add("--embedding", default="auto", choices=EMBEDDINGS, help=about)
    add("--distributed", action="store_true", help="shard the embedding tables over several processes")
    about = "on this machine, for --distributed; torchrun starts its own"
    add("--processes", type=at_least(1, 4096), metavar="N", help=about)
    add("--max-restarts", type=at_least(0), default=0, metavar="N", help="of processes that died (default: 0)")
    about = "how tables are divided: whole tables, rows, columns, or as TorchRec's planner sees fit (default: auto)"
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


DESCRIPTION = """Train, evaluate and compare Deep & Cross Networks on click logs and tables.

first steps:
  fastcross train                               train DCN on a generated click log with planted crosses
  fastcross compare --models dcn,dnn,fm,lr      the paper's table 1 for the same log
  fastcross train --data train.txt.gz           your log in Criteo's format; then, with the folder it names:
  fastcross evaluate runs/NAME                  metrics on the test part
  fastcross predict runs/NAME new.txt --output predictions.csv
  fastcross explain runs/NAME                   which crosses it learned
  fastcross export runs/NAME --output model.onnx
"""

EXAMPLES = {
    "prepare": """examples:
  fastcross prepare day_0.gz --cache day_0.cache
  fastcross prepare train.txt --cache criteo.cache --min-frequency 10 --split time
  fastcross prepare covtype.csv.gz --format covertype --split random:0.9,0,0.1 --cache covtype.cache
  fastcross prepare table.parquet --label clicked --cache table.cache
  fastcross prepare ratings.csv --label liked --categorical user,film --multi 'genres:|' --drop row \\
                    --split time --time-column seen_at --cache ratings.cache

What each column was taken for, and why, is printed; options say otherwise.""",
    "train": """examples:
  fastcross train                                        the embedded default, DCN
  fastcross train --data day_0.cache --run runs/first    a cache made by fastcross prepare
  fastcross train --data ratings.csv --label liked --categorical user,film
  fastcross train --data train.txt --cross-layers 6 --deep-layers 1024,1024 --lr 1e-4 --evaluate-every 2000
  fastcross train --data covtype.csv.gz --format covertype --split 0.9 --cross-layers 8 --deep-layers 292x6 \\
                  --schedule cosine --epochs 30
  fastcross train --resume runs/first                    continue after a crash or Ctrl-C, bit for bit
  fastcross train --processes 2 --data day_0.cache       with the tables divided between two processes""",
    "evaluate": """examples:
  fastcross evaluate runs/first                    the test part of the data it was trained on
  fastcross evaluate runs/first --part validation
  fastcross evaluate runs/first --data day_8.gz    a new labelled file""",
    "predict": """examples:
  fastcross predict runs/first new.txt --output predictions.csv
  fastcross predict runs/first new.txt --output predictions.parquet --on-error skip
  fastcross predict runs/first new.csv --output predictions.csv --id-column user
  fastcross predict runs/first new.txt --output predictions.npy   probabilities alone, a column for each class if many

The output has a row for each row of the input, in its order: its number, its id, the probability of the second of two
classes or of each class, and the likeliest class where they have names. A row that was skipped has its number alone.
Exit code 1: a part of the input was lost (a file that breaks off, with --on-error skip).""",
    "explain": """examples:
  fastcross explain runs/first                     share of variance by degree, heat map, top crosses, one example
  fastcross explain runs/first --data day_8.gz --row 17 --output page""",
    "export": """examples:
  fastcross export runs/first --output model.onnx    raw values in, probabilities out, in onnxruntime alone
  fastcross export runs/first --output model.pt2     compiled for this kind of machine; and model.encoder/
  fastcross export runs/first --output model.onnx --encoded    ids in, logits out, and model.encoder/

docs/serving.md says what goes in, and has a reader for model.encoder/ that needs neither fastcross nor PyTorch.""",
    "extend": """examples:
  fastcross extend runs/first --data today.csv --epochs 1 --run runs/second
  fastcross extend runs/first --data today.csv --min-frequency 5 --run runs/first    replaced when all is done

Old ids and all else that was learned stay; a new id starts as the out-of-vocabulary id, which it was until now.
Training options that are not given are those of RUN. A run that was killed continues with fastcross train --resume.""",
    "compare": """examples:
  fastcross compare --models dcn,dnn                          the demonstration: generated log, curves, Bayes optimum
  fastcross compare --data criteo.cache --seeds 0,1,2         mean ± standard deviation over three seeds
  fastcross compare --data train.txt --models wide_deep,lr --cross C1,C3 --cross C2,C4
  fastcross compare --data train.txt --models lr,wide_deep --crosses auto:20     the crosses that a DCN finds""",
    "tune": """examples:
  fastcross tune --trials 20                                       DCN in the paper's space, on the generated log
  fastcross tune --data criteo.cache --model dcn,dnn --budget 2h --seeds 10 --study study
  fastcross tune --data criteo.cache --grid --space space.json --study grid
  fastcross tune --resume study --trials 40     after Ctrl-C, for more trials, or as a second process at the same time

A space is a JSON file: for each model its parameters, each a list of values or a range:
  {"dcn": {"hidden_layers": [2, 3], "hidden_size": [32, 64], "cross_layers": {"low": 1, "high": 6},
           "lr": {"low": 1e-4, "high": 1e-3, "log": true, "grid": [1e-4, 3e-4, 1e-3]}}}""",
    "paper": """examples:
  fastcross paper --study study                             tables 1 to 4 and figure 3 of a study that tune made
  fastcross paper --study study --beside criteo --output docs/criteo
  fastcross paper --runs runs/dcn-* runs/dnn-* --beside covertype --output docs/covertype

Runs that differ in their seed alone become one line, mean ± deviation; those that are not finished are left out, and
the same command later takes them in.""",
    "convert": """examples:
  fastcross convert runs/sharded runs/single --to single     then: fastcross train --resume runs/single
  fastcross convert runs/single runs/sharded --to sharded    then: fastcross train --resume runs/sharded""",
    "doctor": """examples:
  fastcross doctor                           a few minutes; exit code 1 if a result is wrong
  fastcross doctor --quick --output report   a folder to attach to an issue

TRITON_INTERPRET=1 checks the Triton kernels on a CPU, in Triton's interpreter, and times nothing.""",
    "info": """examples:
  fastcross info                versions, and what can run here
  fastcross info runs/first     what a run was asked for and what came out
  fastcross info day_0.cache    columns, cardinalities and rows of a cache""",
}
