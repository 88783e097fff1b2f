"""The flags of the mesh and of the processes, shared by all programs, and the start that they ask for.

    --pp --ring --ulysses                                         the mesh
    --cpu_devices                                                 virtual CPU devices of this process
    --coordinator_address --num_processes --process_id            several processes, started by hand
    --startup_timeout_s
    --compilation_cache_dir                                       compiled programs, kept for the next start

Under `srun` the three flags of the processes are left out: Slurm knows them.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from absl import flags

from slope_jax.mesh import ring_policy
from slope_jax.mesh.all_reduce import FORMS
from slope_jax.mesh.axes import MeshShape
from slope_jax.mesh.processes import distributed

_PP = flags.DEFINE_integer("pp", 1, "Pipeline stages.", lower_bound=1)
_RING = flags.DEFINE_integer("ring", 1, "Ranks of the ring that passes keys and values, or queries.", lower_bound=1)
_ULYSSES = flags.DEFINE_integer("ulysses", 1, "Ranks that exchange sequence shards for head shards.", lower_bound=1)
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices", 0, "Run on this number of virtual CPU devices per process; 0 uses what there is.", lower_bound=0
)
_COORDINATOR_ADDRESS = flags.DEFINE_string("coordinator_address", None, "host:port of process 0, the same on all.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes of the whole job.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.", lower_bound=0)
_STARTUP_TIMEOUT_S = flags.DEFINE_float(
    "startup_timeout_s", 300.0, "How long processes may take to arrive.", lower_bound=1.0
)
_COMPILATION_CACHE_DIR = flags.DEFINE_string(
    "compilation_cache_dir",
    None,
    "Folder in which compiled programs are kept, so that the next start with the same mesh and sizes is fast.",
)

Number = TypeVar("Number", int, float)

# Where processes may differ: their number, the names that they know process 0 by, and folders of their own.
_OWN_FLAGS = {"process_id", "coordinator_address", "compilation_cache_dir"}

# XLA ends a process whose collective waits for 40 s, which a process that still compiles, or a CPU with fewer cores
# than devices, can take. That another process is gone is noticed by the heartbeat, much earlier.
XLA_TIME_LIMITS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_cpu_collective_call_terminate_timeout_seconds": 600,
    "xla_gpu_first_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_gpu_first_collective_call_terminate_timeout_seconds": 600,
}


class StartError(ValueError):
    """The program cannot start as its flags ask; a refusal for `distributed.run_program`."""


_ENGINE_FLAGS = ("dtype", "expert_weights", "expert_parallel", "tensor_parallel", "all_reduce", "ring_pass")


def define_engine_flags() -> None:
    """Defines the flags that say how an engine holds and splits a model, named as the arguments of `Engine.load`."""
    flags.DEFINE_string("dtype", "bfloat16", "bfloat16 or float32.")
    flags.DEFINE_string("expert_weights", "bfloat16", "bfloat16 (unpacked at load) or mxfp4 (packed on the device).")
    flags.DEFINE_bool("expert_parallel", False, "Split the experts over the ulysses axis and send tokens to them.")
    flags.DEFINE_bool("tensor_parallel", False, "Split the weights of layers over the ulysses axis, not the tokens.")
    flags.DEFINE_enum(
        "all_reduce", None, FORMS, "How --tensor_parallel adds up over the ulysses axis; psum by default."
    )
    flags.DEFINE_enum(
        "ring_pass",
        ring_policy.AUTO,
        ring_policy.RING_PASSES,
        "What goes round the ring: keys and values, queries, or in every tick what moves fewer bytes.",
    )


def engine_options(values: flags.FlagValues) -> dict[str, Any]:
    """The values of the flags of `define_engine_flags`, as arguments of `Engine.load` and of `audit`."""
    return {name: values[name].value for name in _ENGINE_FLAGS}


def numbers(flag: str, texts: Sequence[str], kind: Callable[[str], Number]) -> list[Number]:
    """The numbers of a list flag.

    Raises:
      ValueError: one is not a positive number.
    """
    found = []
    for text in texts:
        try:
            found.append(kind(text))
        except ValueError as error:
            raise ValueError(f"--{flag}: {error}") from error
        if not 0 < found[-1] < math.inf:
            raise ValueError(f"--{flag}: {text} is not positive and finite")
    return found


def chosen(flag: str, texts: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The values of a list flag.

    Raises:
      ValueError: there is none, or one is not known.
    """
    if not texts or set(texts) - set(known):
        raise ValueError(f"--{flag}={','.join(texts)}: it lists one or more of {', '.join(known)}")
    return tuple(dict.fromkeys(texts))


def plot_function(module: str) -> Callable[..., None]:
    """The function `plot` of a module that needs matplotlib, which is needed for nothing else.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        function: Callable[..., None] = importlib.import_module(module).plot
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib (the extra bench): {error}") from error
    return function


def mesh_shape() -> MeshShape:
    """The mesh that the flags ask for."""
    return MeshShape(pp=_PP.value, ring=_RING.value, ulysses=_ULYSSES.value)


def setup_runtime() -> MeshShape:
    """Chooses the devices and joins the other processes; returns the mesh that the flags ask for.

    To be called inside `distributed.run_program`, before anything touches a device.

    Raises:
      StartError: flags that do not fit together, or that differ between processes (on every process), or processes
        that did not arrive in time, which the message names.
    """
    os.environ["XLA_FLAGS"] = with_time_limits(os.environ.get("XLA_FLAGS", ""))
    logging.getLogger("jax._src.distributed").setLevel(logging.WARNING)
    if _CPU_DEVICES.value:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES.value)
    if _COMPILATION_CACHE_DIR.value:
        keep_compiled_programs(_COMPILATION_CACHE_DIR.value)
    try:
        shape = mesh_shape()
        distributed.initialize(
            _COORDINATOR_ADDRESS.value,
            _NUM_PROCESSES.value,
            _PROCESS_ID.value,
            startup_timeout_s=_STARTUP_TIMEOUT_S.value,
        )
        if jax.distributed.is_initialized():
            _keep_stdout_for_results()
        distributed.agree("flags", common_values(flags.FLAGS))
    except (ValueError, RuntimeError, OSError) as error:
        raise StartError(str(error)) from error
    return shape


def _keep_stdout_for_results() -> None:
    """Sends what C++ code writes to stdout to stderr: gloo tells there about its connections."""
    sys.stdout.flush()
    python_stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(python_stdout, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def keep_compiled_programs(folder: str) -> None:
    """Lets JAX keep all compiled programs of this process in a folder, and take from there those it finds."""
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default the many small programs are left out, which together take as long as some large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def with_time_limits(xla_flags: str) -> str:
    """`xla_flags` with those of `XLA_TIME_LIMITS` that it does not set."""
    given = {flag.split("=")[0].removeprefix("--") for flag in xla_flags.split()}
    added = [f"--{name}={seconds}" for name, seconds in XLA_TIME_LIMITS.items() if name not in given]
    return " ".join([*xla_flags.split(), *added])


def common_values(values: flags.FlagValues) -> Mapping[str, str]:
    """The flags that must be the same on all processes, by name; without those of absl itself."""
    return {
        f"--{flag.name}": str(flag.value)
        for module, module_flags in values.flags_by_module_dict().items()
        if not module.startswith("absl.")
        for flag in module_flags
        if flag.name not in _OWN_FLAGS
    }
