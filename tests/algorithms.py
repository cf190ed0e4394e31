"""Algorithms that are none of the package's own, as short as a test can have them."""

from lightning_rl import OnPolicyAlgorithm


class Reinforce(OnPolicyAlgorithm):
    """That of docs/extending.md: the log-prob of each action, weighed by its reward."""

    def training_step(self, rollout, batch_idx):
        for minibatch in self.minibatches(rollout, ("observation", "action", "reward")):
            self.update(minibatch)
        self.finish_iteration(rollout)

    def loss(self, minibatch):
        new = self.policy.evaluate_actions(minibatch)
        return -(minibatch["reward"] * new["sample_log_prob"]).mean(), {}
