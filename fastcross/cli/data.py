"""fastcross prepare: from a log or a table to a cache."""

import sys
from argparse import Namespace

from fastcross.cli.experiment import preparation
from fastcross.cli.info import print_cache
from fastcross.cli.printing import show
from fastcross.training.dataset import Dataset


def prepare(args: Namespace) -> int:
    cache, _ = Dataset(tuple(args.data), args.cache, preparation(args)).open(show, progress=sys.stderr.isatty())
    print_cache(cache)
    return 0
