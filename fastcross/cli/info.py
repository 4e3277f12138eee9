"""fastcross info, doctor and explain: what a run or a cache holds, whether the kernels are right and fast on this
machine, and which crosses a trained DCN uses."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcross.batch import Batch
from fastcross.cli.printing import bar, plain, print_cache, print_metrics, show
from fastcross.data.cache import Cache
from fastcross.data.prediction import read_for_prediction
from fastcross.doctor import clock_of, jobs, new_report, take_turns
from fastcross.explain.decomposition import CrossLogit
from fastcross.explain.explanation import (
    Explanation,
    Speller,
    dense_edges,
    drivers,
    explain_degrees,
    explain_example,
    is_visible,
)
from fastcross.explain.explanation import explain as explain_model
from fastcross.explain.importance import permutation_importances
from fastcross.explain.page import driver_text, number, write_page
from fastcross.models.dcn import DCN
from fastcross.training.config import choose_device
from fastcross.training.environment import describe_environment
from fastcross.training.metrics import predict_logits
from fastcross.training.run_folder import Run, Trained, load_model

if TYPE_CHECKING:
    from tqdm import tqdm


ROWS_PER_BATCH = 1024  # the pairs of this many rows stay in the CPU's cache
BRIEFLY = 64  # batches that `fastcross info` reads
PERMUTED = 8  # batches whose columns are permuted
Batches = Callable[[], Iterable[Batch]]


def info(args: Namespace) -> int:
    if args.path is None:
        print("\n".join(describe_environment()))
        return 0
    path = Path(args.path)
    if (path / "config.json").exists():
        print_run(Run(path))
    elif (path / "manifest.json").exists():
        print_cache(Cache.open(path))
    elif not path.exists():
        raise ValueError(f"there is no {path}")
    else:
        raise ValueError(f"{path} is neither a run folder, with a config.json, nor a cache, with a manifest.json")
    return 0


def doctor(args: Namespace) -> int:
    """Exit code 1: something is wrong."""
    device = choose_device(args.device)
    if args.tune is not None or args.run:
        return tune_plans(args, device)
    report, todo = new_report(device), jobs(device, args.quick)
    with bar("doctor", len(todo), " checks") as progress:
        for name, job in todo:
            progress.set_postfix_str(name)
            job(report)
            progress.update()
    print(report.markdown())
    if args.output:
        report.write(Path(args.output))
        print(f"report: {Path(args.output) / 'report.md'}")
    return 1 if report.wrong else 0


def tune_plans(args: Namespace, device: Any) -> int:
    """Times tiles of the GPU kernels, and keeps the fastest where the kernels look for them."""
    from fastcross import plans  # which needs Triton

    if device.type != "cuda":
        raise ValueError(f"--tune times the kernels of a GPU; got device {device}")
    shapes = plans.parse_shapes(args.tune or ([] if args.run else ["4096x1026x6"]))
    if args.run:
        shapes.append(plans.shape_of(load_model(args.run, "cpu").model, Run(args.run).config["training"]["batch_size"]))
    entries: list[plans.Entry] = []
    with bar("tune", len(shapes), " shapes") as progress:
        for shape in shapes:
            progress.set_postfix_str(str(shape))
            entries += plans.tune(shape, device, partial(take_turns, clock=clock_of(device), budget=1.0), show)
            progress.update()
    print(plans.table(entries))
    print(f"tiles: {plans.keep(entries, device)}")
    return 0


def print_run(run: Run) -> None:
    plan = run.config
    print(f"run {run.path}: {plan['model']}, {'finished' if run.result else 'unfinished'}")
    for name in ("options", "training", "cache", "device", "threads"):
        if text := plain(plan[name]):
            print(f"{name}: {text}")
    if run.result:
        print_metrics(run.result)
        print_strongest(load_model(run.path, "cpu"))
    else:
        print(f"continue with: fastcross train --resume {run.path}")


def explain(args: Namespace) -> int:
    """A page with the crosses that the model uses."""
    trained = load_model(args.run, "cpu")
    model = trained.model
    if not isinstance(model, DCN):
        raise ValueError(f"explain reads the cross network of a DCN; {args.run} holds a {type(model).__name__}")
    rows, training = _rows(trained, args.data), _training(trained)
    if training is None:
        show(f"the cache {trained.cache} is gone: the fields' means are taken over {args.data}")
    if model.config.cross_type == "matrix":
        with bar("explain", None) as progress:
            print_degrees(*explain_degrees(model, _counted(rows, progress), training=training, output=args.class_))
        show("fields and pairs are told apart for cross_type vector alone")
        return 0
    names = trained.schema.names
    with bar("explain", None) as progress:
        explanation = explain_model(model, _counted(rows, progress), training=training, names=names, output=args.class_)
    spell = Speller(trained.encoder, dense_edges(rows()))
    crosses = [cross.fields for cross in explanation.strongest(args.top)]
    pairs = [(names.index(first), names.index(second)) for first, second in crosses]
    found = drivers(CrossLogit(model, args.class_), rows(), explanation, pairs, spell.edges, spell)
    told = dict(zip(crosses, found, strict=True))
    batches = islice(rows(), PERMUTED)
    changes = permutation_importances(lambda batch: predict_logits(model, [batch])[0], batches, trained.encoder)
    example = _example(rows, args.row)
    page = write_page(
        Path(args.output or Path(args.run) / "explanation"),
        explanation,
        title=f"What {args.run} learned",
        drivers=told,
        importances=changes,
        example=explain_example(model, example, explanation, output=args.class_),
        values=spell.row(example),
        top=args.top,
    )
    print_explanation(explanation)
    ranked = sorted(changes.items(), key=lambda pair: -pair[1])[:5]
    print(f"permuted, moves the output (share): {', '.join(f'{name} {share:.1%}' for name, share in ranked)}")
    for fields, strongest in list(told.items())[:5]:
        print(f"  {driver_text(fields, strongest[0])}")
    print(f"page: {page}")
    return 0


def print_strongest(trained: Trained) -> None:
    """Print the strongest crosses of a DCN over some of its training rows, if the cache still exists."""
    training = _training(trained)
    model = trained.model
    if not isinstance(model, DCN) or not model.parallel or training is None:
        return
    if model.config.cross_type == "matrix":
        print_degrees(*explain_degrees(model, lambda: islice(training(), BRIEFLY)))
    elif model.config.cross_type == "vector":
        print_explanation(explain_model(model, lambda: islice(training(), BRIEFLY), names=trained.schema.names))


def print_degrees(degrees: Sequence[float], deep: float, rows: int) -> None:
    parts = {**{f"degree {n}": share for n, share in enumerate(degrees, start=1)}, "deep": deep}
    shares = ", ".join(f"{name} {share:.1%}" for name, share in parts.items() if is_visible(share))
    print(f"variance of the parts over {rows:,} rows: {shares}")


def print_explanation(explanation: Explanation) -> None:
    """Print the logit's variance by degree, and the five strongest crosses."""
    print_degrees(explanation.degrees, explanation.unexplained, explanation.rows)
    unit = f"standard deviation in the {explanation.of}"
    fields = ", ".join(f"{name} {number(value)}" for name, value in explanation.by_themselves()[:5])
    print(f"strongest fields by themselves ({unit}): {fields}")
    crosses = ", ".join(f"{' × '.join(cross.fields)} {number(cross.strength)}" for cross in explanation.strongest(5))
    print(f"strongest crosses ({unit}): {crosses}")


def _rows(trained: Trained, data: str | None) -> Batches:
    """The rows to explain: those of a file, or the test part of the cache (the training part if there is none)."""
    if data is not None and not Path(data).is_dir():
        return lambda: read_for_prediction(data, trained.encoder, batch_size=ROWS_PER_BATCH)
    cache = trained.open_cache(data)
    part = next(part for part in ("test", "validation", "train") if cache.sizes[part])
    return lambda: cache.batches(part, ROWS_PER_BATCH)


def _training(trained: Trained) -> Batches | None:
    if not Path(trained.cache).exists():
        return None
    cache = trained.open_cache()
    return lambda: cache.batches("train", ROWS_PER_BATCH)


def _counted(rows: Batches, progress: "tqdm[Any]") -> Batches:
    def batches() -> Iterable[Batch]:
        for batch in rows():
            yield batch
            progress.update(len(batch))

    return batches


def _example(rows: Batches, number: int) -> Batch:
    """Row ``number``, counted from 1, as a batch."""
    first = 1
    for batch in rows():
        if number < first + len(batch):
            return batch.row(number - first)
        first += len(batch)
    raise ValueError(f"--row must be one of the {first - 1:,} rows, from 1; got {number}")
