"""fastcross prepare: from a log or a table to a cache."""

from argparse import Namespace

from fastcross.cli.experiment import preparation
from fastcross.cli.info import print_cache
from fastcross.cli.printing import bars, show
from fastcross.data import prepare as prepare_cache


def prepare(args: Namespace) -> int:
    with bars() as progress:
        cache = prepare_cache(args.data, args.cache, progress=progress, **preparation(args))
    print_cache(cache)
    skipped = cache.manifest["skipped"]
    if skipped["rows"]:
        show(f"skipped {skipped['rows']:,} bad rows, such as: {skipped['examples'][0]}")
    return 1 if skipped["truncated"] else 0
