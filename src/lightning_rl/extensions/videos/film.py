"""Film several episodes side by side, with a bounded number of frames."""

import io
from fractions import Fraction
from typing import IO, Any

import numpy as np

from lightning_rl.extend.errors import import_extra

TILE = 320
"""Maximum side of one episode's picture, in pixels; larger pictures are scaled down."""

CAPTION = 20
"""Height of the caption above each picture, in pixels."""

GAP = 4
"""Gap between two episodes, in pixels."""

GIF_FRAMES, GIF_WIDTH = 40, 320
"""Maximum size of an animation for TensorBoard, which is stored in the event file."""


def require_video_packages() -> None:
    """Raise a ConfigurationError if a package of the extra `video` is missing."""
    for name in ("av", "PIL"):
        import_extra(
            name,
            f"trainer.video needs the package '{name}', which is not installed: pip install "
            "-e '.[video]', or set trainer.video: false.",
        )


class Film:
    """Frames with the pictures of M running episodes and their captions.

    A frame is taken every `stride` steps, from step 0. Beyond `capacity` frames, every second frame
    is dropped and the stride doubles.

    Args:
        count: M.
        stride: env steps between two frames, at first.
        capacity: maximum number of frames, without the last one; at least 2.

    Attributes:
        frames: [H, W, 3] uint8 each.
    """

    def __init__(self, count: int, stride: int, capacity: int) -> None:
        self.count = count
        self.stride = stride
        self.capacity = capacity - capacity % 2
        self.frames: list[np.ndarray] = []
        self._canvas: Any = None
        self._size = (0, 0)

    def wants(self, step: int) -> bool:
        return step % self.stride == 0

    def show(self, i: int, picture: np.ndarray | None, caption: str) -> None:
        """Draw the picture of an episode, uint8 [H, W, 3], or dim the last picture (None)."""
        from PIL import Image, ImageDraw

        if picture is not None:
            tile = Image.fromarray(np.ascontiguousarray(picture))
            tile = tile.reduce(-(-max(tile.size) // TILE))
            if self._canvas is None:
                self._open(tile.size)
        x, y = self._corner(i)
        width, height = self._size
        if picture is None:
            box = (x, y + CAPTION, x + width, y + CAPTION + height)
            tile = self._canvas.crop(box).point(lambda value: value // 2 + 32)
        self._canvas.paste(tile, (x, y + CAPTION))
        draw = ImageDraw.Draw(self._canvas)
        draw.rectangle((x, y, x + width - 1, y + CAPTION - 1), fill=(32, 34, 38))
        draw.text((x + 5, y + 3), caption, fill=(240, 240, 240))

    def take(self, *, last: bool = False) -> None:
        if len(self.frames) >= self.capacity and not last:
            # Keep an even number, so that this step's frame fits the new stride.
            self.frames = self.frames[::2]
            self.stride *= 2
        # A copy, because the canvas is drawn on again.
        self.frames.append(np.asarray(self._canvas).copy())

    def write(self, file: IO[bytes], fps: float) -> None:
        import av

        height, width, _ = self.frames[0].shape
        with av.open(file, "w", format="mp4") as container:
            # Without look-ahead, the encoder of a short film starts in half the time.
            options = {"preset": "veryfast", "crf": "23", "tune": "zerolatency"}
            rate = Fraction(fps).limit_denominator(1000)
            stream = container.add_stream("libx264", rate=rate, options=options)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.codec_context.thread_count = 1
            for frame in self.frames:
                picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
                container.mux(stream.encode(picture))
            # The encoder holds frames back.
            container.mux(stream.encode(None))

    def gif(self, fps: float) -> bytes:
        from PIL import Image

        step = -(-len(self.frames) // GIF_FRAMES)
        scale = -(-self.frames[0].shape[1] // GIF_WIDTH)
        method = Image.Quantize.FASTOCTREE
        pictures = [
            Image.fromarray(frame)
            .reduce(scale)
            .quantize(64, method=method, dither=Image.Dither.NONE)
            for frame in self.frames[::step]
        ]
        file = io.BytesIO()
        settings = {"duration": max(20, round(1000 * step / fps)), "loop": 0}
        pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], **settings)
        return file.getvalue()

    def _open(self, size: tuple[int, int]) -> None:
        from PIL import Image

        self._size = size
        self._columns = int(np.ceil(np.sqrt(self.count)))
        rows = -(-self.count // self._columns)
        width = self._columns * (size[0] + GAP) - GAP
        height = rows * (size[1] + CAPTION + GAP) - GAP
        # H.264 in yuv420p needs even sides.
        sides = (width + width % 2, height + height % 2)
        self._canvas = Image.new("RGB", sides, (32, 34, 38))

    def _corner(self, i: int) -> tuple[int, int]:
        row, column = divmod(i, self._columns)
        return column * (self._size[0] + GAP), row * (self._size[1] + CAPTION + GAP)
