"""Reports on runs: what they wrote is read, aggregated over seeds, and shown."""

from lightning_rl.reports.comparison import Comparison, Group, compare
from lightning_rl.reports.runs import RunRecord, find_runs
from lightning_rl.reports.statistics import (
    interval_of_improvement,
    interval_of_iqm,
    iqm,
    iqm_curve,
    probability_of_improvement,
)

__all__ = [
    "Comparison",
    "Group",
    "RunRecord",
    "compare",
    "find_runs",
    "interval_of_improvement",
    "interval_of_iqm",
    "iqm",
    "iqm_curve",
    "probability_of_improvement",
]
