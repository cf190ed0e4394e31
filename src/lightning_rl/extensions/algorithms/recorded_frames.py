"""Base class of algorithms that train on the frames of a recorded dataset."""

from typing import Any

from tensordict import TensorDict

from lightning_rl import RolloutAlgorithm
from lightning_rl.extend.errors import require
from lightning_rl.extensions.datasets.frames import RecordedFrames


class FrameAlgorithm(RolloutAlgorithm):
    """Base class of algorithms whose `data.env` shows recorded frames; a subclass writes `loss`.

    Args:
        policy: its action is the predicted label of a frame.
        kwargs: see `RolloutAlgorithm`.
    """

    env_class: type[RecordedFrames]
    """Class of `data.env`."""

    FIELDS: tuple[str, ...] = ("observation", "action", "weight")
    """The fields of a rollout that the loss reads; `action` holds the label."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
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
        for minibatches in self.passes(rollout, self.FIELDS, None):
            for minibatch in minibatches:
                self.update(minibatch)
        self.finish_iteration(rollout)
