"""Wrap a vector env: forward everything that a subclass does not override."""

from abc import abstractmethod
from collections.abc import Mapping

from lightning_rl.envs.vector_env import VectorEnv
from lightning_rl.rollout.contract import FieldSpec
from lightning_rl.rollout.goals import GoalFunction
from lightning_rl.system.delegation import delegated


class VectorEnvWrapper(VectorEnv):
    """Base class of wrappers: forwards everything that a subclass does not override.

    The constructor of a subclass takes `num_envs` and the env as configured, and passes the built
    env to this constructor.
    """

    reset = delegated(VectorEnv.reset, "env")
    step = delegated(VectorEnv.step, "env")
    seeds_of = delegated(VectorEnv.seeds_of, "env")
    state_dict = delegated(VectorEnv.state_dict, "env")
    load_state_dict = delegated(VectorEnv.load_state_dict, "env")
    make_renderable = delegated(VectorEnv.make_renderable, "env")
    render = delegated(VectorEnv.render, "env")
    film = delegated(VectorEnv.film, "env")
    show = delegated(VectorEnv.show, "env")
    stop_interventions = delegated(VectorEnv.stop_interventions, "env")
    add_events = delegated(VectorEnv.add_events, "env")
    randomize_first_episodes = delegated(VectorEnv.randomize_first_episodes, "env")
    close = delegated(VectorEnv.close, "env")

    @abstractmethod
    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        for attribute in VectorEnv.__annotations__:
            setattr(self, attribute, getattr(env, attribute))

    @property
    def progress(self) -> int:
        return self.env.progress

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return self.env.extra_fields

    @property
    def goals(self) -> GoalFunction | None:
        return self.env.goals

    def record_info(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.env.record_info(shapes)
        self.info_fields = shapes
