"""The routes of fastcross serve, in this process: answers, errors, gathering, metrics, the page, a reload."""

import asyncio
import base64
import csv
import hashlib
import json
import math
import re
import shutil
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving_tables import rows_of

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from fastcross import Ranker  # noqa: E402
from fastcross.data.columns import DataError  # noqa: E402
from fastcross.serving import server  # noqa: E402
from fastcross.serving.batching import QueueFull  # noqa: E402
from fastcross.serving.page import POLICY, _field, write_page  # noqa: E402
from fastcross.serving.served import Column, Served  # noqa: E402
from fastcross.serving.server import Service  # noqa: E402
from fastcross.training.run_folder import load_model  # noqa: E402
from tests.serving.conftest import train  # noqa: E402

ITEM = ("film", "minutes", "genres", "tags", "weight", "country")


def write_items(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", *ITEM])
        writer.writeheader()
        writer.writerows({"id": f"k{i}", **{name: row[name] for name in ITEM}} for i, row in enumerate(rows))


@pytest.fixture(scope="module")
def rows(movies):
    return rows_of(movies / "new.csv")


@pytest.fixture(scope="module")
def items(movies, rows):
    write_items(movies / "items.csv", rows)
    return str(movies / "items.csv")


@pytest.fixture(scope="module")
def service(movies, items):
    made = Service(lambda: Served(str(movies / "run"), items, "id"), max_batch=64)
    yield made
    made.inference.close()


@pytest.fixture(scope="module")
def logits(movies, rows):
    """What the model says of full rows."""
    served = Served(str(movies / "run"))
    batch, _ = served.encode(rows)
    with torch.no_grad():
        return load_model(movies / "run").model(batch.dense, batch.categorical, batch.bags).double()


def run(service, *requests):
    """The responses to (method, path, body) requests that are sent at once."""

    async def ask(client, method, path, body=None, **options):
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        return await client.request(method, path, content=content, **options)

    async def together():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://here") as client:
            return await asyncio.gather(
                *(ask(client, *each[:3], **(each[3] if len(each) > 3 else {})) for each in requests)
            )

    return asyncio.run(together())


def post(service, path, body, **options):
    return run(service, ("POST", path, body, options))[0]


def test_predictions_are_those_of_the_model(service, rows, logits):
    expected = torch.softmax(logits, 1).numpy()
    found = post(service, "/predict", {"rows": rows})
    assert found.status_code == 200
    assert found.json()["classes"] == ["0", "1", "2"]
    np.testing.assert_allclose(found.json()["probability"], expected, rtol=0, atol=1e-6)
    assert post(service, "/predict", {"rows": []}).json()["probability"] == []


def test_requests_that_wait_share_a_batch_and_get_their_own_answers(service, rows, logits):
    """Good and bad ones among them: each is told what is wrong in its own rows."""
    expected = torch.softmax(logits, 1).numpy()
    pieces = [slice(i, i + 1 + i % 4) for i in range(56)]
    requests = [("POST", "/predict", {"rows": rows[piece]}) for piece in pieces]
    bad = {5: "age", 17: "minutes", 40: "age"}
    for i, column in bad.items():
        requests[i] = ("POST", "/predict", {"rows": [rows[0], rows[1] | {column: "many"}]})
    before = service.registry.get_sample_value("fastcross_batch_rows_count")
    for i, (piece, found) in enumerate(zip(pieces, run(service, *requests), strict=True)):
        if i in bad:
            assert found.status_code == 422
            assert found.json() == {"error": f"row 2: column {bad[i]} must be a finite number; got 'many'"}
        else:
            np.testing.assert_allclose(found.json()["probability"], expected[piece], rtol=0, atol=1e-6)
    run(service, *requests[:5])
    assert service.registry.get_sample_value("fastcross_batch_rows_count") < before + 10


def test_ranking(service, rows, logits):
    context = {name: rows[3][name] for name in service.served.ranker.context_columns}
    found = post(service, "/rank", {"context": context, "k": 60, "class": 2}).json()
    assert len(found["items"]) == 60
    exact = {}
    for i, row in enumerate(rows):
        batch, _ = service.served.encode([row | context])
        with torch.no_grad():
            exact[f"k{i}"] = float(service.served.model(batch.dense, batch.categorical, batch.bags)[0, 2])
    assert found["scores"] == sorted(found["scores"], reverse=True)
    for item, score in zip(found["items"], found["scores"], strict=True):
        assert abs(score - exact[item]) < 1e-5
    some = post(service, "/rank", {"context": context, "k": 1, "items": ["k3", "k9"], "class": 2}).json()
    assert some["items"] == [max(("k3", "k9"), key=exact.get)]


def test_parts_add_up(movies, service, rows, logits, tmp_path):
    for output in (0, 2):
        found = post(service, "/explain", {"row": rows[7], "class": output}).json()["parts"]
        assert math.isclose(sum(part["effect"] for part in found), float(logits[7, output]), abs_tol=1e-5)
    assert service.served.baseline.any()
    assert {"fields": ["user"], "effect": pytest.approx(0, abs=10)} in found
    assert post(service, "/explain", {"row": rows[7], "class": 3}).status_code == 422
    without = Served(str(shutil.copytree(movies / "run", tmp_path / "run")))
    object.__setattr__(without.trained, "cache", "gone")
    without.baseline = without._baseline()
    assert not without.baseline.any()
    total = sum(part.effect for part in without.explain(rows[7], 2))
    assert math.isclose(total, float(logits[7, 2]), abs_tol=1e-5)


ROW = {"user": "u1", "film": 3, "country": "DE", "probability": None, "genres": ["Drama"], "tags": None, "weight": None}
ROW |= {"age": 30, "minutes": 1.6e9, "seen_at": "2024-01-31 12:30:00"}
CONTEXT = {name: ROW[name] for name in ("user", "age", "seen_at", "probability")}
TENSOR = {"name": "age", "shape": [1], "datatype": "FP64", "data": [1.0]}
BAD = [
    ("/predict", b"", 400, "the body must be JSON: Expecting value"),
    ("/predict", b"\xff", 400, "the body must be JSON: 'utf-8' codec"),
    ("/predict", b"[" * 100_000, 400, "the body must be JSON: "),
    ("/predict", b"9" * 5000, 400, "the body must be JSON: "),
    ("/predict", b"[]", 400, "the body must be a JSON object; got list"),
    ("/predict", b'{"rows": [{"age": NaN}]}', 400, "the body must be JSON: NaN is not JSON; a missing value is null"),
    ("/predict", {}, 422, '"rows" must be a list of rows; got NoneType'),
    ("/predict", {"rows": [ROW] * 4097}, 422, "a request may have 4,096 rows; got 4,097"),
    ("/predict", {"rows": [ROW, 3]}, 422, "row 2 must map columns to values; got 3"),
    ("/predict", {"rows": [ROW | {"age": 1e39}]}, 422, "row 1: column age must be a finite number; got 1e+39"),
    ("/rank", {"context": {}}, 422, "the context: column "),
    ("/rank", {"context": 3}, 422, '"context" must map columns to values; got int'),
    ("/rank", {"context": CONTEXT, "k": 61}, 422, "k must be from 1 to the number of items, 60; got 61"),
    ("/rank", {"context": CONTEXT, "k": "3"}, 422, "\"k\" must be an integer; got '3'"),
    ("/rank", {"context": CONTEXT, "k": True}, 422, '"k" must be an integer; got True'),
    ("/rank", {"context": CONTEXT, "k": 1, "items": ["x"]}, 422, "no item 'x' among 60"),
    ("/rank", {"context": CONTEXT, "k": 1, "items": [True]}, 422, '"items" must be a list of texts and integers'),
    ("/rank", {"context": CONTEXT, "k": 1, "class": 3}, 422, "output must be one of 3, from 0; got 3"),
    ("/rank", {"context": CONTEXT | {"age": "x"}}, 422, "the context: column age must be a finite number; got 'x'"),
    ("/explain", {"row": 3}, 422, "row 1 must map columns to values; got 3"),
    ("/explain", {"row": ROW, "class": "a"}, 422, "\"class\" must be the number of a class, from 0; got 'a'"),
    ("/v2/models/other/infer", {}, 404, "there is no model 'other', version '1'; there is run, version 1"),
    ("/v2/models/run/versions/7/infer", {}, 404, "there is no model 'run', version '7'"),
    ("/v2/models/run/infer", {}, 422, 'the request must be an object with "inputs"'),
    ("/v2/models/run/infer", {"inputs": [3]}, 422, "each input must be an object with a name; got 3"),
    ("/v2/models/run/infer", {"inputs": [TENSOR]}, 422, "the input user is missing; the model reads user, film"),
    ("/v2/models/run/infer", {"inputs": [TENSOR, TENSOR]}, 422, "the input 'age' is there twice"),
    ("/v2/models/run/infer", {"inputs": [TENSOR | {"name": "x"}]}, 422, "the input 'x' is none of the model's: user"),
    ("/v2/models/run/infer", {"inputs": [TENSOR | {"shape": [2, 2]}]}, 422, "the shape [n] or [n, 1]; got list of 2"),
    (
        "/v2/models/run/infer",
        {"inputs": [TENSOR | {"shape": [2]}]},
        422,
        "a list of 2 values as its data; got list of 1",
    ),
    ("/v2/models/run/infer", {"inputs": [TENSOR | {"datatype": "x"}]}, 422, "must be BYTES, INT8, "),
    ("/v2/models/run/infer", {"inputs": [TENSOR | {"datatype": []}]}, 422, "must be BYTES, INT8, "),
    ("/nothing", {}, 404, "Not Found"),
    ("/", {}, 405, "Method Not Allowed"),
]


@pytest.mark.parametrize(("path", "body", "status", "text"), BAD, ids=range(len(BAD)))
def test_bad_requests(service, path, body, status, text):
    found = post(service, path, body)
    assert found.status_code == status, found.text
    assert text in found.json()["error"]
    assert found.json().keys() == {"error"}


def test_an_answer_that_is_no_number_is_an_error(movies):
    served = Served(str(movies / "run"), None)
    assert np.isfinite(served.predict([ROW | {"age": 3e38, "minutes": -3e38}])).all()
    with torch.no_grad():
        served.model.logits.weight.mul_(1e38)
        served.model.logits.weight.mul_(1e38)
    service = Service(lambda: served, max_batch=8)
    found = post(service, "/predict", {"rows": [ROW, ROW]})
    assert (found.status_code, "row 1: the model's answer is not a finite number" in found.text) == (422, True)
    assert "row 1: the logit is not a finite number" in post(service, "/explain", {"row": ROW}).text
    service.inference.close()


def test_sizes_and_encodings(service, monkeypatch):
    monkeypatch.setattr(server, "MOST_BYTES", 1000)
    found = post(service, "/predict", b" " * 1001)
    assert (found.status_code, found.headers["connection"]) == (413, "close")

    async def streamed():
        for _ in range(11):
            yield b" " * 100

    assert run(service, ("POST", "/predict", None, {}))[0].status_code == 400
    with pytest.raises(server.Refused, match="a request may have 1,000 bytes"):
        asyncio.run(server._body(Streamed(streamed())))
    monkeypatch.setattr(server, "BODY_SECONDS", 0.01)

    async def slow():
        yield b" "
        await asyncio.sleep(10)

    with pytest.raises(server.Refused, match=r"the body must be here within 0\.01 seconds"):
        asyncio.run(server._body(Streamed(slow())))
    found = post(service, "/predict", b"", headers={"content-encoding": "gzip"})
    assert (found.status_code, found.json()["error"]) == (415, "a compressed body is not supported")


class Streamed:
    """As much of a request as its body needs."""

    def __init__(self, parts):
        self.headers, self.stream = {}, lambda: parts


def infer_body(rows, **changes):
    """A request of the Open Inference Protocol with binary texts and numbers."""
    inputs, tail = [], b""
    for name in ROW:
        values = [row[name] for row in rows]
        if name in ("age", "minutes"):
            data, kind = np.array(values, np.float64).tobytes(), "FP64"
        else:
            texts = [b"" if v is None else ("|".join(v) if isinstance(v, list) else str(v)).encode() for v in values]
            data, kind = b"".join(struct.pack("<I", len(text)) + text for text in texts), "BYTES"
        inputs.append(
            {"name": name, "shape": [len(rows)], "datatype": kind, "parameters": {"binary_data_size": len(data)}}
        )
        tail += data
    head = json.dumps({"id": "7", "inputs": inputs, **changes}).encode()
    return head + tail, {"inference-header-content-length": str(len(head))}


def test_binary_tensors(service):
    rows = [ROW, ROW | {"user": "Ö", "genres": ["Krimi/Ö", "Drama"]}]
    expected = post(service, "/predict", {"rows": rows}).json()["probability"]
    body, headers = infer_body(rows, parameters={"binary_data_output": True})
    found = post(service, "/v2/models/run/infer", body, headers=headers)
    length = int(found.headers["inference-header-content-length"])
    told = json.loads(found.content[:length])
    assert told["id"] == "7"
    assert told["outputs"][0]["shape"] == [2, 3]
    answer = np.frombuffer(found.content[length:], "<f4").reshape(2, 3)
    np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-6)
    for cut in (1, 9, 30):
        found = post(service, "/v2/models/run/infer", body[:-cut], headers=headers)
        assert (found.status_code, "binary_data_size" in found.json()["error"]) == (422, True)
    found = post(service, "/v2/models/run/infer", body + b"x", headers=headers)
    assert "bytes of binary data; got" in found.json()["error"]
    found = post(service, "/v2/models/run/infer", body, headers={"inference-header-content-length": "99999999"})
    assert found.status_code == 400


