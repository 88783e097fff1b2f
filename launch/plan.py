"""Plans a prefill cluster: which mesh, what time to first token and rate to expect, and what limits them.

    python -m slope_jax.launch.plan --cluster=mi250 --nodes=4 --tokens=32768,65536,100000 --ttft_slo=1,1,2

Nothing runs on a device, and nothing is compiled: times are predicted from sizes (see `slope_jax.planner`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from absl import app, flags

from slope_jax.launch.flags import StartError
from slope_jax.model.published import PUBLISHED, find_config
from slope_jax.planner import Cluster, known_devices, plan
from slope_jax.planner.table import format_plan


def run() -> int:
    """The body of the program; returns the exit status."""
    values = flags.FLAGS
    try:
        config = find_config(values.config)
        cluster = Cluster.load(values.cluster, values.nodes)
        found = plan(config, cluster, numbers("tokens", values.tokens, int), targets(values.ttft_slo))
    except ValueError as error:
        raise StartError(str(error)) from error
    print(format_plan(found, values.rows))
    return 0


def numbers(flag: str, texts: Sequence[str], kind: type) -> list:
    """The numbers of a list flag.

    Raises:
      ValueError: one is not a number.
    """
    try:
        return [kind(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"--{flag}: {error}") from error


def targets(texts: Sequence[str]) -> list[float] | None:
    """The targets, or None when there are none."""
    return numbers("ttft_slo", texts, float) or None


def main(argv: Sequence[str]) -> None:
    """Runs the program."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        sys.exit(run())
    except StartError as error:
        logging.error("%s", error)
        sys.exit(2)


def define_flags() -> None:
    """Defines the flags of the program."""
    flags.DEFINE_string("config", "gpt-oss-120b", f"{' or '.join(PUBLISHED)}, a checkpoint folder, or a config.json.")
    flags.DEFINE_string("cluster", "mi250", f"A machine ({', '.join(known_devices())}), or a TOML file of your own.")
    flags.DEFINE_integer("nodes", 4, "Nodes of the cluster.")
    flags.DEFINE_list("tokens", ["32768", "65536", "100000"], "Lengths of prompts.")
    flags.DEFINE_list("ttft_slo", [], "The target for the time to first token in seconds, one for each length.")
    flags.DEFINE_integer("rows", 5, "Configurations to show for each length.", lower_bound=1)


if __name__ == "__main__":
    define_flags()
    app.run(main)
