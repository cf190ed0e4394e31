"""Run `rl-cli transfer`: say which difference of an env makes a policy fall."""

import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from lightning_rl import Policy
from lightning_rl.extend.checkpoints import load_trained
from lightning_rl.extend.cli import NEEDED, CommandLine, Option, parse_classes
from lightning_rl.extend.envs import EnvFactory, make_env
from lightning_rl.extend.errors import require
from lightning_rl.extend.files import expanded, tell, write_atomically
from lightning_rl.extensions.transfer.candidates import Setup, cure
from lightning_rl.extensions.transfer.onnx_policy import OnnxPolicy
from lightning_rl.extensions.transfer.ranges import terms_outside
from lightning_rl.extensions.transfer.trial import Finding, Trial

OPTIONS = {
    "ckpt_path": Option(
        str, NEEDED, "an ONNX file, a checkpoint, a run directory, or last or best"
    ),
    "layout": Option(str, None, "layout of an ONNX file"),
    "key": Option(str, None, "key of a Dict observation that an ONNX file reads"),
    "data.env": Option(EnvFactory, None, "the env. Default: the env of the run"),
    "recording": Option(str, None, "dataset of the policy in its own env, to compare ranges"),
    "plot": Option(str, "transfer.svg", "file of the plot"),
    **Option.of_checkpoint("ckpt_path"),
}
DESCRIPTION = "Change one difference at a time between the env and what a policy expects."

HEADER = " reward   upright     error     targets     change"
HELPS = 0.1
"""Relative difference of rewards by which a change helps."""

WIDTH, BAR = 900, 24
"""Pixels: width of the plot, height of a bar."""


def transfer(options: Sequence[str], command_line: CommandLine) -> None:
    """Print and plot the effect of each change."""
    if options and not options[0].startswith("-"):
        options = ["--ckpt_path", *options]
    trusted = CommandLine.is_trusted(options)
    with nullcontext() if trusted else CommandLine.only_allowed_imports(options):
        settings = parse_classes("transfer", DESCRIPTION, OPTIONS, options)
        policy, make = _policy_and_env(settings)
        trial = Trial(policy, make)
        if settings.recording is not None:
            outside = terms_outside(trial, settings.recording)
            tell("\n".join(map(str, outside)) or "No term leaves the range of the recording.")
        findings = trial.explain()
    tell(table(findings, trial.base))
    picture = plot(findings, trial.base).encode()
    write_atomically(expanded(settings.plot), lambda file: file.write(picture))
    tell(f"Plot: {settings.plot}")


def _policy_and_env(settings: Any) -> tuple[Policy, Callable[[int], Any]]:
    factory = settings.data.env
    if settings.ckpt_path.endswith(".onnx"):
        require(
            settings.layout is not None and factory is not None,
            f"transfer needs the --layout and the --data.env of {settings.ckpt_path}.",
        )
        env = make_env(factory, 1, "data.env")
        spaces = env.single_observation_space, env.single_action_space
        env.close()
        policy: Policy = OnnxPolicy(
            *spaces, path=settings.ckpt_path, layout=settings.layout, key=settings.key
        )
    else:
        trained = load_trained(
            settings.ckpt_path, trust_code=settings.trust_code, output_dir=settings.output_dir
        )
        policy = trained.policy
        factory = factory or trained.run.env_factory(EnvFactory)
    return policy, lambda num_envs: make_env(factory, num_envs, "data.env")


def table(findings: Sequence[Finding], base: Setup) -> str:
    """Return a line for each change: reward, seconds, velocity error, speed of targets."""
    lines = [
        f"{finding.reward:7.2f} {finding.seconds:7.2f} s {finding.velocity_error:5.2f} m/s "
        f"{finding.target_speed:5.1f} rad/s   {finding.kind}   "
        f"{textwrap.shorten(cure(base, finding.setup), 60)}"
        for finding in findings
    ]
    unchanged = next(finding for finding in findings if finding.setup is base)
    # Means over few episodes: a healthy policy has changes that are as good by chance.
    threshold = unchanged.score(unchanged) * (1.0 + HELPS)
    helps = unchanged.score(findings[0]) > threshold
    end = f"Cure: {cure(base, findings[0].setup)}" if helps else "No change helps."
    return "\n".join([HEADER, *lines, end])


def plot(findings: Sequence[Finding], base: Setup) -> str:
    """Return an SVG picture of the rewards, the unchanged setup in grey."""
    largest = max(finding.reward for finding in findings) or 1.0
    bars = [
        f'<rect y="{BAR * i}" width="{max(0.0, 400 * finding.reward / largest):.0f}" '
        f'height="{BAR - 4}" fill="{"#999" if finding.setup is base else "#4a90d9"}"/>'
        f'<text x="410" y="{BAR * i + 15}">{finding.kind}</text>'
        for i, finding in enumerate(findings)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{BAR * len(bars)}" '
        f'font-family="sans-serif" font-size="13">{"".join(bars)}</svg>'
    )
