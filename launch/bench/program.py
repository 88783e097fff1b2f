"""Measures prefill: time to first token, throughput, and their ratio to the machine's matmul peak.

    python -m slope_jax.launch.bench --model=mini --prompt_tokens=8192,16384
    python -m slope_jax.launch.bench --model=mini --cases=mini --cpu_devices=8 --plot=mini.png > mini.jsonl
    python -m slope_jax.launch.bench --model=mini --operations --noprefill --meshes=1x1x1,2x2x2 --cpu_devices=8
    python -m slope_jax.launch.bench --model=mini --startup
    python -m slope_jax.launch.bench --model=mini --meshes=1x1x2 --parallelism=context,tensor --cpu_devices=2

Prints one JSON object per line. Its `kind` is "engine" (a mesh was loaded and warmed up: seconds, memory), "prefill" (a
batch of prompts of one length), "operation" (a part of a tick, with --operations), or "startup" (two starts of the
program, of which the second finds the compiled programs of the first; with --startup). `parallelism` says what the
ulysses axis divides, the context or the weights. The `relative_time` of a prefill
is its time relative to that of the first row with the same prompts, each as a multiple of what the machine could do.

Every time stands beside the matmul peak measured right before and after it. A time whose two peaks differ by more than
a tenth is taken again, up to --max_tries times; `steady` says whether they agreed in the end.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import app, flags, logging

from slope_jax.engine import Engine
from slope_jax.execution.spec import EXPERT_WEIGHTS, all_reduce_form, stages_on
from slope_jax.launch.bench import operations, prefill, startup
from slope_jax.launch.bench.prefill import PrefillCase
from slope_jax.launch.bench.timing import MatmulPeak
from slope_jax.launch.flags import StartError, chosen, mesh_shape, numbers, plot_function, setup_runtime
from slope_jax.launch.make_checkpoint import PRESETS
from slope_jax.launch.random_weights import RandomSource
from slope_jax.mesh.all_reduce import FORMS
from slope_jax.mesh.axes import MeshShape, make_mesh
from slope_jax.mesh.processes.distributed import run_program
from slope_jax.model.checkpoint import weights
from slope_jax.model.checkpoint.safetensors import TensorSource
from slope_jax.model.config import GptOssConfig
from slope_jax.model.published import PUBLISHED, published_config

Row = dict[str, Any]
CONTEXT, TENSOR = "context", "tensor"
_FLAGS_OF_THEIR_OWN = {"checkpoint", "mesh", "expert_weights", "tensor_parallel", "all_reduce", "dtype", "chunk_tokens"}
_NOT_FROM_TEXT = {"devices", "machine"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
      model: a preset or a published model, with random weights, or the folder of a checkpoint.
      num_layers: the first layers of it, with random weights only; None for all.
      meshes: each of these is measured, the first one first.
      cases: the prefills.
      expert_weights: each of these is measured, the first one first.
      parallelism: likewise, `CONTEXT` or `TENSOR`, over the ulysses axis.
      all_reduce: of tensor parallelism, as of `Engine.load`.
      options: further arguments of `Engine.load`.
      prefill: whether to measure prefills.
      operations: whether to measure single operations and exchanges.
      repeats: batches per case.
      max_tries: how often a time is taken while the machine is not steady.
    """

    model: str
    num_layers: int | None
    meshes: tuple[MeshShape, ...]
    cases: tuple[PrefillCase, ...]
    expert_weights: tuple[str, ...]
    parallelism: tuple[str, ...]
    all_reduce: str | None
    options: dict[str, Any]
    prefill: bool
    operations: bool
    repeats: int
    max_tries: int


