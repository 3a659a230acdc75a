"""A small HTTP server on the loopback device that streams tokens as the API does, and fails on demand."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeServer(ThreadingHTTPServer):
    """Streams `tokens` tokens in chunks of `per_chunk`. fault: what goes wrong with every third request.

    gate: requests that must have come before any is answered.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens, self.per_chunk, self.fault, self.gate = 6, 2, None, None
        self.bodies, self.keys, self.connections = [], [], set()
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # the client had no more patience
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.whole(200, {"data": [{"id": "fake<model>"}]})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.bodies.append((self.path, body))
            server.keys.append(self.headers.get("authorization"))
            server.connections.add(self.client_address)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            fault = server.fault if len(server.bodies) % 3 == 0 else None
        try:
            if server.gate is not None:
                server.gate.wait(timeout=60)
            self.answer(server, body, fault)
        finally:
            with server.lock:
                server.in_flight -= 1

    def answer(self, server, body, fault):
        if fault == "busy":
            self.whole(429, {"error": {"message": "too many", "code": "overloaded"}})
        elif fault == "page":
            self.whole(502, "bad gateway")
        else:
            self.stream(server, len(body["prompt"] if "prompt" in body else body["messages"]), fault)

    def stream(self, server, prompt_tokens, fault):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for count in range(server.per_chunk, server.tokens + 1, server.per_chunk):
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 0 if fault == "empty" else count}
            event = {"choices": [{"text": "x"}], "usage": None if fault == "blind" else usage}
            if count > server.per_chunk and fault == "error":
                event = {"error": {"message": "no such kernel", "code": "request_failed"}}
            if count > server.per_chunk and fault == "strange":
                event = [1, 2]
            if count > server.per_chunk and fault == "drop":
                self.close_connection = True
                return
            self.chunk(f": keep-alive\n\ndata: {json.dumps(event)}\n\n")
        self.chunk("" if fault == "cut" else "data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, text):
        if text:
            self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
            self.wfile.flush()

    def whole(self, status, payload):
        data = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
