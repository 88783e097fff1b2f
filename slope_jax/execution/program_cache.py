"""Compiled programs that are kept between starts, in the folder of JAX's compilation cache.

JAX keeps what the compiler gives, by the program that goes into it: to find it, a start has to trace and lower every
program again, which takes longer than everything else then. Here an executable is kept by what the program is made
from, so a start that finds it does neither. It is found by a start with the same source code, versions, settings,
devices and sizes, and by no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

import slope_jax

_log = logging.getLogger(__name__)
_PROGRAM_SOURCES = ("execution", "kv", "mesh", "model")  # the packages that programs are made from
_HEAD = hashlib.sha256().digest_size


def compile_program(lower: Callable[[], jax.stages.Lowered], mesh: Mesh, made_from: Sequence[Any]) -> Any:
    """Compiles a program, or takes it from the cache.

    With `jax_compilation_cache_dir` unset, and in a run of several processes, nothing is kept here. Like all files with
    programs, those in the folder must be as trustworthy as the source code.

    Args:
      lower: traces and lowers the program.
      mesh: the devices that it runs on.
      made_from: all that it depends on beside the source code; the `repr` of each says everything.
    """
    folder = cache_folder()
    if folder is None or jax.process_count() > 1:
        return lower().compile()
    key = _key(mesh, made_from)
    path = folder / f"slope_jax-{key}.pickle"
    if path.exists():
        try:
            content = path.read_bytes()
            head, body = content[:_HEAD], content[_HEAD:]
            if head != _head(key, body):  # to be seen before anything of it runs
                raise ValueError("it is damaged, or holds another program")
            executable, in_tree, out_tree = pickle.loads(body)
            return serialize_executable.deserialize_and_load(
                executable, in_tree, out_tree, execution_devices=list(mesh.devices.flat)
            )
        except Exception as error:  # whatever is wrong with the file, the program can be compiled again
            _log.warning("%s is not used, and the program compiled again: %r", path, error)
    with _without_jax_cache():
        program = lower().compile()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        body = pickle.dumps(serialize_executable.serialize(program))
        part.write_bytes(_head(key, body) + body)
        part.replace(path)
    except (OSError, ValueError, RuntimeError) as error:
        _log.warning("%s could not be kept: %r", path, error)
    return program


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Neither looks for programs in JAX's cache nor keeps them there.

    XLA leaves the functions out when it writes a program that it has read itself, so what is to be kept here must come
    from the compiler.
    """
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]  # the stubs of jax lack it
    _use_jax_cache(False)
    try:
        yield
    finally:
        _use_jax_cache(enabled)


def _use_jax_cache(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # JAX looks at the setting only once


def cache_folder() -> pathlib.Path | None:
    """The folder of JAX's compilation cache, if it has one."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # the stubs of jax lack it
    return pathlib.Path(folder) if folder else None


def shapes_of(arrays: Any) -> list[str]:
    """The names, shapes, types and partitions of a tree of arrays, for `made_from`."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return [f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {leaf.sharding.spec}" for path, leaf in leaves]


def _head(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _key(mesh: Mesh, made_from: Sequence[Any]) -> str:
    """SHA-256 (hex) of everything that the executable depends on."""
    devices = [(d.platform, d.device_kind, d.id) for d in mesh.devices.flat]
    settings = {name: value for name, value in jax.config.values.items() if name != "jax_compilation_cache_dir"}
    texts = [
        _source_hash(),
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        importlib.metadata.version("flax"),
        mesh.devices.flat[0].client.platform_version,
        _cpu() if devices[0][0] == "cpu" else "",
        os.environ.get("XLA_FLAGS", ""),
        repr(sorted(settings.items())),
        repr((mesh.axis_names, mesh.devices.shape, devices)),
        *(repr(part) for part in made_from),
    ]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _source_hash() -> str:
    """Of the modules that programs are made from."""
    package = pathlib.Path(slope_jax.__file__).parent
    files = sorted(path for part in _PROGRAM_SOURCES for path in (package / part).rglob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def _cpu() -> str:
    """What the CPU can do and how many cores there are, which compiled code relies on, as far as the system tells."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.split(":")[0].strip() in {"flags", "Features", "model name"}}
    return "\n".join([str(os.cpu_count()), *sorted(told)])
