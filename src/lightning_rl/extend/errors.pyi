"""Errors, and checks that raise them."""

from lightning_rl.system.construction import Configurable as Configurable
from lightning_rl.system.construction import do_weights_follow as do_weights_follow
from lightning_rl.system.errors import EnvFaultError as EnvFaultError
from lightning_rl.system.errors import check_range as check_range
from lightning_rl.system.errors import closest as closest
from lightning_rl.system.errors import import_extra as import_extra
from lightning_rl.system.errors import reason_of as reason_of
from lightning_rl.system.errors import require as require
from lightning_rl.system.texts import asks_a_hub as asks_a_hub
from lightning_rl.system.texts import imported as imported
from lightning_rl.system.texts import is_import_path as is_import_path
from lightning_rl.system.texts import is_plain_name as is_plain_name

__all__: list[str]
