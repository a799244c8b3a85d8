"""An HTTP server in place of SGLang's, which answers the commands."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def answering(answer: Callable[[str, Any], tuple[int, object]]) -> Iterator[str]:
    """Start the server and yield its URL. `answer` takes a path and the request's JSON. It returns
    the status, and JSON or a finished text. The JSON of a GET is None."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, question: Any) -> None:
            status, text = answer(self.path, question)
            self.send_response(status)
            self.end_headers()
            self.wfile.write((text if isinstance(text, str) else json.dumps(text)).encode())

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
