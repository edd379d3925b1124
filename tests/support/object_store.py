"""A server on loopback that speaks the S3 protocol, and that can fail on purpose."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

from moto.server import DomainDispatcherApplication, create_backend_app
from pyarrow.fs import FileSystem
from werkzeug.serving import make_server

BUCKET = "checkpoints"
BUSY = (b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.'
        b"</Message></Error>")


class ObjectStore:
    """moto's S3 with one bucket."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.fails: Callable[[int], bool] = lambda number: False
        """Whether a request is refused with 503, as a busy store does, by its number from 1 on."""
        self.requests: list[str] = []
        """Method and path of every request since `fails` was set."""
        self.refused = 0
        self._store = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        FileSystem.from_uri(self._uri(BUCKET) + "&allow_bucket_creation=true")[0].create_dir(BUCKET)

    def uri(self, path: str) -> str:
        """Of a directory in the bucket."""
        return self._uri(f"{BUCKET}/{path}")

    def fail(self, fails: Callable[[int], bool]) -> None:
        """Requests are counted anew."""
        with self._lock:
            self.fails, self.requests, self.refused = fails, [], 0

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _uri(self, place: str) -> str:
        endpoint = quote(f"127.0.0.1:{self._server.port}", safe="")
        return f"s3://key:secret@{place}?scheme=http&region=us-east-1&endpoint_override={endpoint}"

    def _answer(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            self.requests.append(f"{environment['REQUEST_METHOD']} {environment['PATH_INFO']}")
            refuses = self.fails(len(self.requests))
            self.refused += refuses
        if refuses:
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(BUSY)))])
            return [BUSY]
        return self._store(environment, start)  # type: ignore[no-any-return]
