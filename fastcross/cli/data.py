"""fastcross prepare: from a log or a table to a cache."""

import sys
from argparse import Namespace

from fastcross.cli.info import print_cache
from fastcross.cli.printing import show
from fastcross.training.sources import preparation, prepare_files


def prepare(args: Namespace) -> int:
    print_cache(prepare_files(args.data, args.cache, preparation(args), show, progress=sys.stderr.isatty()))
    return 0
