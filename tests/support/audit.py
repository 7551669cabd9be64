"""``make audit``: known vulnerabilities of what the locks pin, by pip-audit; says plainly what could not be looked up.

Exit status 1 when there are some. A service that cannot be reached, or knows none of the packages, is a visible skip:
pip-audit itself calls both success.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "compose" / "deploy" / "locks"
PIP_AUDIT = ROOT / ".tools" / "bin" / "pip-audit"


def pinned() -> str:
    """Every pinned package once, as requirements; PyTorch's CPU build as the release that it is."""
    found: dict[str, str] = {}
    for lock in sorted(LOCKS.glob("*.txt")):
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock.read_text(), re.MULTILINE):
            found[name.lower()] = version.partition("+")[0]
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


def verdict(report: dict[str, Any]) -> tuple[int, list[str]]:
    """Exit status and lines to print, from pip-audit's JSON."""
    packages = report["dependencies"]
    looked_up = [package for package in packages if "skip_reason" not in package]
    if not looked_up:
        return 0, [f"audit: SKIPPED: the advisory service knows none of the {len(packages)} packages (not reachable?)"]
    lines = [f"audit: not looked up: {package['name']}" for package in packages if "skip_reason" in package]
    bad = [(package, known) for package in looked_up for known in package.get("vulns", [])]
    for package, known in bad:
        fixed = ", ".join(known.get("fix_versions", [])) or "no release"
        lines.append(f"audit: {package['name']} {package['version']}: {known['id']}, mended in {fixed}")
    lines.append(f"audit: {len(looked_up)} packages looked up, {len(bad)} known vulnerabilities")
    return (1 if bad else 0), lines


def main() -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pinned())
        file.flush()
        command = [
            str(PIP_AUDIT),
            "--disable-pip",
            "--no-deps",
            "--progress-spinner=off",
            "-f",
            "json",
            "-r",
            file.name,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"audit: SKIPPED: the advisory service cannot be reached: {reason[:300]}")
        return 0
    status, lines = verdict(report)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
