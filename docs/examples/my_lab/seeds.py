"""A subcommand: train one config with several seeds, one after the other."""

from collections.abc import Sequence

from lightning_rl.extend.cli import NEEDED, CommandLine, Option, parse_options
from lightning_rl.extend.files import tell

OPTIONS = {
    "config": Option(str, NEEDED, "config of the runs"),
    "output_dir": Option(str, "outputs", "folder of the runs"),
    "seeds": Option(int, [1, 2], "seeds of the runs", several=True),
}


def train(options: Sequence[str], command_line: CommandLine) -> None:
    """Run `rl-cli my_lab.seeds.train --config FILE --seeds 1 2 3`."""
    settings = parse_options("my_lab.seeds.train", "Train with seeds.", OPTIONS, options)
    for seed in settings.seeds:
        tell(f"Seed {seed}")
        fit = ["fit", "--config", settings.config, "--output_dir", settings.output_dir]
        command_line.run([*fit, "--seed_everything", str(seed), "--exp_name", f"seed_{seed}"])
