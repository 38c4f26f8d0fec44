"""Each rule's tests can fail: twenty-five mistakes of one line, each noticed by the tests of its rule.

A copy of the package gets the mistake; the tests named after the rule run against the copy and must fail.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MUTATIONS = {
    1: ("pushes.py", "if known is not None and known.number > after:", "if known is not None:"),
    2: ("stream.py", "        if not self._types:\n", "        if True:\n"),
    3: ("sotw.py", "if self._snapshot is None or subscription.names or", "if self._snapshot is None or"),
    4: (
        "sotw.py",
        'return "nack" if request.HasField("error_detail") else "ack"',
        'return "nack" if request.version_info != subscription.in_flight.version else "ack"',
    ),
    5: ("delta.py", "if name in forced or stale[name] != resource.version:", "if name in forced or stale:"),
    6: (
        "subscription.py",
        "self.names, self.wildcard = names, wildcard",
        "self.names, self.wildcard = self.names | names, wildcard",
    ),
    7: ("sotw.py", "return nonce == str(subscription.last_number)", "return bool(nonce)"),
    8: ("subscription.py", "        self.forced |= new\n", ""),
    9: ("sotw.py", "legacy = not subscription.named and", "legacy = not asked and"),
    10: (
        "types.py",
        "COMPLETE_STATE: Final = frozenset({LISTENER, CLUSTER})",
        "COMPLETE_STATE: Final = frozenset({LISTENER})",
    ),
    11: (
        "delta.py",
        "return tuple({resource.name: resource for resource in resources}.values())",
        "return tuple(resources)",
    ),
    12: (
        "subscription.py",
        "wanted = changed & self.names\n",
        "wanted = changed & self.names & old.of_type(self.type_url).keys()\n",
    ),
    13: ("subscription.py", "            self.forced.update(asked if", "            set().update(asked if"),
    14: ("subscription.py", "                self.forced.add(resource)\n", "                pass\n"),
    15: ("subscription.py", "        if held:\n", "        if not held:\n"),
    16: (
        "delta.py",
        "if request.response_nonce != subscription.in_flight.nonce:",
        "if request.response_nonce < subscription.last_number.__str__()[:0]:",
    ),
    17: ("snapshot.py", "return self.aliases(type_url).get(name, name)", "return name"),
    18: ("stream.py", "        if not names:\n            return\n", "        if names:\n            return\n"),
    19: ("types.py", "REMOVED_LAST: Final = (CLUSTER, ENDPOINT)", "REMOVED_LAST: Final = (ENDPOINT,)"),
    20: ("stream.py", "            heartbeat=True,\n", "            heartbeat=False,\n"),
    21: ("stream.py", "        if not type_url:\n", "        if type_url is None:\n"),
    22: ("sotw.py", "        if subscription.fresh:\n", "        if True:\n"),
    23: ("warming.py", 'in (None, "ads", "self")', 'in (None, "ads", "self", "path_config_source")'),
    24: (
        "store.py",
        "changes.append(Change(group, after.snapshot, changed, after.faults))",
        "changes.append(Change(group, after.given, changed, after.faults))",
    ),
    25: ("sotw.py", "or version != subscription.sent_version", "or bool(resources)"),
}


@pytest.fixture(scope="module")
def copy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and the tests; what is not mutated is linked."""
    folder = tmp_path_factory.mktemp("mutated")
    for name in ("tests", "modalmesh", "pyproject.toml"):
        (folder / name).symlink_to(root / name)
    (folder / "xds").mkdir()
    for path in (root / "xds").iterdir():
        if path.suffix == ".py":
            shutil.copy(path, folder / "xds" / path.name)
        elif path.name == "pb":
            (folder / "xds" / "pb").symlink_to(path)
    return folder


def run(folder: Path, rule: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header"]
    files = [f"tests/protocol/test_rules_{variant}.py" for variant in ("delta", "sotw")]
    return subprocess.run(
        [*command, *files, "-k", f"test_x{rule:02d}_"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("rule", MUTATIONS, ids=[f"x{rule:02d}" for rule in MUTATIONS])
def test_a_mistake_is_noticed_by_the_tests_of_its_rule(rule: int, copy: Path) -> None:
    file, right, wrong = MUTATIONS[rule]
    path = copy / "xds" / file
    text = path.read_text()
    assert text.count(right) == 1, f"{right!r} stands in {file} {text.count(right)} times"
    path.write_text(text.replace(right, wrong))
    try:
        result = run(copy, rule)
    finally:
        path.write_text(text)
    # 1: tests ran, and one failed. Anything else is a mistake of this test.
    assert result.returncode == 1, result.stdout + result.stderr
    assert "ImportError" not in result.stdout


def test_without_a_mistake_all_pass(copy: Path) -> None:
    for rule in (1, 25):
        result = run(copy, rule)
        assert result.returncode == 0, result.stdout + result.stderr
