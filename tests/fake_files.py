"""A loopback server for tests of downloads: it supports ranges and ETags like S3, and fails on request."""
import json
import re
import threading
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer


class FakeFiles:
    "Files that the server offers, failures to produce, and requests received."
    def __init__(self, url: str):
        self.url = url
        self.files = {}        # Contents by path; anything but bytes is sent as JSON
        self.redirects = {}    # Target of each redirected path
        self.tokens = {}       # Token required for each path
        self.cuts = []         # Number of bytes after which the next answers break off
        self.codes = []        # Status codes of the next answers, sent instead of files
        self.has_ranges = True
        self.has_tags = True
        self.requests = []     # Path, headers and body of each request


class _Handler(BaseHTTPRequestHandler):
    fake: FakeFiles

    def log_message(self, *args): pass

    def fail(self, code: int, **headers):
        self.send_response(code)
        for name, value in headers.items(): self.send_header(name.replace('_', '-'), value)
        self.send_header('Content-Length', '0')
        self.end_headers()

    def do_POST(self): self.do_GET()

    def do_GET(self):
        fake = self.fake
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0)).decode()
        fake.requests.append((self.path, dict(self.headers), body))
        if fake.codes: return self.fail(fake.codes.pop(0))
        token = fake.tokens.get(self.path)
        if token and self.headers.get('Authorization') != f'Bearer {token}': return self.fail(401)
        if self.path in fake.redirects: return self.fail(302, Location=fake.redirects[self.path])
        if self.path not in fake.files: return self.fail(404)
        content = fake.files[self.path]
        if callable(content): content = content(body)
        if content is None: return self.fail(401)
        self.send_file(content if isinstance(content, bytes) else json.dumps(content).encode())

    def send_file(self, content: bytes):
        fake = self.fake
        tag = f'"{sha256(content).hexdigest()[:16]}"'
        begin, end = 0, len(content)
        asked = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', ''))
        same = self.headers.get('If-Range', tag) == tag
        if asked and same and fake.has_ranges:
            begin = int(asked[1])
            if begin >= len(content): return self.fail(416, Content_Range=f'bytes */{len(content)}')
            end = min(end, int(asked[2] or end) + 1)
            self.send_response(206)
            self.send_header('Content-Range', f'bytes {begin}-{end - 1}/{len(content)}')
        else: self.send_response(200)
        self.send_header('Content-Length', str(end - begin))
        if fake.has_tags: self.send_header('ETag', tag)
        self.end_headers()
        cut = fake.cuts.pop(0) if fake.cuts else end - begin
        try: self.wfile.write(content[begin:end][:cut])
        except ConnectionError: pass  # The client closed the connection


class _Server(ThreadingHTTPServer):
    def server_bind(self):
        "Bind without looking up this machine's name, which may take seconds."
        TCPServer.server_bind(self)


@contextmanager
def serve_files():
    "Run a `FakeFiles` server until the end of the block."
    handler = type('Handler', (_Handler,), {})
    server = _Server(('127.0.0.1', 0), handler)
    handler.fake = FakeFiles(f'http://127.0.0.1:{server.server_address[1]}')
    thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=.01))
    thread.start()
    try: yield handler.fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
