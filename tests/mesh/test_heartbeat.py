"""The heartbeat's protocol, its processes played by threads of one process."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slope_jax.mesh.processes import links, relay
from slope_jax.mesh.processes.heartbeat import Heartbeat, Limits, PeerLostError

LIMITS = Limits(beat_s=0.1, silence_s=1.0, grace_s=0.1)
WAIT_S = 20.0


class Job:
    """Makes heartbeats that record their verdict instead of ending the process."""

    def __init__(self) -> None:
        self.listener = links.listen("127.0.0.1", 0)
        self.address: tuple[str, int] = self.listener.getsockname()
        self.beats: dict[int, Heartbeat] = {}
        self.ended: dict[int, threading.Event] = {}
        self.service = ("127.0.0.1", 1)

    def start(self, process_id: int, num_processes: int, facts: str = "1", timeout_s: float = WAIT_S) -> Heartbeat:
        """Process `process_id` up to the point where all have arrived."""
        ended = self.ended[process_id] = threading.Event()
        options: dict[str, Any] = {"facts": {"version": facts}, "limits": LIMITS, "on_lost": ended.set}
        if process_id == 0:
            beat = Heartbeat.serve(self.listener, num_processes, self.service, **options)
        else:
            beat = Heartbeat.join(self.address, process_id, num_processes, timeout_s, **options)
        self.beats[process_id] = beat
        beat.wait_for_all(timeout_s)
        return beat


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    together([functools.partial(beat.close, 1.0) for beat in job.beats.values() if not beat._finished.is_set()])
    job.listener.close()


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results, or errors, of calls made at the same time."""
    if not calls:
        return []
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def start_all(job: Job, count: int) -> list[Heartbeat]:
    beats = together([functools.partial(job.start, p, count) for p in range(count)])
    assert all(isinstance(beat, Heartbeat) for beat in beats), beats
    return beats


def test_gather_gives_every_value_in_order_and_a_peaceful_end(job: Job) -> None:
    beats = start_all(job, 3)
    for turn in range(20):
        values = together([functools.partial(b.gather, "turn", f"{b.me.process_id}.{turn}", WAIT_S) for b in beats])
        assert values == [[f"{p}.{turn}" for p in range(3)]] * 3
    together([beat.close for beat in beats])
    assert [beat.loss(0.3) for beat in beats] == [None] * 3
    assert not any(event.is_set() for event in job.ended.values())


def test_gather_at_different_points_names_both(job: Job) -> None:
    beats = start_all(job, 2)
    errors = together([lambda: beats[0].gather("flags", "", WAIT_S), lambda: beats[1].gather("batch", "", WAIT_S)])
    for error in errors:
        assert isinstance(error, ValueError)
        assert f"'flags' on {beats[0].me}, 'batch' on {beats[1].me}" in str(error)


@pytest.mark.parametrize("absent", [0, 2])
def test_gather_names_who_does_not_come(job: Job, absent: int) -> None:
    beats = start_all(job, 3)
    errors = together([functools.partial(b.gather, "batch", "", 0.3) for b in beats if b.me.process_id != absent])
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert str(error) == f"batch: not reached within 0.3 s by {beats[absent].me}"


@pytest.mark.parametrize("victim", [0, 2])
def test_closed_connection_is_a_loss_for_all(job: Job, victim: int) -> None:
    beats = start_all(job, 3)
    beats[victim]._closing = True  # its own verdict does not matter
    for link in list(beats[victim]._links):
        link.sock.shutdown(socket.SHUT_RDWR)
    for beat in beats:
        if beat is not beats[victim]:
            assert (
                beat.loss(WAIT_S) == f"{beats[victim].me} was lost: its connection closed (killed, crashed or cut off)"
            )
            assert job.ended[beat.me.process_id].wait(WAIT_S)
            with pytest.raises(PeerLostError, match="was lost"):
                beat.gather("batch", "", WAIT_S)


