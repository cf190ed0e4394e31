"""Checks of an algorithm's settings, before a run starts."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import gymnasium
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl.algorithms.rollout_evaluation import log_prob_of
from lightning_rl.optim.objective_checks import WHOLE, check_optimizer, quoted
from lightning_rl.optim.update import Objective
from lightning_rl.policies import Policy
from lightning_rl.rollout.contract import leaves_by_path
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, check_range, require
from lightning_rl.system.lightning_private import start_method_of
from lightning_rl.system.sharded import ShardingStrategy

PRECISIONS = ("32-true", "bf16-mixed")
"""The tested settings of `trainer.precision`."""

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers that act otherwise in eval mode, in which a policy trains."""


def check_policy(algorithm: Any, policy: Any) -> None:
    """Refuse what is no policy, such as the text that a parameter without a type gets."""
    require(
        isinstance(policy, Policy),
        f"{type(algorithm).__name__} takes a Policy, got {type(policy).__name__}. In a class of "
        "your own annotate `policy: Policy`, so that the command line builds it.",
    )


def check_run(trainer: Trainer, policy: Policy) -> None:
    """Refuse what the update does not support, and warn of layers that it leaves out."""
    check_strategy(trainer)
    check_precision(trainer.precision)
    warn_of_layers_without_effect(policy)


def check_precision(precision: Any) -> None:
    """Refuse a precision that the update does not support."""
    scaled = str(precision) in ("16", "16-mixed")
    reason = "the update does not support a scaled loss"
    require(
        str(precision) in (*PRECISIONS, "32", "bf16"),  # Lightning's old names
        f"trainer.precision {precision} is not supported: "
        f"{reason if scaled else 'it would convert the rollouts, with rewards and log-probs'}. "
        f"Use {' or '.join(PRECISIONS)}.",
    )


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies with processes that lack a policy or envs."""
    strategy = trainer.strategy
    started = start_method_of(strategy)
    is_ordinary = type(strategy) in (SingleDeviceStrategy, DDPStrategy)
    if not (is_ordinary or isinstance(strategy, ShardingStrategy)) or started != "popen":
        name = type(strategy).__name__ + ("" if started == "popen" else f" by {started}")
        raise ConfigurationError(
            f"trainer.strategy {name} is not supported: "
            + (
                "every process needs the whole policy for acting."
                if started == "popen"
                else "its processes would share the env's worker processes, and their counters "
                "would be lost."
            )
            + " Use --trainer.strategy ddp or fsdp, or one device."
        )


def check_not_on_meta(trainer: Trainer, module: nn.Module | None) -> None:
    """Refuse parameters without values, unless the strategy copies the first process's values."""
    takes = isinstance(trainer.strategy, ShardingStrategy) or module is None
    require(
        takes or not any(p.is_meta for p in cast(nn.Module, module).parameters()),
        "The policy is on the device meta, without weights: only --trainer.strategy fsdp copies "
        "the first process's weights to it. Use that strategy, or make the policy on another "
        "device.",
    )


def check_batch_size(batch_size: int, per_iteration: int) -> None:
    """Refuse a minibatch that is larger than a rollout of `per_iteration` (N*T) transitions."""
    require(
        batch_size <= per_iteration,
        f"model.batch_size={batch_size} is larger than a rollout: data.num_envs * "
        f"data.buffer_size = {per_iteration} transitions. Lower batch_size, or raise num_envs or "
        "buffer_size.",
    )


def check_entropy(policy: Policy, ent_coef: float) -> None:
    """Refuse an `ent_coef` that is out of range, or not 0 for a policy without a known entropy."""
    check_range("ent_coef", ent_coef, minimum=0)
    require(
        policy.has_entropy or ent_coef == 0,
        f"ent_coef={ent_coef:g} needs an entropy, but the entropy of {type(policy).__name__} is "
        "unknown (a flow with noise: sde). Set ent_coef: 0, or give the flow noise: learnt.",
    )


