"""The fastcross command: runs the parsed command, and prints an error as one line on standard error.

Exit codes: 0 done, 1 done but part of the input was lost (doctor: something is wrong), 2 an error, 130 interrupted by
Ctrl-C, 143 by SIGTERM. (A training that is interrupted by either saves its state first, and exits with 130.)
"""

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

FILES = {  # of the commands that have no file of their own name
    **{"prepare": "train", "extend": "train", "tune": "compare", "paper": "compare"},
    **{"evaluate": "predict", "export": "predict", "serve": "predict", "convert": "predict", "explain": "info"},
    "doctor": "info",
}


def main(argv: Sequence[str] | None = None) -> int:
    command, debug = "", False
    try:
        with _leaving_at_once():
            from fastcross.cli.parser import parse

            args = parse(argv)
            command, debug = args.command, args.debug
            args.argv = list(sys.argv[1:] if argv is None else argv)
            run: Callable[..., int] = getattr(
                importlib.import_module(f"fastcross.cli.{FILES.get(command, command)}"), command
            )
        with _exiting_on_sigterm():
            return run(args)
    except KeyboardInterrupt:
        # An interrupt that has passed through exec() of a text, as in many imports, is recorded as unhandled: Python
        # would end itself by the signal instead of with our exit code. Another exec() clears the record.
        exec("")
        print(f"fastcross {command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        print(f"fastcross {command}: {' '.join(_explain(error).split())}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Exit at once on Ctrl-C while libraries are imported: there is nothing to clean up yet, and an interrupted import
    may swallow the exception or print a traceback."""

    def leave(number: int, frame: object) -> None:
        os.write(2, b"fastcross: interrupted\n")
        os._exit(130)

    usual = signal.default_int_handler
    # A job in the background of a shell ignores Ctrl-C, and only the main thread may change what it does.
    if signal.getsignal(signal.SIGINT) is not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


@contextlib.contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that temporary files are removed."""
    usual = signal.getsignal(signal.SIGTERM)
    if usual is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _explain(error: Exception) -> str:
    """The message of an error for the user."""
    from fastcross.extras import extra_of, needs

    if isinstance(error, ModuleNotFoundError) and error.name and extra_of(error.name):
        return needs("this command", error.name.partition(".")[0])
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | RuntimeError | ImportError | OSError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}; this is a defect of fastcross, --debug shows where"


if __name__ == "__main__":
    sys.exit(main())
