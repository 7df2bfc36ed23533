"""An OpenTelemetry collector that keeps what it gets."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Collector:
    """Takes OTLP requests on a port of its own, or answers them with `status`, or not at all (`hangs`)."""

    def __init__(self, *, status: int = 200, hangs: bool = False) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                collector.paths.append(self.path)
                collector.headers.append(dict(self.headers))
                if hangs:
                    collector.released.wait(300)
                collector.bodies.append(body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """Frees the port. May be called again."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
