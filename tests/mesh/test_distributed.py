"""Jobs of two real processes: each way in which they can end, and what the others then say."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import pytest

from slope_jax.mesh.processes import distributed
from slope_jax.mesh.processes.heartbeat import Limits

JOB = pathlib.Path(__file__).with_name("job.py")
START_LIMIT_S = 120.0  # two imports of jax on a busy machine
LOSS_LIMIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: its status, what it wrote, and when."""

    status: int
    output: str
    pid: int
    at: float


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def started(folder: pathlib.Path, case: str, process_ids: tuple[int, ...] = (0, 1)) -> Iterator[list[subprocess.Popen]]:
    """Starts processes of a job of two; whatever is still there at the end is killed."""
    address = f"127.0.0.1:{free_port()}"
    processes = []
    try:
        for process_id in process_ids:
            with (folder / f"{process_id}.txt").open("wb") as output:
                command = [sys.executable, str(JOB), address, "2", str(process_id), case]
                processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_job(folder: pathlib.Path, case: str, wait_for: tuple[int, ...] = (0, 1)) -> list[Ended | None]:
    """Runs a job of two processes and waits for those of `wait_for`."""
    ends: list[Ended | None] = [None, None]
    with started(folder, case) as processes:
        deadline = time.monotonic() + START_LIMIT_S
        while any(ends[p] is None for p in wait_for):
            for process_id in wait_for:
                status = processes[process_id].poll()
                if ends[process_id] is None and status is not None:
                    output = (folder / f"{process_id}.txt").read_text()
                    ends[process_id] = Ended(status, output, processes[process_id].pid, time.time())
            if time.monotonic() > deadline:
                outputs = [(folder / f"{p}.txt").read_text() for p in (0, 1)]
                pytest.fail(f"{case}: still running after {START_LIMIT_S} s: {outputs}")
            time.sleep(0.05)
    return ends


