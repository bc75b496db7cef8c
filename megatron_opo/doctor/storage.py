"""Directories that a run writes to: can it, is there room, and do other machines see them?"""

import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_opo.doctor.findings import Finding, gib, judged
from megatron_opo.environment import CLOCK_SECONDS, FREE_GB
from megatron_opo.kernel_build import cache_home

LITTLE_ROOM = 10 * 2**30
# By which several machines see the same files.
SHARED = re.compile(
    r"nfs\d?|lustre|gpfs|beegfs|ceph|glusterfs|cifs|smb3|smbfs|9p|wekafs|panfs|pvfs2|orangefs|afs|"
    r"fuse\.(ceph|ceph-fuse|glusterfs|juicefs|sshfs|dfuse|lustre|gpfs|beegfs|wekafs|quobyte|s3fs|"
    r"gcsfuse|rclone|moosefs|mfs|lizardfs|cvmfs2)"
)
# What is written there ends with the container, or with the machine's power.
FLEETING = {"tmpfs": "in memory: a restart of the machine empties it", "ramfs": "in memory"}
CONTAINER = {"overlay", "aufs", "fuse.overlayfs", "fuse.fuse-overlayfs"}


@dataclass(frozen=True)
class Mount:
    """Example: Mount("/home", "nfs4")."""

    place: str
    kind: str

    @property
    def is_shared(self) -> bool:
        return SHARED.fullmatch(self.kind) is not None


def mount_of(path: Path, mountinfo: str | None = None) -> Mount | None:
    """The file system that an existing `path` is on; None where the system does not tell.

    Args:
        mountinfo: the text of /proc/self/mountinfo.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return None
    best: Mount | None = None
    for line in mountinfo.splitlines():
        mount, _, rest = line.partition(" - ")
        if len(mount.split()) < 5 or not rest:
            continue
        place = re.sub(r"\\(\d{3})", lambda m: chr(int(m.group(1), 8)), mount.split()[4])
        # A later mount at the same place hides the earlier one.
        is_above = path.is_relative_to(place)
        if is_above and (best is None or len(place) >= len(best.place)):
            best = Mount(place, rest.split()[0])
    return best


def existing(path: Path) -> Path:
    """The path, or the nearest one above it that is there."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # False, too, where it may not look
        path = path.parent
    return path


def check_storage(run_path: Path) -> list[Finding]:
    return [
        _directory("run directory", run_path, "give another run_dir="),
        _cache(),
        _directory("temporary files", Path(tempfile.gettempdir()), "name another one in TMPDIR"),
    ]


def _cache() -> Finding:
    """Only time is lost without it: each process then compiles for itself."""
    found = _directory("kernel cache", cache_home(), "name another directory in XDG_CACHE_HOME")
    return replace(found, status="note") if found.status == "problem" else found


def _directory(name: str, path: Path, elsewhere: str) -> Finding:
    here = existing(path)
    mount = mount_of(here.resolve())
    kind = mount.kind if mount else "a file system of unknown kind"
    try:
        usage = shutil.disk_usage(here)
        skew = _write_and_compare_clocks(here)
    except OSError as error:
        return Finding(
            name,
            f"{path} cannot be written: {error.strerror or error}",
            "problem",
            f"make it writable for you, or {elsewhere}",
        )
    found = f"{path}, {gib(usage.free)} free ({kind})"
    if usage.free < FREE_GB * 1e9:
        return Finding(name, found, "problem", f"make room, or {elsewhere}")
    if abs(skew) > CLOCK_SECONDS:
        return Finding(
            name,
            f"{found}; its server's clock is {skew:+.0f} s off this machine's",
            "note",
            "have both synchronised: files seem to come from another time",
        )
    if name != "run directory":
        return Finding(name, found)
    if mount and mount.kind in FLEETING:
        return Finding(name, found, "note", f"it is {FLEETING[mount.kind]}; {elsewhere} to keep it")
    if mount and mount.kind in CONTAINER:
        return Finding(
            name,
            found,
            "note",
            f"it is inside the container and goes with it: mount a directory, or {elsewhere}",
        )
    return judged(
        name,
        found,
        "note" if usage.free < LITTLE_ROOM else "ok",
        f"checkpoints of a model above 0.5 billion parameters need more: make room, or {elsewhere}",
    )


def _write_and_compare_clocks(directory: Path) -> float:
    """Seconds that the file system's clock is ahead. Raises OSError if nothing can be written."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".megatron_opo_") as file:
        before = time.time()
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
        return os.stat(file.name).st_mtime - before


def check_shared(run_path: Path, nodes: int) -> Finding:
    """Is the run directory on a file system that nodes share?

    Args:
        nodes: of this machine's Slurm cluster or job; 0 without one.
    """
    name, mount = "shared files", mount_of(existing(run_path).resolve())
    if mount is None:
        return Finding(name, "this system does not tell what the run directory is on")
    found = f"the run directory is on {mount.kind} ({mount.place}), "
    if mount.is_shared:
        return Finding(name, f"{found}which machines share")
    if nodes < 2:
        return Finding(name, f"{found}of this machine alone; that is enough for one machine")
    return Finding(
        name,
        f"{found}which looks like this machine's own",
        "note",
        "jobs of several nodes need run_dir, the model and this project on a file system that all "
        "of them see; `CHECK_ONLY=1 sbatch slurm/...` tries it",
    )
