"""The planner: what a cluster can promise for the prefill of a model, and with which configuration."""

from slope_jax.planner.devices import Cluster, known_devices
from slope_jax.planner.evaluate import Prediction, predict
from slope_jax.planner.forecast import Forecast
from slope_jax.planner.layout import Layout
from slope_jax.planner.search import Answer, Choices, Plan, plan

__all__ = [
    "Answer",
    "Choices",
    "Cluster",
    "Forecast",
    "Layout",
    "Plan",
    "Prediction",
    "known_devices",
    "plan",
    "predict",
]
