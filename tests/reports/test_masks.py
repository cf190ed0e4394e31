"""Action masks: every part that draws an action reads them, and an export with them is written or refused whole."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

import tests.envs  # noqa: F401  # registers envs
from lightning_rl import ActionMask, ActorCritic, GymnasiumEnv, RLDataModule, check_env
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.collectors.uniform_actor import UniformActor
from lightning_rl.extensions.datasets.record import script_action_function
from lightning_rl.extensions.export.formats import export_policy
from lightning_rl.extensions.export.graph import ports_of
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.masks import allowed_random_action
from lightning_rl.rollout.structured_actions import choices_of, flat_actions

SPACES = {
    "Discrete": (Discrete(5, start=2), [5]),
    "MultiDiscrete": (MultiDiscrete([3, 4]), [3, 4]),
    "MultiBinary": (MultiBinary(3), [2, 2, 2]),
    "Tuple": (Tuple((Discrete(2), Box(-1, 1, (2,), np.float32), Discrete(3))), [2, 3]),
}


class OneAllowed(gymnasium.Env):
    """Allows one category of each choice, and refuses any other, as board games do."""

    def __init__(self, kind, lengths=(2, 7)):
        self.action_space, self.sizes = SPACES[kind]
        self.lengths = lengths
        self.observation_space = Dict(
            x=Box(-1, 1, (2,), np.float32), action_mask=MultiBinary(sum(self.sizes))
        )

    def seen(self):
        self.allowed = [int(self.np_random.integers(size)) for size in self.sizes]
        eyes = zip(self.sizes, self.allowed, strict=True)
        mask = np.concatenate([np.eye(size, dtype=np.int8)[one] for size, one in eyes])
        return {"x": self.np_random.uniform(-1, 1, 2).astype(np.float32), "action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(*self.lengths))
        return self.seen(), {}

    def step(self, action):
        flat = flat_actions(self.action_space)
        parts = action if isinstance(action, tuple) else (action,)
        choices = [part for part in parts if np.asarray(part).dtype.kind in "iub"]
        start = getattr(flat, "start", 0)
        taken = np.concatenate([np.ravel(part) for part in choices]) - start
        if taken.tolist() != self.allowed:
            raise ValueError(f"{taken} is not allowed, but {self.allowed}")
        self.left -= 1
        return self.seen(), 1.0, self.left <= 0, False, {}


gymnasium.register("reports/OneAllowed-v0", entry_point=OneAllowed)


def make(num_envs, kind="MultiDiscrete", **settings):
    return GymnasiumEnv(num_envs, "reports/OneAllowed-v0", {"kind": kind}, **settings)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_finished_envs_of_an_evaluation_take_allowed_actions(kind, deterministic):
    env = make(6, kind)
    policy = ActorCritic(env.single_observation_space, env.single_action_space)
    run_episodes(policy, env, range(5), deterministic=deterministic)


@pytest.mark.parametrize("kind", SPACES)
def test_the_check_of_an_env_takes_allowed_actions(kind):
    findings = check_env(partial(make, kind=kind), num_envs=2, seconds=0.3)
    assert [one.text for one in findings if one.level in ("warning", "error")] == []


def test_the_check_blames_an_env_without_seeds_for_that_and_not_for_its_refusal():
    class Unseeded(OneAllowed):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=None)

    gymnasium.register("reports/Unseeded-v0", entry_point=Unseeded)
    findings = check_env(
        lambda n: GymnasiumEnv(n, "reports/Unseeded-v0", {"kind": "Discrete"}),
        num_envs=2,
        seconds=0.3,
    )
    assert [one.topic for one in findings if one.level == "error"] == []
    assert "seeds" in [one.topic for one in findings if one.level == "warning"]


def test_the_check_reads_masks_that_a_wrapper_takes_from_infos():
    env = partial(GymnasiumEnv, id="tests/ReportsActionMask-v0", wrappers=[ActionMask])
    assert [one for one in check_env(env, seconds=0.3) if one.level == "error"] == []


@pytest.mark.parametrize("kind", SPACES)
def test_random_actions_are_allowed_and_equally_distributed(kind):
    space = flat_actions(SPACES[kind][0])
    sizes = choices_of(space)
    mask = torch.ones(4_000, sum(sizes))
    mask[:, 0] = 0
    keys = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    before = torch.full((4_000, *space.shape), 0.5 if "Tuple" in kind else 0)
    drawn = allowed_random_action(space, before, mask, keys)
    assert drawn.shape == before.shape
    assert drawn.dtype == before.dtype
    first = drawn.reshape(4_000, -1)[:, 0].long()
    shares = torch.bincount(first, minlength=sizes[0]) / 4_000
    torch.testing.assert_close(
        shares, torch.tensor([0.0] + [1 / (sizes[0] - 1)] * (sizes[0] - 1)), atol=0.03, rtol=0
    )
    if kind == "Tuple":
        assert (drawn[:, 1:3] == 0.5).all(), "a part that is no choice is kept"


@pytest.mark.parametrize("kind", SPACES)
def test_random_first_steps_take_allowed_actions(kind):
    env = make(3, kind)
    policy = ActorCritic(env.single_observation_space, env.single_action_space)
    rollout = allocate_rollout(
        env.single_observation_space,
        env.single_action_space,
        3,
        6,
        extra_fields=policy.extra_fields,
        device="cpu",
    )
    actor = UniformActor(policy, rollout)
    actor.begin(torch.Generator().manual_seed(0))
    observation, _ = env.reset(seed=1)
    for t in range(6):
        rollout[:, t].set_("observation", observation)
        actor.act(t)
        observation, *_ = env.step(rollout["action"][:, t])
    actor.finish(0, 6)


def test_a_script_that_does_nothing_takes_an_allowed_action():
    env = make(1, "Discrete")
    choose = script_action_function(lambda observation: None, env.single_action_space)
    observation, _ = env.reset(seed=1)
    for _ in range(10):
        observation, *_ = env.step(choose(observation, torch.ones(1, dtype=torch.bool)))


@pytest.mark.parametrize("kind", SPACES)
def test_a_policy_with_masks_over_several_choices_is_exported(kind, tmp_path):
    data = RLDataModule(partial(make, kind=kind), num_envs=2, buffer_size=8)
    policy = ActorCritic(data.observation_space, data.action_space, (8,)).eval()
    metadata = {"policy": "ActorCritic", "versions": {}}
    path = tmp_path / "new" / "policy.pt2"
    files, report = export_policy(policy, ports_of(policy), "torch", path, metadata, {}, None)
    assert report["passed"]
    assert sorted(files) == sorted(path.parent.iterdir())
