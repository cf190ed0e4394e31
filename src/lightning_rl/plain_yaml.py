"""Write and read YAML of plain values, by libyaml where PyYAML was built with it.

That takes a third of the time that Python takes, for what a run writes down as it starts and in
each checkpoint. Files that somebody typed are read by `yaml.safe_load`: its messages show the line.
"""

import re
from enum import Enum
from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class QuotedText(str):
    """A text that stood in quotes, and would be a number, a boolean or null without them.

    The parser leaves it alone, where it reads a plain `str` again as YAML.
    """


# A class of its own, as PyYAML's is the whole process's. It puts a text in quotes that some reader
# of YAML takes for a number, as `1e3`.
_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})
_Dumper.add_representer(QuotedText, lambda dumper, text: dumper.represent_str(str(text)))
_Dumper.add_multi_representer(Enum, lambda dumper, one: dumper.represent_data(one.value))
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), None
)


def dump_yaml(content: object) -> str:
    """Return what `yaml.safe_dump` would, keys in their order."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False)
    return text


def load_yaml(text: str) -> Any:
    """Return what `yaml.safe_load` would.

    Raises:
        YAMLError: where it is none, or holds what is no plain value.
    """
    return yaml.load(text, Loader=_Loader)
