"""kill -9 at random points of a training, then --resume: bit for bit the run that nobody disturbed."""

import os
import shutil
import signal
import subprocess
import sys
import time

from fuzz import draw, workload

ATTEMPTS = 4  # at most so many kills before the run may end


def prepare(folder):
    workload.make(folder)


def case(number, folder):
    rng = draw.start(number)
    name = f"killed-{os.getpid()}-{number}"
    run, kills = folder / name, 0
    try:
        for attempt in range(ATTEMPTS + 1):
            resuming = (run / "config.json").exists()
            arguments = ["train", "--resume", name] if resuming else workload.train(name)
            moment = None if attempt == ATTEMPTS else Moment(rng, run, folder / "finished")
            code, said = (_spawn if rng.random() < 0.1 else _fork)(folder, arguments, moment)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                raise AssertionError(f"fastcross {' '.join(arguments)} after {kills} kills: {code}\n{said}")
            kills += 1
            if (run / "result.json").exists():
                break
        compare(run, folder / "finished", killed_last=code != 0)
    finally:
        shutil.rmtree(run, ignore_errors=True)
    return f"{kills} kills"


class Moment:
    """When to kill: at any time from the start, or at any time from the first file that is written."""

    def __init__(self, rng, run, undisturbed):
        self.run, self.before, self.waiting = run, self._newest(run), rng.random() < 0.75
        written = [path.stat().st_mtime for path in undisturbed.iterdir()]
        self.delay = rng.uniform(0, 1.2 * (max(written) - min(written)) if self.waiting else 3)
        self.since = time.monotonic()

    def has_come(self):
        if self.waiting and self._newest(self.run) != self.before:
            self.waiting, self.since = False, time.monotonic()
        return not self.waiting and time.monotonic() > self.since + self.delay

    @staticmethod
    def _newest(run):
        try:
            return max((path.stat().st_mtime for path in run.iterdir() if path.name != ".lock"), default=0)
        except FileNotFoundError:  # the run is not there yet, or a file has just been replaced
            return 0


def _spawn(folder, arguments, moment):
    """As a user starts it."""
    with open(folder / f"spawn-{os.getpid()}.log", "w+") as log:
        process = subprocess.Popen([sys.executable, "-m", "fastcross", *arguments], cwd=folder, stdout=log, stderr=log)
        while process.poll() is None:
            if moment is not None and moment.has_come():
                process.kill()
            time.sleep(0.002)
        log.seek(0)
        return process.returncode, log.read()


def _fork(folder, arguments, moment):
    """As a new process would, without waiting for imports: nothing here has run an operator or started a thread."""
    import fastcross.cli.train  # noqa: F401
    from fastcross.cli.main import main

    log = folder / f"fork-{os.getpid()}.log"
    log.write_text("")  # the child may be killed before it opens it
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.chdir(folder)
            with open(log, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                code = main(list(arguments))
                sys.stdout.flush()
        finally:
            os._exit(code)
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), log.read_text()
        if moment is not None and moment.has_come():
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def compare(run, undisturbed, killed_last):
    found, expected = workload.outcome(run), workload.outcome(undisturbed)
    for name, value in expected.items():
        if found[name] != value:
            both = f"{str(found[name])[:300]} and {str(value)[:300]}"
            raise AssertionError(f"{name} is not that of the undisturbed run: {both}")
    left = sorted(path.name for path in run.iterdir() if path.name.startswith("."))
    if left and not killed_last:
        raise AssertionError(f"left behind: {', '.join(left)}")
