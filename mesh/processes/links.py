"""Small messages over TCP between the processes of one job: one JSON object per line."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]

MAX_LINE_BYTES = 1 << 24
_SEND_TIMEOUT_S = 5.0
_RETRY_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Who a process is: its number in the job, its host and its process id there."""

    process_id: int
    host: str
    pid: int

    @classmethod
    def this_process(cls, process_id: int) -> Peer:
        """This process under the number `process_id`."""
        return cls(process_id, socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        return f"process {self.process_id} (host {self.host}, pid {self.pid})"


class Link:
    """One end of a connection. `send` may be called from any thread, `receive` from one thread only.

    Attributes:
      peer: who is at the other end; None until it has said so.
      heard: `time.monotonic()` when the other end last gave a sign of life.
      ended: the other end announced that it closes the connection on purpose.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(_SEND_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer: Peer | None = None
        self.heard = time.monotonic()
        self.ended = False
        self._buffer = b""
        self._send_lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends one message. A broken connection is not an error here: `receive` is where a loss is noticed."""
        data = json.dumps(message).encode() + b"\n"
        with self._send_lock, contextlib.suppress(OSError):
            self.sock.sendall(data)

    def receive(self) -> list[Message] | None:
        """The complete messages that have come; None when the connection is closed.

        Raises:
          ValueError: what came is not a line of JSON with a `kind`.
        """
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            raise ValueError(f"a message of more than {MAX_LINE_BYTES} bytes")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise ValueError(f"not a message of this program: {str(message)[:80]!r}")
        return messages

    def finish(self) -> None:
        """Sends nothing more; the other end can still read what was sent before."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Frees the socket."""
        with contextlib.suppress(OSError):
            self.sock.close()


def parse_address(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[ipv6]:port`.

    Raises:
      ValueError: it is neither, or the port is not from 1 to 65535.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"an IPv6 coordinator address is written [address]:port, not {address!r}")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise ValueError(f"the coordinator address must be host:port with a port from 1 to 65535, not {address!r}")
    return host, int(port)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on `port`: of the loopback interface when `host` is one of its names, else of all.

    Raises:
      OSError: the port is in use, which the message says.
    """
    try:
        if host == "localhost" or _is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=512)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
        return socket.create_server(("", port), backlog=512)
    except OSError as error:
        raise OSError(error.errno, f"process 0 cannot listen on port {port}: {error.strerror}") from error


def dial(address: tuple[str, int], deadline: float) -> socket.socket:
    """Connects, trying again until `deadline` (`time.monotonic()`).

    Raises:
      TimeoutError: nobody answered; the message gives the last reason.
    """
    while True:
        try:
            return socket.create_connection(address, timeout=max(0.1, min(5.0, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise TimeoutError(f"no answer from {address[0]}:{address[1]} ({error})") from error
        time.sleep(_RETRY_S)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
