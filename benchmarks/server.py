"""python -m benchmarks.server: requests to `fastcross serve` over loopback, beside a FastAPI handler with onnxruntime.

Both serve one model (26 columns of 10,000 texts and 13 numbers, deep 1024 × 1024) and take the same bodies; they must
agree before they are timed. wrk asks with 64 connections, one contestant after the other, in rounds; the rate and the
latencies of every round are kept, and ratios are of the same round. Writes results/DEVICE/server.json.

  --gathering    `fastcross serve` against itself: one request at a time, as they come, and with a delay
  --soak S       S seconds of load: the memory meanwhile
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import machine, results
from benchmarks.harness.measure import Refused
from benchmarks.serving import CASES, Case, make_encoder, make_rows
from fastcross.interop.serving import export_run
from fastcross.models.dcn import DCN
from fastcross.training.run_folder import Run

CASE = CASES[1]
CONNECTIONS, BODIES, THREADS = 64, 64, 1
ROWS = (1, 10, 100)
WRK = """
local bodies, at = {}, 0
for line in io.lines(BODIES) do bodies[#bodies + 1] = line end
wrk.method, wrk.headers["Content-Type"] = "POST", "application/json"
request = function() at = at % #bodies + 1; return wrk.format(nil, "/predict", nil, bodies[at]) end
done = function(summary, latency)
  local e = summary.errors
  print(string.format("RESULT %d %d %f %f %d", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), e.connect + e.read + e.write + e.status + e.timeout))
end
"""
# What people write today. The kind of the handler decides where it runs: `def` in a pool of threads, `async def` in
# the event loop.
FASTAPI = """
import sys
import numpy as np, onnxruntime, uvicorn
from fastapi import FastAPI
from pydantic import create_model

path, port, kind, threads = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
types = {port.name: str if port.type == "tensor(string)" else float for port in session.get_inputs()}
Row = create_model("Row", **{name: (kind, ...) for name, kind in types.items()})
Request = create_model("Request", rows=(list[Row], ...))
app = FastAPI()

def answer(request):
    columns = {
        name: np.array([getattr(row, name) for row in request.rows], object if kind is str else np.float64)
        for name, kind in types.items()
    }
    return {"probability": session.run(None, columns)[0].tolist()}

if kind == "def":
    @app.post("/predict")
    def predict(request: Request):
        return answer(request)
else:
    @app.post("/predict")
    async def predict(request: Request):
        return answer(request)

uvicorn.run(app, port=port, log_level="warning", access_log=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.server", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each contestant in each round (5)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--gathering", action="store_true", help="fastcross serve against itself")
    parser.add_argument("--soak", type=float, metavar="S", help="the memory under load, for S seconds")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        encoder = make_encoder(CASE)
        run, model = make_run(place / "model", encoder)
        if chosen.soak:
            found: dict[str, Any] = {"soak": soak(run, encoder, chosen.soak, place)}
        elif chosen.gathering:
            options = {"one request at a time": ("--max-batch", "1"), "as they come": ()}
            options |= {f"delay {ms} ms": ("--max-delay-ms", str(ms)) for ms in (1, 5)}
            found = {"gathering": compare({n: serve(run, *o) for n, o in options.items()}, encoder, chosen, place)}
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of PyTorch's exporter, about its own code
                path = export_run(model, encoder, place / "model.onnx").path
            contestants = {"fastcross serve": serve(run)}
            for kind in ("def", "async def"):
                contestants[f"FastAPI, {kind}"] = [sys.executable, "-c", FASTAPI, str(path), "PORT", kind, str(THREADS)]
            found = {"rivals": compare(contestants, encoder, chosen, place)}
    file = results.folder() / "server.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    facts = machine.machine() | machine.versions() | {"load after": f"{os.getloadavg()[0]:.1f}"}
    for name, value in found.items():
        known[name] = {"machine": facts, "command": " ".join(["python -m benchmarks.server", *sys.argv[1:]]), **value}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1) + "\n")


def make_run(folder: Path, encoder: Any) -> tuple[Path, DCN]:
    """A run folder with a model of the case, untrained."""
    torch.manual_seed(0)
    model = DCN(
        encoder.schema.cardinalities,
        CASE.dense,
        CASE.embedding_dim,
        cross_layers=CASE.cross_layers,
        deep_layers=CASE.deep_layers,
    ).eval()
    facts = {"cache": "none", "fingerprint": "", "encoder": encoder.fingerprint}
    plan = {"model": "dcn", "options": {}, "training": {}, "device": "cpu", "threads": 1, **facts}
    run = Run.create(folder, plan, encoder)
    described = {"kind": "dcn", "config": model.config.to_dict(), "schema": encoder.schema.to_dict(), "training": {}}
    run.save("best", {**described, **facts, "model": model.state_dict()})
    return run.path, model


