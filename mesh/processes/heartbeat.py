"""Notices within seconds that a process of the job is gone, and tells every other process which one it was.

Every process has one thread and one TCP connection to process 0. A closed connection is a loss at once (a process that
is killed closes it whatever it was doing); a connection without a beat for `silence_s` is one too (a stopped process,
a host without power). Process 0 passes the name of the lost process on. The thread needs nothing of the main thread,
which may hang in a collective: after a short grace it ends the process.

The same connections carry small agreements between the processes (`gather`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from slope_jax.mesh.processes import links, relay
from slope_jax.mesh.processes.links import Link, Message, Peer

_HELLO_TIMEOUT_S = 10.0
_ANSWER_MARGIN_S = 10.0


class PeerLostError(RuntimeError):
    """Another process of the job was lost or has failed; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times in seconds.

    Attributes:
      beat_s: between two signs of life.
      silence_s: without a sign of life a process counts as lost.
      grace_s: what the main thread has to end by itself after a loss.
    """

    beat_s: float = 1.0
    silence_s: float = 20.0
    grace_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.beat_s * 3 <= self.silence_s:
            raise ValueError(f"silence_s={self.silence_s} must be at least three times beat_s={self.beat_s}")


@dataclasses.dataclass(slots=True)
class _Gather:
    """What process 0 has of one agreement: process -> (name, value)."""

    deadline: float
    parts: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)


def print_now(text: str) -> None:
    """Writes a line to stderr, unless nobody reads it.

    Not print(): the main thread may hold the lock of the stream for ever.
    """
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 1.0)[1]:
            os.write(2, (text.rstrip("\n") + "\n").encode())


class Heartbeat:
    """One process's part in the heartbeat of a job; made by `serve` (process 0) or `join` (the others).

    Attributes:
      me: this process.
      peers: all processes by number, known once `wait_for_all` has returned.
    """

    def __init__(
        self,
        process_id: int,
        num_processes: int,
        *,
        facts: Mapping[str, str],
        limits: Limits,
        on_lost: Callable[[], None],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.me = Peer.this_process(process_id)
        self.peers: dict[int, Peer] = {process_id: self.me}
        self._num_processes = num_processes
        self._facts = dict(facts)
        self._limits = limits
        self._on_lost = on_lost
        self._on_beat = on_beat
        self._service: tuple[str, int] = ("", 0)
        self._links: list[Link] = []
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._state = threading.Condition(threading.RLock())
        self._complete = False
        self._closing = False
        self._finished = threading.Event()
        self._loss: str | None = None
        self._end_at = float("inf")
        self._gathers: dict[int, _Gather] = {}
        self._answers: dict[int, Message] = {}
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="slope_jax heartbeat")

    @classmethod
    def serve(cls, listener: socket.socket, num_processes: int, service: tuple[str, int], **options: Any) -> Heartbeat:
        """Process 0: waits for the others on `listener` and connects their relays to `service`."""
        heartbeat = cls(0, num_processes, **options)
        heartbeat._service = service
        heartbeat._listener = listener
        listener.setblocking(False)
        heartbeat._selector.register(listener, selectors.EVENT_READ)
        heartbeat._thread.start()
        return heartbeat

    @classmethod
    def join(
        cls, coordinator: tuple[str, int], process_id: int, num_processes: int, timeout_s: float, **options: Any
    ) -> Heartbeat:
        """Any other process: connects to process 0.

        Raises:
          RuntimeError: process 0 did not answer within `timeout_s`.
        """
        heartbeat = cls(process_id, num_processes, **options)
        try:
            link = Link(links.dial(coordinator, time.monotonic() + timeout_s))
        except TimeoutError as error:
            raise RuntimeError(f"start-up failed: process 0 did not arrive within {timeout_s:g} s: {error}") from None
        link.send(
            {
                "kind": "hello",
                **dataclasses.asdict(heartbeat.me),
                "num_processes": num_processes,
                "facts": heartbeat._facts,
            }
        )
        link.peer = Peer(0, f"{coordinator[0]}:{coordinator[1]}", 0)  # until process 0 says its own name
        heartbeat._links.append(link)
        heartbeat._selector.register(link.sock, selectors.EVENT_READ, link)
        heartbeat._thread.start()
        return heartbeat

    def wait_for_all(self, timeout_s: float) -> None:
        """Returns when every process has arrived.

        Raises:
          RuntimeError: some did not, or the processes do not fit together (their number, a number used twice, other
            versions), or one was lost while starting; the message names them.
        """
        # Process 0 decides and tells the others, so that all of them give the same names.
        patience = timeout_s if self.me.process_id == 0 else timeout_s + _ANSWER_MARGIN_S
        with self._state:
            self._state.wait_for(lambda: self._complete or self._loss is not None, patience)
            if self._complete:
                return
            if self._loss is None:
                missing = [p for p in range(self._num_processes) if p not in self.peers]
                what = f"processes {missing}" if len(missing) > 1 else f"process {missing[0]}"
                if self.me.process_id:
                    self._loss = f"process 0 answered but did not start the job within {patience:g} s"
                else:
                    self._loss = f"{what} of {self._num_processes} did not arrive within {timeout_s:g} s"
                self._tell_all({"kind": "lost", "text": self._loss})
            text = self._loss
        self.close()
        raise RuntimeError(f"start-up failed: {text}")

    def gather(self, name: str, value: str, timeout_s: float) -> list[str]:
        """The `value` of every process, in the order of their numbers; every process makes the same call.

        Raises:
          TimeoutError: some processes did not make this call in time, which the message names.
          ValueError: some process made another call at this point, which the message says.
          PeerLostError: a process was lost meanwhile.
        """
        with self._state:
            sequence, self._sequence = self._sequence, self._sequence + 1
        part = {"kind": "gather", "sequence": sequence, "name": name, "value": value, "timeout_s": timeout_s}
        if self.me.process_id == 0:
            self._deposit(0, part)
        else:
            self._tell_all(part)
        with self._state:
            patience = timeout_s + _ANSWER_MARGIN_S
            self._state.wait_for(lambda: sequence in self._answers or self._loss is not None, patience)
            answer = self._answers.pop(sequence, None)
            if answer is None and self._loss is not None:
                raise PeerLostError(self._loss)
        if answer is None:
            raise TimeoutError(f"{name}: {self.peers[0]} gave no answer within {patience:g} s")
        if missing := answer.get("missing"):
            names = ", ".join(str(self.peers[p]) for p in missing)
            raise TimeoutError(f"{name}: not reached within {timeout_s:g} s by {names}")
        if len(set(answer["names"])) > 1:
            calls = ", ".join(f"{call!r} on {self.peers[p]}" for p, call in enumerate(answer["names"]))
            raise ValueError(f"the processes are at different points of the program: {calls}")
        return list(answer["values"])

    def loss(self, wait_s: float = 0.0) -> str | None:
        """What is known of a lost process, after at most `wait_s`; None when nobody is lost."""
        with self._state:
            self._state.wait_for(lambda: self._loss is not None, wait_s)
            return self._loss

    def report(self, reason: str, wait_s: float = 2.0) -> None:
        """Tells the others that this process fails, and why; returns when they know it or after `wait_s`."""
        with self._state:
            self._closing = True
        self._tell_all(
            {"kind": "lost", "text": f"{self.me} failed: {reason}"}
            if self.me.process_id == 0
            else {"kind": "failed", "reason": reason}
        )
        self._leave(wait_s)

    def close(self, wait_s: float = 5.0) -> None:
        """Leaves the job in peace: from here on no closed connection is a loss, here or there."""
        with self._state:
            self._closing = True
        self._tell_all({"kind": "bye"})
        self._leave(wait_s)

    # From here on: the thread, and what it calls.

    def _run(self) -> None:
        try:
            next_beat = last_turn = time.monotonic()
            while not self._finished.is_set():
                now = time.monotonic()
                if now - last_turn > 2 * self._limits.beat_s:
                    # This process did not run (a long call that kept the interpreter, a stop and a continue): what the
                    # others sent meanwhile lies unread, so their silence is not theirs.
                    for link in self._links:
                        link.heard += now - last_turn
                last_turn = now
                if now >= next_beat:
                    next_beat = now + self._limits.beat_s
                    self._on_beat()
                    self._tell_all({"kind": "beat"})
                for key, _ in self._selector.select(self._limits.beat_s / 2):
                    if key.data is None:
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                    else:
                        self._read(key.data)
                self._check_silence()
                self._check_gathers()
                if now >= self._end_at:
                    self._on_lost()
                    return
        except Exception:
            # Without its heartbeat this process would hang on a loss, so it must not go on.
            self._lose(f"{self.me} lost its heartbeat thread: {traceback.format_exc()}")
            if not self._finished.wait(self._limits.grace_s):
                self._on_lost()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        link = Link(sock)
        self._links.append(link)
        self._selector.register(sock, selectors.EVENT_READ, link)

    def _read(self, link: Link) -> None:
        try:
            messages = link.receive()
        except ValueError as error:
            self._drop(link)
            if link.peer is not None:
                self._lose(f"{link.peer} was lost: it sent {error}")
            return
        if messages is None:
            self._drop(link)
            if link.peer is not None and not link.ended:
                self._lose(f"{link.peer} was lost: its connection closed (killed, crashed or cut off)")
            return
        for message in messages:
            if link.peer is not None:
                self._handle(link, link.peer, message)
                continue
            try:
                self._admit(link, message)
            except (KeyError, TypeError, ValueError, AttributeError):
                self._drop(link)  # a stranger on the port
                return

    def _admit(self, link: Link, message: Message) -> None:
        """Process 0: the first message of a connection says what it is for."""
        if message["kind"] == "relay":
            self._forget(link)
            relay.serve(link.sock, self._service)
            return
        if message["kind"] != "hello":
            raise ValueError("not a process of a job")
        peer = Peer(int(message["process_id"]), str(message["host"]), int(message["pid"]))
        with self._state:
            if self._complete:
                # Another job's process, or a restarted one: it must not harm the job that runs.
                link.send({"kind": "lost", "text": f"{self.me} refused {peer}: its job runs already"})
                link.finish()
                return
            link.peer = peer
            if problem := self._misfit(peer, message):
                self._lose(problem)
                return
            self.peers[peer.process_id] = peer
            if len(self.peers) < self._num_processes:
                return
            everyone = [dataclasses.asdict(self.peers[p]) for p in range(self._num_processes)]
            self._tell_all({"kind": "welcome", "peers": everyone})
            self._complete = True
            self._state.notify_all()

    def _misfit(self, peer: Peer, hello: Message) -> str | None:
        if hello["num_processes"] != self._num_processes:
            return f"{peer} was started for {hello['num_processes']} processes and {self.me} for {self._num_processes}"
        if peer.process_id in self.peers:
            return f"two processes have the number {peer.process_id}: {self.peers[peer.process_id]} and {peer}"
        if not 0 <= peer.process_id < self._num_processes:
            return f"{peer} has no number from 0 to {self._num_processes - 1}"
        for name in sorted(self._facts.keys() | hello["facts"].keys()):
            here, there = self._facts.get(name), hello["facts"].get(name)
            if here != there:
                return f"{name} differs: {here} on {self.me}, {there} on {peer}"
        return None

    def _handle(self, link: Link, peer: Peer, message: Message) -> None:
        match message["kind"]:
            case "welcome":
                with self._state:
                    self.peers = {p["process_id"]: Peer(**p) for p in message["peers"]}
                    link.peer = self.peers[0]
                    self._complete = True
                    self._state.notify_all()
            case "lost":
                self._lose(message["text"])
            case "failed":
                self._lose(f"{peer} failed: {message['reason']}")
            case "gather":
                self._deposit(peer.process_id, message)
            case "gathered":
                self._answer(message)
            case "bye":
                link.ended = True

    def _deposit(self, process_id: int, part: Message) -> None:
        with self._state:
            entry = self._gathers.setdefault(part["sequence"], _Gather(time.monotonic() + part["timeout_s"]))
            entry.parts[process_id] = (part["name"], part["value"])
            if len(entry.parts) < self._num_processes:
                return
            del self._gathers[part["sequence"]]
        names, values = zip(*(entry.parts[p] for p in range(self._num_processes)), strict=True)
        answer = {"kind": "gathered", "sequence": part["sequence"], "names": names, "values": values}
        self._tell_all(answer)
        self._answer(answer)

    def _check_gathers(self) -> None:
        now = time.monotonic()
        with self._state:
            late = {s: e for s, e in self._gathers.items() if now > e.deadline}
            for sequence in late:
                del self._gathers[sequence]
        for sequence, entry in late.items():
            missing = [p for p in range(self._num_processes) if p not in entry.parts]
            answer = {"kind": "gathered", "sequence": sequence, "missing": missing}
            self._tell_all(answer)
            self._answer(answer)

    def _answer(self, answer: Message) -> None:
        with self._state:
            self._answers[answer["sequence"]] = answer
            self._state.notify_all()

    def _check_silence(self) -> None:
        now = time.monotonic()
        for link in list(self._links):
            silent = now - link.heard
            if link.peer is None:
                if silent > _HELLO_TIMEOUT_S:
                    self._drop(link)
            elif silent > self._limits.silence_s and not link.ended:
                self._lose(
                    f"{link.peer} was lost: no sign of life for {silent:.0f} s "
                    "(stopped, or its host or network is down)"
                )

    def _lose(self, text: str) -> None:
        """Ends this process because of `text`, unless it is ending already."""
        with self._state:
            if self._loss is not None or self._closing:
                return
            self._loss = text
            if self._complete:  # else `wait_for_all` raises it
                print_now(f"\nslope_jax: {self.me} ends because {text}")
                self._end_at = time.monotonic() + self._limits.grace_s
            self._state.notify_all()
        if self.me.process_id == 0:
            self._tell_all({"kind": "lost", "text": text})

    def _tell_all(self, message: Message) -> None:
        for link in list(self._links):
            if link.peer is not None:
                link.send(message)

    def _forget(self, link: Link) -> None:
        self._selector.unregister(link.sock)
        self._links.remove(link)

    def _drop(self, link: Link) -> None:
        self._forget(link)
        link.close()

    def _leave(self, wait_s: float) -> None:
        """Half-closes every connection and waits until the other ends have done the same.

        A socket that is closed with unread data in it resets the connection, and the last message may be lost.
        """
        for link in list(self._links):
            link.finish()
        deadline = time.monotonic() + wait_s
        while any(link.peer is not None for link in list(self._links)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._finished.set()
        self._thread.join(1.0)
        for link in self._links:
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
