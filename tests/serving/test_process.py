"""fastcross serve as a process: NVIDIA's client; a reload and SIGTERM under load, after which nothing is unanswered."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from serving_tables import rows_of

from tests.serving.conftest import train

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
ROOT = Path(__file__).parent.parent.parent


class Process:
    """A server that is ready."""

    def __init__(self, *options):
        command = [sys.executable, "-m", "fastcross", "serve", *map(str, options), "--port", "0", "--threads", "1"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        first = self.process.stderr.readline()
        self.name, port = re.fullmatch(r"serving (\S+) at http://127\.0\.0\.1:(\d+)\n", first).groups()
        self.port = int(port)

    def stop(self):
        """Its exit code, and what it has said."""
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=60)[1]
        return self.process.returncode, said


@pytest.fixture(scope="module")
def current(movies):
    """A link to a run, which can be pointed at another one."""
    train(movies, "second", seed=7)
    (movies / "current").symlink_to(movies / "run")
    return movies / "current"


@pytest.fixture
def server(current):
    found = Process(current)
    yield found
    found.process.kill()
    found.process.wait()


def test_nvidias_client(server, movies):
    client_module = pytest.importorskip("tritonclient.http")
    client = client_module.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("current")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    rows, metadata = rows_of(movies / "new.csv"), client.get_model_metadata("current")
    inputs = {}
    for binary in (True, False):
        for each in metadata["inputs"]:
            values = [row[each["name"]] for row in rows]
            if each["name"] == "seen_at":  # Unix time
                times = np.array([value or "NaT" for value in values], "datetime64[s]")
                values = np.where(np.isnat(times), 0, times.astype(np.float64))
            elif each["datatype"] == "FP64":
                values = np.array([0 if value is None else value for value in values], np.float64)
            else:
                values = np.array([value.encode() for value in values], object)
            tensor = client_module.InferInput(each["name"], [len(rows)], each["datatype"])
            tensor.set_data_from_numpy(values, binary_data=binary)
            inputs[each["name"]] = (tensor, values)
        output = client_module.InferRequestedOutput("probability", binary_data=binary)
        tensors = [tensor for tensor, _ in inputs.values()]
        answers = [client.infer("current", tensors, outputs=o, request_id="r1") for o in (None, [output])]
        plain = [
            {n: v[i] if isinstance(v[i], float) else v[i].decode() for n, (_, v) in inputs.items()}
            for i in range(len(rows))
        ]
        expected = ask(server.port, {"rows": plain})["probability"]
        for answer in answers:
            assert answer.get_response()["id"] == "r1"
            np.testing.assert_allclose(answer.as_numpy("probability"), expected, rtol=0, atol=1e-6)
    with pytest.raises(client_module.InferenceServerException, match="the input user is missing"):
        client.infer("current", tensors[1:])
    with pytest.raises(client_module.InferenceServerException, match="there is no model 'other'"):
        client.infer("other", tensors)
    client.close()
    code, said = server.stop()
    assert (code, said) == (0, "draining\nstopped\n")


def ask(port, body):
    async def once():
        connection = await asyncio.open_connection("127.0.0.1", port)
        return (await exchange(connection, request_of(body)))[2]

    return asyncio.run(once())


def request_of(body):
    content = json.dumps(body).encode()
    return b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(content) + content


async def exchange(connection, request):
    """Status, headers and JSON."""
    reader, writer = connection
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    body = await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))
    return int(head.split()[1]), head, json.loads(body)


def test_reload_and_drain_under_load(server, current, movies):
    """Every request of 16 connections gets its own answer, of the one run or of the other, until the server is gone."""
    rows = rows_of(movies / "new.csv")[:16]
    answers = {}
    for name in ("run", "second"):
        from fastcross.serving.served import Served

        answers[name] = Served(str(movies / name)).predict(rows)
    assert np.abs(answers["run"] - answers["second"]).max() > 1e-3
    seen = {"run": 0, "second": 0}
    ends = []

    async def client(i):
        connection = await asyncio.open_connection("127.0.0.1", server.port)
        request = request_of({"rows": [rows[i]]})
        while True:
            status, head, found = await exchange(connection, request)
            assert status == 200, found
            (which,) = [n for n, each in answers.items() if np.abs(each[i] - found["probability"][0]).max() < 1e-6]
            seen[which] += 1
            if "connection: close" in head:
                ends.append(i)
                return

    async def load():
        clients = [asyncio.ensure_future(client(i)) for i in range(16)]
        until = time.monotonic() + 60

        async def have(which, count):
            while seen[which] < count:
                assert time.monotonic() < until, seen
                for each in clients:
                    if each.done():
                        each.result()
                await asyncio.sleep(0.01)

        await have("run", 100)
        current.unlink()
        current.symlink_to(movies / "second")
        server.process.send_signal(signal.SIGHUP)
        await have("second", 100)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*clients)

    asyncio.run(load())
    assert sorted(ends) == [*range(16)]
    said = server.process.communicate(timeout=60)[1]
    assert (server.process.returncode, said) == (0, "reloaded current\ndraining\nstopped\n")
    with pytest.raises(ConnectionRefusedError):
        ask(server.port, {"rows": []})


def test_what_it_cannot_start_with(movies, capsys):
    from fastcross.cli.main import main

    assert main(["serve", str(movies / "run"), "--key", "film"]) == 2
    assert "--key has no effect without --items" in capsys.readouterr().err
    assert main(["serve", str(movies / "run"), "--host", "192.0.2.1"]) == 2
    assert "cannot listen at 192.0.2.1, port 8080" in capsys.readouterr().err
    assert main(["serve", str(movies / "cache")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
