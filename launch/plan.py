"""Plans a prefill cluster: which mesh, what time to first token and rate to expect, and what limits them.

    python -m slope_jax.launch.plan --cluster=mi250 --nodes=4 --tokens=32768,65536,100000 --ttft_slo=1,1,2
    python -m slope_jax.launch.plan --cluster=my_machine.toml --explain=2,2,8
    python -m slope_jax.launch.plan --cluster=mi250 --tokens=65536 --ttft_slo=0.7 --solve
    python -m slope_jax.launch.plan --cluster=cpu --nodes=1 --config=mini --calibrate=bench.jsonl

Nothing runs on a device, and nothing is compiled: times are predicted from sizes (see `slope_jax.planner`). With
--calibrate the program fits the quantities of the cluster to lines of `slope_jax.launch.bench`, says how well each line
is met, and writes the machine to --save_cluster, a file for --cluster. The exit status is 2 when the input makes no
sense.
"""

from __future__ import annotations

import json
import logging
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from slope_jax.launch.bench.program import read_rows
from slope_jax.launch.flags import StartError, chosen, numbers, plot_function
from slope_jax.launch.make_checkpoint import PRESETS
from slope_jax.mesh import ring_policy
from slope_jax.mesh.axes import MeshShape
from slope_jax.model.published import PUBLISHED
from slope_jax.planner import Choices, Cluster, Prediction, known_devices, plan
from slope_jax.planner.assumptions import assumptions
from slope_jax.planner.calibrate import calibrate
from slope_jax.planner.devices import to_toml
from slope_jax.planner.layout import SEQUENCE, SPLITS
from slope_jax.planner.models import PlannedModel, read_model
from slope_jax.planner.search import Refused, check_lengths, of_mesh, rank
from slope_jax.planner.solve import requirements
from slope_jax.planner.table import as_json, format_calibration, format_explanation, format_plan


def open_model(name: str) -> PlannedModel:
    """A model by the name of a preset or a published model, or by the path of its sizes.

    Raises:
      ValueError: see `models.read_model`.
    """
    if name in PRESETS:
        return PlannedModel(name=name, config=PRESETS[name].config(), is_packed=True)
    return read_model(name)


def formats(model: PlannedModel, asked: Sequence[str]) -> tuple[str, ...]:
    """The formats of the experts to try: those that were asked for, or all that the model can have.

    Raises:
      ValueError: the model cannot have one of them.
    """
    return chosen("expert_weights", asked, model.expert_weights) if asked else model.expert_weights


def explain(
    model: PlannedModel,
    cluster: Cluster,
    degrees: Sequence[int],
    tokens: Sequence[int],
    ttft_slo: Sequence[float],
    choices: Choices,
) -> str:
    """All about one mesh, for every length and everything that its ulysses ranks may do.

    Raises:
      ValueError: three degrees are not given, or the mesh cannot be used at all; the message says why.
    """
    if len(degrees) != 3:
        raise ValueError(f"--explain takes pp,ring,ulysses, not {len(degrees)} numbers")
    targets = check_lengths(model.config, tokens, ttft_slo or None)
    shape = MeshShape(*degrees)
    if cluster.num_devices % shape.num_devices:
        raise ValueError(
            f"--explain: replicas of {shape}, {shape.num_devices} devices each, do not use all "
            f"{cluster.num_devices} devices of the cluster"
        )
    sections, refusals = [], []
    for length, target in zip(tokens, targets, strict=True):
        for split in choices.splits if shape.ulysses > 1 else (SEQUENCE,):
            found = of_mesh(model.config, cluster, shape, split, length, choices)
            if isinstance(found, Refused):
                refusals.append(f"{shape} {split}, {length:,} tokens: {found.reason}")
                continue
            best: list[Prediction] = sorted(found, key=lambda p: rank(p, target))
            sections.append(format_explanation(best, target, assumptions(model.config, cluster, best[0])))
    if not sections:
        raise ValueError("; ".join(refusals))
    return "\n\n".join([*sections, *refusals])


