"""Group relative policy optimization (GRPO), without a critic."""

from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.action_parts import ratio_terms
from lightning_rl.algorithms.checks import check_entropy
from lightning_rl.algorithms.on_policy import OnPolicyAlgorithm
from lightning_rl.algorithms.reference import ReferencePolicy
from lightning_rl.collectors import EpisodeSettings
from lightning_rl.functional import (
    approx_kl,
    clip_fraction,
    clipped_surrogate_loss,
    group_relative_advantage,
    kl_penalty,
)
from lightning_rl.functional.advantages import reversed_scan
from lightning_rl.kwargs import GRPOKwargs, Unpack
from lightning_rl.policies import ActorCritic, Policy
from lightning_rl.rollout.contract import add_transition_field, discount_of, env_steps
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, check_range, require


class GRPO(OnPolicyAlgorithm):
    """GRPO: the envs of a group start in equal states, and their mean return is the baseline.

    Source: Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open
    Language Models", equation 3. Differs from the paper: returns may be compared step by step, and
    the KL term has the gradient of the KL (see `kl_penalty`). See `group_relative_advantage` for
    the variants Dr. GRPO and RLOO. An episode trains only on the steps after its last intervention;
    its return counts in the baseline.

    Args:
        policy: an actor without a critic.
        group_size: G consecutive envs start every episode in the same state; divides
            `data.num_envs`.
        mode: `step` compares returns-to-go at each step, for dense rewards; `trajectory` compares
            whole returns, for a sparse success.
        reset_every_rollout: start new episodes with every rollout, with equal states in a group.
        truncate_at_first_done: train on the first episode of each env only, and end the rollout as
            soon as each env has finished one.
        normalize_advantage: divide by the standard deviation of the group; false is Dr. GRPO.
        leave_one_out: compare with the mean of the other members.
        eps: lower bound on the standard deviation of a group, in units of the reward.
        filter_groups: leave out groups whose members all succeed or all fail, by `info["success"]`.
            Groups with an unfinished episode stay in.
        aggregation: average the loss over steps (`token`), or over the steps of each episode first
            (`trajectory`), so that long episodes do not dominate.
        clip_coef: largest decrease of the ratio below 1.
        clip_high: largest increase of the ratio above 1. Default: `clip_coef`.
        kl_coef: weight of KL(policy || initial policy).
        ent_coef: weight of the entropy bonus.
        kwargs: see `OnPolicyAlgorithm`.

    Raises:
        ConfigurationError: for settings that exclude each other.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        group_size: int = 8,
        mode: Literal["step", "trajectory"] = "step",
        reset_every_rollout: bool = True,
        truncate_at_first_done: bool = True,
        normalize_advantage: bool = True,
        leave_one_out: bool = False,
        eps: float = 1e-3,
        filter_groups: bool = False,
        aggregation: Literal["token", "trajectory"] = "token",
        clip_coef: float = 0.2,
        clip_high: float | None = None,
        kl_coef: float = 0.0,
        ent_coef: float = 0.0,
        **kwargs: Unpack[GRPOKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        require(
            not isinstance(policy, ActorCritic) or policy.critic_is_optional,
            f"GRPO does not train a critic: the critic of {type(policy).__name__} would stay "
            "untrained. Use ActorOnly, without the critic's settings, or PPO.",
        )
        check_range("group_size", group_size, minimum=2)
        check_range("eps", eps, above=0)
        check_range("clip_coef", clip_coef, above=0, below=1)
        check_range("clip_high", clip_high, above=0)
        check_range("kl_coef", kl_coef, minimum=0)
        check_entropy(policy, ent_coef)
        require(
            self.correction.method != "vtrace",
            "off_policy_correction: vtrace needs a critic, and GRPO has none: use decoupled, "
            "loglinear or bypass.",
        )
        for name, value in {
            "mode: trajectory": mode == "trajectory",
            "aggregation: trajectory": aggregation == "trajectory",
            "filter_groups: true": filter_groups,
        }.items():
            require(
                truncate_at_first_done or not value,
                f"{name} needs whole episodes, one per env: set truncate_at_first_done: true.",
            )
        self.group_size = group_size
        self.mode = mode
        self.truncate_at_first_done = truncate_at_first_done
        self.normalize_advantage = normalize_advantage
        self.leave_one_out = leave_one_out
        self.eps = eps
        self.filter_groups = filter_groups
        self.aggregation = aggregation
        self.clip_coef = clip_coef
        self.clip_high = clip_coef if clip_high is None else clip_high
        self.kl_coef = kl_coef
        self.ent_coef = ent_coef
        episodes = EpisodeSettings(group_size, reset_every_rollout, truncate_at_first_done)
        self.episode_settings = episodes
        self.reference = ReferencePolicy(policy) if kl_coef > 0 else None

    def setup(self, stage: str) -> None:
        super().setup(stage)
        num_envs = self.data.num_envs
        require(
            stage != "fit" or num_envs % self.group_size == 0,
            f"data.num_envs={num_envs} is no multiple of model.group_size={self.group_size}: use "
            f"a multiple, such as {self.group_size * max(1, round(num_envs / self.group_size))}.",
        )

    def configure_model(self) -> None:
        super().configure_model()
        if self.reference is not None and self.policy.sharding is not None:
            # Shards exist only now; the copy made in the constructor has whole parameters.
            self.reference.copy()

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        with self.phase("advantage"):
            mask = self.add_advantages(rollout)
        if self.reference is not None:
            with self.phase("reference"):
                log_prob = self.reference.log_prob(rollout)
                add_transition_field(rollout, "reference_log_prob", log_prob)
        self.correct_staleness(rollout)
        for minibatch in self.minibatches(rollout, self.fields, mask):
            self.update(minibatch)
        self.finish_iteration(rollout)

    def after_warm_start(self) -> None:
        if self.reference is not None:
            self.reference.copy_again()

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a rollout that the loss reads, besides the policy's extra fields."""
        names = ("observation", "action", "sample_log_prob", "advantage", "weight")
        reference = () if self.reference is None else ("reference_log_prob",)
        return (*names, *reference, *self.correction_fields)

    def add_advantages(self, rollout: TensorDict) -> Tensor:
        """Write `advantage` and `weight` [N, T+1]; return a mask [N, T] of counted steps."""
        reward, done = self.rewards(rollout), rollout["done"][:, :-1]
        advantage, mask = group_relative_advantage(
            reward,
            done,
            group_size=self.group_size,
            gamma=discount_of(rollout, self.gamma),
            mode=self.mode,
            std_floor=self.eps,
            normalize=self.normalize_advantage,
            leave_one_out=self.leave_one_out,
            truncate_at_first_done=self.truncate_at_first_done,
        )
        if "intervened" in rollout.keys():
            helped = self._helped(rollout["intervened"][:, :-1], done)
            mask = mask & ~(helped[:, :1] if self.mode == "trajectory" else helped)
        self.statistics.set("finished_episodes", done.any(1).float().mean())
        if self.filter_groups:
            mask = mask & self._undecided(rollout)[:, None]
        self.statistics.set("effective_samples", mask.float().mean())
        add_transition_field(rollout, "advantage", advantage)
        add_transition_field(rollout, "weight", self._weight(mask, env_steps(rollout)))
        return mask

    def _helped(self, intervened: Tensor, done: Tensor) -> Tensor:
        # True up to the last intervention of each episode: a backward scan that stops at ends.
        return reversed_scan(intervened.float(), (~done).float()) > 0

    def _undecided(self, rollout: TensorDict) -> Tensor:
        """Return a mask [N] of envs in groups whose members neither all succeed nor all fail."""
        done: Tensor = rollout["done"][:, :-1]
        if not self.data.reports_success and ranks.agree(bool(done.any())):
            raise ConfigurationError(
                "filter_groups: true needs an env that reports info['success'], but no episode "
                "has reported it. Set filter_groups: false; groups of equal returns have "
                "advantage 0 anyway."
            )
        # `argmax` gives the first end; an unfinished row gets 0, which `has_ended` corrects.
        first = done.long().argmax(1, keepdim=True)
        has_ended = done.any(1)
        succeeded = has_ended & rollout["success"].gather(1, first).squeeze(1)
        has_ended, succeeded = (rows.view(-1, self.group_size) for rows in (has_ended, succeeded))
        undecided = ~(succeeded.all(1) | (has_ended & ~succeeded).all(1))
        self.statistics.set("undecided_groups", undecided.float().mean())
        # Back from one number per group to one per env.
        return undecided.repeat_interleave(self.group_size)

    def _weight(self, mask: Tensor, env_steps: Tensor | None) -> Tensor:
        if self.aggregation == "token":
            return torch.ones_like(mask, dtype=torch.float32)
        # With log-probs of parts the mean is over parts: count a row's length in env steps.
        per_part = "sample_log_prob" in self.policy.extra_fields and not self.policy.joint_ratio
        counted = mask if env_steps is None or not per_part else mask * env_steps
        length: Tensor = counted.sum(1, keepdim=True).clamp(min=1)
        steps, rows = ranks.sum_over_ranks(torch.stack([counted.sum(), mask.any(1).sum()]))
        mean_length: Tensor = steps / rows.clamp(min=1)
        weight: Tensor = mask * (mean_length / length)
        return weight

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        policy = self.policy.evaluate_actions(minibatch)
        log_prob, old = policy["sample_log_prob"], minibatch["sample_log_prob"]
        if self.may_be_stale:
            old = self.correction.proximal(log_prob, minibatch)
        joint = self.correction.joint_ratio
        terms = ratio_terms(policy, minibatch, old, minibatch["weight"], joint)

        clip = {"clip_low": self.clip_coef, "clip_high": self.clip_high}
        if self.may_be_stale and self.correction.weighs_samples:
            policy_loss = self.correction.policy_loss(terms, **clip)
        else:
            policy_loss = clipped_surrogate_loss(terms.new, terms.old, terms.advantage, **clip)

        entropy = (terms.entropy_weight * policy["entropy"]).mean()
        loss = policy_loss - self.ent_coef * entropy
        scalars = {
            "policy_loss": policy_loss,
            **({"entropy": entropy} if self.policy.has_entropy else {}),
            # `target_kl` and the adaptive learning rate read it.
            "approx_kl": approx_kl(terms.whole_new, terms.whole_old),
            "clip_fraction": clip_fraction(
                terms.new.detach(), terms.old, **clip, mask=terms.counted
            ),
        }
        if self.reference is not None:
            if self.may_be_stale:
                kl = self.correction.kl_penalty(log_prob, minibatch)
            else:
                kl = kl_penalty(
                    log_prob, minibatch["sample_log_prob"], minibatch["reference_log_prob"]
                )
            scalars["reference_kl"] = (terms.entropy_weight * kl).mean()
            loss = loss + self.kl_coef * scalars["reference_kl"]
        return loss, scalars
