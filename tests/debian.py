"""Debian packages that some tests need and may install: seconds, once a machine."""

import os
import shutil
import subprocess
from collections.abc import Sequence

APT_TIMEOUT_S = 120


def install(packages: Sequence[str]) -> str | None:
    """Install them by apt-get, which needs root; what went wrong, or None."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get to install it"
    # Two test processes may both get here.
    apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120"]
    update = [*apt, "update"]
    add = [*apt, "install", "--no-install-recommends", *packages]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (update, add):
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=APT_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"{' '.join(command)} took more than {APT_TIMEOUT_S} s"
    if done.returncode != 0:  # of the update, a failure may concern another archive only
        return f"apt-get: {(done.stderr.splitlines() or ['failed'])[-1]}"
    return None
