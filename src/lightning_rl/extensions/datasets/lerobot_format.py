"""Describe the files, columns and statistics of a LeRobotDataset v3.0.

```
meta/info.json  meta/stats.json  meta/tasks.parquet  meta/lightning_rl.json
meta/episodes/chunk-000/file-000.parquet
data/chunk-000/file-000.parquet
videos/{key}/chunk-000/file-000.mp4
```

This package adds `meta/lightning_rl.json`, which LeRobot ignores: the place of each column in the
env's observation, its shape (LeRobot has no scalars), and finite bounds of actions. It adds two
columns to the table of episodes: `success`, null if unknown, and `final/<key>`, the true final
observation. A video holds the final observation as the frame after the episode's last frame, and
the column holds its time.

Source: the format of lerobot 0.4.4 (huggingface/lerobot, `src/lerobot/datasets`), version v3.0.
"""

import json
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import gymnasium
import numpy as np

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import import_extra as import_package
from lightning_rl.extend.errors import require
from lightning_rl.extend.files import read_json as read_object
from lightning_rl.extend.files import write_atomically
from lightning_rl.extend.rollout import leaves_by_path
from lightning_rl.extend.spaces import StructuredActions, names_in, names_of

VERSION = "v3.0"

MOST_VALUES = 2**28
"""Maximum number of values in one row of a column."""

CHUNK_FILES = 1000
"""Maximum number of files in a folder `chunk-000`."""

INFO = "meta/info.json"
STATISTICS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
OURS = "meta/lightning_rl.json"
EPISODES = "meta/episodes"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEOS = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

_FIELD = re.compile(r"\{(chunk_index|file_index|video_key)(?::0?([1-9])?d)?\}")
"""Field of a path, with an optional one-digit width."""

EXTRA = "complementary_info."
"""Prefix of the columns that an env or a person adds to a step."""

INTERVENED: str = f"{EXTRA}is_intervention"

LABELS = ("reward", "return", "value", "advantage", "advantage_positive")
"""Extras that `label_dataset` writes."""

STEP_COLUMNS = {
    "next.reward": "float32",
    "next.done": "bool",
    "next.terminated": "bool",
    "next.truncated": "bool",
    "next.success": "bool",
    INTERVENED: "bool",
}
"""Scalar columns of each dataset of this package, in addition to observations and actions."""

INDEX_COLUMNS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Columns that identify a frame; `timestamp` in seconds from the episode's begin."""

TEXTS = ("string", "language", "str", "object")
"""Dtypes of text columns in `info.json`, which the reader skips."""

QUANTILES: dict[str, float] = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}

GYM_NAMES = {"agent_pos": "state", "pixels": "image"}
"""LeRobot's names for parts of the observations of its simulated envs."""


CHANNELS = (1, 3, 4)
"""Allowed numbers of channels of a picture: grey, RGB, RGBA."""

SMALLEST_PICTURE = 32
"""Least height and width of a picture: MiniGrid's grids of symbols have up to 25 by 25 cells."""


@dataclass(frozen=True)
class Leaf:
    """One array of an observation, or the action, and its column.

    Attributes:
        path: keys of the array in the observation; empty if the observation is no dict.
        key: key of the column.
        shape: shape of one element; () for a scalar.
        dtype: NumPy's name.
        picture: whether the dataset stores it as a picture of uint8, from [H, W, C] or [C, H, W].
        names: of the numbers of its last axis, such as joints; () if they have none.
    """

    path: tuple[str, ...]
    key: str
    shape: tuple[int, ...]
    dtype: str
    picture: bool
    names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def channels_first(self) -> bool:
        """Whether a picture is [C, H, W]; the dataset stores [H, W, C]."""
        return self.picture and len(self.shape) == 3 and _channels_first(self.shape)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        if self.channels_first:
            return (*self.shape[1:], self.shape[0])
        return self.shape or (1,)


