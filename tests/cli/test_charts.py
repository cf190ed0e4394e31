"""`docs/charts.md` explains each chart that a run writes, and no other."""

import re
from functools import partial
from pathlib import Path

import pytest

import lightning_rl as rl
from lightning_rl.extensions.remote import ray
from lightning_rl.rollout.contract import flat_transitions
from tests.equivalence.test_async import background
from tests.equivalence.test_off_policy import helped_arm
from tests.helpers import scalars, train
from tests.numerics.test_taking_over import Schedule, helped
from tests.remote import Threads

PAGE = (Path(__file__).parents[2] / "docs" / "charts.md").read_text()
EXPLAINED = [
    name
    for row in re.findall(r"^\| (`[^|]*) \|", PAGE, re.M)
    for name in re.findall(r"`([^`]+)`", row)
]
SHORT = partial(rl.PushCube, max_episode_steps=8)
FEW = {"buffer_size": 10, "total_env_steps": 160}
REPLAYED = FEW | {"replay": partial(rl.ReplayBuffer, capacity=1000)}
GROUPS = {"algorithm": rl.GRPO, "group_size": 2}
OBJECTIVE = "(?:actor|critic|alpha|gripper|q|value)"


class TwoLosses(rl.Algorithm):
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
    tiny = rl.TinyVLA(channels=(4, 4, 4), hidden_size=16, slot_size=8)
    data = {"collector": partial(rl.DatasetCollector, episodes=8), "num_envs": 8}
    train(
        run_dir,
        env=partial(rl.ActionChunk, env=rl.PushBlocks, chunk_size=4),
        data=data | {"total_env_steps": 400, "buffer_size": 12},
        policy={"policy_class": lambda *spaces, **_: rl.VLAPolicy(*spaces, tiny, head=head)},
        model={"algorithm": rl.BehaviorCloning, "n_epochs": 1, "batch_size": 16},
    )


def in_processes(run_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "RayCluster", Threads)
        train(run_dir, env=SHORT, data={"collector": rl.RayCollector, **FEW})


RUNS = {
    "remote collectors": in_processes,
    "PPO in the background": partial(train, env=SHORT, data={"collector": background(1), **FEW}),
    "GRPO": partial(train, env=SHORT, data=FEW, model=GROUPS | {"kl_coef": 0.1}),
    "GRPO of some groups": partial(
        train, env=SHORT, data=FEW, model=GROUPS | {"filter_groups": True}
    ),
    "cloning": clone,
    "cloning by a flow": partial(clone, head="flow"),
    "SAC": partial(
        train, env=SHORT, data=REPLAYED, model={"algorithm": rl.SAC, "random_env_steps": 80}
    ),
    "DQN": partial(train, data=REPLAYED, model={"algorithm": rl.DQN}),
    "FQL": partial(train, env=SHORT, data=REPLAYED, model={"algorithm": rl.FQL}),
    "IQL": partial(
        train,
        env=SHORT,
        data=FEW | {"collector": partial(rl.DatasetCollector, episodes=8), "num_envs": 8},
        policy={"policy_class": rl.SquashedActorCritic},
        model={"algorithm": rl.IQL, "n_epochs": 1, "batch_size": 16},
    ),
    "an arm with a gripper": partial(
        train,
        env=helped_arm,
        data={"replay": rl.MixedReplay, **FEW},
        model={"algorithm": rl.GripperSAC},
    ),
    "somebody takes over": partial(train, env=partial(helped, source=Schedule())),
    "two losses": partial(train, model={"algorithm": TwoLosses, "batch_size": 32}),
}
"""Together they write everything."""


def pattern(name):
    """What a row of the page stands for."""
    own = {"<objective>": OBJECTIVE, "<term>": r"\w+", "<name>": r"\w+", "<metric>": r"\w+"}
    parts = re.split(r"(<\w+>)", name)
    return re.compile("".join(own.get(part, re.escape(part)) for part in parts))


def test_charts_are_explained_and_written(tmp_path):
    rows, tags = [pattern(name) for name in EXPLAINED], set()
    for name, run in RUNS.items():
        run(tmp_path / name)
        written = set(scalars(tmp_path / name, ignore=()))
        unexplained = [tag for tag in written if not any(row.fullmatch(tag) for row in rows)]
        assert not unexplained, f"{name} writes what docs/charts.md does not explain"
        tags |= written
    unwritten = [name for name in EXPLAINED if not any(map(pattern(name).fullmatch, tags))]
    assert not unwritten, "docs/charts.md explains what no run writes"
    assert len(EXPLAINED) == len(set(EXPLAINED))
