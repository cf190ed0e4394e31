"""`rl-cli report`: what runs wrote, compared."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from lightning_rl.cli.app import run
from lightning_rl.extensions.reports.comparison import compare
from tests import references
from tests.helpers import SMALL_RUN, error_of, script
from tests.messages import assert_names

LOOK = """
<script>
{
const box = chart.getBoundingClientRect();
const at = x => chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x, clientY: box.top + 90}));
at(box.width - 16);
document.body.dataset.steps = tip.textContent;
document.querySelector("[data-axis=seconds]").click();
at(box.width - 16);
document.body.dataset.seconds = tip.textContent;
document.getElementById("each").click();
document.body.dataset.dashed = chart.querySelectorAll("[stroke-dasharray]").length;
document.querySelector("#legend button").click();
document.body.dataset.paths = chart.querySelectorAll("path").length;
}
</script></body>"""


BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = next(filter(None, BROWSERS), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
STEPS = [1000, 2000, 3000, 4000]
pytestmark = pytest.mark.usefixtures("own_directory")


def of_gymnasium(id):
    return {"class_path": "lightning_rl.GymnasiumEnv", "init_args": {"id": id, "env_kwargs": None}}


def make_run(name, returns, seed=1, env="CartPole-v1", steps=STEPS, speed=500.0, **settings):
    """Write what `rl-cli fit` writes, as far as a report reads it."""
    directory = Path("outputs", name)
    (directory / "logs").mkdir(parents=True)
    flat = {"clip_coef": 0.2, "optimizer": None} | settings
    config = {
        "seed_everything": seed,
        "exp_name": name.partition("_2")[0],
        "output_dir": "outputs",
        "model": {"class_path": "lightning_rl.PPO", "init_args": flat},
        "data": {"env": env if isinstance(env, dict) else of_gymnasium(env)},
        "trainer": {"best_metric": "eval/avg_reward", "best_mode": "max"},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    manifest = {"outcome": "finished", "seed": seed, "earlier": []}
    manifest["seconds"] = {"total": 12.0, "evaluation": 4.0, "cpu": 8.0}
    manifest["peak_memory"] = {"process": 300 * 2**20, "cuda": None}
    (directory / "run.json").write_text(json.dumps(manifest))
    lines = ["env_steps,train/loss,charts/SPS,eval/avg_reward"]
    for at, value in zip(steps, returns, strict=True):
        lines += [f"{at - 500},0.1,{speed},", f"{at},0.1,{speed},{value}"]
    (directory / "logs" / "metrics.csv").write_text("\n".join(lines) + "\n")
    return directory


def make_seeds(prefix, count=5, gain=1.0, steps=STEPS, **settings):
    generator = np.random.default_rng(count + int(10 * gain))
    curves = np.cumsum(generator.uniform(20, 100, (count, len(steps))) * gain, axis=1)
    for seed, curve in enumerate(curves, 1):
        name = f"{prefix}_seed{seed}_20260101_00000{seed}"
        make_run(name, curve.tolist(), seed, steps=steps, **settings)
    return curves


def report(*arguments):
    run(["report", *map(str, arguments)])


def test_seeds_of_equal_settings_are_a_group_with_the_intervals_of_the_definition():
    curves = make_seeds("a")
    make_seeds("b", gain=2.0, clip_coef=0.3)
    better, worse = compare(["outputs"]).groups
    assert (better.name, worse.name) == ("clip_coef 0.3", "clip_coef 0.2")
    assert better.settings == {"model.init_args.clip_coef": "0.3"}
    curve = worse.curves["eval/avg_reward"]
    assert curve.env_steps.tolist() == STEPS
    assert curve.seconds.tolist() == [2.0, 4.0, 6.0, 8.0]  # 500 env steps a second
    for i, scores in enumerate(curves.T):
        expected = references.stratified_interval(references.iqm, [[scores]], 10_000)
        assert (curve.low[i], curve.high[i]) == pytest.approx(expected, rel=1e-12)
        assert curve.centre[i] == pytest.approx(references.iqm([scores]), rel=1e-12)
    assert worse.scores == pytest.approx(curves[:, -1])
    assert worse.interval == pytest.approx((curve.low[-1], curve.high[-1]))


def test_groups_are_compared_with_each_other():
    a, b = make_seeds("a"), make_seeds("b", gain=1.3, clip_coef=0.3)
    ((first, second, share, interval),) = compare(["outputs"]).improvements
    scores = {"clip_coef 0.2": [a[:, -1]], "clip_coef 0.3": [b[:, -1]]}
    assert share == pytest.approx(references.improvement(scores[first], scores[second]))
    assert interval[0] <= share <= interval[1]


def test_a_run_that_has_not_got_there_has_no_part_and_it_shows():
    make_run("a_20260101_000000", [1, 2, 3, 4])
    make_run("a_20260101_000001", [3, 4], steps=[1000, 2000], seed=2)
    make_run("a_20260101_000002", [5, 9], steps=[1000, 3000], seed=3)  # 7 on the line between
    (group,) = compare(["outputs"]).groups
    curve = group.curves["eval/avg_reward"]
    assert curve.runs.tolist() == [3, 3, 2, 1]
    assert curve.centre.tolist() == [3.0, pytest.approx(13 / 3), 6.0, 4.0]
    assert np.isnan(curve.low[-1])


def test_runs_that_were_evaluated_at_slightly_different_steps_are_one_curve():
    make_run("a_20260101_000000", [1, 2, 3, 4])
    make_run("a_20260101_000001", [3, 4, 5, 6], steps=[1200, 2200, 3200, 4200], seed=2)
    (group,) = compare(["outputs"]).groups
    curve = group.curves["eval/avg_reward"]
    assert curve.env_steps.tolist() == [1000, 1200, 2000, 2200, 3000, 3200, 4000, 4200]
    assert set(curve.runs) == {2}
    assert curve.centre[[0, -1]].tolist() == [2.0, 5.0]  # the nearest evaluation of each


TAG = "{http://www.w3.org/2000/svg}"


def drawn_values(panel, line):
    """Read the values of a line off the axis of a panel, by its first and last tick."""
    ticks = panel.findall(f"{TAG}text[@class='e']")
    (bottom, low), (top, high) = (
        (float(tick.get("y")) - 4, float(tick.text.replace("−", "-")))
        for tick in ticks[:: len(ticks) - 1]
    )
    heights = [float(point.split()[1]) for point in line.get("d")[1:].split("L")]
    return [low + (bottom - y) / (bottom - top) * (high - low) for y in heights]


def draw(monkeypatch, runs="outputs", *options):
    """Draw all runs by the script of the figures of docs/results.md."""
    figure = script("figure", monkeypatch)
    monkeypatch.setattr("sys.argv", ["figure.py", runs, "--output", "figure.svg", *options])
    figure.main()
    return Path("figure.svg").read_text()


def test_a_figure_has_a_panel_for_each_env_with_the_curve_of_its_runs(monkeypatch):
    curves = np.array([[1, 4, 6, 8], [3, 6, 9, 9], [2, 2, 3, 4]])
    for seed, curve in enumerate(curves, 1):
        make_run(f"a_2026010{seed}", curve, seed)
    make_run("b_20260101", [-40, -20, -20, -10], env="Hopper-v5")
    text = draw(monkeypatch)
    figure = ElementTree.fromstring(text)
    panels = figure.findall(f"{TAG}g")
    assert [panel.find(f"{TAG}text").text for panel in panels] == ["CartPole-v1", "Hopper-v5"]
    (legend,) = panels[0].findall(f"{TAG}g/{TAG}text")
    assert legend.text == "a (3 runs)"
    band, line = panels[0].findall(f"{TAG}g/{TAG}path")[:2]
    drawn = drawn_values(panels[0], line)
    assert drawn == pytest.approx(curves.mean(axis=0), abs=0.05)  # of three all are the middle
    (group,) = compare(["outputs/a_20260101", "outputs/a_20260102", "outputs/a_20260103"]).groups
    expected = group.curves["eval/avg_reward"]
    band.set("d", band.get("d").removesuffix("Z"))
    around = [*expected.high, *expected.low[::-1]]
    assert drawn_values(panels[0], band) == pytest.approx(around, abs=0.05)
    other = panels[1].find(f"{TAG}g/{TAG}path[@class='line']")
    assert drawn_values(panels[1], other) == pytest.approx([-40, -20, -20, -10], abs=0.2)


def test_a_line_is_dashed_where_some_runs_have_not_begun_or_have_ended(monkeypatch):
    make_run("a_20260101_000000", [1, 2, 3, 4])
    make_run("a_20260101_000001", [2, 3], steps=[2000, 3000], seed=2)
    figure = draw(monkeypatch)
    lines = re.findall(r'class="line( part)?" d="M([^"]+L[^"]+)"', figure)
    assert [(part, points.count("L") + 1) for part, points in lines] == [
        ("", 2),
        (" part", 2),
        (" part", 2),
    ]


def write_curves(curves, metric="eval/avg_reward"):
    Path("peer.json").write_text(json.dumps({"metric": metric, "curves": curves}))


def test_a_second_panel_is_over_minutes(monkeypatch):
    points = {"a": {"1": [[0, 1, 0], [100, 2, 60], [200, 3, 240]]}}
    write_curves({"peer": points})
    text = draw(monkeypatch, "peer.json", "--minutes")
    assert [axis for axis in ("Env steps", "Minutes") if axis in text] == ["Env steps", "Minutes"]
    for points, share in zip(
        re.findall(r'class="line" d="M([^"]+L[^"]+)"', text), (1 / 2, 1 / 4), strict=True
    ):
        start, middle, end = (float(point.split()[0]) for point in points.split("L"))
        assert (middle - start) / (end - start) == pytest.approx(share, abs=0.01)


def test_curves_of_another_library_are_compared_with_runs(capsys):
    make_run("a_20260101_000000", [1, 2, 3, 4])
    seeds = {"1": [[1000, 1], [4000, 7]], "2": [[1000, 3], [4000, 9]]}
    write_curves({"peer": {"CartPole-v1": seeds}, "other": {"CartPole-v1": {"1": [[4000, 6]]}}})
    groups = compare(["peer.json"]).groups
    assert [(group.name, group.scores) for group in groups] == [("peer", [7, 9]), ("other", [6])]
    assert groups[0].curves["eval/avg_reward"].centre.tolist() == [2.0, 8.0]
    assert [one.name for one in compare(["outputs", "peer.json"]).groups] == ["peer", "other", "a"]
    report("peer.json", "--output", "report.html")
    write_curves({"peer": {"CartPole-v1": seeds}}, metric="eval/success_rate")
    err = error_of(capsys, "report", "peer.json", status=1)
    assert "peer.json has eval/success_rate, not eval/avg_reward: set --metric eval/success" in err
    write_curves({"peer": {"CartPole-v1": {"1": [[4000, 6], [1000, 7]]}}})
    err = error_of(capsys, "report", "peer.json", status=1)
    assert_names(err, "peer.json", "CartPole-v1")
    write_curves({"peer": {"CartPole-v1": {"1": [4000, 6, 1]}}})
    assert_names(error_of(capsys, "report", "peer.json", status=1), "peer.json")


def test_runs_are_grouped_by_the_settings_that_are_named(capsys):
    for i, clip in enumerate((0.1, 0.1, 0.3, 0.3)):
        make_run(f"a_20260101_00000{i}", [1, 2, 3, i], seed=i, clip_coef=clip, gamma=0.9 + i / 100)
    assert len(compare(["outputs"]).groups) == 4
    groups = compare(["outputs"], group_by=["clip_coef"]).groups
    assert [(group.name, group.scores) for group in groups] == [
        ("clip_coef 0.3", [2.0, 3.0]),
        ("clip_coef 0.1", [0.0, 1.0]),
    ]
    err = error_of(capsys, "report", "outputs", "--group_by", "clip_coeff", status=1)
    assert_names(err, "--group_by clip_coeff", "close matches: clip_coef")


def test_what_there_is_not_is_refused_with_what_there_is(capsys):
    make_run("first_20260101_000000", [1, 2, 3, 4])
    err = error_of(capsys, "report", "outputs/first_20260101_000001", status=1)
    assert_names(err, "outputs/first_20260101_000001", "close matches")
    Path("empty").mkdir()
    assert_names(error_of(capsys, "report", "empty", status=1), "empty")
    err = error_of(capsys, "report", "outputs", "--metric", "eval/success_rate", status=1)
    assert_names(err, "1 runs", "eval/success_rate", "eval/avg_reward", "--metric")
    make_run("other_20260101_000000", [1, 2, 3, 4], env="Hopper-v5")
    err = error_of(capsys, "report", "outputs", status=1)
    assert_names(err, "2 envs", "CartPole-v1")
    err = error_of(capsys, "report", "outputs", "--output", "report.pdf", status=1)
    assert_names(err, "--output report.pdf", ".html, .md, .json")
    err = error_of(capsys, "report", "outputs", "--metrc", "x")
    assert_names(err, "report", "--metrc", "close matches: metric")


def test_the_env_within_its_wrappers_is_compared(capsys):
    for name, id in {"plain": "Hopper-v5", "wrapped": "Hopper-v5", "other": "Ant-v5"}.items():
        env = of_gymnasium(id)
        for wrapper in () if name == "plain" else ("RepeatAction", "ActionChunk"):
            env = {"class_path": f"lightning_rl.{wrapper}", "init_args": {"env": env}}
        make_run(f"{name}_20260101_000000", [1, 2, 3, 4], env=env)
    plain, wrapped, other = (
        f"outputs/{name}_20260101_000000" for name in ("plain", "wrapped", "other")
    )
    assert compare([plain, wrapped]).env == "Hopper-v5"
    assert_names(error_of(capsys, "report", wrapped, other, status=1), "Hopper-v5", "Ant-v5")


def test_a_run_that_cannot_be_read_is_left_out_and_the_report_says_why(capsys):
    make_run("good_20260101_000000", [1, 2, 3, 4])
    bad = make_run("bad_20260101_000000", [1, 2, 3, 4], seed=2) / "logs" / "metrics.csv"
    bad.write_text(bad.read_text().replace("2000,0.1,500.0,2", "2000,0.1,500.0,zero"))
    (make_run("none_20260101_000000", [], steps=[], seed=3) / "run.json").write_text(
        json.dumps({"outcome": "failed: RuntimeError: no", "earlier": []})
    )
    report("outputs", "--format", "md")
    out, err = capsys.readouterr()
    assert_names(err, "metrics.csv", "line 5", "'zero'", "eval/avg_reward", "RuntimeError: no")
    assert "## Left out" in out
    assert "1 run, scored by" in out


def test_films_lie_in_the_page_as_long_as_there_is_room(capsys):
    for i in (1, 2):
        videos = make_run(f"a_20260101_00000{i}", [1, 2, 3, i], seed=i) / "videos"
        videos.mkdir()
        (videos / "eval_4000.mp4").write_bytes(bytes([i]) * 2**19)
    report("outputs", "--output", "pages/report.html", "--films_mib", "0.6")
    report("outputs", "--format", "json", "--films_mib", "0.6")
    assert_names(capsys.readouterr().err, "--films_mib 0.6", "--format html")
    page = Path("pages/report.html").read_text()
    assert f"data:video/mp4;base64,{base64.b64encode(bytes([1]) * 2**19).decode()}" in page
    assert 'src="../outputs/a_20260101_000002/videos/eval_4000.mp4"' in page


def test_what_is_in_a_setting_does_not_end_up_as_html():
    make_run("a_20260101_000000", [1, 2, 3, 4], note="</script><b>")
    make_run("b_20260101_000000", [1, 2, 3, 4], note="plain")
    report("outputs")
    page = Path("report.html").read_text()
    assert "<b>" not in page
    assert page.count("</script>") == 2


def opened(page):
    """Open a page in Chromium; return the document as it is then, its messages and its requests."""
    log = page.with_suffix(".netlog")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    command += ["--enable-logging=stderr", f"--log-net-log={log.absolute()}"]
    command += [f"--user-data-dir={Path('profile').absolute()}", page.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # Those of the browser itself, for its own updates, have no page as their initiator.
    of_pages = (e for e in events if e.get("initiator", "not an origin") != "not an origin")
    urls = [event.get("url", "file:") for event in of_pages]
    return done.stdout, messages, [u for u in urls if not u.startswith(("file:", "data:"))]


@needs_chromium
def test_five_seeds_open_in_a_browser_without_an_error_or_a_request():
    make_seeds("a", count=4, steps=list(range(1000, 101_000, 1000)))
    stopped = [1000, 2000, 3000]
    make_run("a_20260101_000004", [1.0, 2.0, 3.0], seed=5, steps=stopped)
    make_seeds("b", gain=2.0, clip_coef=0.3, steps=list(range(1000, 101_000, 1000)))
    report("outputs")
    page = Path("report.html")
    assert page.stat().st_size < 5 * 2**20
    page.write_text(page.read_text().replace("</body>", LOOK))
    document, messages, requests = opened(page)
    assert messages == []
    assert requests == []
    tips = {name: re.search(f'data-{name}="([^"]*)"', document)[1] for name in ("steps", "seconds")}
    assert re.match(
        r"100,000 env stepsclip_coef 0\.3[\d,.]+ \[[\d,.]+, [\d,.]+\], 5 of 5 runs", tips["steps"]
    )
    assert tips["seconds"].startswith("3.33 minutesclip_coef 0.3")
    assert 'data-dashed="1"' in document  # where four runs of five go on
    # of the group that is left: its band, its two lines, and those of its five runs
    assert 'data-paths="8"' in document
    assert "<title>Return of an episode of CartPole-v1</title>" in document


@needs_chromium
def test_a_hundred_runs_of_fifty_settings_open_too():
    for i in range(100):
        make_run(f"a_20260101_{i:06d}", [1, 2, 3, i], seed=i % 2, clip_coef=0.1 + i // 2 / 1000)
    report("outputs")
    assert Path("report.html").stat().st_size < 5 * 2**20
    document, messages, requests = opened(Path("report.html"))
    assert (messages, requests) == ([], [])
    assert len(re.findall(r'class="key"', document)) == 50


def test_an_evaluation_scores_a_run_if_only_its_episodes_are_others(finished_run):
    made = finished_run("--config", "ppo.yaml", *SMALL_RUN, "--data.total_env_steps", "64")
    validate = ["validate", "--ckpt_path", str(made)]
    run([*validate, "--data.num_eval_episodes", "5", "--data.eval_seed", "7"])
    score = json.loads((made / "evaluation.json").read_text())["avg_reward"]
    scored = compare([made])
    assert (scored.groups[0].scores, scored.notes) == ([score], [])
    run([*validate, "--data.env.env_kwargs", "{sutton_barto_reward: true}"])
    trained = compare([made])
    assert trained.groups[0].scores == trained.groups[0].runs[0].metrics["eval/avg_reward"].tolist()
    assert_names(trained.notes[0], f"evaluation.json of {made}", "data.eval_env")
    assert_names(trained.scored_by, "training")


def test_one_run_that_rl_cli_made_is_reported_on(finished_run):
    made = finished_run("--config", "ppo.yaml", *SMALL_RUN, "--data.total_env_steps", "64")
    report(made, "--output", "one.json")
    data = json.loads(Path("one.json").read_text())
    (group,) = data["groups"]
    assert (data["env"], group["name"], group["interval"]) == ("CartPole-v1", "ppo", None)
    costs = group["costs"]
    assert costs["seconds"] > costs["evaluation_seconds"] > 0
    assert costs["cpu_seconds"] > 0
    assert costs["memory"] > 50 * 2**20
    assert group["curves"]["eval/avg_reward"]["seconds"][0] > 0
