"""Printing for all commands: progress to standard error, results to standard output."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

    from fastcross.data.cache import Cache
    from fastcross.data.prediction import PredictionRows


def show(line: str) -> None:
    """Print a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def bar(stage: str, total: int | None, unit: str = " rows") -> "tqdm[Any]":
    """A progress bar; tqdm shows it only if standard error is a terminal."""
    from tqdm.auto import tqdm

    return tqdm(
        desc=stage,
        total=total,
        unit=unit,
        unit_scale=True,
        dynamic_ncols=True,
        leave=False,
        disable=None,
        file=sys.stderr,
    )


@contextlib.contextmanager
def bars(name: str | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """A function of (stage, done, total) for :func:`fastcross.data.prepare`: one bar per stage, or one with this
    name."""
    shown: dict[str, tqdm[Any]] = {}  # the bar of the present stage

    def close() -> None:
        while shown:
            shown.popitem()[1].close()

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in shown:
            close()
            shown[stage] = bar(name or stage, total, "B" if stage in ("read", "predict") else "")
        shown[stage].update(done - shown[stage].n)
        if done >= total:
            close()

    try:
        yield progress
    finally:
        close()


def report_reading(rows: "PredictionRows") -> bool:
    """Print the skipped bad rows of a file, and the share of values that the model does not know.

    Returns whether a part of the file was lost, with an unknown number of rows.
    """
    if rows.problems:
        show(f"skipped {len(rows.problems):,} bad rows, such as: {rows.problems.examples[0]}")
    unknown = {name: count for name, count in rows.unknown.items() if count}
    if unknown:
        worst = sorted(unknown, key=unknown.__getitem__, reverse=True)[:3]
        most = ", ".join(f"{name} {unknown[name] / rows.rows:.1%}" for name in worst)
        more = f"; and of {len(unknown) - len(worst)} more columns" if len(unknown) > len(worst) else ""
        show(f"values unknown to the model, treated as rare: {most} of the rows{more}")
    for message in (*rows.warnings, *rows.problems.truncated):
        show(f"warning: {message}")
    return bool(rows.problems.truncated)


def print_metrics(result: Mapping[str, Any]) -> None:
    """Print the metrics of each part, one line each, and the cost of a training."""
    for part, found in result.items():
        if isinstance(found, Mapping) and ("logloss" in found or "rmse" in found):
            print(f"{part}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items() if value is not None))
    if "optimum" in result:
        print("best possible logloss: " + ", ".join(f"{part} {value:.4f}" for part, value in result["optimum"].items()))
    if "seconds" in result:
        print(
            f"{result['steps']:,} steps in {result['seconds']:.1f} s, {result['rows_per_second']:,.0f} rows/s; "
            f"{result['parameters']:,} parameters, {result['dense_parameters']:,} without embeddings"
        )


def print_cache(cache: "Cache") -> None:
    schema = cache.schema
    print(f"cache {cache.path}, made from {', '.join(item['name'] for item in cache.manifest['inputs'])}")
    configuration = {name: value for name, value in cache.manifest["configuration"].items() if name != "columns"}
    print(f"made with: {plain(configuration)}; encoder {cache.encoder_fingerprint[:12]}")
    print(cache.report)
    if cache.manifest["findings"]:
        return  # the report lists each column
    print(f"dense columns ({len(schema.dense_names)}): {', '.join(schema.dense_names)}")
    for kind, names, cardinalities in (
        ("categorical", schema.categorical_names, schema.cardinalities),
        ("multi-valued", schema.bag_names, schema.bag_cardinalities),
    ):
        if names:
            sizes = ", ".join(f"{name} {size:,}" for name, size in zip(names, cardinalities, strict=True))
            print(f"{kind} columns ({len(names)}) with their cardinalities: {sizes}")


def plain(values: Any) -> str:
    """As in "lr 0.001, epochs 3", without values of None."""
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
