"""Export a trained policy, and check that the export acts like the policy."""

from lightning_rl.extensions.export.graph import ActingGraph as ActingGraph
from lightning_rl.extensions.export.graph import ports_of as ports_of
from lightning_rl.extensions.export.graph import why_not_traced as why_not_traced
from lightning_rl.extensions.export.weights import read_exported as read_exported