def check_random_actions(policy: Policy, random_env_steps: int) -> None:
    """Refuse a negative number, and random actions for critics whose input is not an action."""
    check_range("random_env_steps", random_env_steps, minimum=0)
    require(
        random_env_steps == 0 or policy.replay_action_space == policy.action_space,
        f"random_env_steps={random_env_steps} draws random actions, but the critics of "
        f"{type(policy).__name__} evaluate the noise of a flow, not actions. Set random_env_steps: "
        "0, because the noise is random at first, and learning_starts to the number of env steps "
        "before the first update.",
    )
    space = policy.action_space
    if random_env_steps > 0 and isinstance(space, gymnasium.spaces.Box):
        policy.fields_of(torch.zeros(1, *space.shape))  # refuses them if it cannot store them


def tell_random_actions(algorithm: Any) -> None:
    """Print that random actions come first, in a run that begins with a policy that can act."""
    if algorithm.random_env_steps > 0:
        rank_zero_info(
            f"In an env the first {algorithm.random_env_steps:,} steps take random actions all the "
            "same. To act by the policy from the first step, set model.random_env_steps: 0 and "
            f"model.learning_starts: {algorithm.learning_starts:_}."
        )


def check_random_shift(
    policy: Policy, random_shift: int, pictures: Mapping[tuple[str, ...], tuple[int, ...]]
) -> None:
    """Refuse a negative shift, in pixels, a large one, or one without pictures or for a memory."""
    check_range("random_shift", random_shift, minimum=0)
    require(
        random_shift == 0 or not policy.evaluates_sequences,
        f"random_shift={random_shift} shifts each picture independently, so a memory would "
        "see jumps between steps. Remove random_shift or the memory.",
    )
    require(
        random_shift == 0 or len(pictures) > 0,
        f"random_shift={random_shift} shifts pictures, but there are none in the observation "
        f"space {policy.observation_space}: remove random_shift.",
    )
    parts = leaves_by_path(policy.observation_space)
    for path, axes in pictures.items():
        side = min(parts[path].shape[axis] for axis in axes)
        require(
            random_shift <= side / 4,
            f"random_shift={random_shift} would shift {'.'.join(path) or 'the observation'}, of "
            f"{side} pixels, by more than a quarter of it. Set random_shift: {side // 4} or less. "
            "If it is no picture but a map of symbols, give its space their bounds instead of 255.",
        )


def check_sequences(policy: Policy, sequence_length: int | str | None, burn_in: int) -> None:
    """Refuse sequence settings (in steps) that are out of range, or a policy without a memory."""
    check_range("burn_in", burn_in, minimum=0)
    if isinstance(sequence_length, int):
        check_range("sequence_length", sequence_length, minimum=1)
    settings = {"sequence_length": sequence_length is not None, "burn_in": burn_in > 0}
    names = " and ".join(name for name, is_set in settings.items() if is_set)
    reason = (
        "it stores a state, but its evaluate_actions evaluates single steps (see "
        "Policy.evaluates_sequences)"
        if policy.is_recurrent
        else "it has no memory: add one, policy.init_args.memory: {class_path: LSTM}"
    )
    require(
        policy.evaluates_sequences or not names,
        f"{names} applies to sequences, which need a policy with a memory; "
        f"{type(policy).__name__} cannot train on sequences: {reason}; or remove {names}.",
    )
    require(
        burn_in == 0 or sequence_length != "rollout",
        f"burn_in={burn_in} needs steps before each sequence, but with sequence_length: rollout "
        "there are none. Set burn_in: 0, or a sequence_length in steps.",
    )


def check_first_update(algorithm: Any, setting: str) -> None:
    """Refuse sums of rewards longer than an episode, and a budget that ends before the updates.

    `setting` is the name and value of the setting that decides when updates start.
    """
    data, n_steps, start = algorithm.data, algorithm.n_steps, algorithm.learning_starts
    longest = data.max_episode_actions
    require(
        longest is None or n_steps <= longest,
        f"model.n_steps={n_steps} is longer than an episode: the env ends each episode "
        f"after {longest} steps. Lower n_steps.",
    )
    budget = data.total_iterations * data.env_steps_per_iteration * ranks.world_size()
    require(
        start < budget,
        f"The first update would come after {start} env steps, but the run has {budget} "
        f"(data.total_env_steps). The update needs {setting}, and a minibatch in the replay "
        f"(model.batch_size={algorithm.batch_size}) or, with a memory, a sequence of each env. "
        "Lower these settings, or raise data.total_env_steps.",
    )


