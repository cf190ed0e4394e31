"""What `rl-cli export` writes acts as the policy does: in ONNX without torch, in torch alone, as weights."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import lightning_rl as rl
from lightning_rl.cli.app import run
from lightning_rl.deploy.acting import TrainedPolicy
from lightning_rl.extensions.export.formats import export_policy
from lightning_rl.extensions.export.graph import ActingGraph, is_in_graphs, ports_of
from lightning_rl.extensions.export.metadata import metadata_of
from lightning_rl.extensions.export.parity import drawn, port_array
from tests.envs import ScriptedEnv
from tests.helpers import assert_same, error_of, last, train
from tests.messages import assert_names, refused
from tests.variants import after, variant

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
pytest.importorskip("onnx", reason="the extra `export` is not installed")
pytest.importorskip("onnxscript", reason="the extra `export` is not installed")

BUDGET = {"total_env_steps": 64, "num_eval_episodes": 2}

NUMBERS = spaces.Box(-np.inf, np.inf, (6,), np.float64)
BOX = spaces.Box(np.float32([-2, -1, 0]), np.float32([5, 1, 0.3]))
MASKED = spaces.Dict({"joints": NUMBERS, "action_mask": spaces.MultiBinary(4)})
PRIVILEGED = spaces.Dict({**MASKED.spaces, "secret": NUMBERS})
PICTURE = spaces.Box(0, 255, (36, 36, 3), np.uint8)
CHUNKS = spaces.Box(-1, 1, (4, 3))
SEEN = spaces.Dict({"rgb": PICTURE, "joints": NUMBERS, "goal": spaces.Discrete(4)})
STRUCTURE = spaces.Dict(
    {"action": BOX, "rest": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(2)])}
)

SMALL = partial(rl.NatureCNN, size=8, channels=(4, 4, 4), resize=(40, 40), normalize=True)
PLAIN = (["observation"], ["action"])
MASK = (["observation.action_mask", "observation.joints"], ["action"])
STATE = (["observation", "state"], ["action", "next_state"])
POLICIES = {
    "normalised choices, masked; a privileged critic": (
        lambda: rl.ActorCritic(
            PRIVILEGED,
            spaces.Discrete(4, start=2),
            normalize_observation=True,
            actor_keys=["joints"],
            critic_keys=["secret"],
        ),
        MASK,
    ),
    "parts": (
        lambda: rl.ActorCritic(NUMBERS, STRUCTURE),
        (["observation"], ["action.action", "action.rest.0", "action.rest.1"]),
    ),
    "LSTM, noise, chunks": (
        lambda: rl.ActorCritic(
            NUMBERS,
            CHUNKS,
            memory=partial(rl.LSTM, size=8),
            noise_correlation=0.9,
            log_std="state_dependent",
        ),
        STATE,
    ),
    "SAC, residual, noise, GRU": (
        lambda: rl.SquashedActorCritic(
            NUMBERS,
            BOX,
            (16, 16),
            network="residual",
            actor_normalization="rms",
            noise_correlation=0.5,
            memory=partial(rl.GRU, size=8),
        ),
        STATE,
    ),
    "noise alone is no state; TD3": (
        lambda: rl.DeterministicActorCritic(NUMBERS, BOX, noise_correlation=0.5),
        PLAIN,
    ),
    "discrete SAC": (lambda: rl.DiscreteActorCritic(MASKED, spaces.Discrete(4)), MASK),
    "a Q network": (lambda: rl.QPolicy(MASKED, spaces.Discrete(4), dueling=True), MASK),
    "a gripper": (lambda: rl.GripperActorCritic(NUMBERS, BOX), PLAIN),
    "pictures, choices and numbers": (
        lambda: rl.ActorCritic(SEEN, BOX, encoder=partial(rl.DictEncoder, encoders={"rgb": SMALL})),
        (["observation.goal", "observation.joints", "observation.rgb"], ["action"]),
    ),
    "points in pictures": (
        lambda: rl.SquashedActorCritic(
            PICTURE, BOX, encoder=partial(rl.SpatialSoftmaxCNN, points=4)
        ),
        PLAIN,
    ),
    "in a wrapper": (lambda: rl.SlowPolicy(NUMBERS, BOX, rl.ActorOnly, delay_ms=0.0), PLAIN),
    "a correction of another": (
        lambda: rl.ResidualActorCritic(NUMBERS, BOX, base=rl.ActorCritic),
        PLAIN,
    ),
}
"""What makes a policy, and the names of the inputs and outputs of its graph."""


def made(name):
    torch.manual_seed(0)
    make, names = POLICIES[name]
    policy = make().eval()
    for parameter in policy.parameters():
        parameter.data.mul_(3.0)  # so that some actions are clipped
    return policy, names


def exported(policy, kind, path):
    metadata = {"policy": type(policy).__name__, "versions": {}}
    return export_policy(policy, ports_of(policy), kind, path, metadata, {}, None)


OF_TORCH_ALONE = ("TD3", "discrete SAC", "a Q network", "a gripper", "in a wrapper", "of another")
"""Whose operations others have too: the graph is the same, and what torch writes of it takes a second each."""


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_acts_as_in_torch(name, tmp_path):
    policy, (inputs, outputs) = made(name)
    if name.endswith(OF_TORCH_ALONE):
        files, report = exported(policy, "torch", tmp_path / "policy.pt2")
        program = torch.export.load(files[0]).module()
        example = {port.name: port_array(port, 3) for port in ports_of(policy).inputs}
        given = {key: torch.as_tensor(np.ones_like(one)) for key, one in example.items()}
        assert list(given) == inputs
        assert list(program(given)) == outputs
    else:
        files, report = exported(policy, "onnx", tmp_path / "policy.onnx")
        session = onnxruntime.InferenceSession(files[0])
        assert [one.name for one in session.get_inputs()] == inputs
        assert [one.name for one in session.get_outputs()] == outputs
        assert {one.shape[0] for one in session.get_inputs()} == {"batch"}
    assert report == json.loads(files[-1].read_text())
    assert (report["observations"], report["passed"]) == (1000, True)
    assert list(report["actions"]) == [one for one in outputs if one != "next_state"]
    for part in report["actions"].values():
        # A memory hands rounding on.
        assert part.get("largest_difference", 0.0) <= (5e-5 if "state" in inputs else 1e-5)
        assert "largest_difference" in part or part["equal"] >= 0.999


def test_a_part_may_be_called_action():
    policy, (_, outputs) = made("parts")
    graph = ActingGraph(policy, ports_of(policy))
    assert list(graph(graph.examples())) == [port.name for port in graph.ports.outputs] == outputs


def test_a_program_of_torch_acts_bit_for_bit_and_holds_no_critic(tmp_path):
    policy, _ = made("normalised choices, masked; a privileged critic")
    files, report = exported(policy, "torch", tmp_path / "policy.pt2")
    assert report["actions"]["action"]["equal"] == 1.0
    program = torch.export.load(files[0])
    assert not [name for name in program.state_dict if "critic" in name]
    seen = {"joints": torch.randn(3, 6), "action_mask": torch.ones(3, 4, dtype=torch.int8)}
    inputs = {f"observation.{key}": value for key, value in seen.items()}
    (action,) = program.module()(inputs).values()
    assert_same(action, TrainedPolicy(policy).act({**seen, "secret": torch.zeros(3, 6)}))
    assert policy.critic is not None, "the policy itself keeps its own"


ALONE = """
import json, sys