def run(values: flags.FlagValues) -> int:
    """The body of the program; returns the exit status."""
    try:
        model = open_model(values.config)
        cluster = Cluster.load(values.cluster, values.nodes)
        if values.calibrate:
            rows = [row for path in values.calibrate for row in read_rows(path)]
            if others := sorted({str(row.get("model")) for row in rows} - {values.config}):
                raise ValueError(f"the lines are of {', '.join(others)}, but --config={values.config}")
            try:
                calibration = calibrate(model.config, cluster, rows, fit_up_to=values.fit_up_to)
            except KeyError as error:
                raise ValueError(f"--calibrate: a line has no {error}") from error
            print(format_calibration(calibration))
            if values.save_cluster:
                _write(pathlib.Path(values.save_cluster), to_toml(calibration.cluster))
            return 0
        if values.save_cluster:
            raise ValueError("--save_cluster is of no use without --calibrate")
        tokens = numbers("tokens", values.tokens, int)
        targets = numbers("ttft_slo", values.ttft_slo, float)
        choices = Choices(
            expert_weights=formats(model, values.expert_weights),
            splits=chosen("splits", values.splits, SPLITS),
            ring_pass=values.ring_pass,
        )
        if values.explain:
            if values.solve or values.plot or values.format != "table":
                raise ValueError(
                    "--explain prints a table, and goes neither with --solve nor with --plot nor with --format"
                )
            print(explain(model, cluster, numbers("explain", values.explain, int), tokens, targets, choices))
            return 0
        plot = plot_function("slope_jax.planner.plot") if values.plot else None
        found = plan(model.config, cluster, tokens, targets or None, choices)
        assumed = [assumptions(model.config, cluster, answer.best[0]) for answer in found.answers]
        solved = [requirements(model.config, cluster, answer) for answer in found.answers] if values.solve else []
        if plot is not None:
            try:
                plot(found, values.plot)
            except OSError as error:
                raise ValueError(f"{values.plot}: cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise StartError(str(error)) from error
    if values.format == "json":
        print(json.dumps(as_json(found, assumed, solved)))
    else:
        print(format_plan(found, values.rows, assumed, solved))
    return 0


def _write(path: pathlib.Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from error


def main(argv: Sequence[str]) -> None:
    """Runs the program."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        sys.exit(run(flags.FLAGS))
    except StartError as error:
        logging.error("%s", error)
        sys.exit(2)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    names = ", ".join((*PUBLISHED, *sorted(PRESETS)))
    flags.DEFINE_string(
        "config", "gpt-oss-120b", f"A model ({names}), a checkpoint folder, or any config.json.", flag_values=values
    )
    flags.DEFINE_string(
        "cluster", "mi250", f"A machine ({', '.join(known_devices())}), or a TOML file of your own.", flag_values=values
    )
    flags.DEFINE_integer("nodes", 4, "Nodes of the cluster.", flag_values=values)
    flags.DEFINE_list("tokens", ["32768", "65536", "100000"], "Lengths of prompts.", flag_values=values)
    flags.DEFINE_list(
        "ttft_slo", [], "The target for the time to first token in seconds, one for each length.", flag_values=values
    )
    flags.DEFINE_list(
        "expert_weights",
        [],
        "Formats of the experts to try, mxfp4 and bfloat16; by default all that the checkpoint can be loaded in.",
        flag_values=values,
    )
    flags.DEFINE_list("splits", list(SPLITS), f"What ulysses ranks may do: {', '.join(SPLITS)}.", flag_values=values)
    flags.DEFINE_enum(
        "ring_pass", "auto", ring_policy.RING_PASSES, "What goes round the ring, as of the engine.", flag_values=values
    )
    flags.DEFINE_enum("format", "table", ["table", "json"], "What to print.", flag_values=values)
    flags.DEFINE_integer("rows", 5, "Configurations to show for each length.", lower_bound=1, flag_values=values)
    flags.DEFINE_string("plot", None, "PNG file to draw to; needs matplotlib (the extra bench).", flag_values=values)
    flags.DEFINE_list("explain", [], "pp,ring,ulysses: show this mesh in full.", flag_values=values)
    flags.DEFINE_bool("solve", False, "Say what would have to be true for the targets to be met.", flag_values=values)
    flags.DEFINE_list(
        "calibrate", [], "Files with lines of the benchmark, to which to fit the cluster.", flag_values=values
    )
    flags.DEFINE_string("save_cluster", None, "TOML file to write the calibrated cluster to.", flag_values=values)
    flags.DEFINE_integer(
        "fit_up_to", 4096, "Calibrate to prefills of at most so many tokens; compare the others.", flag_values=values
    )


if __name__ == "__main__":
    define_flags()
    app.run(main)
