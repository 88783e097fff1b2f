"""Starts the processes of one job, and ends all of them when one fails.

    run_program(main)                 every launch program
      main: initialize(...)           everybody is there, JAX's distributed service runs
            agree("flags", {...})     everybody does the same
            ... collectives ...
    end:    all are done              -> status 0 everywhere
            main raises               -> the others are told the reason; status 1 (2 for what it refuses)
            another process is lost   -> its name on stderr; status `PEER_LOST_STATUS`, at most about 25 s later

One process needs none of this: every function here then does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import hashlib
import json
import os
import pathlib
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

import jax

# Private: the detection of Slurm (addresses, numbers) that jax.distributed.initialize itself uses. It has no public
# name, and the addresses are needed before that call.
from jax._src import clusters as _clusters
from jax._src.clusters.slurm_cluster import SlurmCluster as _SlurmCluster

from slope_jax.mesh.processes import links
from slope_jax.mesh.processes.heartbeat import Heartbeat, Limits, PeerLostError, print_now
from slope_jax.mesh.processes.relay import Relay

REFUSED_STATUS = 2
PEER_LOST_STATUS = 3
_END_TIMEOUT_S = 600.0
_MAX_SUMMARY_VALUE = 160


@dataclasses.dataclass(slots=True)
class _Runtime:
    heartbeat: Heartbeat
    limits: Limits
    relay: Relay | None
    port_holder: socket.socket | None


# State of the process, as jax.distributed's own: a process is part of one job.
_runtime: _Runtime | None = None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    startup_timeout_s: float = 300.0,
    limits: Limits | None = None,
) -> None:
    """Makes this process part of a job of `num_processes`; to be called before anything touches a device.

    With no arguments it takes them from Slurm under `srun`, and does nothing elsewhere. One process does nothing.

    Args:
      coordinator_address: host and port of process 0, the same on all; the only port that other hosts must reach.
      num_processes: of the whole job.
      process_id: the number of this process, from 0.
      startup_timeout_s: how long processes may take to arrive.
      limits: times of the heartbeat.

    Raises:
      ValueError: arguments that do not fit together.
      RuntimeError: a process did not arrive in time or does not fit to the others (the message names it), or this
        process is part of a job already.
    """
    global _runtime
    if _runtime is not None or jax.distributed.is_initialized():
        raise RuntimeError("this process is part of a job already")
    job = _resolve(coordinator_address, num_processes, process_id)
    if job is None:
        return
    address, num_processes, process_id = job
    limits = limits or Limits()
    options = {
        "facts": {"the version of jax": jax.__version__},
        "limits": limits,
        "on_lost": _end_lost,
        # Runs without the interpreter: ends this process even if the main thread hangs while it holds the interpreter.
        "on_beat": lambda: faulthandler.dump_traceback_later(2 * limits.silence_s + 5, exit=True, file=2),
    }
    if process_id == 0:
        # Stays bound (not listening) until the service has the port, so that no other program can get it.
        port_holder = socket.socket()
        port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port_holder.bind(("127.0.0.1", 0))
        service = port_holder.getsockname()
        heartbeat = Heartbeat.serve(links.listen(*address), num_processes, service, **options)
        relay = None
        service_address = f"127.0.0.1:{service[1]}"
    else:
        port_holder = None
        heartbeat = Heartbeat.join(address, process_id, num_processes, startup_timeout_s, **options)
        relay = Relay(address)
        service_address = relay.address
    try:
        heartbeat.wait_for_all(startup_timeout_s)
    except BaseException:
        faulthandler.cancel_dump_traceback_later()
        raise
    _runtime = _Runtime(heartbeat, limits, relay, port_holder)
    # The preemption service would swallow SIGTERM, with which Slurm and launch/local.sh end a process.
    jax.config.update("jax_enable_preemption_service", False)
    # gRPC would go through the proxy that the environment names and hang; here it only speaks with this process itself.
    os.environ.setdefault("no_grpc_proxy", "127.0.0.1")
    jax.config.update("jax_check_proxy_envs", False)
    jax.distributed.initialize(
        coordinator_address=service_address,
        num_processes=num_processes,
        process_id=process_id,
        coordinator_bind_address=service_address if process_id == 0 else None,
        initialization_timeout=round(max(1.0, startup_timeout_s)),
    )


def agree(name: str, summary: Mapping[str, str], timeout_s: float = 300.0) -> None:
    """Returns when every process has made this call with the same `summary`.

    Args:
      name: what is agreed on, for messages.
      summary: whatever must be the same on all processes, in named parts.
      timeout_s: how much later than the first process the last one may come.

    Raises:
      ValueError: on every process, when they disagree; names the parts, the processes and their values.
      TimeoutError: on every process, when one does not come; names it.
      PeerLostError: a process was lost meanwhile.
      RuntimeError: there are several processes, but `initialize` of this module did not start them.
    """
    if _runtime is None:
        _check_single()
        return
    summary = {part: _shorten(value) for part, value in summary.items()}
    values = _runtime.heartbeat.gather(name, json.dumps(summary, sort_keys=True), timeout_s)
    if len(set(values)) == 1:
        return
    summaries = [json.loads(value) for value in values]
    differences = []
    for part in sorted(set().union(*summaries)):
        holders: dict[str, list[int]] = {}
        for process, other in enumerate(summaries):
            holders.setdefault(repr(other[part]) if part in other else "nothing", []).append(process)
        if len(holders) > 1:
            each = "; ".join(f"{value} on {_processes(found)}" for value, found in holders.items())
            differences.append(f"{part}: {each}")
    raise ValueError(f"the processes disagree on {name}: " + ", and ".join(differences))


def hosts() -> list[str]:
    """The host name of every process, by its number."""
    if _runtime is None:
        _check_single()
        return [socket.gethostname()]
    return [peer.host for _, peer in sorted(_runtime.heartbeat.peers.items())]


def broadcast(name: str, value: str, timeout_s: float = 300.0) -> str:
    """The `value` of process 0, on every process; the others' values are ignored. Raises as `agree`."""
    if _runtime is None:
        _check_single()
        return value
    mine = value if _runtime.heartbeat.me.process_id == 0 else ""
    return _runtime.heartbeat.gather(name, mine, timeout_s)[0]


