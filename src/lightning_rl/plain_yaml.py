"""Write and read YAML of plain values, by libyaml where PyYAML was built with it.

That takes a third of the time that Python takes, for what a run writes down as it starts and in
each checkpoint. Files that somebody typed are read by `yaml.safe_load`: its messages show the line.
"""

from typing import Any

import yaml

_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
