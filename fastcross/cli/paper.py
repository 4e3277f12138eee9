"""fastcross paper: the paper's tables from a study, or from runs."""

from argparse import Namespace
from pathlib import Path

from fastcross.cli.printing import show
from fastcross.extras import require
from fastcross.tuning.report import Results, write_report


def paper(args: Namespace) -> int:
    require("paper", "train")  # the figure is drawn with matplotlib
    if not args.study and not args.runs:
        raise ValueError("say what to report: --study STUDY, --runs RUN …, or both")
    results = Results.read(args.study, args.runs)
    for run in results.unfinished:
        show(f"{run} is not finished: left out")
    study = Path(args.study) if args.study else None
    default = study / "paper" if study and study.is_dir() else Path("paper")
    page = write_report(args.output or default, results, beside=args.beside, title=args.title)
    print(page.read_text())
    print(f"page: {page}")
    return 0
