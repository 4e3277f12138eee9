"""fastcross evaluate: the metrics of a trained model."""

from argparse import Namespace
from pathlib import Path

from fastcross.cli.printing import print_metrics, report_reading
from fastcross.data import read_for_prediction
from fastcross.training.evaluate import evaluate as evaluate_part
from fastcross.training.evaluate import predict as predict_logits
from fastcross.training.metrics import summarise
from fastcross.training.run_folder import write_json
from fastcross.training.trained import load_model


def evaluate(args: Namespace) -> int:
    trained = load_model(args.run)
    if args.data and not Path(args.data).is_dir():
        rows = read_for_prediction(args.data, trained.open_cache(args.cache), on_error=args.on_error, labelled=True)
        logits, label = predict_logits(trained.model, rows)
        assert label is not None
        found = {args.data: summarise(logits, label)}
        report_reading(rows)
    else:
        cache = trained.open_cache(args.data or args.cache)
        found = {args.part: evaluate_part(trained.model, cache, args.part)}
    print_metrics(found)
    if args.output:
        write_json(Path(args.output), found)
    return 0
