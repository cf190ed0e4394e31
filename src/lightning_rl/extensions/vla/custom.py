"""Act with your own model, given by its class and its weights."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import ConfigurationError, Policy
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import RNG, noise_for, summed
from lightning_rl.extend.rollout import FieldSpec, allocate_rollout
from lightning_rl.extensions.vla.adapters import with_fresh_adapter
from lightning_rl.extensions.vla.backbone import members_of_lists
from lightning_rl.extensions.vla.heads import HALF_LOG_TWO_PI
from lightning_rl.extensions.vla.interface import has_method
from lightning_rl.extensions.vla.loading import (
    away_from_first,
    freeze_matching,
    import_model_class,
    instantiate_model,
)
from lightning_rl.extensions.vla.weights import fill_with_weights, one_message


class CustomVLA(Policy):
    """A policy around your own model with pretrained weights.

    The model is an `nn.Module` with the methods of `Policy`: `forward(td, deterministic=False,
    generator=None)`, `evaluate_actions(td)` and, for algorithms with a critic, `get_value(td)`.
    Optional members: `extra_fields`, `fields_of(action)`, `parameter_groups()`, `joint_ratio`,
    `counts_executed`, and constructor arguments `observation_space` and `action_space`. A class may
    have `blocks` (see `Policy`).

    A model may also have the methods of `VLAModelInterface`, which take and return tensors. Then
    `CustomVLA` draws the actions from a normal distribution around them.

    In YAML:

        policy: class_path: CustomVLA init_args: {model_path: DIR, model_class: my_vla.MyVLA,
            model_config: {width: 64}}

    The class is imported only if you name it, or, for a class in a checkpoint, with `--trust_code
    true`. Weights run no code.

    Args:
        observation_space, action_space: spaces of one env.
        model_path: file of weights (.safetensors, .pt, .pth or .bin), or a directory with one file
            or its shards; read whenever the policy is created. Default: the weights that the
            constructor of the model sets.
        model_class: required; import path of the class.
        model_config: arguments of its constructor.
        strict: refuse weights with other names or shapes; false warns; missing weights stay random.
        freeze: patterns of parameter names that are not trained, such as `*vision*`.
        micro_batch_size: see `Policy`.
        ignore_keys: keys of a Dict observation that the model does not read. A class with an
            attribute `reads` refuses further keys.
        log_std_init: initial log standard deviation of the actions of a plain model.
        meta: see `load_vla_model`.

    Raises:
        ConfigurationError: for an unusable class, an unknown setting, or unusable weights.
    """

    critic_modules = ("model.critic", "model.value_head")

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        model_path: str | None = None,
        model_class: str | None = None,
        model_config: dict[str, Any] | None = None,
        strict: bool = True,
        freeze: Sequence[str] = (),
        micro_batch_size: int | None = None,
        ignore_keys: Sequence[str] = (),
        log_std_init: float = -1.0,
        meta: bool = False,
    ) -> None:
        check_range("micro_batch_size", micro_batch_size, minimum=1)
        if model_class is None:
            raise ConfigurationError(
                "CustomVLA has no model_class: give the import path of a torch.nn.Module, as in "
                "my_vla.MyVLA."
            )
        cls = import_model_class(model_class)
        is_plain = _check_methods(cls, model_class)
        reads = getattr(cls, "reads", None)
        super().__init__(observation_space, action_space, reads, ignore_keys)
        config = model_config or {}
        spaces = {"observation_space": observation_space, "action_space": action_space}
        with away_from_first(meta) as on_meta:
            model = instantiate_model(cls, config, spaces)
        # On `meta` there is no memory to fill.
        if model_path is not None and not on_meta:
            fill_with_weights(model, model_path, strict, "model_path")
        freeze_matching(model, freeze)
        self.has_critic = has_method(model, "get_value")
        evaluates = has_method(model, "evaluate_actions")
        self.counts_executed = bool(getattr(model, "counts_executed", is_plain and not evaluates))
        if is_plain:
            # The model is one module deeper.
            self.critic_modules = ("model.model.critic", "model.model.value_head")
            model = PlainModel(model, action_space, log_std_init)
            step = allocate_rollout(observation_space, action_space, 1, 1)[:, 0]
            # One call, so that a wrong model is refused at construction.
            if not on_meta:
                with torch.no_grad(), one_message(f"{model_class} cannot be called"):
                    model.evaluate_actions(model(step, deterministic=True))
        self.model = model
        self.model_class = model_class
        self.model_settings = _listed(config)  # to compare two policies
        self.joint_ratio = bool(getattr(model, "joint_ratio", False))
        self.micro_batch_size = micro_batch_size

    @property
    def blocks(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, so read-only
        path, model = "model", self.model
        if isinstance(model, PlainModel):
            path, model = "model.model", model.model
        # Of the class, because on an instance `blocks` may be a list of modules.
        patterns = getattr(type(model), "blocks", None)
        return tuple(f"{path}.{name}" for name in patterns or members_of_lists(model))

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return dict(getattr(self.model, "extra_fields", {}))

    def adapt_state_dict(
        self, state: dict[str, Tensor], saved: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], str | None]:
        return with_fresh_adapter(state, saved)

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        return self.model(td, deterministic=deterministic, generator=generator)  # type: ignore[no-any-return]  # nn.Module

    def draw_noise(self, batch: Sequence[int], generator: RNG = None) -> Tensor:
        draw = getattr(self.model, "draw_noise", super().draw_noise)
        return cast(Tensor, draw(batch, generator))

    def get_value(self, td: TensorDict) -> TensorDict:
        if not self.has_critic:
            # The field exists for algorithms without a critic, too.
            return td.set("value", torch.zeros(td.batch_size, device=td.device))
        return self.model.get_value(td)  # type: ignore[no-any-return,operator]  # nn.Module

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        outputs: TensorDict = self.model.evaluate_actions(td)  # type: ignore[operator]  # nn.Module
        needed = ("sample_log_prob", "entropy", *(("value",) if self.has_critic else ()))
        for name in needed:
            require(
                name in outputs.keys(),
                f"{self.model_class}.evaluate_actions returned no '{name}', but "
                f"{', '.join(map(str, outputs.keys())) or 'nothing'}; it must return "
                f"{', '.join(needed)}.",
            )
        return outputs if self.has_critic else self.get_value(outputs)

    def parameter_groups(self) -> list[dict[str, Any]]:
        if not hasattr(self.model, "parameter_groups"):
            return super().parameter_groups()
        return self.model.parameter_groups()  # type: ignore[no-any-return,operator]  # nn.Module

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        if not hasattr(self.model, "fields_of"):
            return super().fields_of(action)
        return self.model.fields_of(action)  # type: ignore[no-any-return,operator]  # nn.Module


class PlainModel(nn.Module):
    """Adds a normal distribution to a model on plain tensors, for `CustomVLA`.

    The model's actions are the mean. The log standard deviation is the model's parameter `log_std`,
    or a new parameter, per number of an action.

    Args:
        model: has methods of `VLAModelInterface`.
        action_space: a Box of floats.
        log_std_init: initial log standard deviation.

    Raises:
        ConfigurationError: for another action space, or a model that returns something else.
    """

    def __init__(
        self, model: nn.Module, action_space: gymnasium.Space[Any], log_std_init: float
    ) -> None:
        super().__init__()
        require(
            isinstance(action_space, gymnasium.spaces.Box) and action_space.dtype.kind == "f",
            f"{type(model).__name__} returns actions as numbers, but the action space is "
            f"{action_space}: define evaluate_actions(td), as in lightning_rl.Policy.",
        )
        self.model, self.shape = model, tuple(action_space.shape or ())
        self.size = math.prod(self.shape)
        self.log_std = None
        # A log_std of the model itself is trained with its weights.
        if not isinstance(getattr(model, "log_std", None), nn.Parameter):
            self.log_std = nn.Parameter(torch.full((self.size,), log_std_init))

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        mean, log_std = self._distribution(td)
        noise = noise_for(self, td, deterministic, generator)
        action = mean if noise is None else mean + noise * log_std.exp()
        td.set("action", action.unflatten(-1, self.shape))
        return td.set("sample_log_prob", self._log_probs(mean, log_std, action).sum(-1))

    def draw_noise(self, batch: Sequence[int], generator: RNG = None) -> Tensor:
        """Draw standard normal noise [*batch, A]."""
        device = next(self.parameters()).device
        return torch.empty(*batch, self.size, device=device).normal_(generator=generator)

    def get_value(self, td: TensorDict) -> TensorDict:
        """Write `value` [B] into `td` [B]."""
        # The model may return [B] or [B, 1].
        value: Tensor = cast(Any, self.model).get_value(td.get("observation"))
        return td.set("value", value.float().reshape(td.batch_size))

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        """Return `sample_log_prob`, `entropy` and `value`, [B] each, of the actions in `td` [B]."""
        if has_method(self.model, "evaluate_actions"):
            fields = self._evaluated(td)
        else:
            mean, log_std = self._distribution(td)
            # Actions of a chunk that were not executed have no part in the log-prob.
            executed = td.get("executed", None)
            log_probs = self._log_probs(mean, log_std, td.get("action").reshape(mean.shape))
            entropies = (log_std + 0.5 + HALF_LOG_TWO_PI).expand(mean.shape)
            fields = {
                "sample_log_prob": summed(log_probs, executed),
                "entropy": summed(entropies, executed),
            }
        if has_method(self.model, "get_value"):
            fields["value"] = self.get_value(td.select("observation")).get("value")
        return TensorDict(fields, td.batch_size)

    def _evaluated(self, td: TensorDict) -> dict[str, Tensor]:
        outputs = cast(Any, self.model).evaluate_actions(td.get("observation"), td.get("action"))
        if hasattr(outputs, "get"):
            outputs = outputs.get("log_prob"), outputs.get("entropy")
        # Other libraries return three tensors, some of them with the values first.
        is_pair = isinstance(outputs, tuple | list) and len(outputs) == 2
        require(
            is_pair and all(isinstance(p, Tensor) and p.numel() == td.numel() for p in outputs),
            f"{type(self.model).__name__}.evaluate_actions must return log-probs and entropies, "
            f"[{td.numel()}] each, as a pair or by the names log_prob and entropy; get_value "
            "returns the values. If the actions are the mean of a normal distribution, remove "
            "evaluate_actions.",
        )
        log_prob, entropy = (part.float().reshape(td.batch_size) for part in outputs)
        return {"sample_log_prob": log_prob, "entropy": entropy}

    def _distribution(self, td: TensorDict) -> tuple[Tensor, Tensor]:
        mean = self.model(td.get("observation"))
        shape = (*td.batch_size, self.size)
        require(
            isinstance(mean, Tensor) and mean.numel() == math.prod(shape),
            f"{type(self.model).__name__}.forward returned "
            f"{list(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__}; it must be "
            f"actions of shape {list(shape)} alone, as in lightning_rl.VLAModelInterface. A model "
            "that draws its own actions and returns log-probs needs the methods of "
            "lightning_rl.Policy.",
        )
        log_std = self.model.log_std if self.log_std is None else self.log_std
        return mean.float().reshape(shape), cast(Tensor, log_std).reshape(-1)

    def _log_probs(self, mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
        return -0.5 * ((action - mean) * (-log_std).exp()).square() - log_std - HALF_LOG_TWO_PI


def _check_methods(cls: type[nn.Module], name: str) -> bool:
    needs = (
        "A model has forward(td, deterministic=False, generator=None), evaluate_actions(td) and, "
        "for PPO and other algorithms with a critic, get_value(td), as lightning_rl.Policy, or "
        "the methods of lightning_rl.VLAModelInterface."
    )
    require(
        not issubclass(cls, Policy),
        f"model_class '{name}' is a whole Policy: give it as the policy's class_path instead.",
    )
    acts, evaluates = (has_method(cls, method) for method in ("forward", "evaluate_actions"))
    keywords = {"deterministic": False, "generator": None}
    # Only the methods of `Policy` take these two.
    reads_td = acts and _takes(cls, "forward", 1, **keywords)
    missing = [] if acts else ["forward"]
    missing += ["evaluate_actions"] if reads_td and not evaluates else []
    require(not missing, f"model_class '{name}' has no {' and no '.join(missing)}. {needs}")
    pair = not evaluates or _takes(cls, "evaluate_actions", 2)
    require(
        reads_td or (pair and _takes(cls, "forward", 1)),
        f"model_class '{name}' has forward{inspect.signature(cls.forward)}, which cannot be called "
        f"with td, deterministic and generator. {needs}",
    )
    return pair and not (reads_td and _takes(cls, "evaluate_actions", 1))


def _takes(cls: type[nn.Module], method: str, count: int, **keywords: Any) -> bool:
    try:
        # `bind` compares signatures without a call; one argument more, for self.
        inspect.signature(getattr(cls, method)).bind(*[None] * (count + 1), **keywords)
    except TypeError:
        return False
    return True


def _listed(config: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(config.items())]