for name in ("torch", "lightning_rl", "tensordict", "gymnasium", "onnx", "onnxscript"):
    sys.modules[name] = None  # to import it is an error

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
inputs = dict(np.load(sys.argv[2]))
meta = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
state = meta["state"]
actions = []
feed = {}
if state:
    feed[state["input"]] = np.zeros((len(inputs["steps"][0]), *state["shape"]), np.float32)
for observation in inputs["steps"]:
    feed[meta["observations"][0]["name"]] = observation.astype(meta["observations"][0]["dtype"])
    outputs = dict(zip([o.name for o in session.get_outputs()], session.run(None, feed)))
    actions.append(outputs["action"])
    if state:
        feed[state["input"]] = outputs[state["output"]]
np.save(sys.argv[3], np.stack(actions))
"""


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {"policy": {"memory": partial(rl.GRU, size=8)}}),
        ("InvertedPendulum-v5", {"policy": {"normalize_observation": True}}),
    ],
)
def test_without_torch_it_does_what_validate_does(env, settings, tmp_path):
    """By what stands in the file alone: names, dtypes, and what is handed on."""
    if env != "CartPole-v1":
        pytest.importorskip("mujoco")
    module, _, _ = train(tmp_path, env=env, data=BUDGET, **settings)
    run(["export", "--ckpt_path", str(last(tmp_path))])
    policy = rl.load_policy(last(tmp_path))
    assert_same(policy.module.state_dict(), module.policy.state_dict())
    made = gymnasium.make_vec(env, num_envs=3, vectorization_mode="sync")
    observation, _ = made.reset(seed=5)
    steps, actions = [], []
    for _ in range(15):
        steps.append(observation)
        actions.append(policy.act(observation))
        observation, *_ = made.step(actions[-1])
    np.savez(tmp_path / "seen.npz", steps=np.stack(steps))
    (tmp_path / "alone.py").write_text(ALONE)
    words = ["alone.py", tmp_path / "export" / "last.onnx", "seen.npz", "done.npy"]
    command = [sys.executable, "-I", *words]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    theirs, ours = np.load(tmp_path / "done.npy"), np.stack(actions)
    assert theirs.shape == ours.shape
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5)


def arm():
    return ScriptedEnv(
        NUMBERS,
        BOX,
        observe=lambda env: env.np_random.normal(size=6),
        reward=1.0,
        terminated=lambda env: env.age == 5,
        metadata={
            "control_period": 0.05,
            "joint_names": ["hip", "knee", "ankle"],
            "joint_stiffness": np.array([80.0, 80.0, 20.0]),
            "joint_damping": (2.0, 2.0, np.inf),
        },
    )


gymnasium.register("tests/Jointed-v0", arm)


@pytest.fixture(scope="module")
def arm_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("arm_run")
    policy = {"normalize_observation": True, "log_std_bounds": (-np.inf, 2.0)}
    train(run_dir, env="tests/Jointed-v0", data=BUDGET, policy=policy)
    return run_dir


def test_metadata_lie_in_the_onnx_file(arm_run, capsys):
    path = str(last(arm_run))
    run(["validate", "--ckpt_path", path, "--trust_code", "true"])
    capsys.readouterr()
    run(["export", "--ckpt_path", path, "--trust_code", "true"])
    out = capsys.readouterr().out
    file = arm_run / "export" / "last.onnx"
    assert out.startswith(f"Policy:  {file}\nAlso:    {file}.parity.json\n")
    assert "Parity:  1,000 observations, action: largest difference " in out
    session = onnxruntime.InferenceSession(file)
    said = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
    assert (said["policy"], said["algorithm"]) == ("ActorCritic", "PPO")
    assert said["env"] == "tests.equivalence.test_export:tests/Jointed-v0"
    assert said["observations"] == [
        {"name": "observation", "shape": [6], "dtype": "float32", "low": None, "high": None}
    ]
    (action,) = said["actions"]
    assert (action["name"], action["shape"], action["dtype"]) == ("action", [3], "float32")
    for name, numbers in {"low": [-2, -1, 0], "high": [5, 1, 0.3], "scale": [3.5, 1, 0.15]}.items():
        assert action[name] == pytest.approx(numbers)
    assert action["center"] == pytest.approx([1.5, 0, 0.15])
    assert (said["control_period"], said["state"]) == (0.05, None)
    assert said["joint_names"] == ["hip", "knee", "ankle"]
    assert (said["joint_stiffness"], said["joint_damping"]) == ([80, 80, 20], [2, 2, None])
    assert said["run"]["env_steps"] == 64
    assert (said["run"]["checkpoint"], said["run"]["seed"]) == ("last.ckpt", 3)
    assert (said["evaluation"]["episodes"], said["evaluation"]["avg_reward"]) == (2, 5.0)
    assert said["evaluation"]["protocol"]["num_eval_episodes"] == 2
    assert {"torch", "onnxruntime", "lightning-rl", "python"} <= set(said["versions"])


CONTENT = {"lightning_rl": {"env_steps": 3}, "state_dict": {"policy.version": torch.tensor(1)}}


def test_damaged_files_of_a_run_are_told_and_left_out(tmp_path):
    env = rl.PushCube(2)
    policy = rl.ActorCritic(env.single_observation_space, env.single_action_space)
    (tmp_path / "run.json").write_text('{"seed": 1')
    os.mkfifo(tmp_path / "evaluation.json")
    with refused(UserWarning, names=("run.json", "exported")) as seen:
        said = metadata_of(policy, ports_of(policy), tmp_path / "x.ckpt", CONTENT, {}, None)
    files = [Path(str(warning.message).split()[0]).name for warning in seen]
    assert files[:2] == ["run.json", "evaluation.json"]
    assert (said["run"]["seed"], said["evaluation"]) == (None, None)


def test_weights_are_read_again_by_load_policy(arm_run, tmp_path, capsys):
    path = tmp_path / "walker.safetensors"
    (arm_run / "evaluation.json").unlink(missing_ok=True)
    run(["export", "--ckpt_path", str(last(arm_run)), "--format", "safetensors", f"--path={path}"])
    out = capsys.readouterr().out
    env = "'tests.equivalence.test_export:tests/Jointed-v0'"
    assert_names(out, last(arm_run), env, "data.env", "--trust_code true")
    said = json.loads(Path(f"{path}.json").read_text())
    assert said["control_period"] is None
    assert said["evaluation"]["avg_reward"] == 5.0, "as it was while it was trained"
    report = json.loads(Path(f"{path}.parity.json").read_text())
    assert report["actions"]["action"]["equal"] == 1.0
    again, first = rl.load_policy(path), rl.load_policy(arm_run)
    assert_same(again.module.state_dict(), first.module.state_dict())
    assert again.action_space == first.action_space
    assert again.module.observation_space == first.module.observation_space
    Path(f"{path}.json").unlink()
    with refused(names=(f"{path}.json", "walker.safetensors", "FileNotFoundError")):
        rl.load_policy(path)


def test_exported_weights_are_data(arm_run, tmp_path):
    """Of a JSON that names code of others nothing is imported."""
    path = tmp_path / "walker.safetensors"
    run(["export", "--ckpt_path", str(last(arm_run)), "--format", "safetensors", f"--path={path}"])
    beside = Path(f"{path}.json")
    said = json.loads(beside.read_text())
    said["construction"]["config"]["model"]["init_args"]["policy"]["class_path"] = "os.system"
    beside.write_text(json.dumps(said))
    with refused(names=("os.system", "model.init_args.policy")):
        rl.load_policy(path)
    path.write_bytes(b"nothing")
    with refused(names=path):
        rl.load_policy(path)


def test_observations_of_the_comparison_lie_where_the_normaliser_has_seen_them():
    """Bits and a mask before them have moments, too."""
    seen = spaces.Dict({**MASKED.spaces, "bits": spaces.MultiBinary(3)})
    policy = rl.ActorCritic(
        seen, spaces.Discrete(4), normalize_observation=True, actor_keys=list(seen)
    )
    means = torch.linspace(-300.0, 300.0, 6)
    policy.normalizer.mean[-6:] = means
    joints = drawn(policy, 1000, np.random.default_rng(0))["joints"]
    np.testing.assert_allclose(joints.mean(0), means, atol=0.5)


def test_what_cannot_be_exported_is_refused(arm_run, capsys):
    export = ["export", "--ckpt_path", last(arm_run)]
    error = error_of(capsys, "export", "--fromat", "onnx")
    assert_names(error, "--fromat", "close matches: format")
    assert "onnx" in error_of(capsys, *export, "--format", "onxx")
    error = error_of(capsys, *export, "--path", "policy.pt")
    assert_names(error, "--path policy.pt", ".onnx", "--format onnx")
    assert "ckpt_path" in error_of(capsys, "export")


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("onnxruntime.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with refused(names=("pip install -e '.[export]'", "onnxruntime")):
        exported(made("a gripper")[0], "onnx", tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_a_policy_of_a_run_in_bfloat16_is_a_graph_in_float32(tmp_path):
    policy, _ = made("a gripper")
    policy.set_precision("bf16-mixed")
    report = exported(policy, "torch", tmp_path / "policy.pt2").report
    assert (report["computed_in"], report["passed"]) == ("float32", True)
    assert report["actions"]["action"]["equal"] == 1.0
    assert policy.autocast_dtype is torch.bfloat16, "the policy itself is left as it is"


def act_in_another_way_traced(policy, result, *args, **kwargs):
    if torch.compiler.is_exporting():
        result["action"] = result["action"] + 1e-3


ODD = after(rl.ActorCritic, "Odd", forward=act_in_another_way_traced)


def test_an_export_that_acts_otherwise_is_refused_by_how_much_and_leaves_nothing(tmp_path):
    path = tmp_path / "policy.pt2"
    with refused(names=(path, "1,000 observations", "action by 0.0001", "1e-05")):
        exported(ODD(NUMBERS, spaces.Box(-10, 10, (3,))), "torch", path)
    assert list(tmp_path.iterdir()) == []


VLA = spaces.Dict({"rgb": PICTURE, "proprio": spaces.Box(-1, 1, (3,), np.float32)})
CHUNK = spaces.Box(-1, 1, (2, 3), np.float32)


def without_its_model(backbone):
    """It takes seconds to make."""
    rl.Backbone.__init__(backbone)
    backbone.model, backbone.slot_size, backbone.summary_size = torch.nn.Identity(), 4, 4


def test_a_large_model_that_cannot_be_traced_says_so(tmp_path):
    large = variant(rl.TransformersBackbone, "Large", __init__=without_its_model)()
    policy = rl.VLAPolicy(VLA, CHUNK, large, head="gaussian")
    assert is_in_graphs(policy)
    with refused(names=("VLAPolicy", "torch.export", "--format safetensors", "load_policy")):
        exported(policy, "onnx", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def a_flow(*spaces):
    return rl.VLAPolicy(*spaces, rl.PerceptronBackbone((8,), 4), head="flow")


@pytest.mark.parametrize(("kind", "steered"), [("onnx", False), ("torch", True)])
def test_a_flow_is_one_graph_from_its_fixed_noise_or_from_the_noise_that_steers_it(
    kind, steered, tmp_path
):
    space = spaces.Dict({"proprio": spaces.Box(-1, 1, (3,), np.float32)})
    policy = rl.NoisePolicy(space, CHUNK, base=a_flow) if steered else a_flow(space, CHUNK)
    _, report = exported(policy, kind, tmp_path / "policy")
    assert report["passed"]
