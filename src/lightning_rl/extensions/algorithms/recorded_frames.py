"""Base class of algorithms that train on the frames of a recorded dataset."""

from abc import abstractmethod
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Algorithm, Policy
from lightning_rl.extend.algorithms import Objective, TransitionSampler, check_batch_size, epochs
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.rollout import flat_transitions
from lightning_rl.extensions.datasets.frames import RecordedFrames


class FrameAlgorithm(Algorithm):
    """Base class of algorithms whose `data.env` shows recorded frames; a subclass writes `loss`.

    Args:
        policy: its action is the predicted label of a frame.
        n_epochs: passes over the frames of a rollout.
        kwargs: see `Algorithm`.
    """

    uses_replay = False

    env_class: type[RecordedFrames]
    """Class of `data.env`."""

    FIELDS: tuple[str, ...] = ("observation", "action", "weight")
    """The fields of a rollout that the loss reads; `action` holds the label."""

    def __init__(self, policy: Policy, *, n_epochs: int = 1, **kwargs: Any) -> None:
        super().__init__(policy, **kwargs)
        check_range("n_epochs", n_epochs, minimum=1)
        self.n_epochs = n_epochs

    def configure_objectives(self) -> list[Objective]:
        return [self.objective(self.loss)]

    @abstractmethod
    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of samples [B], and scalars to log."""

    def minibatches_per_iteration(self) -> int:
        return self.n_epochs * -(-self.data.num_envs * self.data.buffer_size // self.batch_size)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            check_batch_size(self.batch_size, self.data.num_envs * self.data.buffer_size)
        # Refuses an env of another class before training.
        _ = self.frames_env
        require(
            self.data.evaluates_on_the_training_env,
            f"{type(self).__name__} evaluates the held-out episodes of data.env; data.eval_env "
            "could contain training data. Remove data.eval_env.",
        )

    @property
    def frames_env(self) -> Any:
        """The evaluation env.

        Raises:
            ConfigurationError: if the env is not an `env_class`.
        """
        # The evaluation env exists in each stage, a training env only in `fit`.
        env, class_name = self.data.eval_env, self.env_class.__name__
        require(
            isinstance(env, self.env_class),
            f"{type(self).__name__} trains on the frames of a recorded dataset, but data.env is a "
            f"{type(env).__name__}: set data.env: {{class_path: {class_name}, init_args: "
            "{path: ...}}.",
        )
        return env

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        # The policy's action was a guess; the loss reads the label in its place.
        rollout["action"].copy_(rollout["label"])
        flat = flat_transitions(rollout, [*self.FIELDS, *self.policy.extra_fields])
        epoch_settings = (self.n_epochs, self.batch_size, self.generator, _nothing)
        for epoch in epochs(TransitionSampler(flat), *epoch_settings):
            for minibatch in epoch:
                self.update(minibatch)
        self.finish_iteration(rollout)


def _nothing(flat: TensorDict, index: Tensor, sizes: Any) -> dict[str, Tensor]:
    return {}
