"""Act with a model of one's own, named by its class and its weights."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.errors import ConfigurationError, check_range, require
from lightning_rl.permission import granted
from lightning_rl.policies.base import Policy
from lightning_rl.policies.vla.loading import (
    freeze_matching,
    import_model_class,
    instantiate_model,
)
from lightning_rl.policies.vla.weights import WEIGHTS, fill_with_weights
from lightning_rl.rollout import FieldSpec


class CustomVLA(Policy):
    """A model of your own, with weights that it was trained to elsewhere.

    The model is an `nn.Module` that acts, values and evaluates by TensorDict, as `Policy` says of
    each method: `forward(td, deterministic=False, generator=None)`, `evaluate_actions(td)` and, for
    an algorithm with a critic, `get_value(td)`. It may have `extra_fields`, `fields_of(action)`,
    `parameter_groups()` and `joint_ratio`, as `Policy` has them. Where its constructor names
    `observation_space` or `action_space`, it gets them.

    In YAML:

        policy:
          class_path: CustomVLA
          init_args: {model_path: DIR, model_class: my_vla.MyVLA, model_config: {width: 64}}

    The weights are read as data. The class is code: it is imported where you name it yourself, and
    for a checkpoint that names it with `--trust_code true`.

    Args:
        observation_space, action_space: of one env.
        model_path: file of weights (.safetensors, or a state dict in .pt, .pth or .bin), or a
            directory that holds one, or its shards. Read whenever the policy is made. Not optional.
        model_class: import path of the class. Not optional.
        model_config: arguments of its constructor.
        strict: refuse weights whose names or shapes are not the model's; false warns, and what the
            file lacks (a value head, say) begins anew.
        freeze: patterns of parameter names that are not trained, as in `*vision*`.
        micro_batch_size: see `Policy`.

    Raises:
        ConfigurationError: for a class that cannot be had or lacks a method, a setting that it does
            not take, and weights that are not there or do not fit.
    """

    critic_modules = ("model.critic", "model.value_head")

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_path: str | None = None,
        model_class: str | None = None,
        model_config: dict[str, Any] | None = None,
        strict: bool = True,
        freeze: Sequence[str] = (),
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__(observation_space, action_space)
        check_range("micro_batch_size", micro_batch_size, least=1)
        if model_class is None:
            raise ConfigurationError(
                "CustomVLA has no model_class: give the import path of a torch.nn.Module, as in "
                "my_vla.MyVLA."
            )
        if model_path is None:
            raise ConfigurationError(
                f"CustomVLA has no model_path: give {WEIGHTS}. A model that begins without weights "
                "is a Policy of its own: name it as the policy's class_path."
            )
        cls = import_model_class(granted("model_class", model_class))
        _check_methods(cls, model_class)
        config = model_config or {}
        spaces = {"observation_space": observation_space, "action_space": action_space}
        model = instantiate_model(cls, config, spaces)
        fill_with_weights(model, model_path, strict, "model_path")
        freeze_matching(model, freeze)
        self.model = model
        self.model_class = model_class
        self.model_settings = _listed(config)  # so that two policies can be compared by them
        self.has_critic = hasattr(model, "get_value")
        self.joint_ratio = bool(getattr(model, "joint_ratio", False))
        self.micro_batch_size = micro_batch_size

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return dict(getattr(self.model, "extra_fields", {}))

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> TensorDict:
        return self.model(td, deterministic=deterministic, generator=generator)  # type: ignore[no-any-return]  # nn.Module

    def get_value(self, td: TensorDict) -> TensorDict:
        """Write `value` [B]: zero, where the model has no critic."""
        if not self.has_critic:
            return td.set("value", torch.zeros(td.batch_size, device=td.device))
        return self.model.get_value(td)  # type: ignore[no-any-return,operator]  # nn.Module

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        """Ask the model.

        Raises:
            ConfigurationError: where the model leaves out what it must return.
        """
        result: TensorDict = self.model.evaluate_actions(td)  # type: ignore[operator]  # nn.Module
        needed = ("sample_log_prob", "entropy", *(("value",) if self.has_critic else ()))
        for name in needed:
            require(
                name in result.keys(),
                f"{self.model_class}.evaluate_actions returned no '{name}', but "
                f"{', '.join(map(str, result.keys())) or 'nothing'}; it must return "
                f"{', '.join(needed)}.",
            )
        return result if self.has_critic else self.get_value(result)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the model's own, if it has any."""
        if not hasattr(self.model, "parameter_groups"):
            return super().parameter_groups()
        return self.model.parameter_groups()  # type: ignore[no-any-return,operator]  # nn.Module

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        """Return what the model's own gives, if it has one."""
        if not hasattr(self.model, "fields_of"):
            return super().fields_of(action)
        return self.model.fields_of(action)  # type: ignore[no-any-return,operator]  # nn.Module


def _check_methods(cls: type[nn.Module], name: str) -> None:
    """Refuse a model that cannot act, or evaluate actions."""
    needs = (
        "A model has forward(td, deterministic=False, generator=None), evaluate_actions(td) and, "
        "for PPO and other algorithms with a critic, get_value(td), as lightning_rl.Policy says "
        "of each."
    )
    require(
        not issubclass(cls, Policy),
        f"model_class '{name}' is a whole Policy: give it as the policy's class_path instead.",
    )
    for method in ("forward", "evaluate_actions"):
        own = getattr(cls, method, None)
        require(
            own is not None and own is not nn.Module.forward,
            f"model_class '{name}' has no {method}. {needs}",
        )
    signature = inspect.signature(cls.forward)
    try:
        signature.bind(None, None, deterministic=False, generator=None)
    except TypeError as error:
        raise ConfigurationError(
            f"model_class '{name}' has forward{signature}, which cannot be called with td, "
            f"deterministic and generator. {needs}"
        ) from error


def _listed(config: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(config.items())]
