"""The data contract: fields of a rollout, and trees of tensors."""

from lightning_rl.rollout.allocation import allocate_rollout as allocate_rollout
from lightning_rl.rollout.contract import FieldSpec as FieldSpec
from lightning_rl.rollout.contract import add_transition_field as add_transition_field
from lightning_rl.rollout.contract import final_observations as final_observations
from lightning_rl.rollout.contract import flat_transitions as flat_transitions
from lightning_rl.rollout.contract import leaves_by_path as leaves_by_path
from lightning_rl.rollout.contract import leaves_of_tree as leaves_of_tree
from lightning_rl.rollout.contract import map_tree as map_tree
from lightning_rl.rollout.contract import next_observations as next_observations
from lightning_rl.rollout.contract import tree_of_leaves as tree_of_leaves
from lightning_rl.rollout.goals import GoalFunction as GoalFunction
from lightning_rl.rollout.next_states import next_states as next_states

__all__: list[str]
