"""Parameters that would silently never be trained are refused, by name; what is frozen on purpose is not."""

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_rl import (
    GRPO,
    PPO,
    SAC,
    ActorCritic,
    ActorOnly,
    BehaviorCloning,
    OnPolicyAlgorithm,
    ReplayBuffer,
    SquashedActorCritic,
)
from tests.callbacks import callback
from tests.helpers import fit_in, make_data, make_ppo
from tests.messages import refused
from tests.variants import variant

SHORT = {"total_env_steps": 4 * 16, "iterations_per_epoch": 1, "num_eval_episodes": 1}


class Tempered(OnPolicyAlgorithm):
    """Weighs its samples by a temperature that it learns, as V-MPO does."""

    trains, detached = False, False

    def __init__(self, policy: ActorCritic, **kwargs):
        super().__init__(policy, **kwargs)
        self.temperature = nn.Parameter(torch.ones(()))

    def configure_objectives(self):
        if not self.trains:
            return super().configure_objectives()
        groups = [*self.policy.parameter_groups(), {"params": [self.temperature]}]
        return [self.objective(self.loss, groups=groups)]

    def training_step(self, rollout, batch_idx):
        for minibatch in self.minibatches(rollout, ("observation", "action", "reward")):
            self.update(minibatch)
        self.finish_iteration(rollout)

    def loss(self, minibatch):
        new = self.policy.evaluate_actions(minibatch)
        temperature = self.temperature.detach() if self.detached else self.temperature
        weight = (minibatch["reward"] / temperature.exp()).softmax(0).detach()
        return -(weight * new["sample_log_prob"]).sum() + temperature.square() + new[
            "value"
        ].square().mean(), {}


def begin(tmp_path, algorithm, env="CartPole-v1", change=None, **model):
    """Build a run, change its algorithm, and train for one iteration."""
    replay = {"replay": ReplayBuffer} if issubclass(algorithm, SAC) else {}
    data = make_data(env, **SHORT, **replay)
    module = make_ppo(data, algorithm=algorithm, **{"compile": False, **model})
    if change is not None:
        change(module)
    fit_in(tmp_path, module, data, limit_val_batches=0)
    return module


def test_a_parameter_of_an_own_algorithm_that_no_objective_moves_is_refused(tmp_path):
    with refused(names=("'temperature'", "configure_objectives", "requires_grad_(False)")):
        begin(tmp_path, Tempered)
    trained = begin(tmp_path, type("Trained", (Tempered,), {"trains": True}))
    assert float(trained.temperature.detach()) != 1.0
    frozen = begin(
        tmp_path / "frozen", Tempered, change=lambda m: m.temperature.requires_grad_(False)
    )
    assert float(frozen.temperature) == 1.0


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_one_that_no_gradient_ever_reaches_is_told_at_the_end(tmp_path, compile, traced_only):
    cls = type("Detached", (Tempered,), {"trains": True, "detached": True})
    with refused(UserWarning, names=("'temperature'", "detach()")):
        begin(tmp_path, cls, compile=compile)


class Apart(PPO):
    """A second loss, for a module of its own."""

    def __init__(self, policy: ActorCritic, cut: bool = False, **kwargs):
        super().__init__(policy, **kwargs)
        self.head, self.cut = nn.Linear(4, 1), cut

    def configure_objectives(self):
        return [
            *super().configure_objectives(),
            self.objective(self.head_loss, self.head, name="head"),
        ]

    def training_step(self, rollout, batch_idx):
        self.updates["head"](rollout[:, 0])
        super().training_step(rollout, batch_idx)

    def head_loss(self, minibatch):
        seen = minibatch["observation"]
        predicted = self.head(seen)
        if self.cut:  # moves another parameter, not its own
            predicted = predicted.detach() + self.policy.get_value(minibatch)["value"][:, None]
        return predicted.square().mean(), {}


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_loss_that_reaches_none_of_its_parameters_is_refused(tmp_path, compile, traced_only):
    begin(tmp_path / "whole", Apart, compile=compile)
    with refused(names=("loss", "'head'", "'head.weight'")):
        begin(tmp_path / "cut", Apart, cut=True, compile=compile)


@pytest.mark.parametrize("name", ["", "agent"])
def test_the_main_loss_is_updated_wherever_it_is_listed(name, tmp_path):
    """It is the one without a name, or else the first; one that nothing updates is named at the end."""

    def configure(module):
        main = module.objective(module.loss, prepare=module.prepare, name=name)
        head = module.objective(module.head_loss, module.head, name="head")
        return [main, head] if name else [head, main]

    listed = variant(Apart, configure_objectives=configure, training_step=PPO.training_step)
    with refused(UserWarning, names=("'head'", "self.updates['head']")):
        module = begin(tmp_path, listed, lr_schedule="adaptive", target_kl=0.1)
    taken = {key: loss.statistics.applied for key, loss in module.objectives.items()}
    assert taken["head"] == 0
    assert taken[name] > 0


