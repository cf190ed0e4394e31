"""Read files of `torch.save` as data, within the memory that their size on the disk promises."""

import zipfile
from pathlib import Path
from typing import Any

import torch

ARCHIVE = b"PK\x03\x04"
"""First bytes of a file of `torch.save`, in its form since torch 1.6."""


def load_tensors(path: str | Path, **options: Any) -> Any:
    """Return the content of a file of `torch.save`; no code runs. `options`: see `torch.load`.

    Raises:
        ValueError: the file has records that torch does not write.
        Exception: the file is damaged, or holds objects besides numbers, texts and tensors.
    """
    with open(path, "rb") as file:
        is_archive = file.read(len(ARCHIVE)) == ARCHIVE
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            check_records(archive, path)
    return torch.load(path, weights_only=True, **options)


def check_records(archive: zipfile.ZipFile, path: str | Path) -> None:
    """Refuse compressed or overlapping records: 2 MB of them can hold 2 GB.

    Raises:
        ValueError: torch does not write such records.
    """
    records = archive.infolist()
    # torch stores records uncompressed, one after another.
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    if not stored or sum(record.file_size for record in records) > Path(path).stat().st_size:
        raise ValueError("its records are compressed or overlap, which torch.save never writes")
