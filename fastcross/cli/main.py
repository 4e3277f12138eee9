"""The fastcross command: runs what arguments.py has parsed, and turns errors into one line on standard error."""

import importlib
import os
import sys
from collections.abc import Sequence

from fastcross.cli.arguments import build_parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        module = importlib.import_module(f"fastcross.cli.{'compare' if args.command == 'compare' else 'commands'}")
        return getattr(module, args.command)(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if args.debug:
            raise
        return _fail(args.command, f"{error}; the commands need: pip install 'fastcross[train,cpu]'")
    except Exception as error:
        if args.debug:
            raise
        return _fail(args.command, str(error) or type(error).__name__)


def _fail(command: str, message: str) -> int:
    print(f"fastcross {command}: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
