"""A small HTTP server on the loopback device that streams events as the API does; a test says what it answers."""

import contextlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeServer(ThreadingHTTPServer):
    """Answers GET with a list of one model, and each POST with `answer(handler, body)`. Keeps what was asked.

    pages(path): (headers, content) of what else it answers to GET, without a key; None for other paths.
    """

    daemon_threads = True
    request_queue_size = 128  # of socketserver's five, connections of clients that all begin at once were lost

    def __init__(self, answer, port=0, pages={}.get):
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer
        self.pages = pages
        self.models = ["fake<model>"]
        self.key = None  # that requests must have
        self.paths, self.bodies, self.keys, self.connections = [], [], [], set()
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextlib.contextmanager
    def running(self):
        with self:
            threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            yield self
            self.shutdown()

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # the client had no more patience
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def refused(self):
        if self.server.key is None or self.headers.get("authorization") == f"Bearer {self.server.key}":
            return False
        self.whole(401, {"error": {"message": "the API key is not valid"}})
        return True

    def do_GET(self):
        if (page := self.server.pages(self.path)) is not None:
            self.page(*page)
        elif not self.refused():
            self.whole(
                200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.server.models]}
            )

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.paths.append(self.path)
            server.bodies.append(body)
            server.keys.append(self.headers.get("authorization"))
            server.connections.add(self.client_address)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            if not self.refused():
                server.answer(self, body)
        finally:
            with server.lock:
                server.in_flight -= 1

    def begin(self):
        """The head of a stream, whose chunks follow."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def event(self, event):
        self.chunk(f": keep-alive\n\ndata: {json.dumps(event)}\n\n")

    def end(self, mark="data: [DONE]\n\n"):
        """The end of a stream. mark: its last event; empty for a stream that breaks off."""
        if mark:
            self.chunk(mark)
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, text):
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def page(self, headers, content):
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def whole(self, status, payload):
        data = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
