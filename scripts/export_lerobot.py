"""Export a directory of LeRobot, such as a SmolVLA, as ONNX graphs, without a run of ours.

python scripts/export_lerobot.py DIR --path smolvla.graphs --dtype float16
"""

import json
from pathlib import Path
from typing import get_args

from lightning_rl import LeRobotPolicy
from lightning_rl.extensions.export.formats import export_policy
from lightning_rl.extensions.export.graph import ports_of
from lightning_rl.extensions.export.metadata import versions
from lightning_rl.extensions.export.parity import Dtype
from scripting import parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("directory", help="what LeRobot's save_pretrained wrote")
    parser.add_argument("--path", type=Path, required=True, help="new directory; a file for an ACT")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    args = parser.parse_args()
    policy = LeRobotPolicy(path=args.directory)
    metadata = {"policy": policy.directory.kind, "versions": versions()}
    done = export_policy(
        policy, ports_of(policy), "onnx", args.path, metadata, {}, lambda _: policy, args.dtype
    )
    print(json.dumps(done.report, indent=2))


if __name__ == "__main__":
    main()
