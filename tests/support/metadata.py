"""A metadata service as clouds have it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def served(answer: Callable[[str, str, Any], str | None]) -> Iterator[str]:
    """Address of a metadata service that answers with answer(method, path, headers), 404 for None."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answer(self.command, self.path, self.headers)
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        do_PUT = do_GET  # noqa: N815 - the name that http.server calls

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