def leaves_of(space: gymnasium.Space[Any], name: str = "observation") -> list[Leaf]:
    """Return the columns of the elements of a space, with LeRobot's names; a Dict has several.

    Names: `observation.state`, `observation.environment_state`, `observation.image`,
    `observation.images.<camera>`, and `observation.<key>` for others.
    """
    leaves = [_leaf_of(part, path) for path, part in leaves_by_path(space).items()]
    pictures = sum(leaf.picture for leaf in leaves)
    columns = [_named(leaf, name, pictures) for leaf in leaves]
    keys = [leaf.key for leaf in columns]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise ConfigurationError(
            f"Two parts of the {name} space would be the column '{min(twice)}' of a dataset: "
            "rename one of them (gymnasium.wrappers.TransformObservation)."
        )
    return columns


def _leaf_of(space: gymnasium.Space[Any], path: tuple[str, ...]) -> Leaf:
    spaces = gymnasium.spaces
    kinds = (spaces.Box, spaces.MultiBinary, spaces.Discrete, spaces.MultiDiscrete)
    if not isinstance(space, kinds):
        raise ConfigurationError(
            f"Space {space} cannot be written into a dataset: use Box, Discrete, MultiDiscrete or "
            "MultiBinary, or a Dict of them (gymnasium.wrappers.FlattenObservation turns most "
            "others into a Box)."
        )
    shape, dtype = tuple(space.shape or ()), np.dtype(space.dtype)
    return Leaf(path, "", shape, dtype.name, _is_picture(space), names_of(space))


def _is_picture(space: gymnasium.Space[Any]) -> bool:
    # A video would change symbols into others: small arrays, other bounds, and one or four channels
    # may hold symbols, and stay numbers.
    return (
        isinstance(space, gymnasium.spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) == 3
        and 3 in (space.shape[0], space.shape[-1])
        and sorted(space.shape)[1] >= SMALLEST_PICTURE
        and bool((space.low == 0).all() and (space.high == 255).all())
    )


def _named(leaf: Leaf, name: str, pictures: int) -> Leaf:
    words = [GYM_NAMES.get(word, word) for word in leaf.path]
    if leaf.picture:
        words = [word for word in words if word not in ("image", "images")]
        words = ["images", *words] if words else ["image"]
    # An action stays `action`; only an observation without a key becomes `observation.state`.
    elif not words and name == "observation":
        words = ["state"]
    # A key names a folder of videos (videos/<key>/chunk-000), so it must hold no slash.
    key = ".".join([name, *words]).replace("/", "_")
    return replace(leaf, key=key)


def action_leaf(space: gymnasium.Space[Any]) -> Leaf:
    """Return the column of an action."""
    leaf, *other_leaves = leaves_of(space, "action")
    if other_leaves or leaf.path:
        raise ConfigurationError(
            f"Action space {space} cannot be written into a dataset, which stores an action as one "
            "array: use Box, Discrete, MultiDiscrete or MultiBinary."
        )
    return replace(leaf, key="action", picture=False)


