"""Observation and action spaces: masks, names and structured actions."""

from lightning_rl.rollout.allocation import space_spec as space_spec
from lightning_rl.rollout.masks import MASK as MASK
from lightning_rl.rollout.masks import allowed_random_action as allowed_random_action
from lightning_rl.rollout.names import by_name as by_name
from lightning_rl.rollout.names import named as named
from lightning_rl.rollout.names import names_in as names_in
from lightning_rl.rollout.names import names_of as names_of
from lightning_rl.rollout.names import order_of as order_of
from lightning_rl.rollout.spaces import space_of as space_of
from lightning_rl.rollout.structured_actions import StructuredActions as StructuredActions
from lightning_rl.rollout.structured_actions import as_env_action as as_env_action
from lightning_rl.rollout.structured_actions import as_env_counts as as_env_counts
from lightning_rl.rollout.structured_actions import as_policy_counts as as_policy_counts
from lightning_rl.rollout.structured_actions import choices_of as choices_of
from lightning_rl.rollout.structured_actions import differs_in_env as differs_in_env
from lightning_rl.rollout.structured_actions import first_choice as first_choice
from lightning_rl.rollout.structured_actions import flat_actions as flat_actions

__all__: list[str]
