"""Stand in for the env of a run on a dataset alone (`data.offline`)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_rl import ConfigurationError, VectorEnv
from lightning_rl.extend.envs import EnvFactory, Observation, Seed
from lightning_rl.extend.errors import require
from lightning_rl.extend.spaces import flat_actions
from lightning_rl.extensions.datasets.ends import Ends
from lightning_rl.extensions.datasets.reader import Reader, read_episodes


class DatasetSpaces(VectorEnv):
    """Env with the spaces of a dataset, see `Episodes.spaces`, and without steps.

    Args:
        num_envs: N.
        path, keys, ends, reader: see `read_episodes`.

    Raises:
        ConfigurationError: if the dataset cannot be read, or does not describe its actions.
    """

    def __init__(
        self,
        num_envs: int,
        path: str,
        keys: dict[str, str] | None = None,
        ends: Ends | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        observation, action = read_episodes(path, keys, ends=ends, reader=reader).spaces()
        self.single_observation_space = observation
        self.single_action_space = flat_actions(action)

    def reset(self, seed: Seed = None, options: dict[str, Any] | None = None) -> Any:
        """Refuse.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "This run has a dataset and no env (data.offline: true), so no policy can act in it: "
            "set data.env, the env of the recording."
        )

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        raise NotImplementedError("DatasetSpaces refuses `reset`.")


def spaces_of_collector(collector: Any) -> EnvFactory:
    """Return the factory of a stand-in for the env, from the factory of `DatasetCollector`.

    Raises:
        ConfigurationError: if the collector reads no dataset.
    """
    # A collector in YAML is a partial: its keywords are the settings.
    collector_settings = getattr(collector, "keywords", {})
    require(
        isinstance(collector_settings.get("path"), str),
        "data.offline is true, but data.collector names no dataset: set data.collector: "
        "{class_path: DatasetCollector, init_args: {path: ...}}, or remove data.offline.",
    )
    names = [
        name
        for name in ("path", "keys", "ends", "reader")
        if collector_settings.get(name) is not None
    ]
    return partial(DatasetSpaces, **{name: collector_settings[name] for name in names})
