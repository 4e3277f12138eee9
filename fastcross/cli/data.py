"""fastcross prepare: from a log or a table to a cache."""

from argparse import Namespace

from fastcross.cli.experiment import preparation
from fastcross.cli.info import print_cache
from fastcross.cli.printing import bars, show
from fastcross.training.dataset import Dataset


def prepare(args: Namespace) -> int:
    with bars() as progress:
        cache, _ = Dataset(tuple(args.data), args.cache, preparation(args)).open(show, progress=progress)
    print_cache(cache)
    return 0
