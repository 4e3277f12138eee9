"""A small log with every kind of column, its cache and its runs, through the command line alone."""

import contextlib
import csv
import fcntl
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

MODEL = ["--cross-layers", "2", "--deep-layers", "8", "--embedding-dim", "4"]
TRAINING = ["--batch-size", "32", "--epochs", "12", "--evaluate-every", "20", "--patience", "0", "--threads", "1"]
ROWS = 600
TIMES = ("seconds", "rows_per_second", "sha256")


def make(folder):
    """log.csv, new.csv, cache/, finished/ and unfinished/, once for all workers."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".making", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "made").exists():
            return
        write_log(folder / "log.csv", ROWS, seed=0)
        write_log(folder / "new.csv", 40, seed=1)
        kinds = ["--multi", "genres:|", "--dense", "price,age", "--categorical", "shop,item"]
        command(folder, "prepare", "log.csv", "--cache", "cache", *kinds)
        command(folder, *train("finished"))
        interrupted(folder)
        (folder / "made").touch()


def train(run, cache="cache"):
    """The command that trains ``run``: with a checkpoint after every step."""
    return ["train", "--data", cache, "--run", run, *MODEL, *TRAINING, "--checkpoint-seconds", "0"]


def write_log(path, rows, seed):
    rng = random.Random(seed)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "price", "age", "shop", "item", "genres"])
        for _ in range(rows):
            shop, item = rng.randrange(4), rng.randrange(30)
            genres = "|".join(rng.sample(["drama", "comedy", "war", "crime", "film noir"], rng.randrange(4)))
            label = int((shop + item) % 2 == 0) if rng.random() < 0.9 else rng.randrange(2)
            price = "" if rng.random() < 0.05 else f"{rng.lognormvariate(0, 1):.3f}"
            writer.writerow([label, price, rng.randint(18, 90), f"shop {shop}", f"item {item}", genres])


def command(folder, *arguments):
    """``fastcross`` in a process of its own; its standard error if it fails."""
    done = subprocess.run([sys.executable, "-m", "fastcross", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"fastcross {' '.join(arguments)}: {done.returncode}\n{done.stderr}")
    return done.stdout


def interrupted(folder):
    """A run that was killed on its way, as soon as it had come to a second evaluation."""
    arguments = [sys.executable, "-m", "fastcross", *train("unfinished")]
    process = subprocess.Popen(arguments, cwd=folder, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = folder / "unfinished" / "metrics.csv"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (folder / "unfinished" / "result.json").exists():
        raise AssertionError("the run that was to be killed has finished")


def in_process(folder, *arguments):
    """The command's exit code, what it printed and what it said, without a new process."""
    from fastcross.cli.main import main

    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*arguments])
    finally:
        os.chdir(before)
    return code, out.getvalue(), err.getvalue()


def outcome(run):
    """What must not depend on how often a run was killed: everything but the time it took."""
    from fastcross.training import checkpoint

    with open(run / "metrics.csv", newline="") as file:
        found = {"result": json.loads((run / "result.json").read_text()), "metrics": list(csv.DictReader(file))}
    found |= {name: checkpoint.load(run / f"{name}.safetensors") for name in ("best", "last")}
    return {name: _without_time(value) for name, value in found.items()}


def _without_time(value):
    if isinstance(value, dict):
        return {key: _without_time(each) for key, each in value.items() if key not in TIMES}
    if isinstance(value, list | tuple):
        return [_without_time(each) for each in value]
    if hasattr(value, "numpy"):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    return repr(value)  # so that NaN equals NaN


def copied(folder, name, *parts):
    """A copy that one worker may damage."""
    own = folder / f"{name}-{os.getpid()}"
    if not own.exists():
        own.mkdir()
        for part in parts:
            source = folder / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, own / part)
    return own
