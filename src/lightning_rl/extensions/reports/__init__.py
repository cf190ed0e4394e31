"""Reports on runs: read their files, aggregate over seeds, show tables and curves."""

from lightning_rl.extensions.reports.comparison import Comparison as Comparison
from lightning_rl.extensions.reports.comparison import Group as Group
from lightning_rl.extensions.reports.comparison import compare as compare
from lightning_rl.extensions.reports.comparison import compare_each as compare_each
from lightning_rl.extensions.reports.runs import RunRecord as RunRecord
from lightning_rl.extensions.reports.runs import find_runs as find_runs
from lightning_rl.extensions.reports.statistics import (
    interval_of_improvement as interval_of_improvement,
)
from lightning_rl.extensions.reports.statistics import interval_of_iqm as interval_of_iqm
from lightning_rl.extensions.reports.statistics import iqm as iqm
from lightning_rl.extensions.reports.statistics import iqm_curve as iqm_curve
from lightning_rl.extensions.reports.statistics import (
    probability_of_improvement as probability_of_improvement,
)