def check_replayed(algorithm: Any, steps_of_one_sequence: int) -> None:
    """Refuse a collector that drops rollouts, and a replay without room for what is drawn."""
    name, size = type(algorithm).__name__, algorithm.batch_size
    require(
        not algorithm.data.may_drop_rollouts,
        f"data.collector.overflow=overwrite drops unread rollouts, but {name} trains on each env "
        f"step, with updates_per_env_step={algorithm.updates_per_env_step:g} updates. Use "
        "overflow: block, and raise max_staleness if the envs often wait.",
    )
    # The replay does not exist before training starts.
    room = getattr(algorithm.replay, "capacity", None)
    require(
        room is None or room >= size,
        f"data.replay.capacity={room} is smaller than model.batch_size={size}: the "
        "replay could never give a minibatch of different transitions. Raise the capacity "
        "(1,000,000 is usual), or lower batch_size.",
    )
    require(
        room is None or room >= steps_of_one_sequence,
        f"data.replay.capacity={room} has no room for one sequence of each env: "
        f"model.sequence_length={algorithm.sequence_length} times data.num_envs="
        f"{algorithm.data.num_envs}. Raise the capacity (1,000,000 is usual), or lower "
        "sequence_length.",
    )


def check_all_parameters_move(
    algorithm: LightningModule, objectives: Collection[Objective]
) -> None:
    """Refuse parameters without an objective, and objectives without parameters."""
    kind = type(algorithm).__name__
    for objective in objectives:
        require(
            len(objective.parameters) > 0,
            f"The objective{f' {objective.name!r}' if objective.name else ''} of {kind} has no "
            "parameters to train: its modules are frozen (requires_grad is False), or have none. "
            "Remove it from configure_objectives, or name the modules that it trains.",
        )
    moved = {id(parameter) for objective in objectives for parameter in objective.parameters}
    untrained = [
        name
        for name, parameter in algorithm.named_parameters()
        if parameter.requires_grad and id(parameter) not in moved
    ]
    require(
        not untrained,
        f"No objective of {kind} trains {quoted(untrained)}. Add them to an objective in "
        "configure_objectives, such as self.objective(self.loss, "
        f"groups=[*self.policy.parameter_groups(), {{'params': [...]}}]); or freeze them "
        "(targets, references) with requires_grad_(False).",
    )
    # Tensors in lists, dicts or plain attributes are in no state dict and no optimizer.
    loose = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in algorithm.named_modules()
        for name, value in vars(module).items()
        if any(id(leaf) not in moved for leaf in _trainable_in(value))
    ]
    hparams = vars(algorithm).get("_hparams_initial", {})
    copied = [name for name, value in hparams.items() if any(True for _ in _trainable_in(value))]
    require(
        not copied,
        f"self.save_hyperparameters() of {kind} would write whole modules into each checkpoint: "
        f"call self.save_hyperparameters(ignore={copied}), or remove it, because checkpoints hold "
        "the arguments of the constructor anyway.",
    )
    require(
        not loose,
        f"{kind} holds tensors with gradients that are neither trained nor saved: {quoted(loose)}. "
        "To train them, make each tensor an nn.Parameter, put modules into an nn.ModuleList or "
        "nn.ModuleDict instead of a list or dict, and add them to an objective in "
        "configure_objectives. Otherwise call requires_grad_(False) on them.",
    )


def _trainable_in(value: Any) -> Iterator[Tensor]:
    parts = value.values() if isinstance(value, dict) else value
    for part in parts if isinstance(value, list | tuple | dict) else (value,):
        tensors = part.parameters() if isinstance(part, nn.Module) else (part,)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_leaf and tensor.requires_grad:
                yield tensor


def checked_optimizer(objective: Objective) -> Optimizer:
    """Make the optimizer of an objective, and check it; warn of weights that round its steps.

    Raises:
        ConfigurationError: if its class refuses a setting or a parameter, or it is unusable.
    """
    try:
        optimizer = objective.make_optimizer(objective.groups)
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(f"model.optimizer cannot be made: {error}") from error
    check_optimizer(optimizer, objective.schedule.initial)
    coarse = [p for p in objective.parameters if torch.finfo(p.dtype).eps > 1e-6]  # not float32
    if coarse:
        rank_zero_warn(
            f"{sum(p.numel() for p in coarse):,} of the trained weights are in {coarse[0].dtype}: "
            "most steps of an optimizer are smaller than its numbers are apart, and are rounded "
            "away. Load the weights as dtype: float32, and compute by trainer.precision: "
            "bf16-mixed; or freeze them, and train an adapter (lora)."
        )
    return optimizer


