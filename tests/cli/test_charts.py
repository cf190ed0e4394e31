"""`docs/charts.md` explains each chart that a run writes, and no other."""

import re
from functools import partial
from pathlib import Path

import pytest
from lightning.pytorch import seed_everything

from lightning_rl import (
    GRPO,
    SAC,
    Algorithm,
    BehaviorCloning,
    DatasetCollector,
    GripperSAC,
    MixedReplay,
    PushBlocks,
    PushCube,
    RayCollector,
    ReplayBuffer,
    SquashedActorCritic,
    TinyVLA,
    VLAPolicy,
)
from lightning_rl.envs import ActionChunk
from lightning_rl.extensions.remote import ray
from lightning_rl.rollout.contract import flat_transitions
from tests.equivalence.test_async import background
from tests.equivalence.test_off_policy import helped_arm
from tests.helpers import fit_in, make_data, scalars, train
from tests.numerics.test_taking_over import Schedule, helped
from tests.remote import Threads

PAGE = (Path(__file__).parents[2] / "docs" / "charts.md").read_text()
EXPLAINED = [
    name
    for row in re.findall(r"^\| (`[^|]*) \|", PAGE, re.M)
    for name in re.findall(r"`([^`]+)`", row)
]
SHORT = partial(PushCube, max_episode_steps=8)
FEW = {"buffer_size": 10, "total_env_steps": 160}
OBJECTIVE = "(?:actor|critic|alpha|gripper)"


class TwoLosses(Algorithm):
    """An actor that imitates itself, and a critic that guesses rewards, each with an optimizer."""

    def __init__(self, policy, n_epochs, **kwargs):  # as `helpers.train` makes it
        super().__init__(policy, **kwargs)

    def configure_objectives(self):
        actor = self.objective(self.actor_loss, self.policy.actor)
        return [actor, self.objective(self.critic_loss, self.policy.critic, name="critic")]

    def training_step(self, rollout, batch_idx):
        batch = flat_transitions(rollout, ("observation", "action", "reward"))
        for update in self.updates.values():
            update(batch)
        self.finish_iteration(rollout)

    def actor_loss(self, batch):
        return -self.policy.evaluate_actions(batch)["sample_log_prob"].mean(), {}

    def critic_loss(self, batch):
        return (self.policy.get_value(batch)["value"] - batch["reward"]).square().mean(), {}


def clone(run_dir, head="token"):
    seed_everything(1)
    env = partial(ActionChunk, env=PushBlocks, chunk_size=4)
    demonstrations = partial(DatasetCollector, episodes=8)
    budget = {"total_env_steps": 400, "buffer_size": 12, "num_envs": 8}
    data = make_data(env, collector=demonstrations, **budget)
    tiny = TinyVLA(channels=(4, 4, 4), hidden_size=16, slot_size=8)
    policy = VLAPolicy(data.observation_space, data.action_space, backbone=tiny, head=head)
    fit_in(run_dir, BehaviorCloning(policy, n_epochs=1, batch_size=16), data)


def off_policy(run_dir):
    seed_everything(1)
    data = make_data(SHORT, **FEW, replay=partial(ReplayBuffer, capacity=1000))
    policy = SquashedActorCritic(data.observation_space, data.action_space, (16,))
    fit_in(run_dir, SAC(policy, batch_size=16, random_env_steps=80), data)


def in_processes(run_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "RayCluster", Threads)
        train(run_dir, env=SHORT, data={"collector": RayCollector, **FEW})


RUNS = {
    "remote collectors": in_processes,
    "PPO in the background": partial(train, env=SHORT, data={"collector": background(1), **FEW}),
    "GRPO": partial(
        train, env=SHORT, data=FEW, model={"algorithm": GRPO, "group_size": 2, "kl_coef": 0.1}
    ),
    "GRPO of some groups": partial(
        train,
        env=SHORT,
        data=FEW,
        model={"algorithm": GRPO, "group_size": 2, "filter_groups": True},
    ),
    "cloning": clone,
    "cloning by a flow": partial(clone, head="flow"),
    "SAC": off_policy,
    "an arm with a gripper": partial(
        train, env=helped_arm, data={"replay": MixedReplay, **FEW}, model={"algorithm": GripperSAC}
    ),
    "somebody takes over": partial(train, env=partial(helped, source=Schedule())),
    "two losses": partial(train, model={"algorithm": TwoLosses, "batch_size": 32}),
}
"""Together they write everything."""


@pytest.fixture
def written(tmp_path_factory):
    """The tags of all runs, by run."""
    tags = {}
    for name, run in RUNS.items():
        directory = tmp_path_factory.mktemp("charts")
        run(directory)
        tags[name] = set(scalars(directory, ignore=()))
    return tags


def pattern(name):
    """What a row of the page stands for."""
    own = {"<objective>": OBJECTIVE, "<term>": r"\w+", "<name>": r"\w+", "<metric>": r"\w+"}
    parts = re.split(r"(<\w+>)", name)
    return re.compile("".join(own.get(part, re.escape(part)) for part in parts))


def test_charts_are_explained_and_written(written):
    rows = [pattern(name) for name in EXPLAINED]
    for run, tags in written.items():
        unexplained = [tag for tag in tags if not any(row.fullmatch(tag) for row in rows)]
        assert not unexplained, f"{run} writes what docs/charts.md does not explain"

    tags = set().union(*written.values())
    unwritten = [name for name in EXPLAINED if not any(map(pattern(name).fullmatch, tags))]
    assert not unwritten, "docs/charts.md explains what no run writes"
    assert len(EXPLAINED) == len(set(EXPLAINED))
