"""A key-value store over HTTP, as Horovod's launchers serve one: PUT, GET and DELETE of ``/scope/key``.

The processes that a launcher has started find each other's addresses in it. It knows no secrets and asks for none, so
it listens at one address only: the loopback interface, or the one that the other hosts were told.
"""

from __future__ import annotations

import contextlib
import socketserver
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

SERVER_THREAD = "process-wide key-value server"
_POLL = 0.05
_REQUEST_SECONDS = 10.0


class KeyValueClient:
    """Reads and writes keys of a server.

    Args:
        url: ``http://host:port``.
        scope: The folder of the keys.
    """

    def __init__(self, url: str, scope: str) -> None:
        self._base = f"{url}/{scope}/"
        # not over a proxy that the environment names for the world outside
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def put(self, key: str, value: str) -> None:
        """Writes a value.

        Raises:
            OSError: the server does not answer.
        """
        request = urllib.request.Request(self._base + key, data=value.encode(), method="PUT")
        with self._opener.open(request, timeout=_REQUEST_SECONDS):
            pass

    def get(self, key: str) -> str | None:
        """The value, None where there is none yet. Raises OSError if the server does not answer."""
        try:
            with self._opener.open(self._base + key, timeout=_REQUEST_SECONDS) as response:
                value: bytes = response.read()
                return value.decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def wait(self, key: str, seconds: float) -> str:
        """The value, as soon as somebody has written it.

        Raises:
            TimeoutError: nobody did in time.
            OSError: the server does not answer.
        """
        deadline = time.monotonic() + seconds
        while (value := self.get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody wrote {key!r} within {seconds:g} s")
            time.sleep(_POLL)
        return value


class KeyValueServer:
    """Serves until the process ends; its threads are daemons.

    Args:
        host: The address to listen at, and to tell the others.
    """

    def __init__(self, host: str) -> None:
        try:
            self._server = _Server((host, 0), _Handler)
        except OSError:  # the name that others have for this host, behind a translated address
            self._server = _Server(("", 0), _Handler)
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name=SERVER_THREAD, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the service."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.values: dict[str, bytes] = {}
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks up the host's name, which takes seconds where no name server answers
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_DELETE(self) -> None:
        # A process says that it has connected; others may still read what it wrote.
        self._answer(200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: one line per request is no news."""