def run_program(main: Callable[[], int | None], *, refusals: tuple[type[Exception], ...] = ()) -> int:
    """Runs the body of a program, which may call `initialize`, and ends it together with the other processes.

    Args:
      main: returns the exit status (None is 0). Every process must return before any of them ends.
      refusals: errors that are the user's to mend; one line on stderr tells them, and the status is `REFUSED_STATUS`.

    Returns:
      The largest exit status of the processes, the same on all. When `main` raises in one of several processes, this
      function does not return: it prints the error, tells the others, and ends the process with status 1, or with
      `PEER_LOST_STATUS` when the loss of another process is behind it. With one process the error is raised, unless
      it is a refusal.
    """
    try:
        status = main() or 0
        if _runtime is not None:
            status = _end_together(status)
        return status
    except BaseException as error:
        refused = isinstance(error, refusals)
        if _runtime is not None:
            _end_failed(_runtime, error, refused)
        if not refused:
            raise
        print_now(_refusal(error))
        return REFUSED_STATUS


def abort(reason: str) -> NoReturn:
    """Ends this process with status 1 and all others with `reason`; for any thread, whatever the main thread does."""
    print_now(f"slope_jax: {reason}")
    if _runtime is not None:
        _runtime.heartbeat.report(reason)
    _end(1)


def _resolve(
    address: str | None, num_processes: int | None, process_id: int | None
) -> tuple[tuple[str, int], int, int] | None:
    """The checked arguments of a job of several processes; None for a single process."""
    if address is not None:
        links.parse_address(address)
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, not {num_processes}")
    if None in (address, num_processes, process_id) and num_processes != 1 and _SlurmCluster.is_env_present():
        address, num_processes, process_id, _ = _clusters.ClusterEnv.auto_detect_unset_distributed_params(
            address, num_processes, process_id, None, _SlurmCluster.name, None
        )
    given = {"coordinator_address": address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3:
        return None
    if num_processes == 1 and process_id in (None, 0):
        return None
    if address is None or num_processes is None or process_id is None:
        there = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ValueError(f"{there} was given without {' and '.join(missing)}; several processes need all three")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id={process_id} must be from 0 to {num_processes - 1} (num_processes - 1)")
    return links.parse_address(address), num_processes, process_id


def _check_single() -> None:
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "several processes must be started with slope_jax.mesh.processes.distributed.initialize; "
            "these were started with jax.distributed.initialize"
        )


def _shorten(value: str) -> str:
    """Keeps messages short; the digest still tells long values apart."""
    if len(value) <= _MAX_SUMMARY_VALUE:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:16]
    return f"{value[:_MAX_SUMMARY_VALUE]}... ({len(value)} characters, sha256 {digest})"


def _processes(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"processes {shown}"


def _end_together(status: int) -> int:
    global _runtime
    assert _runtime is not None
    statuses = _runtime.heartbeat.gather("the end of the program", str(status), _END_TIMEOUT_S)
    jax.distributed.shutdown()
    _runtime.heartbeat.close()
    faulthandler.cancel_dump_traceback_later()
    for closable in (_runtime.relay, _runtime.port_holder):
        if closable is not None:
            closable.close()
    _runtime = None
    return max(map(int, statuses))


def _end_failed(runtime: _Runtime, error: BaseException, refused: bool) -> NoReturn:
    # A broken collective may be noticed here before the heartbeat knows who broke it.
    patience = runtime.limits.silence_s + 5 if _looks_remote(error) else 0.0
    if runtime.heartbeat.loss(patience) is not None:
        if not isinstance(error, PeerLostError):
            print_now(f"slope_jax: this process also failed with {_summary(error)}")
        _end(PEER_LOST_STATUS)
    print_now(_refusal(error) if refused else "".join(traceback.format_exception(error)))
    runtime.heartbeat.report(_summary(error))
    _end(REFUSED_STATUS if refused else 130 if isinstance(error, KeyboardInterrupt) else 1)


def _refusal(error: BaseException) -> str:
    return f"{pathlib.Path(sys.argv[0]).stem}: {error}"


def _looks_remote(error: BaseException) -> bool:
    """Whether this is what a collective raises when another process goes: gloo's errors are ValueErrors."""
    if not isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
        return False
    text = str(error).lower()
    return any(sign in text for sign in ("gloo", "nccl", "rccl", "connection", "rendezvous", "coordination"))


def _summary(error: BaseException) -> str:
    first_lines = " ".join(str(error).split("\n")[:3])
    return f"{type(error).__name__}: {first_lines[:1000]}"


def _end_lost() -> NoReturn:
    _end(PEER_LOST_STATUS)


def _end(status: int) -> NoReturn:
    """Ends the process without the exit handlers: JAX's would wait for the lost process."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    # In a thread with a time limit: a hanging main thread may hold the lock of a stream.
    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(1.0)
    os._exit(status)
