"""The commands and their arguments."""

import argparse
import shutil
import sys
from collections.abc import Sequence

from fastcross._version import __version__
from fastcross.cli.help import DESCRIPTION, EXAMPLES
from fastcross.cli.options import (
    add_data,
    add_distributed,
    add_growth,
    add_model,
    add_preparation,
    add_reading,
    add_search,
    add_trained_on,
    add_training,
)
from fastcross.cli.values import at_least, auto_crosses, integers, names, run_folder
from fastcross.models import MODELS
from fastcross.training.config import LOGGERS


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
    add_preparation(prepare)

    train = command("train", "train a model, by default DCN on a generated click log")
    add_data(train)
    train.add_argument("--run", metavar="FOLDER", help="run folder (default: runs/MODEL-DATE-TIME)")
    train.add_argument(
        "--resume",
        type=run_folder,
        metavar="FOLDER",
        help="continue this run; all other options come from it, but for --cache if its data has moved",
    )
    train.add_argument("--model", default="dcn", choices=MODELS, help="which model (default: %(default)s)")
    train.add_argument(
        "--seed", type=at_least(0, 2**63 - 1), default=0, help="of weights, order of rows, dropout (default: 0)"
    )
    train.add_argument("--log", choices=LOGGERS, help="send the metrics of each evaluation there, too")
    add_model(train)
    add_training(train)
    add_distributed(train)

    evaluate = command("evaluate", "metrics of a trained model on a part of its data or on a new file")
    evaluate.add_argument("run", type=run_folder, metavar="RUN", help="run folder, or its best.safetensors")
    evaluate.add_argument("--part", default="test", help="train, validation or test (default: %(default)s)")
    evaluate.add_argument("--data", metavar="FILE", help="a cache, or a labelled file like the one trained on")
    evaluate.add_argument("--output", metavar="FILE", help="write the metrics to this JSON file too")
    add_reading(evaluate)
    add_trained_on(evaluate)

    predict = command("predict", "probabilities for the rows of a file")
    predict.add_argument("run", type=run_folder, metavar="RUN", help="run folder, or its best.safetensors")
    predict.add_argument("data", metavar="FILE", help="a file like the one trained on, with or without labels")
    predict.add_argument("--output", required=True, metavar="FILE", help="where to write: .csv, .parquet or .npy")
    predict.add_argument("--id-column", metavar="NAME", help="a column of FILE to carry over, to know the rows by")
    add_reading(predict)
    add_trained_on(predict)

    explain = command("explain", "which crosses a trained DCN uses, exactly, as a page with figures")
    explain.add_argument("run", metavar="RUN", help="run folder")
    explain.add_argument("--data", metavar="FILE", help="rows to explain (default: the test part it was trained with)")
    explain.add_argument("--row", type=at_least(1), default=1, metavar="N", help="the example that is taken apart (1)")
    explain.add_argument("--class", dest="class_", type=at_least(0), default=0, metavar="N", help="which logit (0)")
    explain.add_argument("--top", type=at_least(1), default=10, metavar="N", help="crosses with their values (10)")
    explain.add_argument("--output", metavar="FOLDER", help="where to write the page (default: RUN/explanation)")

    export = command("export", "write a trained model to a file for serving that does without fastcross")
    export.add_argument("run", type=run_folder, metavar="RUN", help="run folder, or its best.safetensors")
    export.add_argument("--output", required=True, metavar="FILE", help="where to write: .onnx or .pt2")
    export.add_argument(
        "--encoded",
        action="store_true",
        help="ONNX that takes ids and gives logits, with the encoder in a folder beside it",
    )

    extend = command("extend", "let a trained model learn the ids that new data brings, and go on training with it")
    extend.add_argument("run", type=run_folder, metavar="RUN", help="run folder, finished")
    extend.add_argument("--data", nargs="+", required=True, metavar="FILE", help="labelled files like those trained on")
    extend.add_argument(
        "--run", dest="target", metavar="FOLDER", help="the extended run (default: runs/MODEL-DATE-TIME); may be RUN"
    )
    extend.add_argument("--cache", metavar="FOLDER", help="where to keep prepared data (default: ~/.cache/fastcross)")
    add_growth(extend)
    add_training(extend)

    compare = command("compare", "train several models on the same split: the paper's table 1 for your data")
    add_data(compare)
    compare.add_argument(
        "--models", type=names, default=list(MODELS), metavar="NAMES", help=f"of {', '.join(MODELS)} (default: all)"
    )
    compare.add_argument("--seeds", type=integers, default=[0], metavar="N,N,…", help="one run each (default: 0)")
    compare.add_argument("--output", metavar="FOLDER", help="where to save (default: runs/compare-DATE-TIME)")
    add_model(compare)
    compare.add_argument(
        "--crosses",
        dest="auto_crosses",
        type=auto_crosses,
        metavar="auto[:N]",
        help="give wide_deep and lr the N strongest crosses (default: 42) that a DCN finds in the training part",
    )
    add_training(compare)

    tune = command("tune", "search for the best setting of one or several models: layers, sizes, learning rate")
    add_data(tune)
    add_search(tune)
    add_model(tune)
    add_training(tune)

    paper = command("paper", "the paper's tables 1 to 4 and figure 3, from a study of tune or from runs")
    paper.add_argument(
        "--study", metavar="STUDY", help="the folder of a study, or a results.json that this command wrote"
    )
    paper.add_argument("--runs", nargs="+", default=[], metavar="RUN", help="finished run folders, seeds told apart")
    paper.add_argument("--output", metavar="FOLDER", help="where to write (default: STUDY/paper, or paper)")
    paper.add_argument("--title", default="The paper's tables", help="of the page")
    paper.add_argument(
        "--beside", choices=("criteo", "covertype", "higgs"), help="the paper's numbers for these data, too"
    )

    convert = command("convert", "the checkpoints of a run from one file to shards, or back")
    convert.add_argument("run", type=run_folder, metavar="RUN", help="run folder")
    convert.add_argument("output", metavar="OUT", help="run folder to write; resume and evaluate it like the other")
    convert.add_argument("--to", required=True, choices=("single", "sharded"), help="single: as without --distributed")

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