def check_whole_minibatches(objectives: Collection[Objective]) -> None:
    """Refuse a loss of whole minibatches with several processes: each has only a part."""
    names = [objective.name for objective in objectives if objective.micro_batch_size == WHOLE]
    require(
        not names or ranks.world_size() == 1,
        f"The loss of {quoted(names)} needs whole minibatches, but each of {ranks.world_size()} "
        "processes has only a part: train in one process, --trainer.devices 1.",
    )


def check_statistics_of_ranks(policy: Policy) -> None:
    """Refuse statistics of observations that differ between processes.

    Raises:
        ConfigurationError: names the buffer; on all ranks.
    """
    sums = {name: float(buffer.double().sum()) for name, buffer in policy.named_buffers()}
    first, *others = ranks.gather_over_ranks(sums)
    # As texts, because NaN differs from itself.
    different = [name for name in first if any(str(o[name]) != str(first[name]) for o in others)]
    require(
        not different,
        f"{type(policy).__name__}: {quoted(different)} differ between processes, because "
        "update_normalization gets the observations of one process. Combine its statistics by "
        "lightning_rl.extend.ranks, such as sum_over_ranks.",
    )


def warn_of_layers_without_effect(policy: Policy) -> None:
    """Warn of dropout, and of batch statistics that nothing has set: eval mode leaves them out."""
    layers = [name for name, layer in policy.named_modules() if _has_no_effect(layer)]
    if layers:
        rank_zero_warn(
            f"{quoted(layers)} of {type(policy).__name__} have no effect: a policy is in eval mode "
            "in the update, too, so that it computes what acted. Leave them out, or normalize with "
            "nn.LayerNorm."
        )


def _has_no_effect(layer: nn.Module) -> bool:
    """Return whether eval mode leaves a layer out."""
    if isinstance(layer, BATCH_NORM):
        count = layer.num_batches_tracked  # None: a layer that always reads the batch's statistics
        return count is not None and int(count) == 0
    return isinstance(layer, DROPOUT) and layer.p > 0


def warn_of_unreached(algorithm: Any, optimizers: Mapping[str, Optimizer]) -> None:
    """Warn of objectives without an update, and of own parameters without a gradient, in a run."""
    counts = {name: loss.statistics for name, loss in algorithm.objectives.items()}
    idle = [name for name, count in counts.items() if count.applied + count.skipped == 0]
    if 0 < len(idle) < len(counts):
        rank_zero_warn(
            f"This run has updated no parameter of the objective {quoted(idle)}. Call "
            f"self.updates[{idle[0]!r}](minibatch) in training_step; or train longer, if its first "
            "update comes later."
        )
    names = {id(p): name for name, p in algorithm.named_parameters()}
    # An optimizer has no state for a parameter that it has never moved.
    unreached = [
        names[id(parameter)]
        for name, optimizer in optimizers.items()
        if algorithm.objectives[name].statistics.applied > 0 and optimizer.state
        for parameter in algorithm.objectives[name].parameters
        if not names[id(parameter)].startswith("policy.")
        and not bool(optimizer.state.get(parameter, {"step": 0}).get("step", 1))
    ]
    if unreached:
        rank_zero_warn(
            f"No gradient has reached {quoted(unreached)} in this run, so they are unchanged. Look "
            "for detach(), item() or torch.no_grad() between them and the loss."
        )


def check_replay_is_used(algorithm: LightningModule, replay: object | None) -> None:
    """Refuse a replay buffer for an algorithm that does not use it."""
    name = type(algorithm).__name__
    require(
        replay is None or bool(algorithm.uses_replay),
        f"data.replay is set ({type(replay).__name__}), but {name} trains on fresh rollouts only: "
        "remove data.replay, or train with SAC or TD3. If an algorithm of your own reads "
        "self.replay, set uses_replay = True in its class.",
    )


