"""Print which tests were skipped, by reason; fail for a reason that the table does not list.

pytest --junitxml one.xml; python tests/skips.py one.xml
"""

import re
import sys
from collections import Counter
from xml.etree import ElementTree

REASONS = {
    "envpool": "the extra envpool brings 14 packages that are not pinned: scripts/environments.py",
    "constraints-libero.txt": "LIBERO needs MuJoCo 3 and 350 MB of models: scripts/environments.py",
    "constraints-robots.txt": "robots need MuJoCo 3: scripts/environments.py",
    "constraints-ogbench.txt": "OGBench needs MuJoCo 3: scripts/environments.py",
    "there is a GPU": "asks what a machine without one is told",
    "this CPU cannot": "it does not flush denormal numbers",
    "the tests have another handler": "started by nohup, which ignores SIGHUP",
    "needs the extra ray": "no index of this machine has Ray; .ci/run has warned",
    "no Chromium is installed": "Debian's package needs root and a network; .ci/run has warned",
}
"""Parts of reasons for which a test may be skipped, and why it is not made to run."""


def skipped(path):
    """Yield the reason of each skipped test of a file that `pytest --junitxml` wrote."""
    for case in ElementTree.parse(path).iter("testcase"):
        for element in case.iter("skipped"):
            if element.get("type") != "pytest.xfail":
                yield re.sub(
                    r"^could not import '(\w+)'.*", r"could not import '\1'", element.get("message")
                )


def main(paths):
    counts = Counter(reason for path in paths for reason in skipped(path))
    unknown = 0
    print(f"Skipped: {sum(counts.values())} tests")
    for reason, count in counts.most_common():
        why = [text for part, text in REASONS.items() if part in reason]
        unknown += not why
        print(f"{count:4} {reason}: {why[0] if why else 'NOT IN THE TABLE of tests/skips.py'}")
    return int(unknown > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
