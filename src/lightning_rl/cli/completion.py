"""Write the script with which bash and zsh complete the words of `rl-cli`."""

from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.cli.first_check import CORE
from lightning_rl.cli.names_table import Table
from lightning_rl.system.extensions import SUBCOMMANDS

SCRIPT = """_rl_cli() {{
  local words=
  case "$3" in
{after}
    *) case "${{COMP_WORDS[1]}}" in
{options}
      esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$2"))
}}
complete -o default -F _rl_cli rl-cli"""

BEFORE = {"bash": "", "zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"}
"""What a shell needs before the script."""


def completion(shell: str, table: Table) -> str:
    """Return the script. Of a setting that takes a class it offers the settings of all classes."""
    candidates = {
        "rl-cli": [*CORE, *SUBCOMMANDS],
        "--config": list(shipped_configs()),
        "--ckpt_path": ["last", "best"],
    }
    settings: dict[str, None] = {}
    for path, name, names in table.places():
        settings |= dict.fromkeys(f"--{path}.{setting}" for setting in names)
        if path not in ("data", "trainer"):  # their class is fixed
            candidates.setdefault(f"--{path}", []).append(name)
    options = {
        subcommand: [
            *(f"--{option}" for option in names if option[0] != "<"),
            *(settings if "model" in names else ()),
        ]
        for subcommand, names in table.options.items()
    }
    lines = [
        "\n".join(
            f'{" " * width}{word}) words="{" ".join(words)}" ;;' for word, words in case.items()
        )
        for width, case in ((4, candidates), (8, options))
    ]
    return BEFORE[shell] + SCRIPT.format(after=lines[0], options=lines[1])
