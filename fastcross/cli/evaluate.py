"""fastcross evaluate: the metrics of a trained model."""

from argparse import Namespace
from pathlib import Path

from fastcross.cli.conflicts import refuse
from fastcross.cli.outputs import check_output, refuse_overwriting
from fastcross.cli.printing import bar, bars, print_metrics, report_reading
from fastcross.data import read_for_prediction
from fastcross.training.metrics import evaluate as evaluate_part
from fastcross.training.metrics import predict_rows
from fastcross.training.run_folder import load_model, write_json


def evaluate(args: Namespace) -> int:
    reads_file = bool(args.data) and not Path(args.data).is_dir()
    if reads_file:
        refuse(args, "a file, all rows of which are evaluated", ("part",))
    else:
        refuse(args, "a cache, whose rows are known to be good", ("on_error",))
    lost = False
    output = check_output(args.output, (".json",), args.run) if args.output else None
    trained = load_model(args.run)
    if reads_file:
        if args.cache:
            trained.open_cache(args.cache)
        with bars("evaluate") as progress:
            rows = read_for_prediction(
                args.data, trained.encoder, on_error=args.on_error, labelled=True, progress=progress
            )
            if output:
                refuse_overwriting(output, rows.paths)
            predicted = predict_rows(trained.model, rows)
        found = {args.data: predicted.summarise(regression=trained.schema.task == "regression")}
        lost = report_reading(rows)
    else:
        cache = trained.open_other_cache(args.data) if args.data else trained.open_cache(args.cache)
        with bar("evaluate", cache.sizes.get(args.part)) as shown:
            found = {args.part: evaluate_part(trained.model, cache, args.part, progress=shown.update)}
    print_metrics(found)
    if output:
        write_json(output, found)
    return 1 if lost else 0