def case_time(folder: pathlib.Path, process_id: int) -> float:
    """When the victim was about to do what the case says."""
    found = re.search(r"^case at ([\d.]+)$", (folder / f"{process_id}.txt").read_text(), re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize(("case", "status"), [("end", 0), ("end_4", 4)])
def test_normal_end_has_one_status_on_all_and_whole_arrays(tmp_path: pathlib.Path, case: str, status: int) -> None:
    for end in run_job(tmp_path, case):
        assert end is not None
        assert end.status == status, end.output
        assert "done" in end.output


def survivor_names_victim(folder: pathlib.Path, end: Ended | None, victim: int, reason: str) -> None:
    survivor = 1 - victim
    assert end is not None
    assert end.status == distributed.PEER_LOST_STATUS, end.output
    assert re.search(
        rf"slope_jax: process {survivor} \(host \S+, pid {end.pid}\) ends because "
        rf"process {victim} \(host {re.escape(socket.gethostname())}, pid \d+\) was lost: {reason}",
        end.output,
    ), end.output
    assert end.at - case_time(folder, victim) < LOSS_LIMIT_S


@pytest.mark.parametrize("victim", [0, 1])
def test_survivor_of_a_killed_process_names_it(tmp_path: pathlib.Path, victim: int) -> None:
    end = run_job(tmp_path, f"kill_{victim}", wait_for=(1 - victim,))[1 - victim]
    survivor_names_victim(tmp_path, end, victim, "its connection closed")


def test_survivor_of_a_process_without_a_sign_of_life_names_it(tmp_path: pathlib.Path) -> None:
    """Stopped, or held by a call into C that keeps the interpreter; the latter ends itself at 2 * silence_s + 5."""
    waited_for = {"stop_0": (1,), "stop_1": (0,), "hold_1": (0, 1)}
    for case in waited_for:
        (tmp_path / case).mkdir()
    with concurrent.futures.ThreadPoolExecutor() as pool:  # together: most of their time is waiting
        jobs = {case: pool.submit(run_job, tmp_path / case, case, wait) for case, wait in waited_for.items()}
    for case, job in jobs.items():
        victim = int(case[-1])
        survivor_names_victim(tmp_path / case, job.result()[1 - victim], victim, r"no sign of life for \d+ s")
    held = jobs["hold_1"].result()[1]
    assert held is not None
    assert held.status != 0
    assert "Timeout" in held.output
    assert held.at - case_time(tmp_path / "hold_1", 1) < LOSS_LIMIT_S


@pytest.mark.parametrize(
    ("case", "reason"), [("raise", "KeyError: 'the case of the test'"), ("abort", "the watchdog of the test")]
)
def test_error_of_one_process_is_told_to_the_other(tmp_path: pathlib.Path, case: str, reason: str) -> None:
    survivor, failed = run_job(tmp_path, f"{case}_1")
    assert survivor is not None
    assert failed is not None
    assert failed.status == 1
    assert reason in failed.output
    assert survivor.status == distributed.PEER_LOST_STATUS, survivor.output
    expected = rf"because process 1 \(host \S+, pid {failed.pid}\) failed: {reason}"
    assert re.search(expected, survivor.output), survivor.output
    assert survivor.at - case_time(tmp_path, 1) < LOSS_LIMIT_S


def test_disagreement_ends_both_with_the_differing_part(tmp_path: pathlib.Path) -> None:
    expected = "the processes disagree on flags: chunk_tokens: '2048' on process 0; '4096' on process 1"
    for end in run_job(tmp_path, "disagree"):
        assert end is not None
        assert end.status in (1, distributed.PEER_LOST_STATUS)
        assert expected in end.output
        assert "dtype:" not in end.output


def test_process_that_never_arrives_is_named(tmp_path: pathlib.Path) -> None:
    with started(tmp_path, "alone", (0,)) as first, started(tmp_path, "alone", (1,)) as second:
        assert [process.wait(START_LIMIT_S) for process in (*first, *second)] == [1, 1]
    for present, absent in [(0, 1), (1, 0)]:
        output = (tmp_path / f"{present}.txt").read_text()
        assert re.search(rf"start-up failed: process {absent} .*did not arrive within 2 s", output), output


def test_stopped_process_is_noticed_well_within_the_limit() -> None:
    limits = Limits()
    assert limits.silence_s + limits.beat_s + limits.grace_s < LOSS_LIMIT_S / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_processes": 2}, "num_processes=2 was given without coordinator_address and process_id"),
        ({"coordinator_address": "a:1", "num_processes": 2}, "given without process_id"),
        ({"process_id": 0}, "given without coordinator_address and num_processes"),
        ({"coordinator_address": "a:1", "num_processes": 2, "process_id": 2}, "process_id=2 must be from 0 to 1"),
        ({"coordinator_address": "a:1", "num_processes": 2, "process_id": -1}, "process_id=-1 must be from 0 to 1"),
        ({"num_processes": 1, "process_id": 1}, "process_id=1|coordinator_address"),
        ({"num_processes": 0}, "num_processes must be at least 1, not 0"),
        ({"coordinator_address": "host", "num_processes": 2, "process_id": 0}, "must be host:port"),
        ({"coordinator_address": "host:0", "num_processes": 2, "process_id": 0}, "port from 1 to 65535"),
        ({"coordinator_address": "::1:80", "num_processes": 2, "process_id": 0}, r"written \[address\]:port"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distributed.initialize(**arguments)


@pytest.mark.parametrize("arguments", [{}, {"num_processes": 1}, {"num_processes": 1, "process_id": 0}])
def test_one_process_needs_nothing(arguments: dict) -> None:
    distributed.initialize(**arguments)
    assert not jax.distributed.is_initialized()
    distributed.agree("flags", {"a": "b"})
    assert distributed.broadcast("choice", "x") == "x"
    assert len(distributed.hosts()) == 1
    assert distributed.run_program(lambda: 7) == 7
    assert distributed.run_program(lambda: None) == 0
    with pytest.raises(ZeroDivisionError):
        distributed.run_program(lambda: 1 // 0)


def test_slurm_gives_address_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "4097",
        "SLURM_STEP_NODELIST": "nid[003-006]",
        "SLURM_NTASKS": "32",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert distributed._resolve(None, None, None) == (("nid003", 61441), 32, 9)
    assert distributed._resolve(None, 1, None) is None
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert distributed._resolve(None, None, None) is None
