"""Encode pictures as video or PNG, and decode them."""

import io
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import reason_of, require
from lightning_rl.extensions.datasets.lerobot_format import check_file, import_extra

CODEC = "libsvtav1"
SETTINGS = {"g": "2", "crf": "30", "preset": "12", "svtav1-params": "lp=1"}
"""LeRobot's codec settings: a key frame every two frames, for fast seeking; one thread."""

PIXELS = "yuv420p"

FORMATS = {1: ("gray", "L"), 3: ("rgb24", "RGB"), 4: ("rgba", "RGBA")}
"""FFmpeg's and Pillow's names of decoded pictures, by number of channels."""

PICTURES = ("PNG", "JPEG", "WEBP", "BMP")
"""Formats of pictures to read; other formats may open other files, or run a program."""

MOST_PIXELS = 2**26
"""Maximum pixels of a video frame."""

CURE = "Restore the file, or leave the camera out: name only the other observations in keys."


class VideoWriter:
    """Write frames of H x W pixels to a video."""

    def __init__(self, path: Path, height: int, width: int, fps: float) -> None:
        self._av = import_extra("av")
        os.environ.setdefault("SVT_LOG", "1")  # the codec prints much to stderr
        self._container = self._av.open(str(path), "w")
        self._stream = self._container.add_stream(CODEC, rate=rate_of(fps), options=SETTINGS)
        self._stream.height, self._stream.width = height, width
        self._stream.pix_fmt = PIXELS
        _open_without_priority(self._stream.codec_context)

    def add(self, frame: np.ndarray) -> None:
        picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        self._container.mux(self._stream.encode(picture))

    def close(self) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()


def _open_without_priority(codec: Any) -> None:
    """Open a codec, and reset the scheduling of its threads and of this thread."""
    # As root, SVT-AV1 gives these threads the highest real-time priority (SCHED_FIFO, 99), which
    # starves all other processes.
    if not hasattr(os, "sched_setscheduler"):  # Linux has it
        codec.open()
        return
    tasks, scheduler = Path("/proc/self/task"), os.sched_getscheduler(0)
    threads = {task.name for task in tasks.glob("*")}
    codec.open()
    if os.sched_getscheduler(0) != scheduler:
        opened = {task.name for task in tasks.glob("*")} - threads
        for thread in (0, *map(int, opened)):
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, scheduler, os.sched_param(0))


def rate_of(fps: float) -> Fraction:
    """Return frames per second as the fraction that a video stores."""
    return Fraction(fps).limit_denominator(100_000)


