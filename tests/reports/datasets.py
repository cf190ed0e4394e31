"""Write datasets as strangers do: LeRobotDatasets v3.0 by hand, by options that deviate."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box

pa = pytest.importorskip("pyarrow", reason="needs the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra data")
pytest.importorskip("av", reason="needs the extra data")

STATE, ACTION = Box(-10, 10, (2,)), Box(-1, 1, (2,))


def png(pixels):
    """Return the bytes of a picture."""
    file = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def numbers(count, **more):
    """Columns of an observation and an action, and others."""
    generator = np.random.default_rng(1)
    return {
        "observation.state": generator.normal(size=(count, 2)).astype(np.float32),
        "action": generator.uniform(-1, 1, (count, 2)).astype(np.float32),
        **more,
    }


def as_column(values):
    """An arrow column of an array; another column as it is."""
    if not isinstance(values, np.ndarray):
        return values
    if values.ndim == 1:
        return pa.array(values)
    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in values.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def make(
    path,
    lengths=(4, 3),
    columns=None,
    *,
    fps=10,
    features=None,
    rows=None,
    info=None,
    tasks=("push",),
    files=None,
    **index,
):
    """Write a dataset; `index` replaces `timestamp`, `frame_index`, `episode_index`, `index` or `task_index`; `...` leaves out."""
    path, total = Path(path), sum(lengths)
    columns = columns or numbers(total)
    frames = np.concatenate([np.arange(n) for n in lengths])
    episodes = np.repeat(np.arange(len(lengths)), lengths)
    counted = {
        "timestamp": (frames / fps).astype(np.float32),
        "frame_index": frames,
        "episode_index": episodes,
        "index": np.arange(total),
        "task_index": np.zeros(total, np.int64),
        **{name: np.asarray(values) for name, values in index.items()},
    }
    described = {
        key: {"dtype": values.dtype.name, "shape": list(values.shape[1:]) or [1], "names": None}
        for key, values in {**columns, **counted}.items()
        if isinstance(values, np.ndarray)
    }
    table = pa.table({key: as_column(values) for key, values in {**columns, **counted}.items()})
    begins, files = np.cumsum([0, *lengths]), files or [len(lengths)]
    first, places = 0, []
    for number, count in enumerate(files):
        file = path / f"data/chunk-000/file-{number:03d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        size = begins[first + count] - begins[first]
        pq.write_table(table.slice(int(begins[first]), int(size)), file)
        places, first = places + [number] * count, first + count
    told = {
        "episode_index": list(range(len(lengths))),
        "tasks": [[tasks[0]]] * len(lengths),
        "length": list(lengths),
        "data/chunk_index": [0] * len(lengths),
        "data/file_index": places,
        "dataset_from_index": begins[:-1].tolist(),
        "dataset_to_index": begins[1:].tolist(),
        **(rows or {}),
    }
    file = path / "meta/episodes/chunk-000/file-000.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(told), file)
    texts = {"task_index": list(range(len(tasks))), "__index_level_0__": list(tasks)}
    pq.write_table(pa.table(texts), path / "meta/tasks.parquet")
    said = {
        "codebase_version": "v3.0",
        "total_episodes": len(lengths),
        "fps": fps,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": described | (features or {}),
        **(info or {}),
    }
    said = {key: value for key, value in said.items() if value is not ...}
    (path / "meta/info.json").write_text(json.dumps(said))
    return path


def film(path, frames):
    """Write frames [T, H, W, 3] as a film, losslessly but for its colours."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"g": "2", "crf": "10"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def with_film(path, key, *, lengths=(2, 2), begins=(0.0, 0.2), ends=None, size=(16, 16, 3), **more):
    """Write a dataset with a camera whose film is still missing; return the path of the film."""
    rows = {f"videos/{key}/{name}": [0] * len(lengths) for name in ("chunk_index", "file_index")}
    rows |= {f"videos/{key}/from_timestamp": list(begins)}
    rows |= {f"videos/{key}/to_timestamp": list(ends)} if ends else {}
    features = {key: {"dtype": "video", "shape": list(size), "names": None}}
    make(path, lengths, features=features, rows=rows | more.pop("rows", {}), **more)
    return path / f"videos/{key}/chunk-000/file-000.mp4"


def with_pictures(path, key, contents, shape, **columns):
    """Write a dataset of one episode whose camera has these files, as bytes, for pictures."""
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    column = pa.array([{"bytes": content, "path": None} for content in contents], kind)
    features = {key: {"dtype": "image", "shape": list(shape), "names": None}}
    columns = columns or numbers(len(contents))
    return make(path, (len(contents),), {**columns, key: column}, features=features)


def greys(*levels):
    """Frames [T, 16, 16, 3], each of one level of grey."""
    return np.stack([np.full((16, 16, 3), level, np.uint8) for level in levels])
