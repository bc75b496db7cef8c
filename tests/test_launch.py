"""Ranks as small scripts: who is blamed, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_opo.errors import LogError
from megatron_opo.launch import EXIT_CONSEQUENCE, all_seats, run_ranks

ROOT = Path(__file__).parents[1]
LAUNCH = """
import sys
from pathlib import Path
from megatron_opo.launch import all_seats, run_ranks
sys.exit(run_ranks([sys.executable, "rank.py"], all_seats(2), Path("logs")))
"""
# What rank 0 does is its first argument, what rank 1 does its second.
ROLES = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
Path(f"pid_{rank}").write_text(str(os.getpid()))
exec(sys.argv[1 + rank])
"""


def run(tmp_path: Path, zero: str, one: str) -> int:
    return run_ranks([sys.executable, "-c", ROLES, zero, one], all_seats(2), tmp_path)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_all_succeed(tmp_path, capfd):
    assert run(tmp_path, "print('rank 0 here')", "print('rank 1 here')") == 0
    assert capfd.readouterr() == ("rank 0 here\n", "")
    assert (tmp_path / "rank_1.log").read_text() == "rank 1 here\n"


def test_a_killed_rank_is_named_although_rank_0_fails_of_it(tmp_path, capfd):
    one = "print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    assert run(tmp_path, f"time.sleep(1); sys.exit({EXIT_CONSEQUENCE})", one) == 128 + 9
    shown = capfd.readouterr().err
    assert "error: rank 1 was killed by signal 9 (Killed)" in shown
    assert "ran out of memory" in shown
    assert "last words" in shown


SHARES = """
import torch
shared = torch.UntypedStorage._new_using_filename_cpu(1000)
Path("shared").write_text(shared._share_filename_cpu_()[1].decode())
os.killpg(0, signal.SIGKILL)
"""


def test_a_killed_rank_0_is_named_and_leaves_no_shared_memory(tmp_path, capfd):
    assert run(tmp_path, SHARES, "time.sleep(1)") == 128 + 9
    assert "error: rank 0 was killed by signal 9" in capfd.readouterr().err
    name = (tmp_path / "shared").read_text().strip("/")
    assert name.startswith(f"torch_{(tmp_path / 'pid_0').read_text()}_")
    assert not Path("/dev/shm", name).exists()


def test_a_rank_that_fails_first_is_named_with_its_log(tmp_path, capfd):
    zero = "time.sleep(1); sys.exit(1)"
    assert run(tmp_path, zero, "print('no such head'); sys.exit(1)") == 1
    assert "rank 1 failed with exit code 1; the end of" in (shown := capfd.readouterr().err)
    assert "no such head" in shown


def test_rank_0_speaks_for_a_mistake_that_all_found(tmp_path, capfd):
    assert run(tmp_path, "time.sleep(0.5); sys.exit(2)", "sys.exit(2)") == 2
    assert capfd.readouterr().err == ""


def test_rank_0_may_close_what_it_owns_after_the_others_ended(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("megatron_opo.launch.NOTICE_SECONDS", 0.1)
    zero = "time.sleep(2); print('error: told', file=sys.stderr); sys.exit(2)"
    assert run(tmp_path, zero, f"sys.exit({EXIT_CONSEQUENCE})") == 2
    assert capfd.readouterr().err == "error: told\n"


def test_a_rank_that_notices_nothing_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_opo.launch.NOTICE_SECONDS", 0.1)
    start = time.monotonic()
    assert run(tmp_path, "time.sleep(60)", "sys.exit(1)") == 1
    assert time.monotonic() - start < 20


def test_a_log_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="give a run_dir in which you may create files"):
        run_ranks([sys.executable, "-c", ""], all_seats(2), tmp_path / "file" / "logs")


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_a_signal_to_the_launcher_ends_all_ranks(tmp_path, signum, code):
    """Rank 0 is interrupted, so that it closes what it owns; it tells the others."""
    (tmp_path / "rank.py").write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "rank = os.environ['RANK']\n"
        "Path(f'pid_{rank}').write_text(str(os.getpid()))\n"
        "try:\n"
        "    while not Path('closed').exists(): time.sleep(0.05)\n"
        "except KeyboardInterrupt:\n"
        "    Path('closed').write_text(rank)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        # Tests that run in the background inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pid_files = [tmp_path / "pid_0", tmp_path / "pid_1"]
    deadline = time.monotonic() + 60
    while not all(p.exists() and p.read_text() for p in pid_files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    launcher.send_signal(signum)
    assert launcher.wait(30) == code
    ranks = [int(p.read_text()) for p in pid_files]
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "closed").exists() == (signum != signal.SIGKILL)


def test_a_second_signal_ends_ranks_that_take_their_time(tmp_path):
    (tmp_path / "rank.py").write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGTERM, lambda *_: Path('asked').touch())\n"
        "Path('pid_' + os.environ['RANK']).write_text('')\n"
        "while True: time.sleep(0.05)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"pid_{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    while not (tmp_path / "asked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert launcher.poll() is None
    while launcher.poll() is None:  # insist
        launcher.send_signal(signal.SIGTERM)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert launcher.returncode == 143
