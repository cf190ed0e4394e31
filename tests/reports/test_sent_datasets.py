"""Datasets that were sent: recording removes and changes nothing outside, reading only reads files."""

import json
import os
import shutil
import socket

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from lightning_rl.extensions.datasets.episode import Episode
from lightning_rl.extensions.datasets.label import label_dataset
from lightning_rl.extensions.datasets.minari import write_minari
from lightning_rl.extensions.datasets.reader import read_episodes
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from lightning_rl.system.errors import ConfigurationError
from tests.messages import refused
from tests.reports import datasets
from tests.reports.datasets import film, greys, make, pa, png, pq

SPACES = Box(-1, 1, (2,)), Box(-1, 1, (1,))
MARK = ".lightning_rl_recording"


def put(path, text="mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def content(path):
    """What a directory holds: files with their bytes, links with their targets."""
    return {
        str(file.relative_to(path)): os.readlink(file) if file.is_symlink() else file.read_bytes()
        for file in path.rglob("*")
        if file.is_symlink() or file.is_file()
    }


def step(writer, last=False):
    writer.add(np.zeros(2, np.float32), np.zeros(1), 1.0, last, False)


def record(path, **settings):
    writer = EpisodeWriter(path, *SPACES, 10, **settings)
    step(writer, last=True)
    writer.end_episode(np.ones(2, np.float32), success=True)
    writer.finalise()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A dataset of one episode, to be copied."""
    record(path := tmp_path_factory.mktemp("recorded") / "data")
    return path


def put_film(path, container="mp4"):
    """Write a film of four frames, each of a level of grey."""
    film(named := path.with_suffix(f".{container}"), greys(0, 50, 100, 150))
    named.rename(path)


@pytest.mark.parametrize(
    "names",
    [
        (".lock", "data/a.txt", "videos/e.mp4", "meta/notes.txt"),  # of a run that was killed
        (".lock",),
        (".finalised/data/a.txt", "data/b.txt"),
        (".recording/a.txt",),
        (".joining/a.txt", ".lock", "config.yaml"),
        (MARK, "data/a.txt"),
    ],
)
def test_a_directory_that_is_no_dataset_keeps_all_it_holds(names, tmp_path):
    for name in names:
        put(tmp_path / name)
    before = content(tmp_path)
    with refused(names=(names[0].split("/")[0])):
        EpisodeWriter(tmp_path, *SPACES, 10)
    assert content(tmp_path) == before


def test_a_begun_dataset_that_holds_something_else_keeps_it(tmp_path):
    begun = tmp_path / "begun"
    writer = EpisodeWriter(begun, *SPACES, 10)
    step(writer)
    del writer
    put(begun / "thesis.tex")
    before = content(begun)
    with refused(names="thesis.tex"):
        EpisodeWriter(begun, *SPACES, 10)
    assert content(begun) == before


@pytest.mark.parametrize("end", ["finalised", "killed", "killed while a file was written"])
def test_a_first_episode_that_was_not_finished_is_no_obstacle(end, tmp_path):
    path = tmp_path / "data"
    writer = EpisodeWriter(path, *SPACES, 10)
    step(writer)
    if end == "finalised":  # by Ctrl-C, an error of the env or a full disk
        writer.finalise()
        assert list(path.iterdir()) == []
        step(writer)  # and the writer goes on
        assert (path / MARK).is_file()
    if end.endswith("written"):
        put(path / ".tmp-1-a")
    del writer
    record(path)
    assert len(read_episodes(path)) == 1
    left = {one.name for one in path.iterdir()} - {".tmp-1-a"}
    assert left == {"data", "meta"}


def test_files_of_episodes_are_kept_whatever_the_order_of_the_table(tmp_path):
    path = tmp_path / "data"
    writer = EpisodeWriter(path, *SPACES, 10)
    for _ in range(2):
        step(writer, last=True)
        writer.end_episode(np.ones(2, np.float32), success=True)
    del writer  # without being finalised: two files
    table = path / "meta/episodes/chunk-000"
    swap = [table / f"file-00{i}.parquet" for i in range(2)]
    os.rename(swap[0], table / "a")
    os.rename(swap[1], swap[0])
    os.rename(table / "a", swap[1])
    before = content(path / "data")
    EpisodeWriter(path, *SPACES, 10)
    assert content(path / "data") == before


LINKS = ["data", "meta", "videos", ".lock", ".recording", ".joining", ".finalised", MARK]
LINKS += ["data/chunk-000", "data/chunk-000/file-000.parquet", "data/chunk-000/file-007.parquet"]
LINKS += ["meta/info.json", "meta/episodes/chunk-000/file-000.parquet", "meta/stats.json"]


@pytest.mark.parametrize("name", LINKS)
def test_links_inside_a_dataset_are_refused_for_writing(name, recorded, tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "data"
    shutil.copytree(recorded, path)
    place = path / name
    if place.exists():
        os.rename(place, victim)
    else:
        put(victim, "secret")
    place.symlink_to(victim)
    before = content(tmp_path)
    for write in (lambda: EpisodeWriter(path, *SPACES, 10), lambda: label_dataset(path)):
        with refused(names="link"):
            write()
        assert content(tmp_path) == before


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    from lightning_rl.system.files import lock_file

    put(tmp_path / "victim", "secret")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with refused(names="link"):
        lock_file(tmp_path / ".lock", "taken")
    assert (tmp_path / "victim").read_text() == "secret"


def test_a_dataset_behind_a_link_that_the_user_names_is_extended(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    record(tmp_path / "link")
    assert len(read_episodes(tmp_path / "data")) == 2


# Reading: no host, no other file, no end that does not come.

CAMERA = "observation.images.front"


@pytest.fixture
def port():
    """A port of this machine that nobody may ask for anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        yield server.getsockname()[1]
        with pytest.raises(TimeoutError):
            server.accept()


def texts(port):
    """Texts with which FFmpeg opens hosts or other files."""
    return {
        "sdp": f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
        f"m=video {port} RTP/AVP 96\na=rtpmap:96 H264/90000\n",
        "playlist": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:{port}/a.ts\n",
        "concat": f"ffconcat version 1.0\nfile http://127.0.0.1:{port}/a.mp4\n",
        "svg": f'<svg><image href="http://127.0.0.1:{port}/a.png"/></svg>',
        "eps": "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n",
    }


def with_pictures(path, contents, size=(16, 16, 3)):
    actions = np.zeros((len(contents), 2), np.float32)
    return datasets.with_pictures(path, CAMERA, contents, size, action=actions)


def with_film(path, size=(16, 16, 3), **settings):
    columns = {"action": np.zeros((4, 2), np.float32)}
    return datasets.with_film(path, CAMERA, ends=(0.2, 0.4), size=size, columns=columns, **settings)


@pytest.mark.parametrize("kind", texts(0))
def test_a_picture_is_decoded_as_a_picture_alone(kind, port, tmp_path):
    with_pictures(tmp_path, [texts(port)[kind].encode()] * 2)
    with refused(names=("picture", CAMERA, "PNG")):
        read_episodes(tmp_path)[0]


@pytest.mark.parametrize("kind", texts(0))
def test_a_film_is_an_mp4_or_matroska_file_alone(kind, port, tmp_path):
    put(with_film(tmp_path), texts(port)[kind])
    with refused(names=("MP4", "Matroska")):
        read_episodes(tmp_path)[0]


def test_pictures_and_films_are_read(tmp_path):
    levels = greys(10, 90)
    with_pictures(tmp_path / "a", [png(frame) for frame in levels])
    found = read_episodes(tmp_path / "a")[0].observation.numpy()
    np.testing.assert_array_equal(found[:2], levels)
    for container in ("mp4", "mkv"):
        path = tmp_path / f"b: 100% {container}"
        put_film(with_film(path), container)
        means = read_episodes(path)[1].observation.float().mean((1, 2, 3)).tolist()
        np.testing.assert_allclose(means, [100, 150, 150], atol=4)


@pytest.mark.parametrize("name", [b"avc1", b"stsd"])
def test_a_film_of_an_unknown_codec_is_one_message(name, tmp_path):
    path = with_film(tmp_path)
    put_film(path)
    path.write_bytes(path.read_bytes().replace(name, name[:3] + b"X"))
    with refused(names=(path.name,)):
        list(read_episodes(tmp_path))


PATHS = [
    "http://127.0.0.1:{port}/a",
    "udp:/127.0.0.1:{port}",
    "concat:a|b",
    "/dev/zero",
    "../other/{{file_index}}",
    "a/../../b",
    "{{chunk_index:0999999999d}}",
    "{{chunk_index:>9999}}",
    "{{chunk_index!r:9999}}",
    "{{chunk_index.__class__}}",
    "{{0}}",
    "{{video_key}}{{nothing}}",
    "{{",
    "",
    "a\0b",
    "a" * 5000,
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["data_path", "video_path"])
def test_paths_have_a_fixed_grammar_and_stay_inside(name, path, port, tmp_path):
    put_film(with_film(tmp_path, info={name: path.format(port=port)}))
    with refused(names=(name, "Restore info.json")):
        read_episodes(tmp_path)[0]


def test_a_camera_whose_name_leads_outside_is_refused(tmp_path):
    path = tmp_path / "data"
    put_film(with_film(path))
    for file in [path / "meta/info.json"]:
        file.write_text(file.read_text().replace(CAMERA, "observation.images/../../../x"))
    with refused(names="x"):
        read_episodes(path)[0]


@pytest.mark.parametrize("said", [(16, 16, 3), (16, 16, 1), (8, 16, 3)])
def test_sizes_of_pictures_are_checked_before_they_are_decoded(said, tmp_path, monkeypatch):
    from PIL import Image

    with_pictures(tmp_path / "a", [png(np.zeros((3000, 3000, 3), np.uint8))] * 2, said)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with refused(names=("3000 x 3000", "info.json")):
        read_episodes(tmp_path / "a")[0]
    film(with_film(tmp_path / "b", said), np.zeros((4, 128, 64, 3), np.uint8))
    with refused(names=("128 x 64", "info.json")):
        read_episodes(tmp_path / "b")[0]


# Reading: bounded, and one message each.

INFO, TASKS = "meta/info.json", "meta/tasks.parquet"
DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
ROWS = 60_000_000


def grown(path, name):
    """Put a table of 60 million rows, of less than 2 MB, in the place of another."""
    table = pq.read_table(path / name)
    schema = pa.schema([(one, table.schema.field(one).type) for one in table.column_names])
    many = 2**20
    rows = pa.table({one: [table[one][0].as_py()] * many for one in schema.names}, schema)
    with pq.ParquetWriter(path / name, schema, compression="zstd") as writer:
        group = pa.concat_tables([rows] * (ROWS // many + 1)).slice(0, ROWS)
        writer.write_table(group, row_group_size=ROWS)
    assert (path / name).stat().st_size < 2**21


def narrow(path):
    """A dataset of few columns."""
    columns = {"action": np.zeros((7, 1), np.float32), "observation": np.zeros((7, 1), np.float32)}
    return make(path, columns=columns)


@pytest.mark.slow  # it writes 60 million rows
@pytest.mark.parametrize(
    ("name", "words"), [(DATA, "GiB of memory"), (EPISODES, "60,000,000 rows")]
)
def test_sixty_million_rows_are_refused(name, words, tmp_path):
    grown(narrow(tmp_path), name)
    with refused(names=words):
        list(read_episodes(tmp_path))


@pytest.mark.parametrize("name", [DATA, EPISODES, TASKS])
def test_tables_that_grow_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rl.extensions.datasets.tables.MOST_BYTES", 100)
    narrow(tmp_path)
    if name != DATA:
        monkeypatch.setattr("lightning_rl.extensions.datasets.tables.MOST_BYTES", 2**30)
        monkeypatch.setattr("lightning_rl.extensions.datasets.tables.MOST_ROWS", 0)
    with refused(names=("file-000" if name != TASKS else "", "at most")):
        list(read_episodes(tmp_path))


def test_texts_that_recur_are_counted_as_often_as_they_recur(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rl.extensions.datasets.tables.MOST_BYTES", 2**20)
    table = pa.table({"task_index": range(1000), "task": ["x" * 10_000] * 1000})
    pq.write_table(table, narrow(tmp_path) / TASKS)
    assert (tmp_path / TASKS).stat().st_size < 2**15
    with refused(names=("tasks.parquet", "GiB of memory")):
        read_episodes(tmp_path)


def test_an_episode_of_more_pictures_than_the_memory_holds_is_refused(tmp_path, monkeypatch):
    with_pictures(tmp_path, [png(frame) for frame in greys(1, 2)])
    monkeypatch.setattr(
        "lightning_rl.extensions.datasets.lerobot_reader.available_bytes", lambda *_: 1000
    )
    with refused(names=("2 pictures", CAMERA, "camera")):
        read_episodes(tmp_path)[0]


@pytest.mark.parametrize("name", [INFO, DATA, EPISODES, TASKS, "videos"])
def test_a_fifo_is_no_file(name, tmp_path):
    place = with_film(tmp_path)
    put_film(place)
    place = place if name == "videos" else tmp_path / name
    place.unlink()
    os.mkfifo(place)
    with refused(names="regular file"):
        list(read_episodes(tmp_path))


JSONS = {
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "list": "[]",
    "large": " " * (2**24 + 1) + "{}",
    "digits": "1" * 10_000,
    "null": "null",
}


@pytest.mark.parametrize("kind", JSONS)
@pytest.mark.parametrize("name", [INFO, "meta/lightning_rl.json"])
def test_odd_json_is_one_message(name, kind, tmp_path):
    put(narrow(tmp_path) / name, JSONS[kind])
    with refused(names=name):
        read_episodes(tmp_path)


JUNK = [None, 0, -1, 10**30, float("inf"), "", "x", [], [-1], [10**9] * 3, {}, {"dtype": "float32"}]


def places(value, at=()):
    """Where a JSON value has others: their keys."""
    keys = value if isinstance(value, dict) else ()
    for key in range(len(value)) if isinstance(value, list) else keys:
        yield (*at, key)
        yield from places(value[key], (*at, key))


def opened(path):
    """Read a dataset; a message is as good."""
    try:
        return list(read_episodes(path))
    except ConfigurationError as error:
        assert 20 < len(str(error)) < 2000  # noqa: PT017
        return None


@pytest.mark.parametrize("name", [INFO, "meta/lightning_rl.json"])
@pytest.mark.filterwarnings("ignore")
def test_changed_descriptions_are_read_or_one_message(name, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    good = (tmp_path / name).read_text()
    found = []
    for number, at in enumerate(places(json.loads(good))):
        for junk in (JUNK[number % len(JUNK)], ...)[: 1 + number % 2]:
            changed = json.loads(good)
            here = changed
            for key in at[:-1]:
                here = here[key]
            if junk is ...:
                del here[at[-1]]
            else:
                here[at[-1]] = junk
            (tmp_path / name).write_text(json.dumps(changed))
            found.append(opened(tmp_path))
    assert None in found
    (tmp_path / name).write_text(good)
    assert opened(tmp_path)


def odd(count):
    """Columns of odd types and values."""
    numbers = [-1, 10**15, 1.5, float("nan"), True]
    values = [None, "x", b"x", *numbers, [1], [], ["x"], {"a": 1}, [[1, 2]]]
    yield from (pa.array([value] * count) for value in values)
    yield pa.array(["x"] * count).dictionary_encode()
    yield pa.array([1] * count, pa.timestamp("s"))
    yield pa.array([[("a", 1)]] * count, pa.map_(pa.string(), pa.int64()))


@pytest.mark.parametrize("name", [DATA, EPISODES, TASKS])
@pytest.mark.filterwarnings("ignore")
def test_odd_tables_are_read_or_one_message(name, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    table = pq.read_table(tmp_path / name)
    table = table.select([one for one in table.column_names if not one.startswith("stats/")])
    found = []
    for i, column in enumerate(table.column_names):
        kinds = list(odd(len(table)))
        tables = [table.set_column(i, column, kinds[(5 * i + j) % len(kinds)]) for j in range(2)]
        tables += [table.drop_columns([column])]
        names = [
            table.column_names[0] if j == i else one for j, one in enumerate(table.column_names)
        ]
        tables += [table.rename_columns(names)] if i else []
        for changed in tables:
            pq.write_table(changed, tmp_path / name)
            found.append(opened(tmp_path))
    assert found.count(None) > 3
    for rows in (table.slice(0, 0), pa.concat_tables([table, table]), pa.table({"x": [1]})):
        pq.write_table(rows, tmp_path / name)
        opened(tmp_path)


@pytest.mark.parametrize("name", ["file-x.parquet", "file-.parquet", "file-1.2.parquet"])
def test_a_file_without_a_number_is_named(name, tmp_path):
    put(narrow(tmp_path) / "meta/episodes/chunk-000" / name)
    with refused(names=(name, "no number")):
        read_episodes(tmp_path)


# Minari's form: HDF5 may hold links, values of other files, itself, and programs as pictures.


def minari(path, space=SPACES[0]):
    """Write an episode of two steps; return its file and the description of the dataset."""
    pytest.importorskip("h5py", reason="needs the extra data")
    seen = torch.from_numpy(np.stack([space.sample()] * 3))
    ends, never, zeros = torch.tensor([False, True]), torch.zeros(2).bool(), torch.zeros(2)
    episode = Episode(seen, zeros[:, None], zeros, ends, never, None, never, "")
    write_minari(path, [episode], space, SPACES[1])
    return path / "data/main_data.hdf5", path / "data/metadata.json"


def external_link(h5py, group, victim):
    group["actions"] = h5py.ExternalLink(str(victim), "/x")


def soft_link(h5py, group, victim):
    group["actions"] = h5py.SoftLink("/nothing")


def values_elsewhere(h5py, group, victim):
    group.create_dataset("actions", (2, 1), "float32", external=[(str(victim), 0, 8)])


def virtual(h5py, group, victim):
    layout = h5py.VirtualLayout((2, 1), "float32")
    layout[:] = h5py.VirtualSource(str(victim), "x", (2, 1))
    group.create_virtual_dataset("actions", layout)


def itself(h5py, group, victim):
    group["actions"] = group


def huge(h5py, group, victim):
    group.create_dataset("actions", (10**14, 1), "float32", chunks=(1024, 1))


@pytest.mark.parametrize(
    "change", [external_link, soft_link, values_elsewhere, virtual, itself, huge]
)
@pytest.mark.filterwarnings("ignore")
def test_an_episode_of_minari_lies_in_its_file_and_in_memory(change, tmp_path):
    file, _ = minari(tmp_path / "data")
    import h5py

    victim = tmp_path / "victim"
    os.mkfifo(victim)
    with h5py.File(file, "a") as opened:
        del opened["episode_0/actions"]
        change(h5py, opened["episode_0"], victim)
    with refused(names=("Minari", tmp_path)):
        read_episodes(tmp_path / "data")[0]


@pytest.mark.filterwarnings("ignore")
def test_pictures_of_minari_are_jpeg(tmp_path):
    file, metadata = minari(tmp_path, Box(0, 255, (16, 16, 3), np.uint8))
    import h5py

    said = json.loads(metadata.read_text()) | {"jpeg_encoding": True}
    metadata.write_text(json.dumps(said))
    with h5py.File(file, "a") as opened:
        del opened["episode_0/observations"]
        kind = h5py.vlen_dtype(np.uint8)
        seen = opened["episode_0"].create_dataset("observations", (3,), kind)
        for i in range(3):
            seen[i] = np.frombuffer(texts(0)["eps"].encode(), np.uint8)
    with refused(names=("Minari", tmp_path)):
        read_episodes(tmp_path)[0]


@pytest.mark.parametrize(
    "said",
    [
        {"total_episodes": 10**12},
        {"total_episodes": 1.5},
        {"total_episodes": None},
        {"data_format": "x"},
        {"observation_space": 1},
        {"observation_space": "{}"},
        {"action_space": "[" * 100_000},
        {"action_space": '{"type": "Discrete", "n": "x"}'},
        {"observation_space": '{"type": "Box", "shape": [1000000000000], "low": 0, "high": 1}'},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_odd_descriptions_of_minari_are_one_message(said, tmp_path):
    _, metadata = minari(tmp_path)
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | said))
    with refused(names=str(tmp_path)):
        read_episodes(tmp_path)[0]


def in_tables(path, kind, space=SPACES[0]):
    """An episode of Minari in the form of Arrow or Parquet; return its table and the file."""
    storage = pytest.importorskip("minari.dataset.minari_storage", reason="needs the extra data")
    from minari.data_collector.episode_buffer import EpisodeBuffer

    made = storage.MinariStorage.new(path, space, SPACES[1], data_format=kind)
    steps = {"actions": np.zeros((2, 1), np.float32), "rewards": np.zeros(2)}
    ends = {"terminations": np.zeros(2, bool), "truncations": np.zeros(2, bool)}
    seen = np.stack([space.sample()] * 3)
    made.update_episodes([EpisodeBuffer(id=0, observations=seen, **steps, **ends, infos={})])
    (file,) = (path / "0").glob("part-*")
    read = pq.read_table if kind == "parquet" else lambda name: pa.ipc.open_file(name).read_all()
    return read(file), file


def rewrite(table, file, kind, **options):
    if kind == "parquet":
        return pq.write_table(table, file, **options)
    with pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return None


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.filterwarnings("ignore")
def test_tables_of_minari_are_read_within_bounds(kind, tmp_path, monkeypatch):
    table, file = in_tables(tmp_path, kind)
    rewrite(table, file, kind)
    assert len(read_episodes(tmp_path)[0]) == 2
    many = pa.concat_tables([table] * 2000)
    rewrite(many, file, kind, compression="zstd")
    words = {"arrow": "its columns are compressed", "parquet": "GiB of memory"}
    monkeypatch.setattr("lightning_rl.extensions.datasets.tables.MOST_BYTES", 2**12)
    with refused(names=(str(tmp_path), words[kind])):
        read_episodes(tmp_path)[0]
    monkeypatch.undo()
    monkeypatch.setattr("lightning_rl.extensions.datasets.minari.MOST_STEPS", 5000)
    rewrite(many, file, kind)
    with refused(names="5,001 rows"):
        read_episodes(tmp_path)[0]
    monkeypatch.setattr("lightning_rl.extensions.datasets.minari.available_bytes", lambda *_: 10)
    rewrite(table, file, kind)
    with refused(names="10 are free"):
        read_episodes(tmp_path)[0]


def test_pictures_in_tables_of_minari_are_jpeg(tmp_path):
    table, file = in_tables(tmp_path, "arrow", Box(0, 255, (16, 16, 3), np.uint8))
    assert read_episodes(tmp_path)[0].observation.shape == (3, 16, 16, 3)
    column = pa.array([texts(0)["eps"].encode()] * 3, pa.binary())
    at = table.column_names.index("observations")
    rewrite(table.set_column(at, "observations", column), file, "arrow")
    with refused(names=("Minari", tmp_path)):
        read_episodes(tmp_path)[0]


def test_a_fifo_is_no_file_of_minari(tmp_path):
    file, _ = minari(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with refused(names="regular file"):
        read_episodes(tmp_path)


DAMAGES = {
    "bytes of a page": (None, None),  # for which pyarrow has several lines
    "a statistic of text": ("stats/action/q50", "x"),
    "a statistic of another shape": ("stats/action/count", -1),
    "no statistic": ("stats/action/mean", None),
    "a place that is none": ("meta/episodes/chunk_index", None),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_table_is_one_message_of_one_line(name, recorded, tmp_path):
    shutil.copytree(recorded, path := tmp_path / "data")
    (table,) = (path / ("meta/episodes" if DAMAGES[name][0] else "data")).rglob("*.parquet")
    if DAMAGES[name][0]:
        (column, value), rows = DAMAGES[name], pq.read_table(table)
        values = pa.array([value] * len(rows))
        pq.write_table(rows.set_column(rows.column_names.index(column), column, values), table)
    else:
        damaged = bytearray(table.read_bytes())
        damaged[4:60] = bytes(range(56))
        table.write_bytes(damaged)
    with refused(names=("meta/episodes" if DAMAGES[name][0] else table.name, "restore")) as caught:
        list(read_episodes(path))
        EpisodeWriter(path, *SPACES, 10).finalise()
    assert "\n" not in str(caught.value)
