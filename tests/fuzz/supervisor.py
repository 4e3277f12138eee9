"""Starts the workers, shares the time among the suites, and blames a worker that dies or hangs on its last case."""

import collections
import dataclasses
import json
import signal
import subprocess
import sys
import time

from fuzz import worker

SHARES = {"operators": 5, "sidedoors": 3, "embedding": 2, "optimiser": 2, "swap": 2, "bytes": 2, "kill": 2}
SLICE = 60  # seconds at most that a worker lives: a new one begins with fresh memory


@dataclasses.dataclass(frozen=True)
class Limits:
    seconds: float
    processes: int
    failures: int  # after which a suite is given up
    hang: float = 300  # seconds after which a case hangs


@dataclasses.dataclass
class Report:
    """What a suite tried and what failed; prints as text."""

    name: str
    next: int
    share: float
    used: float = 0.0
    tried: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: list[dict] = dataclasses.field(default_factory=list)

    @property
    def cases(self):
        return sum(self.tried.values())

    def __str__(self):
        lines = [f"{self.name}: {self.cases:,} cases in {self.used:.0f} process seconds, {len(self.failures)} failed"]
        lines += [f"    {count:8,}  {what}" for what, count in sorted(self.tried.items())]
        lines += [f"  FAILED {self.name}:{failure['case']}  {failure['error']}" for failure in self.failures]
        return "\n".join(lines)


class Worker:
    """A process that runs the cases of one suite from ``report.next`` on."""

    def __init__(self, report, seconds, folder, hang):
        self.hang = hang
        self.report, self.first, self.started = report, report.next, time.monotonic()
        self.log = folder / f"{report.name}-{self.first}.log"
        arguments = [report.name, str(self.first), str(seconds), str(folder), str(self.log)]
        with open(self.log.with_suffix(".stderr"), "w") as errors:
            self.process = subprocess.Popen([sys.executable, worker.__file__, *arguments], stdout=errors, stderr=errors)
        self.position, self.killed = 0, False
        report.next += 1_000_000  # another worker of the suite must not run the same cases

    def poll(self):
        """Whether it has ended; reads what it wrote down."""
        ended = self.process.poll() is not None
        self._read()
        if ended:
            self.report.used += time.monotonic() - self.started
            if self.process.returncode:
                self._blame()
            self.log.with_suffix(".stderr").unlink()
        elif time.time() - self._current_since() > self.hang and not self.killed:
            self.killed = True
            self.process.send_signal(signal.SIGABRT)  # faulthandler then says where it is
        return ended

    def _read(self):
        if not self.log.exists():
            return
        with open(self.log) as file:
            file.seek(self.position)
            for line in iter(file.readline, ""):
                if not line.endswith("\n"):
                    break  # half written
                self.position += len(line.encode())
                self._note(json.loads(line))

    def _note(self, entry):
        self.report.tried.update(entry.get("done", {}))
        if "failure" in entry:
            self._fail(entry["failure"], entry["error"], entry["traceback"])

    def _fail(self, case, error, said):
        self.report.failures.append({"case": case, "error": error, "traceback": said})
        replay = f"--case {self.report.name}:{case} (or, with all that ran before it, :{self.first}-{case})"
        print(f"FAILED {replay}\n{said}", flush=True)

    def _blame(self):
        said = self.log.with_suffix(".stderr").read_text()[-4000:]
        code = self.process.returncode
        what = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        current = self.log.with_suffix(".current")
        case = int(current.read_text()) if current.exists() else self.first
        self.report.tried["failed"] += 1
        self._fail(case, f"the process {'hung and ' if self.killed else ''}{what}", said)

    def _current_since(self):
        current = self.log.with_suffix(".current")
        return current.stat().st_mtime if current.exists() else time.time()


def run(names, seed, limits, folder):
    """All suites, each for its share of the time; the one that is furthest behind gets the next process."""
    reports = [Report(name, seed, SHARES.get(name, 1)) for name in names]
    end, workers = time.monotonic() + limits.seconds, []
    # Short enough that every suite has its turn; each has one, however short the time.
    seconds = min(SLICE, max(2.0, limits.seconds * limits.processes / len(names) / 2))
    while True:
        workers = [each for each in workers if not each.poll()]
        late = time.monotonic() > end - 1
        able = [each for each in reports if len(each.failures) < limits.failures and (each.next == seed or not late)]
        if not workers and not able:
            return reports
        if able and len(workers) < limits.processes:
            busy = collections.Counter()
            for each in workers:
                busy[each.report.name] += time.monotonic() - each.started + 1
            report = min(able, key=lambda each: (each.used + busy[each.name]) / each.share)
            workers.append(Worker(report, seconds, folder, limits.hang))
        time.sleep(0.05)
