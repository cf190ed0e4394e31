"""Answer `rl-cli` with no subcommand at once, and load the rest only when it is needed."""

import sys
from importlib.metadata import version

USAGE = """usage: rl-cli {fit,validate,test} [options]

  fit       train:               rl-cli fit --config ppo.yaml
            change any setting:  rl-cli fit --config ppo.yaml --model.clip_coef 0.1
            resume:              rl-cli fit --ckpt_path last
  validate  evaluate:            rl-cli validate --ckpt_path last
  test      evaluate on seeds that no evaluation has used

  --config FILE       YAML file, or the bare name of a shipped one
  --ckpt_path PATH    a checkpoint, a run directory, or `last` or `best` of the newest run
  --exp_name NAME     first part of the run directory's name
  --output_dir DIR    where run directories are made (default: outputs)
  --trust_code true   run code of others that the configuration in a checkpoint names
  --print_config      print the whole configuration, and exit

  rl-cli SUBCOMMAND --help lists every option, rl-cli --version the version."""

SUBCOMMANDS = ("fit", "validate", "test")


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if arguments[0] == "--version":
        print(f"lightning-rl {version('lightning-rl')}")
        return
    if arguments[0] not in SUBCOMMANDS:
        sys.stderr.write(
            f"rl-cli: unknown subcommand '{arguments[0]}'; choose from {', '.join(SUBCOMMANDS)}.\n"
        )
        sys.exit(2)
    from lightning_rl.cli import run

    run(arguments)


if __name__ == "__main__":
    main()