def hidden_list(module):
    module.heads = [nn.Linear(2, 2)]


def plain_tensor(module):
    module.temperature = torch.ones((), requires_grad=True)


def module_of_the_policy(module):
    module.policy.auxiliary = nn.Linear(2, 2)


def settings_saved(module):
    module.save_hyperparameters({"policy": module.policy, "width": 8})


def unfrozen_copy(module):
    module.reference = copy.deepcopy(module.policy)


@pytest.mark.parametrize(
    ("algorithm", "env", "change", "named"),
    [
        (PPO, "CartPole-v1", hidden_list, ("'heads'", "nn.ModuleList")),
        (PPO, "CartPole-v1", plain_tensor, ("'temperature'", "nn.Parameter")),
        (PPO, "CartPole-v1", settings_saved, "save_hyperparameters(ignore=['policy'])"),
        (PPO, "CartPole-v1", unfrozen_copy, ("reference.actor.0.weight", "requires_grad_(False)")),
        (
            SAC,
            "Pendulum-v1",
            module_of_the_policy,
            ("policy.auxiliary.weight", "policy.auxiliary.bias"),
        ),
        (SAC, "Pendulum-v1", plain_tensor, "'temperature'"),
    ],
)
def test_its_relatives_are_refused_too(tmp_path, algorithm, env, change, named):
    with refused(names=named):
        begin(tmp_path, algorithm, env, change)


def test_an_objective_of_strangers_is_refused_and_a_generator_is_read_once(tmp_path):
    data = make_data("CartPole-v1", **SHORT)
    module = make_ppo(data)
    with refused(names=("2 parameters", "PPO", "nn.Parameter")):
        module.objective(module.loss, nn.Linear(1, 1))
    objective = module.objective(module.loss, groups=[{"params": module.policy.parameters()}])
    (group,) = objective.make_optimizer(objective.groups).param_groups
    assert len(group["params"]) == len(objective.parameters) > 0


def test_an_objective_of_frozen_modules_alone_is_refused(tmp_path):
    with refused(names=("'head'", "Apart", "configure_objectives")):
        begin(tmp_path, Apart, change=lambda module: module.head.requires_grad_(False))


def thaw(trainer, module, *args):
    module.policy.actor[0].requires_grad_(trainer.global_step > 0)


def regroup(trainer, module, *args):
    if trainer.global_step > 0:
        trainer.optimizers[0].add_param_group({"params": [*module.policy.actor[0].parameters()]})


def freeze(trainer, module, *args):
    module.policy.actor[0].requires_grad_(trainer.global_step == 0)


@pytest.mark.parametrize("change", [thaw, regroup, freeze])
def test_what_is_frozen_unfrozen_or_added_within_a_run_is_refused(change, tmp_path):
    data = make_data("CartPole-v1", **SHORT | {"total_env_steps": 3 * 4 * 16})
    module = make_ppo(data, compile=False)
    module.policy.actor[0].requires_grad_(change is freeze)
    with refused(names=("'policy.actor.0.weight'", "requires_grad", "--trainer.init_from")):
        fit_in(tmp_path, module, data, callbacks=[callback(on_train_batch_start=change)])
    assert int(module.policy.version) == 1


def frozen_layer(module):
    module.policy.actor[0].requires_grad_(False)


@pytest.mark.parametrize(
    ("algorithm", "env", "settings"),
    [
        (PPO, "CartPole-v1", {"critic_warmup_iterations": 5}),
        (GRPO, "CartPole-v1", {"group_size": 2}),
        (SAC, "Pendulum-v1", {"policy_delay": 100, "learning_starts": 16}),
        (SAC, "Pendulum-v1", {"learn_alpha": False}),
    ],
    ids=["warm-up", "no critic", "delayed actor", "fixed temperature"],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_frozen_parts_warm_up_and_targets_raise_no_alarm(
    tmp_path, algorithm, env, settings, frozen
):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*radient.*")
        begin(tmp_path, algorithm, env, frozen_layer if frozen else None, **settings)


def test_a_critic_that_is_left_alone_and_a_reference_raise_no_alarm():
    data = make_data("CartPole-v1", **SHORT)
    policy = ActorCritic(data.observation_space, data.action_space, (8,))
    actor = ActorOnly(data.observation_space, data.action_space, (8,))
    reference = GRPO(actor, group_size=2, kl_coef=0.1)
    for module in (BehaviorCloning(policy), reference):
        module.configure_optimizers()
    continuous = make_data("Pendulum-v1", **SHORT)
    spaces = continuous.observation_space, continuous.action_space
    for settings in ({"normalize_observation": True}, {"critic_normalization": "batch"}):
        tau = {"tau": None} if "critic_normalization" in settings else {}
        SAC(SquashedActorCritic(*spaces, (8,), **settings), **tau).configure_optimizers()
