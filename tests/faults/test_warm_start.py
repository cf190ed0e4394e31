"""`trainer.init_from`: a policy begins with another one's weights where it acts alike, or not at all."""

import logging
import warnings
from functools import partial

import pytest
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch import nn

from lightning_rl import DQN, GRPO, PPO, ActorCritic, ActorOnly, ReplayBuffer
from lightning_rl.algorithms.checkpoint_checks import warm_start_weights
from tests.helpers import last, load, make_data, train
from tests.messages import assert_names, refused
from tests.probes import ActionProbe
from tests.variants import variant

SHORT = {"total_env_steps": 64}


def wide(low=-1, high=1):
    """Return what makes a probe of continuous actions within other bounds."""

    def make(n):
        env = ActionProbe(n, continuous=True)
        env.single_action_space = Box(low, high, (1,))
        return env

    return make


def begin(tmp_path, first, then, env="CartPole-v1", other_env=None):
    """Train with the settings `first` of the policy, and begin with that with those of `then`."""
    before, *_ = train(tmp_path / "a", env=env, data=SHORT, seed=5, **first)
    model = {"learning_rate": 1e-9, "lr_schedule": "constant"} | then.pop("model", {})
    then |= {"model": model, "trainer": {"init_from": str(last(tmp_path / "a"))}}
    after, *_ = train(tmp_path / "b", env=other_env or env, data=SHORT, seed=6, **then)
    return before.policy, after.policy


def policy(**settings):
    return {"policy": settings}


def assert_alike(one, other, size):
    td = TensorDict({"observation": torch.randn(20, size)}, [20])
    modes = [p.get_action(td.clone(), deterministic=True) for p in (one, other)]
    torch.testing.assert_close(modes[0]["action"].double(), modes[1]["action"].double())
    torch.testing.assert_close(modes[0]["sample_log_prob"], modes[1]["sample_log_prob"])


@pytest.mark.parametrize("normalizes", [True, False])
def test_an_observation_normaliser_is_not_left_out_nor_made_up(normalizes, tmp_path):
    settings = [policy(normalize_observation=flag) for flag in (normalizes, not normalizes)]
    words = "normalizer.mean too many" if normalizes else "no normalizer.mean"
    with refused(names=(words, "normalize_observation")):
        begin(tmp_path, *settings)


def test_the_cure_shows_the_settings_of_the_checkpoints_configuration(tmp_path):
    train(tmp_path / "a", data=SHORT, policy={"normalize_observation": True})
    config = "model: {init_args: {policy: {class_path: ActorCritic, init_args: {squash: false}}}}"
    content = load(last(tmp_path / "a")) | {"rl_config": config}
    fresh = ActorCritic(Box(-1.0, 1.0, (4,)), make_data().action_space, (16,))
    with refused(names=("class_path: ActorCritic", "squash: false")):
        warm_start_weights(fresh, content)
    for broken in ("model: [", "model: PPO", "a", ""):
        with refused(names=("normalizer.mean", "critic_modules")):
            warm_start_weights(fresh, content | {"rl_config": broken})


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ({"activation": "relu"}, {}, ("actor.1", "Tanh", "ReLU", "activation: relu")),
        (
            {"squash": True},
            {},
            ("distribution", "DiagonalGaussian", "TanhGaussian", "squash: true"),
        ),
        (
            {},
            {"squash": True},
            ("distribution", "TanhGaussian", "DiagonalGaussian", "hidden_sizes"),
        ),
    ],
)
def test_another_function_of_the_same_weights_is_refused(first, then, words, tmp_path):
    with refused(names=words):
        begin(tmp_path, policy(**first), policy(**then), wide())


def test_it_is_refused_of_a_resumed_run_too(tmp_path):
    train(tmp_path / "a", env=wide(), data=SHORT, policy={"activation": "relu"})
    with refused(names=("actor.1", "Tanh", "ReLU", "--ckpt_path")):
        train(tmp_path / "a", env=wide(), ckpt_path=last(tmp_path / "a"))


@pytest.mark.parametrize(
    ("first", "then", "other_env", "words"),
    [
        (
            {},
            {"log_std_bounds": (-1.0, 0.0)},
            None,
            ("distribution.bounds", "(-1.0, 0.0)", "(-5.0, 2.0)"),
        ),
        (
            {"squash": True},
            {"squash": True},
            wide(-3, 1),
            ("distribution.center", "[-1.0]", "[0.0]"),
        ),
    ],
)
def test_other_settings_and_action_bounds_are_warned_of(first, then, other_env, words, tmp_path):
    with refused(UserWarning, names=words):
        begin(tmp_path, policy(**first), policy(**then), wide(), other_env)


