"""The steps before and after the policy: none changes a number."""

from typing import Any

from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
)
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

from .configuration_lightning_rl import LightningRLConfig


def make_lightning_rl_pre_post_processors(
    config: LightningRLConfig, dataset_stats: Any = None
) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """Return LeRobot's two pipelines. The policy normalises, so `dataset_stats` are not read."""
    before = [
        RenameObservationsProcessorStep(rename_map={}),
        AddBatchDimensionProcessorStep(),
        DeviceProcessorStep(device=config.device),
    ]
    return (
        PolicyProcessorPipeline(steps=before, name="policy_preprocessor"),
        PolicyProcessorPipeline(
            steps=[DeviceProcessorStep(device="cpu")],
            name="policy_postprocessor",
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        ),
    )