def read_frames(
    path: Path, times: Sequence[float], fps: float, size: tuple[int, ...]
) -> np.ndarray:
    """Return the frames [M, H, W, C] uint8 at increasing times [M] in seconds; check the file."""
    av = import_extra("av")
    frames = np.empty((len(times), *size), np.uint8)
    count = 0
    try:
        with closing(_opened(path)) as container:
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise ValueError("its codec is unknown")
            _check_size(stream.height, stream.width, size)
            # Frames may be larger than in the header, because codecs round sizes up.
            limit = {"max_pixels": str((size[0] + 128) * (size[1] + 128))}
            stream.codec_context.options = limit
            stream.codec_context.thread_count = 1  # each thread would keep its own frames
            # To the key frame at or before the first time; the frames before it are skipped below.
            container.seek(int(times[0] / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                if count == len(times):
                    break
                seconds = float(frame.pts * stream.time_base)
                # A quarter of a frame: the container rounds times to its time base.
                if seconds < times[count] - 0.25 / fps:
                    continue
                if seconds > times[count] + 0.25 / fps:
                    break
                frames[count] = _pixels(frame, size)
                count += 1
    except (av.FFmpegError, OSError, IndexError, ValueError, TypeError, ArithmeticError) as error:
        raise ConfigurationError(
            f"The video {path} cannot be read ({reason_of(error)}). {CURE}"
        ) from error
    require(
        count == len(times),
        f"The video {path} is broken: it has no frame at {times[min(count, len(times) - 1)]:.3f} "
        f"seconds. {CURE}",
    )
    return frames


def _opened(path: Path) -> Any:
    """Open an MP4 or Matroska file; other formats can make FFmpeg open other files or hosts."""
    check_file(path)
    with path.open("rb") as file:
        head = file.read(8)
    # By content, not by the name, which the sender chooses.
    container = "mp4" if head[4:] == b"ftyp" else "matroska"
    if container == "matroska" and head[:4] != b"\x1aE\xdf\xa3":
        raise ValueError("it is neither MP4 nor Matroska")
    return import_extra("av").open(
        f"file:{path.absolute()}",
        format=container,
        options={"protocol_whitelist": "file"},
        stream_options=[{"max_pixels": str(MOST_PIXELS)}],
    )


def _check_size(height: int, width: int, size: tuple[int, ...]) -> None:
    if (height, width) != size[:2] or _channels(size) not in FORMATS:
        raise ValueError(f"a picture of {height} x {width} pixels, but info.json says {list(size)}")


def _channels(size: tuple[int, ...]) -> int:
    return size[2] if len(size) == 3 else 1


def _pixels(frame: Any, size: tuple[int, ...]) -> np.ndarray:
    if frame.format.name.startswith(("gray1", "ya16")):  # depth pictures need more than 8 bits
        raise ValueError(
            f"a picture of format {frame.format.name}, but only 8 bits per channel are supported"
        )
    _check_size(frame.height, frame.width, size)
    pixels: np.ndarray = frame.to_ndarray(format=FORMATS[_channels(size)][0])
    return pixels.reshape(size)


def join_videos(sources: Iterable[Path], target: Path, fps: float) -> list[int]:
    """Concatenate videos without compressing again; return the first frame of each."""
    av = import_extra("av")
    begins, frames = [], 0
    with closing(av.open(str(target), "w")) as joined:
        stream = None
        for source in sources:
            begins.append(frames)
            with closing(_opened(source)) as container:
                video = container.streams.video[0]
                if stream is None:
                    stream = joined.add_stream_from_template(video, opaque=True)
                    stream.time_base = video.time_base
                # Where the previous videos end, in units of the time base.
                offset = round(Fraction(frames) / rate_of(fps) / video.time_base)
                for packet in container.demux(video):
                    if packet.dts is None:  # the end
                        continue
                    packet.pts, packet.dts = packet.pts + offset, packet.dts + offset
                    packet.stream = stream
                    joined.mux(packet)
                    frames += 1
    return begins


class PngEncoder:
    """Encode frames of H x W pixels as PNG."""

    # Use one encoder for many frames: the library releases the memory of an encoder late.
    def __init__(self, height: int, width: int) -> None:
        self._av = import_extra("av")
        self._context: Any = self._av.CodecContext.create("png", "w")
        self._context.height, self._context.width = height, width
        self._context.pix_fmt, self._context.time_base = "rgb24", Fraction(1)
        self._context.thread_count = 1  # so that `encode` returns the frame immediately

    def encode(self, frame: np.ndarray) -> bytes:
        picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        return b"".join(bytes(packet) for packet in self._context.encode(picture))


def decode_picture(content: bytes, size: tuple[int, ...]) -> np.ndarray:
    """Decode a file of `PICTURES` to uint8 of shape `size`: [H, W, C], or [H, W] for grey."""
    pillow = import_extra("PIL.Image")
    errors = (OSError, SyntaxError, EOFError, LookupError, struct.error)
    try:
        with pillow.open(io.BytesIO(content), formats=PICTURES) as picture:
            _check_size(picture.height, picture.width, size)  # before anything is decoded
            # Byte 24 of a PNG is its bit depth.
            if picture.format == "PNG" and content[24] > 8:  # depth pictures need more than 8 bits
                raise ValueError(
                    f"a picture of {content[24]} bits per channel; only 8 bits are supported"
                )
            return np.array(picture.convert(FORMATS[_channels(size)][1])).reshape(size)
    except (*errors, pillow.DecompressionBombError) as error:
        raise ValueError(
            f"not a picture in one of the formats {', '.join(PICTURES)} ({reason_of(error)})"
        ) from error


def jpeg_bytes(content: bytes) -> int:
    """Return the number of bytes of a decoded JPEG."""
    with import_extra("PIL.Image").open(io.BytesIO(content), formats=("JPEG",)) as picture:
        return int(picture.height * picture.width * len(picture.getbands()))
