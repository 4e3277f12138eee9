"""fastcross serve: the routes, what they count, and the process around them.

    GET  /                              a page: the model, its metrics, a form that scores a row and shows its parts
    POST /predict                       {"rows": [{column: value, …}, …]} -> {"probability": […]}
    POST /rank                          {"context": {…}, "k": 10} -> {"items": […], "scores": […]}
    POST /explain                       {"row": {…}} -> {"parts": [{"fields": […], "effect": …}, …]}
    GET  /metrics                       for Prometheus
    GET  /v2/health/live, ready         and the rest of the Open Inference Protocol (protocol.py):
    GET  /v2/models/NAME, /ready        POST /v2/models/NAME/infer

An error is {"error": text}. It names the row, from 1, and the column, and nothing of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import prometheus_client
import torch
import uvicorn
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from fastcross._version import __version__
from fastcross.data.columns import DataError
from fastcross.serving import protocol
from fastcross.serving.batching import Inference, QueueFull
from fastcross.serving.page import POLICY, write_page
from fastcross.serving.served import Served

MOST_BYTES, MOST_ROWS = 16 << 20, 4096  # of a request
BODY_SECONDS = 30.0  # in which it must be here
DRAIN_SECONDS = 1.0  # in which connections that are open may send one more request
LATENCIES = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
Handler = Callable[[Request], Awaitable[Response]]


class Refused(Exception):
    """An answer that is an error: its status, and its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Service:
    """The routes over one inference thread; ``app`` is an ASGI application.

    Args:
        load: makes the :class:`Served`; called again by :meth:`reload`.
        options: of :class:`Inference`.
        log: takes lines for the operator.
    """

    def __init__(self, load: Callable[[], Served], *, log: Callable[[str], object] = print, **options: Any) -> None:
        self.load, self.log, self.draining = load, log, False
        self._reloading = asyncio.Lock()
        self.registry = place = prometheus_client.CollectorRegistry()
        self.requests = Counter("fastcross_requests", "Requests answered.", ["route", "status"], registry=place)
        self.rows = Counter("fastcross_rows", "Rows of requests answered.", registry=place)
        about = "From a request's headers to its answer."
        self.seconds = Histogram("fastcross_request_seconds", about, ["route"], buckets=LATENCIES, registry=place)
        self.batches = Histogram("fastcross_batch_rows", "Rows computed together.", buckets=BATCHES, registry=place)
        self.reloads = Counter("fastcross_reloads", "Reloads, by their result.", ["result"], registry=place)
        self.inference = Inference(load(), observe=self.batches.observe, **options)
        queue = Gauge("fastcross_queue_requests", "Requests that wait for the inference thread.", registry=place)
        queue.set_function(lambda: len(self.inference))
        self.registry.register(_Unseen(self))
        prometheus_client.ProcessCollector(registry=self.registry)
        one, of_model = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        routes = [
            self._route("GET", "/", self.page),
            self._route("GET", "/metrics", self.metrics),
            self._route("POST", "/predict", self.predict),
            self._route("POST", "/rank", self.rank),
            self._route("POST", "/explain", self.explain),
            self._route("GET", "/v2", self.about),
            self._route("GET", "/v2/health/live", self.live),
            self._route("GET", "/v2/health/ready", self.ready),
            *(self._route("GET", path, self.model) for path in (one, of_model)),
            *(self._route("GET", f"{path}/ready", self.model_ready) for path in (one, of_model)),
            *(self._route("POST", f"{path}/infer", self.infer) for path in (one, of_model)),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})

    @property
    def served(self) -> Served:
        served = self.inference.served
        assert isinstance(served, Served)
        return served

    async def reload(self) -> None:
        """Take the run, and the items, as they are now; where they cannot be read, the old ones stay."""
        async with self._reloading:
            try:
                self.inference.served = await asyncio.to_thread(self.load)
            except Exception as error:
                self.reloads.labels("failed").inc()
                self.log(f"the reload failed, and what was served still is: {error}")
            else:
                self.reloads.labels("done").inc()
                self.log(f"reloaded {self.served.name}")

    # ---- plain JSON

    async def predict(self, request: Request) -> Response:
        asked = _object(await _body(request))
        served, answer = await self.inference.predict(_rows(asked.get("rows")))
        self.rows.inc(len(answer))
        classes = {"classes": list(served.classes)} if answer.ndim == 2 else {}
        return JSONResponse({served.output: answer.tolist(), **classes})

    async def rank(self, request: Request) -> Response:
        asked = _object(await _body(request))
        if self.served.ranker is None:
            raise Refused(404, "there are no items; the server was started without --items")
        context, k, items = asked.get("context"), asked.get("k", 10), asked.get("items")
        if not isinstance(context, dict):
            raise DataError(f'"context" must map columns to values; got {type(context).__name__}')
        if type(k) is not int:
            raise DataError(f'"k" must be an integer; got {k!a:.60}')
        if items is not None and not (isinstance(items, list) and all(type(item) in (int, str) for item in items)):
            raise DataError('"items" must be a list of texts and integers')
        output = _class(asked)
        try:
            found = await self.inference.run(lambda served: served.rank(context, k, items, output))
        except DataError as error:
            raise DataError(str(error).replace("row 1", "the context", 1)) from None
        except (KeyError, ValueError) as error:  # an item that is not there, k larger than the items
            raise DataError(str(error.args[0])) from None
        self.rows.inc()
        return JSONResponse({"items": [item for item, _ in found], "scores": [score for _, score in found]})

    async def explain(self, request: Request) -> Response:
        asked = _object(await _body(request))
        if not self.served.explainable:
            raise Refused(404, "the logit of this model has no exact parts: see fastcross explain")
        (row,), output = _rows([asked.get("row")]), _class(asked)
        parts = await self.inference.run(lambda served: served.explain(row, output))
        return JSONResponse({"parts": [{"fields": part.fields, "effect": part.effect} for part in parts]})

    # ---- the Open Inference Protocol

    async def about(self, request: Request) -> Response:
        return JSONResponse({"name": "fastcross", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        return JSONResponse({"ready": not self.draining}, 503 if self.draining else 200)

    async def model(self, request: Request) -> Response:
        return JSONResponse(protocol.describe(self._named(request)))

    async def model_ready(self, request: Request) -> Response:
        return JSONResponse({"name": self._named(request).name, "ready": not self.draining}, 503 * self.draining or 200)

    async def infer(self, request: Request) -> Response:
        served, body = self._named(request), await _body(request)
        length = request.headers.get(protocol.HEADER_LENGTH, str(len(body)))
        if not length.isdecimal() or int(length) > len(body):
            raise Refused(400, f"{protocol.HEADER_LENGTH} must be at most the {len(body)} bytes of the body")
        asked = _object(body[: int(length)])
        rows = protocol.read_rows(asked, body[int(length) :], [column.name for column in served.columns])
        binary = protocol.wants_binary(asked, served.output)
        served, answer = await self.inference.predict(_rows(rows))
        self.rows.inc(len(answer))
        content, headers = protocol.write_answer(asked, served, answer, binary)
        return Response(content, headers=headers)

    def _named(self, request: Request) -> Served:
        name, version = request.path_params["name"], request.path_params.get("version", "1")
        if name != self.served.name or version != "1":
            asked, there = f"{name[:60]!a}, version {version[:60]!a}", f"{self.served.name}, version 1"
            raise Refused(404, f"there is no model {asked}; there is {there}")
        return self.served

    # ---- for people

    async def page(self, request: Request) -> Response:
        return HTMLResponse(write_page(self.served), headers={"content-security-policy": POLICY})

    async def metrics(self, request: Request) -> Response:
        text = prometheus_client.generate_latest(self.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    # ---- around every answer

    def _route(self, method: str, path: str, handler: Handler) -> Route:
        seconds = self.seconds.labels(path)

        async def endpoint(request: Request) -> Response:
            start = time.perf_counter()
            try:
                response = await handler(request)
            except DataError as error:
                response = _error(422, str(error))
            except Refused as error:
                response = _error(error.status, str(error))
            except QueueFull as error:
                response = _error(429, str(error))
                response.headers["retry-after"] = "1"
            except ClientDisconnect:
                response = _error(400, "the client has gone")
            except Exception:
                self.log(traceback.format_exc())
                response = _error(500, "this is a defect of fastcross; the server's log has more")
            if self.draining or response.status_code in (408, 413):
                response.headers["connection"] = "close"
            seconds.observe(time.perf_counter() - start)
            self.requests.labels(path, response.status_code).inc()
            return response

        return Route(path, endpoint, methods=[method])

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self.requests.labels("none", error.status_code).inc()
        response = _error(error.status_code, error.detail)
        response.headers.update(error.headers or {})
        return response


class _Unseen:
    """A counter that the inference thread keeps, in the served model."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[CounterMetricFamily]:
        about = "Values that the vocabulary of a column does not know, since the model was loaded."
        counter = CounterMetricFamily("fastcross_unseen_values", about, labels=["column"])
        for name, count in [*self.service.served.unseen.items()]:
            counter.add_metric([name], count)
        yield counter


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


async def _body(request: Request) -> bytes:
    too_large = Refused(413, f"a request may have {MOST_BYTES:,} bytes")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "a compressed body is not supported")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MOST_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                if (size := size + len(part)) > MOST_BYTES:
                    raise too_large
    except TimeoutError:
        raise Refused(408, f"the body must be here within {BODY_SECONDS:g} seconds") from None
    return b"".join(parts)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON; a missing value is null")


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = _JSON.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object; got {type(found).__name__}")
    return found


def _rows(rows: Any) -> list[Any]:
    if not isinstance(rows, list):
        raise DataError(f'"rows" must be a list of rows; got {type(rows).__name__}')
    if len(rows) > MOST_ROWS:
        raise DataError(f"a request may have {MOST_ROWS:,} rows; got {len(rows):,}")
    return rows


def _class(asked: dict[str, Any]) -> int:
    output = asked.get("class", 0)
    if type(output) is not int:
        raise DataError(f'"class" must be the number of a class, from 0; got {output!a:.60}')
    return output


class _Process(uvicorn.Server):
    """uvicorn's, with other signals: SIGHUP reloads; SIGTERM and Ctrl-C drain, and are no error then."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self.service.log(f"serving {self.service.served.name} at http://{shown}:{port}")

    def _reload(self) -> None:
        task = asyncio.get_running_loop().create_task(self.service.reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """No new connections. Those that are open get the answer to what they have sent, and are told to close: a
        connection closed at once would reset a request on its way."""
        self.service.draining = True
        self.service.log("draining")
        for server in self.servers:
            server.close()
        end = time.monotonic() + DRAIN_SECONDS
        while self.server_state.connections and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)


def serve(
    load: Callable[[], Served],
    *,
    host: str,
    port: int,
    threads: int,
    log: Callable[[str], object],
    **options: Any,
) -> None:
    """Serve until SIGTERM or Ctrl-C. The port is taken before the model is loaded, and answers after its warm-up."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ValueError(f"cannot listen at {host}, port {port}: {error.strerror}") from None
        service = Service(load, log=log, **options)
        config = uvicorn.Config(
            service.app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=30,
        )
        _Process(config, service).run([listener])
        service.inference.close()
        log("stopped")