def test_about_the_model(service):
    assert run(service, ("GET", "/v2"))[0].json()["name"] == "fastcross"
    assert run(service, ("GET", "/v2/health/live"))[0].json() == {"live": True}
    assert run(service, ("GET", "/v2/health/ready"))[0].json() == {"ready": True}
    assert run(service, ("GET", "/v2/models/run/ready"))[0].status_code == 200
    told = run(service, ("GET", "/v2/models/run"))[0].json()
    assert {each["name"]: each["datatype"] for each in told["inputs"]}["seen_at"] == "FP64"
    assert told["outputs"] == [{"name": "probability", "datatype": "FP32", "shape": [-1, 3]}]


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["2024", "t1 t2"])
)
ANY = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
CHANGED = st.dictionaries(st.sampled_from([*ROW]), ANY, max_size=3).map(lambda changes: ROW | changes)
BODIES = st.one_of(
    st.tuples(st.just("/predict"), st.fixed_dictionaries({"rows": st.lists(CHANGED | ANY, max_size=3) | ANY})),
    st.tuples(
        st.just("/rank"),
        st.fixed_dictionaries(
            {"context": CHANGED | ANY},
            optional={"k": st.integers(-1, 70) | ANY, "items": st.lists(st.just("k1") | ANY) | ANY, "class": ANY},
        ),
    ),
    st.tuples(st.just("/explain"), st.fixed_dictionaries({"row": CHANGED | ANY}, optional={"class": ANY})),
    st.tuples(
        st.just("/v2/models/run/infer"),
        st.fixed_dictionaries(
            {
                "inputs": st.lists(
                    st.fixed_dictionaries(
                        {"name": st.sampled_from([*ROW]) | ANY},
                        optional={
                            "shape": st.just([1]) | ANY,
                            "datatype": st.sampled_from(["BYTES", "FP64", "INT8"]) | ANY,
                            "data": st.just(["1"]) | ANY,
                            "parameters": ANY,
                        },
                    )
                    | ANY
                )
                | ANY
            },
            optional={"outputs": ANY, "parameters": ANY},
        ),
    ),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(BODIES | st.tuples(st.just("/predict"), st.binary()))
@example(("/predict", {"rows": [ROW | {"age": 1.7e38, "minutes": 1e38}]}))
@example(("/predict", {"rows": [ROW | {"tags": ["t1"] * 3, "weight": [1e38] * 3}]}))
@example(("/rank", {"context": CONTEXT | {"age": 3e38}, "k": 60}))
def test_bodies_at_random(service, movies, sent):
    """An answer or an error that says what is wrong; never a defect, and no number that is none."""
    path, body = sent
    found = post(service, path, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert found.status_code in (200, 400, 422), found.text
    assert (found.status_code == 200) != ("error" in found.json())
    assert str(movies) not in found.text
    assert "NaN" not in found.text or found.status_code != 200


def test_the_queue_is_bounded(movies):
    service = Service(lambda: Served(str(movies / "run")), max_batch=8, max_queue=3)
    begun, free = threading.Event(), threading.Event()

    async def ask():
        blocked = asyncio.ensure_future(service.inference.run(lambda _: (begun.set(), free.wait(60))))
        await asyncio.to_thread(begun.wait, 60)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://here") as client:
            waiting = [asyncio.ensure_future(client.post("/predict", json={"rows": [ROW]})) for _ in range(3)]
            while len(service.inference) < 3:
                await asyncio.sleep(0.01)
            refused = await client.post("/predict", json={"rows": [ROW]})
            free.set()
            await blocked
            return refused, await asyncio.gather(*waiting)

    refused, answered = asyncio.run(ask())
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"] == "3 requests wait, and 3 may; try again"
    assert [each.status_code for each in answered] == [200] * 3
    service.inference.close()
    with pytest.raises(QueueFull):
        asyncio.run(service.inference.predict([ROW]))


def test_a_request_waits_for_others_where_it_shall(movies):
    service = Service(lambda: Served(str(movies / "run")), max_batch=8, max_delay=5.0)
    requests = [("POST", "/predict", {"rows": [ROW]})] * 8
    assert {each.status_code for each in run(service, *requests)} == {200}  # at once: the batch is full
    assert service.registry.get_sample_value("fastcross_batch_rows_count") == 1
    service.inference.close()


def test_metrics(movies):
    service = Service(lambda: Served(str(movies / "run")), max_batch=8)
    post(service, "/predict", {"rows": [ROW | {"user": "never seen", "tags": ["t1", "new"], "weight": [1, 1]}, ROW]})
    post(service, "/predict", {"rows": 3})
    post(service, "/nothing", {})
    text = run(service, ("GET", "/metrics"))[0].text
    for line in (
        'fastcross_requests_total{route="/predict",status="200"} 1.0',
        'fastcross_requests_total{route="/predict",status="422"} 1.0',
        'fastcross_requests_total{route="none",status="404"} 1.0',
        "fastcross_rows_total 2.0",
        'fastcross_batch_rows_bucket{le="2.0"} 1.0',
        "fastcross_queue_requests 0.0",
        'fastcross_unseen_values_total{column="user"} 1.0',
        'fastcross_unseen_values_total{column="tags"} 1.0',
        'fastcross_unseen_values_total{column="film"} 0.0',
        'fastcross_request_seconds_count{route="/predict"} 2.0',
    ):
        assert f"\n{line}\n" in text, line
    service.inference.close()


def test_the_page(service):
    found = run(service, ("GET", "/"))[0]
    text, policy = found.text, found.headers["content-security-policy"]
    assert "DCN (parallel), 2 cross layers (vector), deep layers 16." in text
    assert "It ranks 60 items." in text
    assert all(f'data-column="{name}"' in text for name in ROW)
    assert re.search(r"<th>test</th>(<td class=n>[\d.]+</td>){2}", text)
    for tag, kind in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        allowed = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{allowed}'" in policy
    assert policy == POLICY
    assert "http://" not in text
    assert "https://" not in text  # it loads nothing
    hostile = _field(0, Column('"><script>', "categorical", ["<b>", "'\""]))
    assert "<script>" not in hostile
    assert "<b>" not in hostile
    assert "\"'" not in hostile


def test_models_without_parts_have_a_page_too(movies):
    served = Served(str(train(movies, "matrix", cross_type="matrix")))
    assert not served.explainable
    assert "The parts add up" not in write_page(served)
    service = Service(lambda: served, max_batch=8)
    assert post(service, "/explain", {"row": ROW}).status_code == 404
    assert post(service, "/rank", {"context": {}}).status_code == 404
    assert post(service, "/predict", {"rows": [ROW]}).status_code == 200
    service.inference.close()


def test_a_reload_takes_what_is_there_now_or_keeps_what_was(movies, rows, tmp_path):
    said, items, run_folder = [], tmp_path / "items.csv", tmp_path / "now"
    write_items(items, rows[:30])
    run_folder.symlink_to(movies / "run")
    service = Service(lambda: Served(str(run_folder), str(items), "id"), log=said.append, max_batch=8)
    context = {"context": CONTEXT, "k": 30}
    first = post(service, "/rank", context).json()
    assert len(first["items"]) == 30
    with open(items, "r+b") as file:  # it changes under the server
        file.write(b"\0" * 500)
    assert post(service, "/rank", context).json() == first
    asyncio.run(service.reload())
    assert "the reload failed, and what was served still is: " in said[-1]
    assert post(service, "/rank", context).json() == first
    run_folder.unlink()
    run_folder.symlink_to(train(movies, "other", seed=5))
    write_items(items, rows[:20])
    asyncio.run(service.reload())
    assert said[-1] == "reloaded now"
    assert post(service, "/rank", context).json()["error"] == "k must be from 1 to the number of items, 20; got 30"
    assert post(service, "/rank", context | {"k": 20}).json() != first
    assert service.registry.get_sample_value("fastcross_reloads_total", {"result": "failed"}) == 1
    service.inference.close()


def test_items_of_another_run_are_refused(movies, tmp_path):
    other, path = train(movies, "third", seed=9), str(tmp_path / "items.safetensors")
    Ranker(movies / "run", {"film": ["1", "2"]}, key=["a", "b"]).save(path)
    assert len(Served(str(movies / "run"), path).ranker) == 2
    with pytest.raises(ValueError, match=r"items.safetensors is of another model"):
        Served(str(other), path)
    with pytest.raises(ValueError, match="--key has no effect on"):
        Served(str(movies / "run"), path, "id")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Served(str(movies / "run"), str(tmp_path / "none.csv"))
    (tmp_path / "bad.csv").write_text("film,minutes\n1,2\n3\n")
    with pytest.raises(DataError, match=r"bad\.csv: not a readable table"):
        Served(str(movies / "run"), str(tmp_path / "bad.csv"))
    (tmp_path / "words.csv").write_text("film,minutes\n1,many\n")
    with pytest.raises(DataError, match="many"):
        Served(str(movies / "run"), str(tmp_path / "words.csv"))


def test_items_of_parquet_are_those_of_csv(movies, items, tmp_path, service):
    import pyarrow.parquet

    from fastcross.serving.served import read_table

    columns = service.served.trained.encoder.columns
    pyarrow.parquet.write_table(read_table(Path(items), columns, "id"), tmp_path / "items.parquet")
    found = Served(str(movies / "run"), str(tmp_path / "items.parquet"), "id").ranker
    assert found.keys == service.served.ranker.keys
    assert torch.equal(found.score(CONTEXT), service.served.ranker.score(CONTEXT))