def open_model(name: str, num_layers: int | None) -> str | TensorSource:
    """A model with random weights, or the folder of a checkpoint.

    Raises:
      ValueError: there is neither a model nor a folder of that name, or layers are to be cut off a checkpoint.
    """
    if name in PRESETS:
        config = PRESETS[name].config()
    elif name in PUBLISHED:
        config = published_config(name)
    elif not pathlib.Path(name).is_dir():
        names = ", ".join((*sorted(PRESETS), *PUBLISHED))
        raise ValueError(f"{name!r} is neither a model ({names}) nor a folder")
    elif num_layers is not None:
        raise ValueError(f"{name} is a checkpoint, of which all layers are used: leave num_layers out")
    else:
        return name
    if num_layers is not None:
        if not 1 <= num_layers <= config.num_layers:
            raise ValueError(f"num_layers must be in 1..{config.num_layers} for {name}, not {num_layers}")
        config = dataclasses.replace(config, layer_types=config.layer_types[:num_layers])
    return RandomSource(config)


def measure(settings: Settings) -> Iterator[Row]:
    """Measures everything, one row at a time, those of one engine together.

    Raises:
      ValueError: the model cannot be run so; before anything is measured as far as sizes tell.
    """
    source = weights.open_source(open_model(settings.model, settings.num_layers))
    check(source.config, settings, jax.devices())
    peak = MatmulPeak(jax.devices())
    common = _common(settings)
    first_shares: dict[tuple[int, int], float] = {}
    for expert_weights, mesh, parallelism in itertools.product(
        settings.expert_weights, settings.meshes, settings.parallelism
    ):
        options = settings.options
        if parallelism == TENSOR:
            options = options | {"tensor_parallel": True, "all_reduce": settings.all_reduce}
        cases = [case for case in settings.cases if case.mesh == mesh]
        engine, row = load_engine(source, mesh, cases, expert_weights, options)
        shared = common | {"mesh": str(mesh), "devices": mesh.num_devices, "dtype": engine.dtype}
        shared |= {"expert_weights": expert_weights, "parallelism": parallelism}
        shared |= {"expert_parallel": engine.programs.expert_parallel}
        shared |= {"all_reduce": engine.programs.split.form if parallelism == TENSOR else None}
        yield {"kind": "engine"} | shared | row
        if settings.operations:
            for row in operations.rows(engine, peak, settings.max_tries):
                yield {"kind": "operation"} | shared | row
        for case in cases if settings.prefill else ():
            row = prefill.prefill_row(engine, case, settings.repeats, peak, settings.max_tries)
            first = first_shares.setdefault((case.prompt_tokens, case.concurrency), row["share_of_peak"])
            yield {"kind": "prefill"} | shared | row | {"relative_time": first / row["share_of_peak"]}


def check(config: GptOssConfig, settings: Settings, devices: Sequence[jax.Device]) -> None:
    """Raises ValueError when a mesh does not fit the model or the devices, or a prompt is too long for the model."""
    expert_parallel = bool(settings.options.get("expert_parallel"))
    if TENSOR in settings.parallelism:
        all_reduce_form(tensor_parallel=True, expert_parallel=expert_parallel, all_reduce=settings.all_reduce)
    for mesh in settings.meshes:
        stages_on(config, mesh, expert_parallel=expert_parallel)
        make_mesh(mesh, devices)
    holds = settings.options.get("kv_cache_tokens")
    for case in settings.cases:
        if isinstance(holds, int) and case.prompt_tokens > holds:
            raise ValueError(f"a prompt of {case.prompt_tokens} tokens does not fit into kv_cache_tokens={holds}")
        if case.prompt_tokens > config.max_position:
            raise ValueError(f"a prompt of {case.prompt_tokens} tokens: the model takes at most {config.max_position}")


