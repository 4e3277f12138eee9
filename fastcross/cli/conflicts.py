"""Options that would have no effect are errors: a user who gives one expects it to matter."""

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

PREPARATION = (
    "format",
    "label",
    "task",
    "weight",
    "group",
    "categorical",
    "dense",
    "multi",
    "datetime",
    "drop",
    "columns",
    "time_column",
    "split",
    "split_seed",
    "min_frequency",
    "hash_buckets",
    "on_error",
)
WITH_RESUME = ("command", "debug", "argv", "parser", "resume", "cache", "processes", "max_restarts", "log")


def check_data(args: Namespace) -> None:
    """Of train and compare: a cache is prepared already, and the generated log has a form of its own."""
    if not args.data:
        refuse(args, "the generated log", PREPARATION)
    elif len(args.data) == 1 and Path(args.data[0]).is_dir():
        refuse(args, f"the cache {args.data[0]}, which is prepared already", ("rows", "cache", *PREPARATION))
    else:
        refuse(args, "--data, but on the log that is generated without it", ("rows",))


def check_resume(args: Namespace, what: str = "a run", others: Iterable[str] = ()) -> None:
    """With --resume nothing may be given but the options that are no property of what is resumed."""
    said = f"{what} that is resumed: its options are those it was started with"
    refuse(args, said, set(vars(args)) - {*WITH_RESUME, *others})


def refuse(args: Namespace, what: str, names: Iterable[str]) -> None:
    """Raise where one of these options was given, that is, where it differs from its default."""
    given = sorted(flag(name) for name in names if getattr(args, name) != args.parser.get_default(name))
    if given:
        raise ValueError(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect on {what}")


def flag(name: str) -> str:
    """How a user writes an option."""
    return "--cross" if name == "crosses" else f"--{name.replace('_', '-')}"