def check_prepared_fields(algorithm: type, base: type) -> None:
    """Refuse an algorithm with `prepare` but without `prepared_fields`, for several processes."""
    # The class that overrides `prepare`, or a subclass of it, must override `prepared_fields`.
    order = algorithm.__mro__[: algorithm.__mro__.index(base) + 1]
    prepares, draws = (
        next(i for i, cls in enumerate(order) if name in vars(cls))
        for name in ("prepare", "prepared_fields")
    )
    require(
        draws <= prepares,
        f"{order[prepares].__name__} overrides `prepare`, which needs a whole minibatch, but with "
        "several processes each has only a part. Also override `prepared_fields`, which computes "
        "the fields of all minibatches of an update, or train with --trainer.devices 1.",
    )


EXACT, ROUGH = 1e-3, 1e-1
"""Largest allowed |difference| / (1 + |x|) of a log-prob from the stored x: float32, and lower.

Rounding causes a thousandth of it, or a tenth with a memory.
"""


def check_first_ratio(policy: Policy, rollout: TensorDict) -> bool:
    """Refuse a policy whose log-probs of its own actions differ from the stored ones.

    The first ratio of an update must be 1. All ranks take part; random streams do not change.
    Return whether the rollout [N, T+1] has steps of the current weights; others are not checked.
    """
    fresh = rollout["policy_version"][:, :-1] == policy.version
    if policy.is_recurrent:  # older weights may have computed the states
        fresh = fresh.cummin(1).values
    if not ranks.agree(bool(fresh.any())):
        return False
    fault = _ratio_fault(policy, rollout, fresh)
    if ranks.agree(fault is not None):
        raise ConfigurationError(next(filter(None, ranks.gather_over_ranks(fault))))
    return True


def _ratio_fault(policy: Policy, rollout: TensorDict, fresh: Tensor) -> str | None:
    name = type(policy).__name__
    stored: Tensor = rollout["sample_log_prob"][:, :-1]
    # Dropout or sampling in the check must not change the run's random streams.
    with torch.random.fork_rng(devices=[stored.device] if stored.is_cuda else []):
        log_prob = log_prob_of(policy, rollout)
    if log_prob.shape != stored.shape:
        return (
            f"{name}.evaluate_actions returned sample_log_prob of shape {list(log_prob.shape[2:])} "
            f"for each step, but forward returned {list(stored.shape[2:])}: both shapes must be "
            "equal, without a trailing dimension of one."
        )
    rough = computes_below_float32(policy, stored.device)
    distance = (log_prob.float() - stored).abs() / (1.0 + stored.abs())
    # NaN is left to the finite check of the optimizer steps.
    differs = distance.flatten(2).amax(2) if distance.dim() > 2 else distance
    differs = (differs > (ROUGH if rough else EXACT)) & differs.isfinite() & fresh
    if not differs.any():
        return None
    row, step = differs.nonzero()[0].tolist()
    share = f"{int(differs.sum())} of {int(fresh.sum())} steps"
    if not differs[:, 0].any():
        # A hint at a state in the module: at the first step both calls begin with an empty one.
        share += ", but not in the first step of any env"
    return (
        f"{name}.evaluate_actions and {name}.forward return different log-probs for the same "
        f"actions and weights, in {share}. The first is env {row}, step {step}: "
        f"{_numbers(stored[row, step])} by forward, {_numbers(log_prob[row, step])} by "
        "evaluate_actions. The usual causes: the module keeps a state between calls, such as a "
        "GRU's (store it in the rollout by extra_fields); evaluate_actions samples again; eval "
        "mode leaves dropout or noise on; batch norm; or the sample was clipped or squashed before "
        "it was stored."
    )


def computes_below_float32(policy: Policy, device: torch.device) -> bool:
    """Return whether a policy computes below float32 on a device, for example in TensorFloat32."""
    if policy.autocast_dtype is not None:
        return True
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in policy.parameters()):
        return True
    backends: Any = torch.backends  # its type lacks `fp32_precision`
    if device.type != "cuda":
        return backends.mkldnn.matmul.fp32_precision in ("tf32", "bf16")
    # cuDNN has its own switch for convolutions, which is on by default.
    convolves = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in policy.modules())
    return backends.cuda.matmul.fp32_precision == "tf32" or (
        convolves and backends.cudnn.conv.fp32_precision == "tf32"
    )


def _numbers(value: Tensor) -> str:
    numbers = [f"{number:.5g}" for number in value.flatten()[:3].tolist()]
    return ", ".join(numbers) + (", ..." if value.numel() > 3 else "")