def serve(run: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "fastcross", "serve", str(run), "--port", "PORT", "--threads", str(THREADS)]
    return [*command, *options]


@contextlib.contextmanager
def started(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([part.replace("PORT", str(port)) for part in command], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def ask(port: int, body: str) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", body.encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def wait_for(port: int, body: str) -> Any:
    for _ in range(600):
        try:
            return ask(port, body)
        except OSError:
            time.sleep(0.2)
    raise Refused(f"nobody answers at port {port}")


def make_bodies(case: Case, encoder: Any, rows: int, path: Path) -> list[str]:
    """Requests of different rows, as lines of a file."""
    bodies = []
    for seed in range(BODIES):
        raw = make_rows(case, encoder, rows, seed)["raw"]
        columns = {name: np.nan_to_num(v).tolist() if v.dtype != object else v.tolist() for name, v in raw.items()}
        listed = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        bodies.append(json.dumps({"rows": listed}))
    path.write_text("\n".join(bodies) + "\n")
    return bodies


def processor_seconds(process: int) -> float:
    """That a process and its threads have taken so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(port: int, bodies: Path, seconds: float, process: int) -> dict[str, float]:
    """Requests per second, latencies in ms, and the server's own processor time per request in ms."""
    before = processor_seconds(process)
    script = bodies.with_suffix(".lua")
    script.write_text(WRK.replace("BODIES", json.dumps(str(bodies)), 1))
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "--timeout", "30s", "-s", str(script)]
    done = subprocess.run([*command, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True)
    numbers = re.search(r"RESULT (\d+) (\d+) ([\d.]+) ([\d.]+) (\d+)", done.stdout)
    assert numbers, done.stdout
    requests, microseconds, p50, p99, errors = map(float, numbers.groups())
    cpu = 1e3 * (processor_seconds(process) - before) / max(requests, 1)
    return {"rate": requests / microseconds * 1e6, "p50": p50 / 1e3, "p99": p99 / 1e3, "cpu": cpu, "errors": errors}


def compare(commands: dict[str, list[str]], encoder: Any, chosen: Any, place: Path) -> dict[str, Any]:
    ports = {name: 18100 + i for i, name in enumerate(commands)}
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(started(c, ports[name])).pid for name, c in commands.items()}
        for rows in ROWS:
            path = place / f"bodies-{rows}.jsonl"
            bodies = make_bodies(CASE, encoder, rows, path)
            answers = [np.array(wait_for(port, bodies[0])["probability"]) for port in ports.values()]
            largest = max(float(np.abs(each - answers[0]).max()) for each in answers)
            if not largest < 1e-5:
                raise Refused(f"the answers differ by {largest}")
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
            for name, port in ports.items():
                load(port, path, 1, processes[name])
            for _ in range(chosen.rounds):
                for name, port in ports.items():
                    rounds[name].append(load(port, path, chosen.seconds, processes[name]))
            found[str(rows)] = {"difference": largest, "rounds": rounds}
            print(f"{rows} rows per request")
            first = rounds[next(iter(commands))]
            for name, each in rounds.items():
                median = {key: statistics.median(one[key] for one in each) for key in each[0]}
                rates = ratios(a["rate"] / b["rate"] for a, b in zip(first, each, strict=True))
                costs = ratios(b["cpu"] / a["cpu"] for a, b in zip(first, each, strict=True))
                times = "".join(f"  {key} {median[key]:8.2f} ms" for key in ("p50", "p99", "cpu"))
                print(f"  {name:22} {median['rate']:6.0f}/s{times}  errors {median['errors']:.0f}")
                print(f"  {'':22} the first: rate × {rates}, processor time / {costs}", flush=True)
    return found


def ratios(found: Iterable[float]) -> str:
    """Median, smallest and largest."""
    values = sorted(found)
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def soak(run: Path, encoder: Any, seconds: float, place: Path) -> dict[str, Any]:
    path = place / "bodies-1.jsonl"
    bodies = make_bodies(CASE, encoder, 1, path)
    memory: list[dict[str, float]] = []
    with started(serve(run), 18100) as process:
        wait_for(18100, bodies[0])
        answers: dict[str, Any] = {}
        asking = threading.Thread(target=lambda: answers.update(load(18100, path, seconds, process.pid)))
        asking.start()
        start = time.time()
        while asking.is_alive():
            status = Path(f"/proc/{process.pid}/status").read_text()
            kilobytes = re.search(r"VmRSS:\s+(\d+)", status)
            assert kilobytes
            memory.append({"seconds": round(time.time() - start, 1), "MB": int(kilobytes[1]) / 1e3})
            print(memory[-1], flush=True)
            asking.join(max(1.0, seconds / 20))
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    print(answers)
    return {"memory": memory, "load": answers, "exit code": process.returncode}


if __name__ == "__main__":
    main()
