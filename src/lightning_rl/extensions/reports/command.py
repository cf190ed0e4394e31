"""Run `rl-cli report`: compare runs on one page with curves, scores, settings, costs and films."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from jsonargparse import Namespace

from lightning_rl.extend.cli import NEEDED, CommandLine, Option, parse_options
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.files import expanded, tell, write_atomically
from lightning_rl.extensions.reports.comparison import METRIC, Comparison, compare
from lightning_rl.extensions.reports.rendering import as_data, as_markdown, as_page

Format = Literal["html", "md", "json"]


def _has_no_films(settings: Namespace) -> str:
    kind, _ = _format_and_path(settings.format, settings.output)
    return "" if kind == "html" else f"it is for --format html, not {kind}"


OPTIONS = {
    "<runs>": Option(
        str, NEEDED, "run directories, directories with runs, or .json files of curves", True
    ),
    "output": Option(str, None, "file to write. Default: print md and json"),
    "format": Option(Format, None, "html, md or json. Default: by the file's name"),
    "metric": Option(str, METRIC, "evaluation metric to compare runs"),
    "group_by": Option(
        str, [], "settings that are equal in the runs of a group. Default: all but the seed", True
    ),
    "films_mib": Option(
        float, 10.0, "MiB of films in the page; further films are linked", unused=_has_no_films
    ),
}
DESCRIPTION = "Compare runs: learning curves with intervals, scores, settings, costs, films."

DEFAULT = "report.html"


def report(options: Sequence[str], command_line: CommandLine) -> None:
    """Write or print a report on runs."""
    settings = parse_options("report", DESCRIPTION, OPTIONS, options).as_dict()
    check_range("films_mib", settings["films_mib"], minimum=0)
    kind, output = _format_and_path(settings["format"], settings["output"])
    comparison = compare(settings["runs"], settings["metric"], settings["group_by"] or None)
    for _, reason in comparison.left_out:
        tell(f"Left out: {reason}", sys.stderr)
    for note in comparison.notes:
        tell(f"Note: {note}", sys.stderr)
    text = _rendered(comparison, kind, output, settings["films_mib"])
    # File names and texts from YAML or JSON may hold characters that UTF-8 cannot encode.
    content = text.encode(errors="backslashreplace")
    if output is None:
        tell(content.decode())
        return
    write_atomically(output, lambda file: file.write(content))
    tell(f"Report: {output} ({len(content) / 2**20:.2f} MiB)")


def _format_and_path(kind: Format | None, output: str | None) -> tuple[Format, Path | None]:
    formats: dict[str, Format] = {f".{name}": name for name in get_args(Format)}
    suffix = Path(output or DEFAULT).suffix
    # The name of the file decides, unless --format does.
    if kind is not None:
        require(
            output is None or formats.get(suffix, kind) == kind,
            f"--output {output} does not end with .{kind}, as a file of --format {kind} does.",
        )
    else:
        require(
            suffix in formats,
            f"--output {output} must end in one of {', '.join(formats)}: set --format html, md "
            "or json.",
        )
        kind = formats[suffix]
    # A page is always a file; the texts go to stdout by default.
    if output is None:
        return kind, Path(DEFAULT) if kind == "html" else None
    return kind, expanded(output)


def _rendered(comparison: Comparison, kind: Format, output: Path | None, films_mib: float) -> str:
    if kind == "html":
        assert output is not None
        return as_page(comparison, output, films_mib)
    if kind == "md":
        return as_markdown(comparison)
    return json.dumps(as_data(comparison), indent=1, allow_nan=False)
