"""The jobs of .ci/run: how their results are counted and kept."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from rank_programs import run_command

ROOT = Path(__file__).resolve().parents[3]
TABLE = re.compile(r"(?s)(cat <<'END'\n).*?(\nEND\n)")
JOBS = """\
three    commit  tests   echo '=== 3 passed, 1 skipped in 2.00s ==='
cases    commit  beside  echo '[doctest] test cases: 8 | 8 passed | 0 failed | 9 skipped'
check    commit  checks  true
none     night   tests   echo '=== 2 skipped in 2.00s ==='
tool     night   tests   need no-such-tool && true
broken   night   checks  echo '=== 1 failed, 2 passed, 1 error in 2.00s ==='; false"""


def run(root: Path, *words: str) -> tuple[int, list[str]]:
    """The status and the lines of .ci/run, of another table."""
    script = root / ".ci" / "run"
    if not script.exists():
        script.parent.mkdir()
        text = (ROOT / ".ci" / "run").read_text()
        script.write_text(TABLE.sub(lambda found: found[1] + JOBS + found[2], text, count=1))
        subprocess.run(["git", "init", "-q"], cwd=root, check=True)
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        commit = ["git", *who, "commit", "-q", "--allow-empty", "-m", "one"]
        subprocess.run(commit, cwd=root, check=True)
    env = {"PYTHON": "python3"}
    done = run_command("bash", script, *words, env=env, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout.splitlines()


def test_what_has_passed_is_counted_and_kept(tmp_path: Path) -> None:
    status, lines = run(tmp_path)
    assert (status, lines[-1]) == (0, "14 passed, 0 failed")  # 3 tests, 8 cases, 3 jobs
    kept = "none\tpassed\t2026-01-02\tabc\t7\t3\t0\ta CPU\n"  # the record that is committed
    (tmp_path / ".ci" / "passes.tsv").write_text(kept)
    _, listed = run(tmp_path, "--list")
    commit = subprocess.check_output(
        ["git", "describe", "--always", "--dirty"], cwd=tmp_path, text=True
    ).strip()
    last = {line.split()[0]: line.split()[2:4] for line in listed}
    assert {name: words[-1] for name, words in last.items()} == {
        **dict.fromkeys(("three", "cases", "check"), commit),
        "none": "abc",
        **dict.fromkeys(("tool", "broken"), "never"),
    }


def test_what_has_run_no_test_or_lacks_a_tool_fails(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "night", "check")
    assert (status, lines[-1]) == (1, "3 passed, 5 failed")
    assert "none: no test has run" in lines
    assert "no-such-tool is not on PATH: apt-get install no-such-tool" in lines
    assert run(tmp_path, "nothing")[0] == 2
    _, listed = run(tmp_path, "--list")
    failed = [line.split()[0] for line in listed if line.endswith("(failed since)")]
    assert failed == ["none", "tool", "broken"]