def test_the_bounds_of_rescaled_actions_come_with_the_weights(tmp_path):
    """So the policy does what it did, in the units of the env."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*may act differently.*")
        pair = begin(tmp_path, policy(), policy(), wide(0, 10), wide(0, 20))
    assert_alike(*pair, 1)
    assert pair[1].distribution.center.item() == 5


@pytest.mark.parametrize(
    ("first", "then", "note"),
    [
        (PPO, GRPO, "The critic of the checkpoint is not used: critic.0.bias"),
        (
            GRPO,
            PPO,
            "The critic starts with new weights, because the checkpoint's policy has no critic: critic.0.bias",
        ),
    ],
)
def test_a_critic_may_be_left_out_or_new(first, then, note, tmp_path, caplog):
    grpo = {"group_size": 2, "kl_coef": 0.1}
    settings = [
        {
            "model": {"algorithm": cls} | (grpo if cls is GRPO else {}),
            **policy(normalize_observation=True),
        }
        for cls in (first, then)
    ]
    logging.getLogger("lightning.pytorch").propagate = True
    with caplog.at_level(logging.INFO):
        pair = begin(tmp_path, *settings)
    assert note in caplog.text
    torch.testing.assert_close(
        [*pair[0].actor.parameters()], [*pair[1].actor.parameters()], atol=1e-6, rtol=0
    )
    assert [type(each) for each in pair] == [
        {PPO: ActorCritic, GRPO: ActorOnly}[c] for c in (first, then)
    ]


def test_random_actions_before_a_policy_that_can_act_are_told_with_their_cure(tmp_path, caplog):
    logging.getLogger("lightning.pytorch").propagate = True
    data = {"replay": partial(ReplayBuffer, capacity=100)} | SHORT
    model = {"algorithm": DQN, "learning_starts": 48}
    train(tmp_path / "a", data=data, model=model)
    texts = []
    for cure in ({}, {"random_env_steps": 0, "exploration_initial": 0.05}):
        start = {"init_from": str(tmp_path / "a")}
        with caplog.at_level(logging.INFO):
            train(tmp_path / f"b{len(cure)}", data=data, model=model | cure, trainer=start)
        texts.append(caplog.text)
        caplog.clear()
    names = "model.random_env_steps: 0", "model.learning_starts: 48", "model.exploration_initial"
    assert_names(texts[0], "32", *names)
    assert not any(name in texts[1] for name in names)


def test_a_critic_of_another_shape_begins_anew_as_a_whole(tmp_path, caplog):
    logging.getLogger("lightning.pytorch").propagate = True
    with caplog.at_level(logging.INFO):
        pair = begin(tmp_path, policy(), policy(critic_hidden_sizes=(8,)))
    assert_names(caplog.text, "critic")
    torch.testing.assert_close(pair[0].actor[0].weight, pair[1].actor[0].weight)


@pytest.mark.parametrize(("first", "then"), [(True, True), (True, False), (False, True)])
def test_the_scale_of_rewards_comes_with_the_critic_that_is_in_its_units(
    first, then, tmp_path, caplog
):
    logging.getLogger("lightning.pytorch").propagate = True
    before, *_ = train(tmp_path / "a", data=SHORT, model={"normalize_reward": first})
    settings = {"model": {"normalize_reward": then}, "trainer": {"init_from": str(tmp_path / "a")}}
    with caplog.at_level(logging.INFO):
        after, *_ = train(tmp_path / "b", data=SHORT, **settings)
    assert ("scale of rewards" in caplog.text) == (first != then)
    if first == then:
        counts = [float(module.reward_normalizer.count) for module in (before, after)]
        assert counts[1] == 2 * counts[0], "the rewards of both runs"
    else:
        assert_names(caplog.text, "model.normalize_reward")


class Named(ActorOnly):
    """A user's own policy, whose critic has a name of its own."""

    critic_modules = ("v_net",)

    def __init__(self, *args, critic=True):
        super().__init__(*args)
        self.has_critic = critic
        if critic:
            self.v_net = nn.Linear(4, 1)


@pytest.mark.parametrize(
    "cls", [Named, variant(Named, "Undeclared", critic_modules=ActorOnly.critic_modules)]
)
def test_the_critic_of_a_users_own_policy_is_what_it_says(cls):
    spaces = (Box(-1.0, 1.0, (4,)), make_data().action_space)
    with_critic, without = cls(*spaces), cls(*spaces, critic=False)
    content = {
        "state_dict": {f"policy.{k}": v for k, v in with_critic.state_dict().items()},
        "lightning_rl": {},
    }
    if cls is Named:
        weights, note = warm_start_weights(without, content)
        assert weights.keys() == without.state_dict().keys()
        assert_names(note, "critic", "v_net.bias, v_net.weight")
    else:
        with refused(names=("v_net.weight", "critic_modules")):
            warm_start_weights(without, content)


def test_a_checkpoint_of_before_actions_were_rescaled_names_the_cure(tmp_path):
    """Its policy took the output of the network for the action; its config does not say so."""
    old = policy(rescale_action=False)
    before, *_ = train(tmp_path / "a", env=wide(0, 10), data=SHORT, **old)
    content = load(last(tmp_path / "a"))
    for key in ("policy", "contents"):  # nor did it have a description, or a list of its keys
        del content["lightning_rl"][key]
    torch.save(content, last(tmp_path / "a"))
    cure = ("distribution.center", "rescale_action: false", "rescale_action false")
    with refused(names=cure):
        train(tmp_path / "a", env=wide(0, 10), ckpt_path=last(tmp_path / "a"))
    warm = {"init_from": str(last(tmp_path / "a"))}
    with refused(names=cure):
        train(tmp_path / "b", env=wide(0, 10), data=SHORT, trainer=warm)
    model = {"learning_rate": 1e-9, "lr_schedule": "constant"}
    after, *_ = train(tmp_path / "c", env=wide(0, 10), data=SHORT, trainer=warm, model=model, **old)
    assert_alike(before.policy, after.policy, 1)
    with refused(names=("rescale_action: false", "distribution.center")):
        begin(tmp_path / "d", policy(), old, wide(0, 10))
