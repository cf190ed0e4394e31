"""Numbers that an algorithm of a user changes are saved and restored; what else it changes is named."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import PPO, SAC, ActorCritic, AsyncCollector, Policy, ReplayBuffer
from tests.helpers import last, load, train
from tests.messages import assert_names, refused
from tests.variants import after

HALF, WHOLE = {"total_env_steps": 4 * 16 * 3}, {"total_env_steps": 4 * 16 * 5}


class Adaptive(PPO):
    """Changes a class attribute, attributes of other kinds of numbers, and a constructor argument."""

    shadowed = 1.0

    def __init__(self, policy: Policy, penalty: float = 8.0, **kwargs):
        super().__init__(policy, **kwargs)
        self.penalty, self.count, self.flag, self.best = penalty, 0, False, None
        self.double = np.float64(1)

    def setup(self, stage):
        super().setup(stage)
        self.processes = self.trainer.world_size

    def training_step(self, rollout, batch_idx):
        super().training_step(rollout, batch_idx)
        self.shadowed *= 0.5
        self.penalty *= 0.5
        self.double *= np.float64(0.3)
        self.count += 1
        self.flag = not self.flag
        self.best = max(self.best or -9.0, float(rollout["reward"].mean()))
        self.made_late = self.count * 10
        self.ent_coef = 0.01 * 0.9**self.iterations_done


def numbers(module):
    names = ("shadowed", "penalty", "count", "flag", "best", "double", "made_late", "ent_coef")
    return {name: getattr(module, name) for name in names}


def run(run_dir, data, algorithm=Adaptive, **settings):
    ckpt_path = settings.pop("ckpt_path", None)
    model = {"algorithm": algorithm, "compile": False, **settings}
    return train(run_dir, data=data, model=model, ckpt_path=ckpt_path)[0]


@pytest.mark.parametrize("collector", [None, AsyncCollector])
def test_a_resumed_run_equals_an_uninterrupted_one(collector, tmp_path):
    more = {} if collector is None else {"collector": partial(collector, max_staleness=0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        whole = run(tmp_path / "whole", WHOLE | more)
        run(tmp_path / "stopped", HALF | {"total_env_steps": WHOLE["total_env_steps"]} | more)
    run(tmp_path / "first", HALF | more)
    resumed = run(tmp_path / "resumed", WHOLE | more, ckpt_path=str(last(tmp_path / "first")))
    assert numbers(resumed) == numbers(whole)
    assert resumed.processes == 1
    saved = load(last(tmp_path / "whole"))["lightning_rl"]["numbers"]
    assert set(saved[0]) == set(numbers(whole)), "and no counter of the package"
    assert saved[0]["penalty"] == (8.0, 8.0 * 0.5**5)


class OffPolicy(SAC):
    beta = 1.0

    def training_step(self, rollout, batch_idx):
        super().training_step(rollout, batch_idx)
        self.beta *= 0.5


def test_numbers_of_an_off_policy_algorithm_are_restored(tmp_path):
    replay = {"replay": partial(ReplayBuffer, capacity=500)}
    data = {"num_envs": 2, "buffer_size": 16, "num_eval_episodes": 1, **replay}
    settings = {"env": "Pendulum-v1", "model": {"algorithm": OffPolicy, "compile": False}}
    train(tmp_path / "one", data=data | {"total_env_steps": 64}, **settings)
    module, *_ = train(
        tmp_path / "two",
        data=data | {"total_env_steps": 96},
        ckpt_path=str(last(tmp_path / "one")),
        **settings,
    )
    assert module.beta == 0.5**3
    assert set(load(last(tmp_path / "two"))["lightning_rl"]["numbers"][0]) == {"beta"}


def test_a_value_that_the_resumed_run_sets_wins_and_a_line_says_so(tmp_path, capsys):
    run(tmp_path / "one", HALF)
    capsys.readouterr()
    module = run(tmp_path / "two", WHOLE, ckpt_path=str(last(tmp_path / "one")), penalty=100.0)
    assert module.penalty == 100 * 0.5**2
    assert module.count == 5
    assert_names(capsys.readouterr().out, "penalty=100.0", "1.0", "not restored")


def test_an_old_checkpoint_without_numbers_resumes(tmp_path):
    run(tmp_path / "one", HALF)
    content = load(last(tmp_path / "one"))
    del content["lightning_rl"]["numbers"]
    del content["lightning_rl"]["contents"]
    torch.save(content, tmp_path / "old.ckpt")
    assert run(tmp_path / "two", WHOLE, ckpt_path=str(tmp_path / "old.ckpt")).count == 2


class Gains:
    def __init__(self):
        self.gain = 1.0


class OtherKinds(PPO):
    def __init__(self, policy: Policy, **kwargs):
        super().__init__(policy, **kwargs)
        self.history, self.tensor, self.gains = [], torch.zeros(2), Gains()
        self.single, self.untouched = np.float32(1), [1, 2]

    def training_step(self, rollout, batch_idx):
        super().training_step(rollout, batch_idx)
        self.history.append(1)
        self.tensor += 1
        self.gains.gain *= 2
        self.single *= np.float32(0.5)


def test_changed_attributes_of_other_kinds_are_named_once_with_the_cure(tmp_path):
    names = ("OtherKinds", "history", "tensor", "gains", "single", "register_buffer")
    with refused(UserWarning, names=names) as caught:
        run(tmp_path, HALF | {"iterations_per_epoch": 1}, algorithm=OtherKinds)
    texts = [str(one.message) for one in caught if "register_buffer" in str(one.message)]
    assert len(texts) == 1
    assert "untouched" not in texts[0]


class InPlace(SAC):
    """Writes into what it holds; `actors_own` and `run_replay` are saved with the run."""

    def __init__(self, policy, **kwargs):
        super().__init__(policy, **kwargs)
        self.second = ReplayBuffer(policy.observation_space, policy.action_space, 2, capacity=50)
        self.noise, self.shuffle = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.dice, self.means = random.Random(0), {"mean": [torch.zeros(1)]}
        self.memory = TensorDict({"deep": {"x": torch.zeros(1)}}, [])
        self.untouched = [torch.zeros(1), torch.Generator(), TensorDict({"x": torch.zeros(1)}, [])]
        self.actors_own = list(policy.parameters())

    def on_train_start(self):
        self.run_replay = self.replay
        super().on_train_start()

    def training_step(self, rollout, batch_idx):
        self.second.extend(rollout)
        torch.rand(1, generator=self.noise), self.shuffle.random(), self.dice.random()
        self.means["mean"][0].add_(1), self.memory["deep", "x"].add_(1)
        super().training_step(rollout, batch_idx)


def test_what_changes_in_place_is_named_at_any_depth(tmp_path):
    data = {"num_envs": 2, "buffer_size": 8, "total_env_steps": 64, "num_eval_episodes": 1}
    model = {"algorithm": InPlace, "compile": False, "random_env_steps": 0, "batch_size": 4}
    with refused(UserWarning, names=("second", "on_save_checkpoint")) as caught:
        train(tmp_path, env="Pendulum-v1", data=data | {"replay": ReplayBuffer}, model=model)
    (text,) = [str(one.message) for one in caught if "InPlace changes" in str(one.message)]
    named = text.partition("changes ")[2].partition(", but")[0].split(", ")
    assert named == ["second", "noise", "shuffle", "dice", "means", "memory"]


def test_algorithms_of_the_package_save_no_numbers(tmp_path):
    run(tmp_path, HALF, algorithm=PPO)
    assert "numbers" not in load(last(tmp_path))["lightning_rl"]


def test_a_number_of_a_policy_that_training_changes_is_named_once_with_the_cure(tmp_path):
    """Copies that act in the background, and checkpoints, have its first value."""
    own = after(
        ActorCritic, "Own", __init__=lambda policy, *args, **kw: policy.__dict__.update(epsilon=1)
    )
    own.__module__ = __name__

    def anneal(module, *args):
        module.policy.epsilon = 0.5**module.iterations_done

    model = {"algorithm": after(PPO, training_step=anneal), "compile": False}
    with refused(UserWarning, names=("Own.epsilon", "AsyncCollector", "register_buffer")) as caught:
        train(tmp_path, data=HALF, policy={"policy_class": own}, model=model)
    assert sum("Own.epsilon" in str(one.message) for one in caught) == 1
