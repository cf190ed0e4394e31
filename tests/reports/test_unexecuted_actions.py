"""Actions of a chunk that nobody executed are not cloned, whatever form the log-prob has."""

import warnings
from functools import partial

import pytest
import torch
from gymnasium.spaces import Box, MultiDiscrete
from tensordict import TensorDict

from lightning_rl import (
    ActionChunk,
    ActorCritic,
    BehaviorCloning,
    DatasetCollector,
    DeterministicActorCritic,
    GymnasiumEnv,
    RLDataModule,
    SquashedActorCritic,
)
from lightning_rl.extensions.datasets.episode import Episode
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from tests.helpers import fit_in
from tests.messages import refused
from tests.variants import passing

SEEN, CHUNKS = Box(-1, 1, (3,)), Box(-2, 2, (4, 2))
POLICIES = {
    "unbounded": lambda: ActorCritic(SEEN, CHUNKS, (8,), rescale_action=False),
    "rescaled": lambda: ActorCritic(SEEN, CHUNKS, (8,)),
    "squashed": lambda: ActorCritic(SEEN, CHUNKS, (8,), squash=True),
    "SAC": lambda: SquashedActorCritic(SEEN, CHUNKS, (8,)),
    "TD3": lambda: DeterministicActorCritic(SEEN, CHUNKS, (8,)),
    "choices": lambda: ActorCritic(SEEN, MultiDiscrete([3, 3, 3, 3]), (8,)),
}


def evaluated(policy, action, executed):
    td = TensorDict({"observation": torch.full((2, 3), 0.2), "action": action}, [2])
    td.update(policy.fields_of(action))
    if executed is not None:
        td["executed"] = executed
    return policy.evaluate_actions(td)


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "squashed"])
def test_a_log_prob_of_a_chunk_is_that_of_what_was_executed(name):
    torch.manual_seed(0)
    policy = POLICIES[name]()
    action = torch.stack([torch.as_tensor(policy.action_space.sample()) for _ in range(2)])
    executed = torch.tensor([[True, True, False, False], [True, False, False, False]])
    everything = torch.ones_like(executed)
    whole, all_of_it = (evaluated(policy, action, x) for x in (None, everything))
    for key in ("sample_log_prob", "entropy"):
        torch.testing.assert_close(whole[key], all_of_it[key])
    found = evaluated(policy, action, executed)
    behind = action.clone()
    behind[:, 2:] = 0  # which nobody did
    behind[1, 1:] = 1
    other = evaluated(policy, behind, executed)
    torch.testing.assert_close(other["sample_log_prob"], found["sample_log_prob"])
    rest = evaluated(policy, action, ~executed)
    for key in ("sample_log_prob", "entropy"):
        torch.testing.assert_close(found[key] + rest[key], whole[key])


def test_of_a_squashed_gaussian_too():
    torch.manual_seed(0)
    policy = POLICIES["squashed"]()
    td = policy.get_action(TensorDict({"observation": torch.full((2, 3), 0.2)}, [2]))
    executed = torch.tensor([[True, True, False, False], [True, False, False, False]])
    whole = policy.evaluate_actions(td)
    parts = [policy.evaluate_actions(td.clone().set("executed", x)) for x in (executed, ~executed)]
    for key in ("sample_log_prob", "entropy"):
        torch.testing.assert_close(parts[0][key] + parts[1][key], whole[key])


def without_executed(policy, td):
    """It knows nothing of chunks that were cut short."""
    return (td.exclude("executed"),)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Episodes of two steps: of a chunk of 4, the last two actions were never done."""
    directory = tmp_path_factory.mktemp("demonstrations") / "ds"
    observations, actions = Box(-8, 8, (3,)), Box(-2, 2, (1,))
    writer = EpisodeWriter(directory, observations, actions, 30.0, "", "png")
    ends = torch.zeros(2, dtype=torch.bool)
    for _ in range(4):
        steps = torch.rand(3, 3), torch.full((2, 1), 1.5), torch.zeros(2)
        writer.write(Episode(*steps, ends, torch.tensor([False, True]), True, ends, "", {}))
    writer.finalise()
    return directory


def cloned(policy, dataset, run_dir, execute=None):
    env = partial(ActionChunk, env=partial(GymnasiumEnv, id="Pendulum-v1"), chunk_size=4)
    env = partial(env, execute=execute) if execute else env
    data = RLDataModule(
        env,
        num_envs=4,
        buffer_size=2,
        total_env_steps=32,
        collector=partial(DatasetCollector, path=str(dataset), fps=30.0),
        num_eval_episodes=1,
    )
    torch.manual_seed(0)
    made = policy(data.observation_space, data.action_space, (8,))
    before = made.actor[-1].bias.detach().clone()
    module = BehaviorCloning(made, n_epochs=3, batch_size=4, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_in(run_dir, module, data, limit_val_batches=0)
    return (made.actor[-1].bias.detach() - before).abs()[:4] > 1e-6


@pytest.mark.parametrize("execute", [None, 1])
@pytest.mark.parametrize("policy", [ActorCritic, SquashedActorCritic])
def test_what_the_demonstrator_did_is_cloned_and_nothing_else(policy, execute, dataset, tmp_path):
    """Also beyond `execute`: an arm in real time executes these actions (LeRobot #1005)."""
    moved = cloned(policy, dataset, tmp_path, execute)
    assert moved.int().tolist() == [1, 1, 0, 0]


def test_a_policy_that_would_clone_it_is_refused(dataset, tmp_path):
    with refused(names=("OwnEvaluation", "chunk", "extra_fields", "counts_executed")):
        cloned(
            passing(ActorCritic, "OwnEvaluation", evaluate_actions=without_executed),
            dataset,
            tmp_path,
        )