def load_engine(
    source: TensorSource,
    mesh: MeshShape,
    cases: Sequence[PrefillCase],
    expert_weights: str,
    options: dict[str, Any],
) -> tuple[Engine, Row]:
    """A warm engine, whose cache holds the largest batch of the cases, and how long it took to start."""
    if not {"kv_cache_tokens", "memory_budget"} & options.keys():
        held = prefill.cache_tokens(cases, options["chunk_tokens"], source.config.sliding_window)
        options = options | {"kv_cache_tokens": held}
    begin = time.perf_counter()
    engine = Engine.load(source, mesh=mesh, expert_weights=expert_weights, **options)
    loaded = time.perf_counter()
    programs = engine.warmup()
    row = {"load_s": loaded - begin, "warmup_s": time.perf_counter() - loaded, "programs": programs}
    report = engine.memory()
    memory = dataclasses.asdict(report) | {"total": report.total}
    return engine, row | {"buckets": list(engine.buckets), "memory": memory}


def _common(settings: Settings) -> Row:
    """What all rows say of the machine, the software and the model."""
    device = jax.devices()[0]
    return {
        "model": settings.model,
        "num_layers": settings.num_layers,
        "device_kind": device.device_kind,
        "platform": device.platform,
        "processes": jax.process_count(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "slope_jax": importlib.metadata.version("slope_jax"),
    }


def parse_mesh(text: str) -> MeshShape:
    """A mesh written as `2x2x2` (pp x ring x ulysses).

    Raises:
      ValueError: the text is not one.
    """
    degrees = text.split("x")
    if len(degrees) != 3 or not all(degree.isdecimal() for degree in degrees):
        raise ValueError(f"{text!r} is not a mesh; write pp x ring x ulysses as in 2x2x2")
    return MeshShape(*(int(degree) for degree in degrees))


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments written as `name=value`, values as in Python, or else texts.

    Raises:
      ValueError: one is not written so, or is not an argument that can be given so.
    """
    known = inspect.signature(Engine.load).parameters.keys() - _FLAGS_OF_THEIR_OWN - _NOT_FROM_TEXT
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--option={text!r} is not of the form name=value")
        if name not in known:
            raise ValueError(f"--option={text!r}: {name} is not one of {', '.join(sorted(known))}")
        try:
            options[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[name] = value
    return options


def read_settings(values: flags.FlagValues) -> Settings:
    """The settings that the flags ask for.

    Raises:
      ValueError: flags contradict each other.
    """
    if values.cases is None:
        meshes = tuple(dict.fromkeys(parse_mesh(text) for text in values.meshes)) or (mesh_shape(),)
        lengths = numbers("prompt_tokens", values.prompt_tokens, int)
        cases = prefill.product_of(meshes, lengths, numbers("concurrency", values.concurrency, int))
        if not cases:
            raise ValueError("--prompt_tokens and --concurrency need a number each")
    else:
        cases = prefill.CASES[values.cases]
        meshes = tuple(dict.fromkeys(case.mesh for case in cases))
    parallelism = chosen("parallelism", values.parallelism, (CONTEXT, TENSOR))
    if values.all_reduce and TENSOR not in values.parallelism:
        raise ValueError(f"--all_reduce={values.all_reduce} is of no use without --parallelism={TENSOR}")
    if values.plot and (values.startup or not values.prefill):
        raise ValueError("--plot draws prefills: it goes neither with --startup nor with --noprefill")
    return Settings(
        model=values.model,
        num_layers=values.num_layers,
        meshes=meshes,
        cases=cases,
        expert_weights=chosen("expert_weights", values.expert_weights, EXPERT_WEIGHTS),
        parallelism=parallelism,
        all_reduce=values.all_reduce,
        options={"dtype": values.dtype, "chunk_tokens": values.chunk_tokens} | parse_options(values.option),
        prefill=values.prefill,
        operations=values.operations,
        repeats=values.repeats,
        max_tries=values.max_tries,
    )


def read_rows(path: str) -> Iterator[Row]:
    """The rows that an earlier run printed.

    Raises:
      ValueError: the file cannot be read, or a line of it is not a row.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not a JSON object: {error}") from error
        if not isinstance(row, dict) or "kind" not in row:
            raise ValueError(f"{path}, line {number}: not a row of this program")
        yield row


def run() -> int:
    """The body of the program; returns the exit status."""
    values = flags.FLAGS
    rows: list[Row] = []
    try:
        if values.plot:
            if not (values.plot.endswith(".png") and pathlib.Path(values.plot).absolute().parent.is_dir()):
                raise ValueError(f"--plot={values.plot}: not the name of a .png file in a folder that exists")
            plot = plot_function("slope_jax.launch.bench.plot")
        if values.rows:
            if not values.plot:
                raise ValueError("--rows is of no use without --plot")
            rows = [row for path in values.rows for row in read_rows(path)]
        else:
            settings = read_settings(values)
            if values.startup:
                found: Iterator[Row] = startup.startup_rows(sys.argv[1:])
            else:
                setup_runtime()
                found = measure(settings)
            for row in found:
                rows.append(row)
                if values.startup or jax.process_index() == 0:
                    print(json.dumps(row), flush=True)
        if values.plot and (values.rows or values.startup or jax.process_index() == 0):
            plot(rows, values.plot)
    except ValueError as error:
        logging.debug("refused", exc_info=True)  # shown with --verbosity=1
        raise StartError(str(error)) from error
    return 0


def main(argv: Sequence[str]) -> None:
    """Runs the program."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    sys.exit(run_program(run, refusals=(StartError,)))


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program, beside those of the mesh and of the processes."""
    names = ", ".join((*sorted(PRESETS), *PUBLISHED))
    flags.DEFINE_string(
        "model", "mini", f"A model with random weights ({names}), or the folder of a checkpoint.", flag_values=values
    )
    flags.DEFINE_integer(
        "num_layers", None, "Only so many layers of it, with random weights.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_list(
        "meshes",
        [],
        "Meshes as pp x ring x ulysses, such as 1x1x1,2x2x2; by default that of the flags.",
        flag_values=values,
    )
    flags.DEFINE_list("prompt_tokens", ["8192"], "Lengths of prompts.", flag_values=values)
    flags.DEFINE_list("concurrency", ["1"], "Prompts in a batch.", flag_values=values)
    flags.DEFINE_enum(
        "cases",
        None,
        sorted(prefill.CASES),
        "A table of cases, instead of the three flags above.",
        flag_values=values,
    )
    flags.DEFINE_list("expert_weights", ["bfloat16"], "bfloat16, mxfp4, or both.", flag_values=values)
    flags.DEFINE_list(
        "parallelism",
        [CONTEXT],
        "What the ulysses axis divides: context (tokens), tensor (weights of layers), or both.",
        flag_values=values,
    )
    flags.DEFINE_enum("all_reduce", None, FORMS, "How tensor parallelism adds up; psum by default.", flag_values=values)
    flags.DEFINE_string("dtype", "bfloat16", "bfloat16 or float32.", flag_values=values)
    flags.DEFINE_integer(
        "chunk_tokens", 4096, "Longest chunk of a prompt that is processed at once.", flag_values=values
    )
    flags.DEFINE_multi_string(
        "option", [], "name=value, a further argument of Engine.load; repeatable.", flag_values=values
    )
    flags.DEFINE_bool("prefill", True, "Measure prefills.", flag_values=values)
    flags.DEFINE_bool("operations", False, "Measure single operations and exchanges.", flag_values=values)
    flags.DEFINE_bool(
        "startup",
        False,
        "Measure a first and a second start with a new compilation cache, nothing else.",
        flag_values=values,
    )
    flags.DEFINE_integer("repeats", 3, "Batches per case.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "max_tries", 5, "How often a time is taken while the machine is not steady.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string(
        "plot", None, "PNG file to draw the prefills to; needs matplotlib (the extra bench).", flag_values=values
    )
    flags.DEFINE_list(
        "rows", [], "Measure nothing, and draw the rows in these files, which earlier runs printed.", flag_values=values
    )
