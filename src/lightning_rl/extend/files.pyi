"""Files, folders of runs, and printed lines."""

from lightning_rl.system.files import TEMPORARY as TEMPORARY
from lightning_rl.system.files import expanded as expanded
from lightning_rl.system.files import lock_file as lock_file
from lightning_rl.system.files import move as move
from lightning_rl.system.files import open_file as open_file
from lightning_rl.system.files import read_json as read_json
from lightning_rl.system.files import read_text as read_text
from lightning_rl.system.files import shown as shown
from lightning_rl.system.files import write_atomically as write_atomically
from lightning_rl.system.files import writing as writing
from lightning_rl.system.output import tell as tell
from lightning_rl.system.output import tell_from_handler as tell_from_handler
from lightning_rl.system.plain_yaml import dump_yaml as dump_yaml
from lightning_rl.system.plain_yaml import read_yaml as read_yaml
from lightning_rl.system.runs import new_run_dir as new_run_dir
from lightning_rl.system.tensors import load_tensors as load_tensors

__all__: list[str]