@pytest.mark.parametrize("victim", [0, 2])
def test_silence_is_a_loss_for_all(job: Job, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = start_all(job, 3)
    start = time.monotonic()
    monkeypatch.setattr(beats[victim], "_tell_all", lambda message: None)
    for beat in beats:
        if beat is not beats[victim]:
            assert str(beat.loss(WAIT_S)).startswith(f"{beats[victim].me} was lost: no sign of life")
    assert time.monotonic() - start > LIMITS.silence_s / 2


def test_process_that_did_not_run_blames_nobody(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that could not run for longer than `silence_s` must read what came before it judges."""
    beats = start_all(job, 2)
    original, stalls = beats[0]._tell_all, iter([True])

    def stall(message: links.Message) -> None:
        if next(stalls, False):
            time.sleep(1.5 * LIMITS.silence_s)
        original(message)

    monkeypatch.setattr(beats[1], "_check_silence", lambda: None)
    monkeypatch.setattr(beats[0], "_tell_all", stall)
    assert beats[0].loss(3 * LIMITS.silence_s) is None
    assert next(stalls, None) is None


def test_report_gives_the_reason_to_all(job: Job) -> None:
    beats = start_all(job, 3)
    beats[1].report("ValueError: too long", 0.5)
    for beat in (beats[0], beats[2]):
        assert beat.loss(WAIT_S) == f"{beats[1].me} failed: ValueError: too long"


def test_missing_processes_are_named_to_those_who_came(job: Job) -> None:
    errors = together([lambda: job.start(0, 4, timeout_s=0.5), lambda: job.start(2, 4, timeout_s=0.5)])
    for error in errors:
        assert str(error) == "start-up failed: processes [1, 3] of 4 did not arrive within 0.5 s"


def test_absent_coordinator_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        options: dict[str, Any] = {"facts": {}, "limits": LIMITS, "on_lost": lambda: None}
        with pytest.raises(RuntimeError, match=r"process 0 did not arrive within 0.3 s: no answer from 127.0.0.1"):
            Heartbeat.join(sock.getsockname(), 1, 2, 0.3, **options)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((1, 3, "1"), r"process 1 \(.*\) was started for 3 processes and process 0 \(.*\) for 2"),
        ((0, 2, "1"), r"two processes have the number 0: process 0 \(.*\) and process 0"),
        ((5, 2, "1"), r"process 5 \(.*\) has no number from 0 to 1"),
        ((1, 2, "2"), r"version differs: 1 on process 0 \(.*\), 2 on process 1"),
    ],
)
def test_processes_that_do_not_fit_are_refused_on_both_sides(
    job: Job, other: tuple[int, int, str], message: str
) -> None:
    def join() -> None:
        options: dict[str, Any] = {"facts": {"version": other[2]}, "limits": LIMITS, "on_lost": lambda: None}
        Heartbeat.join(job.address, other[0], other[1], WAIT_S, **options).wait_for_all(WAIT_S)

    for error in together([lambda: job.start(0, 2), join]):
        with pytest.raises(RuntimeError, match=message):
            raise error


def test_strangers_do_not_harm_a_running_job(job: Job) -> None:
    beats = start_all(job, 2)
    hello = {"kind": "hello", "process_id": 1, "host": "h", "pid": 1, "num_processes": 2, "facts": {}}
    for data in [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\n",
        b"[]\n",
        b'{"kind": "hello"}\n',
        b'{"kind": "lost", "text": "x"}\n',
        json.dumps(hello | {"process_id": "x"}).encode() + b"\n",
    ]:
        with socket.create_connection(job.address, timeout=WAIT_S) as sock:
            sock.sendall(data)
            assert sock.recv(100) == b""
    with socket.create_connection(job.address, timeout=WAIT_S) as sock:
        sock.sendall(json.dumps(hello).encode() + b"\n")
        assert b"its job runs already" in sock.recv(1000)
    assert together([functools.partial(b.gather, "x", "y", WAIT_S) for b in beats]) == [["y", "y"]] * 2


def test_relay_carries_bytes_both_ways_and_keeps_lost_connections_open(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        job.service = service.getsockname()
        start_all(job, 2)
        carrier = relay.Relay(job.address)
        sent = os.urandom(1 << 20)
        with socket.create_connection(links.parse_address(carrier.address), timeout=WAIT_S) as client:
            client.sendall(b"ping")
            upstream, _ = service.accept()
            with upstream:
                upstream.settimeout(WAIT_S)
                assert upstream.recv(100) == b"ping"
                sending = threading.Thread(target=upstream.sendall, args=(sent,))
                sending.start()
                received = b""
                while len(received) < len(sent):
                    received += client.recv(1 << 16)
                sending.join()
                assert received == sent
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
        carrier.close()
