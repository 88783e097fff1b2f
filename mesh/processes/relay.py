"""Carries the traffic of JAX's coordination service over the coordinator's port.

    process i                                             process 0
    JAX client -> 127.0.0.1:a   Relay ====== port of the coordinator ====== serve -> 127.0.0.1:b  JAX service

JAX's client ends its process at once, with a message that names nobody, when its connection to the service closes.
Here that connection is to the own process: when process 0 is lost it stays open, silent, and the heartbeat has the time
to say who was lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from slope_jax.mesh.processes import links

_GREETING = b'{"kind": "relay"}\n'
_READY = b"ready\n"
_SERVICE_START_S = 120.0


class Relay:
    """Listens on a port of the loopback interface and carries each connection to the coordinator.

    Attributes:
      address: what the local client must connect to.
    """

    def __init__(self, coordinator: tuple[str, int]) -> None:
        self._coordinator = coordinator
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._accept)

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                _start(self._carry, self._listener.accept()[0])

    def _carry(self, client: socket.socket) -> None:
        with client:
            with contextlib.suppress(OSError), links.dial(self._coordinator, time.monotonic() + 5.0) as upstream:
                upstream.settimeout(_SERVICE_START_S + 10.0)
                upstream.sendall(_GREETING)
                if upstream.recv(len(_READY), socket.MSG_WAITALL) == _READY:
                    _join(client, upstream)
            # Whatever became of the way to the service, the client's connection stays open until the client closes it.
            with contextlib.suppress(OSError):
                while client.recv(1 << 16):
                    pass

    def close(self) -> None:
        """Accepts nothing more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)


def serve(sock: socket.socket, service: tuple[str, int]) -> None:
    """Joins a connection that greeted as a relay with the coordination service, in threads of its own.

    Args:
      sock: the connection, its greeting already read.
      service: where the service of this process listens, now or soon.
    """
    _start(_serve, sock, service)


def _serve(sock: socket.socket, service: tuple[str, int]) -> None:
    with sock, contextlib.suppress(OSError), links.dial(service, time.monotonic() + _SERVICE_START_S) as upstream:
        sock.sendall(_READY)
        _join(sock, upstream)


def _join(near: socket.socket, far: socket.socket) -> None:
    """Carries bytes both ways until `near` sends no more, and then until `far` has sent its rest."""
    for sock in (near, far):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = _start(_pump, far, near)
    _pump(near, far)
    with contextlib.suppress(OSError):
        far.shutdown(socket.SHUT_WR)
    back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)


def _start(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True, name="slope_jax relay")
    thread.start()
    return thread
