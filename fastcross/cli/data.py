"""fastcross prepare: from a log or a table to a cache."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from fastcross.cli.experiment import preparation
from fastcross.cli.printing import bars, show
from fastcross.data import Cache
from fastcross.data import prepare as prepare_cache


def prepare(args: Namespace) -> int:
    with bars() as progress:
        cache = prepare_cache(args.data, args.cache, progress=progress, **preparation(args))
    print_cache(cache)
    skipped = cache.manifest["skipped"]
    if skipped["rows"]:
        show(f"skipped {skipped['rows']:,} bad rows, such as: {skipped['examples'][0]}")
    return 1 if skipped["truncated"] else 0


def print_cache(cache: Cache) -> None:
    schema = cache.schema
    print(f"cache {cache.path}, made from {', '.join(item['name'] for item in cache.manifest['inputs'])}")
    configuration = {name: value for name, value in cache.manifest["configuration"].items() if name != "columns"}
    print(f"made with: {plain(configuration)}; encoder {cache.encoder_fingerprint[:12]}")
    print(cache.report)
    if cache.manifest["findings"]:
        return  # the report has named each column
    print(f"dense columns ({len(schema.dense_names)}): {', '.join(schema.dense_names)}")
    for kind, names, cardinalities in (
        ("categorical", schema.categorical_names, schema.cardinalities),
        ("multi-valued", schema.bag_names, schema.bag_cardinalities),
    ):
        if names:
            sizes = ", ".join(f"{name} {size:,}" for name, size in zip(names, cardinalities, strict=True))
            print(f"{kind} columns ({len(names)}) with their cardinalities: {sizes}")


def plain(values: Any) -> str:
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