def file_form(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return the space of an action in the files of others: a flat MultiBinary is a MultiBinary."""
    structure = space.structure if isinstance(space, StructuredActions) else None
    return structure if isinstance(structure, gymnasium.spaces.MultiBinary) else space


def guessed_leaves(features: Mapping[str, Any]) -> list[Leaf]:
    """Return the observation's columns, except text, of a dataset without our description."""
    features = {key: feature for key, feature in features.items() if feature["dtype"] not in TEXTS}
    columns = {key: feature for key, feature in features.items() if key.startswith("observation.")}
    # Some datasets, such as of plain Gymnasium envs, have one column without a dot.
    if not columns and "observation" in features:
        columns = {"observation": features["observation"]}
    return [
        leaf_of(key, feature, tuple(key.split(".")[1:]) if len(columns) > 1 else ())
        for key, feature in columns.items()
    ]


def leaf_of(key: str, feature: Mapping[str, Any], path: tuple[str, ...]) -> Leaf:
    """Return the leaf that a column of `info.json` describes."""
    picture = feature["dtype"] in ("image", "video")
    shape = tuple(feature["shape"]) or (1,)
    if picture and _channels_first(shape):  # LeRobot may describe [C, H, W], but stores [H, W, C]
        shape = (*shape[1:], shape[0])
    names = () if picture else names_in(feature.get("names"), shape[-1])
    return Leaf(path, key, shape, "uint8" if picture else feature["dtype"], picture, names)


def description_of(leaf: Leaf) -> dict[str, Any]:
    """Return a leaf's entry in `meta/lightning_rl.json`; `info.json` has its names."""
    return {name: value for name, value in asdict(leaf).items() if name != "names"}


def _channels_first(shape: tuple[int, ...]) -> bool:
    return shape[0] in CHANNELS and shape[-1] not in CHANNELS


def leaf_from(described: Mapping[str, Any], features: Mapping[str, Any]) -> Leaf:
    """Return the leaf that `meta/lightning_rl.json` describes; raise if `features` differ."""
    # JSON has lists where a `Leaf` has tuples.
    tuples = {name: tuple(described[name]) for name in ("path", "shape")}
    leaf = Leaf(**{**described, **tuples})
    column = leaf_of(leaf.key, features[leaf.key], ())
    leaf = replace(leaf, names=column.names)
    # A dataset edited by hand may have changed info.json alone.
    fits = leaf.kept_shape == column.shape and leaf.picture == column.picture
    if not fits or not all(isinstance(key, str) for key in leaf.path) or not _is_dtype(leaf.dtype):
        raise ValueError(f"{leaf} is not the column {column}")
    return leaf


def feature_of(leaf: Leaf, video: bool, fps: float) -> dict[str, Any]:
    """Return a column's entry in `info.json`; `video`: store pictures as videos."""
    shape = list(leaf.kept_shape)
    if not leaf.picture:
        return {"dtype": leaf.dtype, "shape": shape, "names": list(leaf.names) or None}
    names = ["height", "width", "channels"]
    if not video:
        return {"dtype": "image", "shape": shape, "names": names}
    info = {
        "video.height": shape[0],
        "video.width": shape[1],
        "video.codec": "av1",
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }
    return {"dtype": "video", "shape": shape, "names": names, "info": info}


def number_feature(dtype: str) -> dict[str, Any]:
    """Describe a column of single numbers for `info.json`."""
    return {"dtype": dtype, "shape": [1], "names": None}


def filled(template: str, place: Mapping[str, int | str]) -> str:
    """Fill a `data_path` or `video_path` template with `place`; return the path in the dataset."""
    # Not `str.format`: it would read attributes of the arguments, as in {chunk_index.__class__}.
    if set("{}") & set(_FIELD.sub("", template)):
        raise ValueError("a field is {chunk_index:03d}, {file_index:03d} or {video_key}")

    def value(field: re.Match[str]) -> str:
        name, width = field.groups()
        if name not in place:
            raise ValueError(f"it has no {name}")
        return str(place[name]).zfill(int(width or 0))

    name = _FIELD.sub(value, template)
    path = PurePosixPath(name)
    # A backslash or a drive's colon would leave the folder on Windows.
    if not path.parts or path.is_absolute() or ".." in path.parts or set(name) & set(":\\\0"):
        raise ValueError(f"{name!r} is not a path within the dataset")
    return name


def place_of(number: int) -> dict[str, int]:
    """Return chunk and file index of a file number."""
    return {"chunk_index": number // CHUNK_FILES, "file_index": number % CHUNK_FILES}


def number_of(path: Path) -> int:
    """Return the number of a file, from its name and its folder's name."""
    return int(path.parent.name.split("-")[1]) * CHUNK_FILES + int(path.stem.split("-")[1])


def file_name(number: int, suffix: str) -> str:
    """Return the path of a numbered file within its folder."""
    place = place_of(number)
    return f"chunk-{place['chunk_index']:03d}/file-{place['file_index']:03d}{suffix}"


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder, in the order of their numbers."""
    paths = list(folder.glob("chunk-*/file-*.*"))
    for file in paths:
        # After "chunk-" and "file-".
        require(
            file.parent.name[6:].isdecimal() and file.stem[5:].isdecimal(),
            f"{file} has no number where a LeRobotDataset has one, as in chunk-000/file-000: "
            "rename or remove it.",
        )
    return sorted(paths, key=number_of)


def read_info(path: Path) -> dict[str, Any]:
    """Read `info.json` and check the entries that the reader needs."""
    info = read_json(path)
    version = str(info.get("codebase_version"))
    require(
        version.startswith("v3."),
        f"The dataset at {path.parents[1]} has the format {version}, but the reader needs "
        f"{VERSION}: convert it with lerobot (lerobot.datasets.v30.convert_dataset_v21_to_v30).",
    )
    kinds: dict[str, Any] = {"fps": int | float, "features": dict, "data_path": str}
    features = info.get("features")
    features = features if isinstance(features, dict) else {}
    if any(isinstance(spec, dict) and spec.get("dtype") == "video" for spec in features.values()):
        kinds["video_path"] = str
    invalid = [name for name, kind in kinds.items() if not isinstance(info.get(name), kind)]
    invalid += [] if isinstance(info.get("total_episodes"), int | None) else ["total_episodes"]
    invalid += [] if "fps" in invalid or 0 < info["fps"] <= 1e6 else ["fps"]
    strange = {key for key, feature in features.items() if not _is_feature(feature)}
    # LeRobot adds columns that no reader here needs, such as audio: ignore strange ones among them.
    unread = {key for key in strange if _is_unread(key, features[key])}
    invalid += [f"features.{key}" for key in features if key in strange - unread]
    require(
        not invalid,
        f"{path} has no valid {', '.join(invalid)}: restore it, or give another dataset.",
    )
    return info | {"features": {key: features[key] for key in features if key not in unread}}


def _is_feature(feature: Any) -> bool:
    return (
        isinstance(feature, dict)
        and (feature.get("dtype") in ("image", "video", *TEXTS) or _is_dtype(feature.get("dtype")))
        and isinstance(feature.get("shape"), list | tuple)
        and all(isinstance(size, int) and size > 0 for size in feature["shape"])
        and len(feature["shape"]) <= 32
        and prod(feature["shape"]) <= MOST_VALUES
        and (len(feature["shape"]) in (2, 3) or feature["dtype"] not in ("image", "video"))
    )


def _is_unread(key: str, feature: Any) -> bool:
    """Return whether no reader misses a column that is neither numbers, pictures nor text."""
    described = feature if isinstance(feature, dict) else {}
    is_read = key.partition(".")[0] in ("observation", "next", "complementary_info")
    if key == "action" or key in INDEX_COLUMNS or (is_read and not described):
        return False
    return not is_read or described.get("dtype") == "audio" or described.get("shape") == [0]


def read_ours(path: Path, features: Mapping[str, Any]) -> dict[str, Any]:
    """Read `meta/lightning_rl.json`, with leaves for the observation and the action."""
    content = read_json(path)
    try:
        leaves = [leaf_from(leaf, features) for leaf in content.get("observation", ())]
        action = {"action": leaf_from(content["action"], features)} if "action" in content else {}
        start = np.asarray(content.get("action_start") or 0)
        shape = content["action"]["shape"] if start.ndim else []
        if start.dtype.kind not in "iu" or list(start.shape) != shape:
            raise ValueError("action_start is not a number for each part of an action")
        bounds = {}
        if "action_bounds" in content:
            bounds["action_bounds"] = np.asarray(content["action_bounds"])
            check_bounds(bounds["action_bounds"], content["action"]["shape"])
        extras = dict(content.get("extras", {}))
        if not all(isinstance(text, str) and text for text in [*extras, *extras.values()]):
            raise ValueError("extras does not map columns to names")
        if len(set(extras.values())) < len(extras):
            raise ValueError("two extras have the same name")
        # Written only if a rule decided how a copied episode ended.
        rules = content.get("end_rules", [])
        if not (isinstance(rules, list) and all(isinstance(rule, str) for rule in rules)):
            raise ValueError("end_rules are texts")
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{path} does not describe the columns of info.json ({error!r}): remove it, or restore "
            "it."
        ) from error
    return {**content, "observation": leaves, **action, **bounds, "extras": extras}


def kind_of(dtype: str) -> str:
    """Return the kind of a dtype; signed and unsigned integers are one kind, and so is text."""
    return "text" if dtype in TEXTS else np.dtype(dtype).kind.replace("u", "i")


def as_dtype(values: np.ndarray, dtype: str, column: str) -> np.ndarray:
    """Return a copy of values in the dtype of an env's space; refuse integers that would change."""
    cast = values.astype(dtype)
    require(
        cast.dtype.kind not in "iu" or np.array_equal(cast, values),
        f"{column} holds numbers that {dtype} cannot hold, such as {values[cast != values][:1]}. "
        "Record it with this env, or correct the column.",
    )
    return cast


def check_bounds(bounds: np.ndarray, shape: Sequence[int]) -> None:
    """Raise a ValueError if bounds of actions are not [2, *shape] with finite low < high."""
    fits = bounds.dtype.kind in "iuf" and bounds.size == 2 * prod(shape) and len(bounds) == 2
    if not (fits and np.isfinite(bounds).all() and (bounds[0] < bounds[1]).all()):
        raise ValueError("the bounds of actions are not finite low < high for each number")


def check_paths(leaves: Sequence[Leaf], path: Path) -> None:
    """Refuse an observation whose path lies within another observation."""
    for outer in leaves:
        for inner in leaves:
            require(
                outer is inner or outer.path != inner.path[: len(outer.path)],
                f"The dataset at {path} has the observation '{inner.key}' inside the observation "
                f"'{outer.key}': rename one of them by keys.",
            )


def check_file(path: Path) -> None:
    """Refuse a path that is not a regular file: reading a FIFO would never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")


def _is_dtype(name: Any) -> bool:
    try:
        return isinstance(name, str) and np.dtype(name).kind in "biuf"
    except TypeError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a dataset."""
    try:
        return read_object(path, None)  # the Hugging Face cache has links
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{path} cannot be read: the file is missing. Restore it, or give another dataset."
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(content, indent=4, ensure_ascii=False)
    write_atomically(path, lambda file: file.write(text.encode()))


def import_extra(name: str) -> Any:
    """Import a module of the extra `data`."""
    missing = "Datasets need a package that is not installed: pip install -e '.[data]'"
    return import_package(name, missing)


def as_column(values: np.ndarray) -> Any:
    """Return the arrow array of values [L, ...]: scalars or nested lists of fixed size."""
    arrow = import_extra("pyarrow")
    column = arrow.array(np.ascontiguousarray(values).reshape(-1))
    # Lists of the last axis first. Only the list of a row has a fixed size, as in LeRobot.
    for axis in range(values.ndim - 1, 0, -1):
        if axis == 1:
            return arrow.FixedSizeListArray.from_arrays(column, values.shape[1])
        rows = prod(values.shape[:axis])
        offsets = np.arange(rows + 1, dtype=np.int32) * values.shape[axis]
        column = arrow.ListArray.from_arrays(offsets, column)
    return column


def as_row(value: Any) -> Any:
    """Return the arrow array of one value, with its type: to infer it pyarrow imports dateutil."""
    arrow = import_extra("pyarrow")
    # The first leaf of nested lists decides their type.
    leaf, depth = value, 0
    while isinstance(leaf, list):
        leaf, depth = leaf[0] if leaf else None, depth + 1
    kinds = {bool: arrow.bool_, int: arrow.int64, float: arrow.float64, str: arrow.string}
    kind = kinds.get(type(leaf), arrow.null)()
    for _ in range(depth):
        kind = arrow.list_(kind)
    return arrow.array([value], kind)


def from_column(column: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values [L, *shape] of an arrow array or chunked array."""
    arrow = import_extra("pyarrow")
    compute = import_extra("pyarrow.compute")
    count = len(column)
    array = column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column
    # LeRobot stores arrays of several axes as an extension type over nested lists.
    while isinstance(array, arrow.ExtensionArray):
        array = array.storage
    size = 1  # values of a row
    # Unwrap one axis per turn; the product of the lengths must be the declared shape.
    while array.null_count == 0 and hasattr(array.type, "value_field"):  # lists
        lengths = compute.list_value_length(array).unique().to_pylist()
        if len(lengths) > 1:
            raise ValueError(f"its lists have {min(lengths)} to {max(lengths)} entries")
        size *= lengths[0] if lengths else 1
        array = array.flatten()
    if array.null_count:
        raise ValueError(f"{array.null_count} values are missing")
    kinds = (arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean)
    if not any(kind(array.type) for kind in kinds):
        raise ValueError(f"it holds {array.type} instead of numbers")
    if count and size != prod(shape):
        raise ValueError(f"it has {size} values per row, but its shape is {list(shape)}")
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values.reshape(count, *shape)


def write_table(path: Path, table: Any) -> None:
    """Write a small table atomically."""
    parquet = import_extra("pyarrow.parquet")
    write_atomically(path, lambda file: parquet.write_table(table, file))


def tasks_table(tasks: Sequence[str]) -> Any:
    """Return the table of tasks in pandas' format, with the texts as index."""
    arrow = import_extra("pyarrow")
    # Pandas' name for an index without a name; LeRobot reads the texts from the index.
    index = "__index_level_0__"
    numbers = arrow.array(range(len(tasks)), arrow.int64())
    table = arrow.table({"task_index": numbers, index: arrow.array(tasks, arrow.string())})

    def column(name: str | None, field: str | None, kind: str) -> dict[str, Any]:
        described = {"name": name, "field_name": field, "pandas_type": kind, "metadata": None}
        return described | {"numpy_type": "object" if kind == "unicode" else kind}

    names = column(None, None, "unicode") | {"metadata": {"encoding": "UTF-8"}}
    columns = [column("task_index", "task_index", "int64"), column(None, index, "unicode")]
    described = {
        "index_columns": [index],
        "column_indexes": [names],
        "columns": columns,
        "creator": {"library": "pyarrow", "version": arrow.__version__},
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(described)})


def tasks_of(table: Any) -> dict[int, str]:
    """Return the texts of a table of tasks, by task number."""
    texts = [name for name in table.column_names if name != "task_index"]
    if not texts or "task_index" not in table.column_names:
        raise ValueError(f"it has the columns {table.column_names}, not task_index and a text")
    pairs = [table.column(name).to_pylist() for name in ("task_index", texts[0])]
    # By `type`: True is an int too.
    if {type(number) for number in pairs[0]} - {int} or {type(text) for text in pairs[1]} - {str}:
        raise ValueError("a task is a whole number and a text")
    if len(set(pairs[0])) < len(pairs[0]):
        raise ValueError("two tasks have the same number")
    return dict(zip(*pairs, strict=True))


def as_pictures(contents: Sequence[bytes]) -> Any:
    """Return the arrow array of encoded pictures."""
    arrow = import_extra("pyarrow")
    kind = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    return arrow.array([{"bytes": content, "path": None} for content in contents], kind)
