"""Known vulnerabilities of what the locks pin, from pip-audit; `make audit` calls it.

Ends with 1 where there are any. If no vulnerability service can be reached, it reports this and
exits with 0: a build behind a package mirror must not fail for it, nor look as if it had been
audited.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("pypi", "osv")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Audit:
    """The advisories of a service for one lock. ``unknown`` packages were not looked at."""

    lock: str
    checked: int
    unknown: int
    found: tuple[str, ...]


def read_report(lock: str, report: dict[str, Any]) -> Audit:
    """From the JSON that pip-audit writes."""
    packages = report["dependencies"]
    checked = [package for package in packages if "vulns" in package]
    found = tuple(
        f"{package['name']} {package['version']}: {vulnerability['id']}"
        + (f", fixed in {', '.join(fixes)}" if (fixes := vulnerability["fix_versions"]) else "")
        for package in checked
        for vulnerability in package["vulns"]
    )
    return Audit(lock, len(checked), len(packages) - len(checked), found)


def audit(lock: Path, service: str) -> Audit | None:
    """``None`` where the service cannot be reached."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format=json"]
    command += ["--progress-spinner=off", f"--vulnerability-service={service}", "-r", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    try:
        read = read_report(lock.name, json.loads(done.stdout))
    except ValueError:
        return None
    # A mirror without the service's data answers that it knows no package.
    return read if read.checked else None


def verdict(audits: Sequence[Audit | None]) -> tuple[int, list[str]]:
    """The exit code, and what to say."""
    lines, code = [], 0
    for one in audits:
        if one is None:
            continue
        unknown = f", {one.unknown} unknown to the service" if one.unknown else ""
        lines.append(f"audit: {one.lock}: {one.checked} packages checked{unknown}")
        lines += [f"audit: {one.lock}: VULNERABLE {found}" for found in one.found]
        code |= bool(one.found)
    if None in audits:
        lines.append(
            "audit: NOT AUDITED: no vulnerability service can be reached from here "
            f"({' or '.join(SERVICES)}); run `make audit` where one can"
        )
    return int(code), lines


def main(locks: Sequence[Path]) -> int:
    audits = []
    for lock in locks:
        found = (audit(lock, service) for service in SERVICES)
        audits.append(next((one for one in found if one is not None), None))
    code, lines = verdict(audits)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main([ROOT / name for name in sys.argv[1:]]))
