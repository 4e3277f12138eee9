"""Where a command's rows come from: a cache, files that are prepared first, or the embedded default."""

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastcross._version import __version__
from fastcross.cli.arguments import FOR_GENERATED_LOG, GENERATED_ROWS
from fastcross.data import Cache, prepare
from fastcross.data.generate import read_info, write_click_log


def user_folder() -> Path:
    """Where prepared data is kept unless --cache says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastcross"


def open_source(args: Namespace, show: Callable[[str], None]) -> tuple[Cache, dict[str, float]]:
    """The cache the arguments ask for, made first if need be, and the best possible logloss of its parts if known."""
    if not args.data:
        for name, value in FOR_GENERATED_LOG.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        return default_source(args.rows or GENERATED_ROWS, args.cache, show)
    if len(args.data) == 1 and Path(args.data[0]).is_dir():
        return Cache.open(args.data[0]), {}
    return prepare_files(args.data, args.cache, preparation(args), show), {}


def default_source(rows: int, folder: str | None, show: Callable[[str], None]) -> tuple[Cache, dict[str, float]]:
    """The embedded default: a generated click log whose best possible logloss is known."""
    home = Path(folder) if folder else user_folder() / f"clicks-{rows}-{__version__}"
    home.mkdir(parents=True, exist_ok=True)
    log = home / "clicks.txt"
    if not log.exists() or not read_info(log):
        show(f"generating a click log of {rows:,} rows with planted crosses: {log}")
        write_click_log(log, rows)
    info = read_info(log)
    assert info is not None
    cache = prepare_files([str(log)], str(home / "cache"), {"format": "criteo", "split": info.split}, show)
    return cache, info.bayes_logloss_parts


def prepare_files(
    files: list[str], cache: str | None, options: dict[str, Any], show: Callable[[str], None], *, progress: bool = False
) -> Cache:
    """The cache of these files under these options; `prepare` itself sees whether it is there and up to date."""
    if cache is None:
        key = json.dumps([[str(Path(file).resolve()) for file in files], options], sort_keys=True, default=str)
        name = f"{Path(files[0]).name.split('.')[0]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        cache = str(user_folder() / name)
    made = prepare(files, cache, progress=progress, **options)
    if skipped := made.manifest["skipped"]["rows"]:
        show(f"skipped {skipped:,} bad rows, such as: {made.manifest['skipped']['examples'][0]}")
    show(f"data: {cache}, {', '.join(f'{size:,} {part}' for part, size in made.sizes.items())} rows")
    return made


def preparation(args: Namespace) -> dict[str, Any]:
    """The arguments of `prepare`; what was not given is left to it."""
    options: dict[str, Any] = {"seed": args.split_seed, "on_error": args.on_error}
    if args.columns:
        options["columns"] = json.loads(Path(args.columns).read_text())
        if args.label:
            options["columns"]["label"] = args.label
    elif args.label:
        options["columns"] = args.label
    if args.split:
        options["split"] = _split(args.split)
    for name in ("format", "min_frequency", "hash_buckets"):
        if (value := getattr(args, name)) is not None:
            options[name] = value
    return options


def _split(text: str) -> str:
    """A single fraction trains, the rest tests; everything else goes to `prepare` as it is."""
    try:
        train = float(text)
    except ValueError:
        return text
    return f"random:{train:g},0,{1 - train:g}"
