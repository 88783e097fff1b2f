"""The scripts that start several processes, and the flags that the processes share."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from absl import flags

from slope_jax.launch import flags as common_flags

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
TRY_XLA = "import jax; assert jax.jit(lambda x: x + 1)(1) == 2"
WAIT_S = 90.0

PROBE = '''
"""Notes its arguments; then ends with the status that the last one gives for its number, or stays."""
import os, pathlib, sys, time
flags = dict(flag.removeprefix("--").split("=") for flag in sys.argv[1:])
number = int(flags.get("process_id", 0))
pathlib.Path(f"seen-{number}").write_text("\\n".join([str(os.getpid()), *sys.argv[1:]]))
os.write(1, f"out {number}\\n".encode())  # at once, so that no line of another process gets between a text and its end
os.write(2, f"err {number}\\n".encode())
wanted = flags["statuses"].split(",")[number]
time.sleep(60.0 if wanted == "stay" else 0.3 * number)
sys.exit(int(wanted))
'''


@pytest.fixture
def probe(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a module `probe`."""
    (tmp_path / "probe.py").write_text(PROBE)
    return tmp_path


def local(folder: pathlib.Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts local.sh in `folder`."""
    return subprocess.Popen(
        [str(LAUNCH / "local.sh"), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_local_gives_every_process_its_flags(probe: pathlib.Path) -> None:
    done = local(probe, "-n", "3", "-d", "5", "-m", "probe", "--", "--statuses=0,0,0", "--text=a b")
    out, err = done.communicate(timeout=WAIT_S)
    assert done.returncode == 0, err
    assert out == "out 0\n"
    assert set(err.splitlines()) == {"err 0", "[1] out 1", "[1] err 1", "[2] out 2", "[2] err 2"}
    coordinators = set()
    for number in range(3):
        _, *given = (probe / f"seen-{number}").read_text().splitlines()
        assert given[:3] == ["--cpu_devices=5", "--statuses=0,0,0", "--text=a b"]
        assert given[4:] == ["--num_processes=3", f"--process_id={number}"]
        coordinators.add(given[3])
    assert len(coordinators) == 1
    assert coordinators.pop().startswith("--coordinator_address=127.0.0.1:")


def test_local_with_one_process_needs_no_coordinator(probe: pathlib.Path) -> None:
    done = local(probe, "-n", "1", "-d", "8", "-m", "probe", "--", "--statuses=0")
    done.communicate(timeout=WAIT_S)
    assert done.returncode == 0
    assert (probe / "seen-0").read_text().splitlines()[1:] == ["--cpu_devices=8", "--statuses=0"]


@pytest.mark.parametrize(("statuses", "expected"), [("0,7", 7), ("3,7", 7), ("7,3", 7), ("0,3", 3)])
def test_local_has_the_status_of_what_failed(probe: pathlib.Path, statuses: str, expected: int) -> None:
    done = local(probe, "-n", "2", "-m", "probe", "--", f"--statuses={statuses}")
    done.communicate(timeout=WAIT_S)
    assert done.returncode == expected


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_local_ends_its_processes_when_it_is_ended(probe: pathlib.Path, number: int, expected: int) -> None:
    running = local(probe, "-n", "2", "-m", "probe", "--", "--statuses=stay,stay")
    seen = [probe / "seen-0", probe / "seen-1"]
    deadline = time.monotonic() + WAIT_S
    while not all(path.exists() and path.read_text() for path in seen):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(path.read_text().split()[0]) for path in seen]
    os.kill(pids[1], signal.SIGSTOP)  # the hardest to end
    running.send_signal(number)
    running.communicate(timeout=WAIT_S)
    assert running.returncode == expected
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("arguments", [["-n", "0"], ["-d", "x"], ["-z"]])
def test_local_refuses_what_it_does_not_understand(probe: pathlib.Path, arguments: list[str]) -> None:
    done = local(probe, *arguments)
    _, err = done.communicate(timeout=WAIT_S)
    assert done.returncode == 2
    assert "launch/local.sh -n 2 -d 4 --" in err


def test_local_runs_the_selftest_over_two_processes(tmp_path: pathlib.Path) -> None:
    flags_ = ["--ring=2", "--ulysses=2", "--max_bytes=1024"]
    done = local(tmp_path, "-n", "2", "-d", "2", "-m", "slope_jax.launch.selftest", "--", *flags_)
    out, err = done.communicate(timeout=WAIT_S)
    assert done.returncode == 0, err
    header, *rows = out.split("verdict\n")
    assert "each line a ulysses group: host, then process:device" in header
    lines = rows[0].splitlines()
    assert len(lines) == 11
    assert all(line.endswith(" ok") for line in lines)


def sbatch(folder: pathlib.Path, **environment: str) -> list[str]:
    """What slurm.sbatch gives to srun: XLA_FLAGS, then the arguments."""
    srun = folder / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$XLA_FLAGS" "$@"\n')
    srun.chmod(0o755)
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), "--pp=4", "--output_dir=a b"],
        env={"PATH": f"{folder}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def accepts(xla_flags: str) -> bool:
    """Whether jaxlib starts with these flags; those of GPUs are read on any machine."""
    command = [sys.executable, "-c", TRY_XLA]
    environment = os.environ | {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, timeout=WAIT_S, check=False).returncode == 0


def test_slurm_starts_one_program_per_device(tmp_path: pathlib.Path) -> None:
    _, *arguments = sbatch(tmp_path, PYTHON="py")
    assert arguments[-5:] == ["py", "-m", "slope_jax.launch.prefill", "--pp=4", "--output_dir=a b"]
    assert "--gpu-bind=none" in arguments
    assert "slope_jax.launch.selftest" in sbatch(tmp_path, MODULE="slope_jax.launch.selftest")
    text = (LAUNCH / "slurm.sbatch").read_text()
    for wanted in ("--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8"):
        assert f"#SBATCH {wanted}\n" in text


def test_jaxlib_knows_the_flags_of_slurm(tmp_path: pathlib.Path) -> None:
    overlapped, *_ = sbatch(tmp_path)
    serial, *_ = sbatch(tmp_path, SERIAL_COLLECTIVES="1")
    assert "--xla_gpu_enable_command_buffer= " in overlapped
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in overlapped
    assert "--xla_gpu_enable_latency_hiding_scheduler=false" in serial
    assert accepts(common_flags.with_time_limits(overlapped))
    assert accepts(serial)
    assert not accepts(f"{overlapped} --xla_gpu_graph_level=0"), "the check must find a flag that is gone"


def test_flags_of_the_user_win_over_the_time_limits() -> None:
    name = "xla_cpu_collective_call_terminate_timeout_seconds"
    added = common_flags.with_time_limits(f"--{name}=7 --xla_other=1").split()
    assert added[:2] == [f"--{name}=7", "--xla_other=1"]
    assert sum(flag.startswith(f"--{name}=") for flag in added) == 1
    assert len(added) == len(common_flags.XLA_TIME_LIMITS) + 1


def test_flags_that_processes_must_share() -> None:
    values = common_flags.common_values(flags.FLAGS)
    assert {"--pp", "--ring", "--ulysses", "--cpu_devices", "--num_processes"} <= values.keys()
    assert not {"--process_id", "--coordinator_address", "--verbosity", "--log_dir"} & values.keys()
