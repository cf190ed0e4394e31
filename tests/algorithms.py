"""Algorithms that are none of the package's own, as short as a test can have them."""

from lightning_rl import PPO, OnPolicyAlgorithm
from tests.variants import before


class Reinforce(OnPolicyAlgorithm):
    """That of docs/extending.md: the log-prob of each action, weighed by its reward."""

    def training_step(self, rollout, batch_idx):
        for minibatch in self.minibatches(rollout, ("observation", "action", "reward")):
            self.update(minibatch)
        self.finish_iteration(rollout)

    def loss(self, minibatch):
        new = self.policy.evaluate_actions(minibatch)
        return -(minibatch["reward"] * new["sample_log_prob"]).mean(), {}


def with_first_ratios(algorithm):
    """Return an algorithm that keeps in `firsts` the first ratios of each iteration, less 1."""

    def begin(module):
        module.firsts = []

    def look(module, minibatch):
        if len(module.objectives[""].statistics) == 0:
            new = module.policy.evaluate_actions(minibatch)["sample_log_prob"].detach()
            module.firsts.append((new - minibatch["sample_log_prob"]).exp() - 1)

    return before(algorithm, on_train_start=begin, loss=look)


def peek(module, result, minibatch):
    """Decide by the value of a loss, which no graph can: `after(PPO, loss=peek)`."""
    loss, scalars = result
    return (loss if loss > 0 else loss * 2), scalars


def limit_is_failure(learner, rollout):
    """Make the mistake of treating a time limit as the end of all rewards, before advantages or a replay."""
    rollout["terminated"] |= rollout["truncated"]


class Margin(PPO):
    """Passes its settings on."""

    def __init__(self, policy, margin=0.1, **kwargs):
        super().__init__(policy, **kwargs)


class Starred(PPO):
    """Passes everything on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
