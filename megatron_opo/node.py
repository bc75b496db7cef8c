"""What `megatron-opo launch` does on its node: servers, trainer ranks, and an eye on the others."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron_opo.cluster import (
    Board,
    Job,
    Layout,
    ToldElsewhere,
    counted,
    lay_out,
    meet,
)
from megatron_opo.errors import ClusterError, OpoError, RecipeError, TrainingError
from megatron_opo.failure import error_text
from megatron_opo.launch import (
    EXIT_CONSEQUENCE,
    Seats,
    Stopped,
    TimeWarning,
    raising_on_signals,
    run_ranks,
)
from megatron_opo.observe.loggers import check_loggers
from megatron_opo.observe.prometheus import claim_metrics_port
from megatron_opo.preflight import check_nodes
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import dump_recipe
from megatron_opo.redaction import API_KEY_VARIABLE
from megatron_opo.rollout.process import Server, close_servers, follow
from megatron_opo.rollout.server import SERVERS_VARIABLE, api_key, launch_servers
from megatron_opo.runs import (
    ATTEMPT_VARIABLE,
    ATTEMPTS,
    attempts,
    latest_checkpoint,
    only_run,
)

BEAT_SECONDS = 2.0
# Slurm itself takes minutes to notice that a node is gone.
SILENT_SECONDS = 60.0
DEPART_SECONDS = 30.0
KEY_FILE = "api_key"


def run_node(recipe: Recipe, job: Job, command: list[str], *, check_only: bool = False) -> int:
    """Take part in the job until it ends; its exit code, the same on every node.

    Args:
        command: of one trainer rank.
        check_only: stop after the preflight.

    Raises:
        ClusterError: nodes do not find each other, do not match, or are lost.
        RecipeError: the recipe does not fit the nodes.
        UnfitEnvironmentError: the package of a logger is not installed.
        LogError: the port for Prometheus is taken.
        TrainingError: this job's last two attempts made no progress.
    """
    directory = recipe.run_path / "logs" / job.attempt
    # From here on: it may come while the servers start.
    warning = TimeWarning()
    signal.signal(signal.SIGUSR1, warning.note)
    with raising_on_signals(), ExitStack() as held:
        board = meet(job, directory)
        try:
            if job.node == 0 and not check_only:
                held.enter_context(only_run(recipe.run_path))
                check_loggers(recipe.log.loggers)
                config = recipe.log
                held.enter_context(
                    claim_metrics_port(config.prometheus_host, config.prometheus_port)
                )
                record_attempt(recipe.run_path, job.attempt)
                write_key(directory / KEY_FILE, api_key())
            nodes = check_nodes(board, directory, dump_recipe(recipe))
            if check_only:
                if job.node == 0:
                    verb = "is" if len(nodes) == 1 else "are"
                    print(f"{counted(len(nodes))} {verb} fit: {', '.join(job.nodes)}")
                return _depart(board, 0)
            gpus = len(nodes[0]["gpus"])
            layout = _lay_out(recipe, job, gpus)
            device = "cuda" if gpus else "cpu"
            code = _work(recipe, board, layout, directory, command, device, warning)
        except ToldElsewhere:
            return _depart(board, EXIT_CONSEQUENCE)
        except BaseException as error:
            code = error.exit_code if isinstance(error, OpoError) else EXIT_CONSEQUENCE
            _tell(board, f"{job.host}: {error or type(error).__name__}", code)
            raise
        return _depart(board, code)


def write_key(path: Path, key: str) -> None:
    """A file that only this user can read, unlike what a store on the network holds."""
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(key)


def _lay_out(recipe: Recipe, job: Job, gpus: int) -> Layout:
    try:
        return lay_out(recipe, len(job.nodes), gpus)
    except RecipeError as error:
        if job.node == 0:
            raise
        raise ToldElsewhere(str(error)) from None


def record_attempt(run_path: Path, attempt: str) -> None:
    """Note which step this start of the job begins at.

    Raises:
        TrainingError: the two starts before it began there, too.
    """
    checkpoint = latest_checkpoint(run_path)
    version = checkpoint.version if checkpoint else 0
    job_id = attempt.partition(".")[0]
    same_job = [a["step"] for a in attempts(run_path) if a["attempt"].partition(".")[0] == job_id]
    if same_job[-2:] == [version, version]:
        raise TrainingError(
            f"job {job_id} started at step {version} for the third time: it makes no progress "
            f"between restarts, so it stops here. The logs of each start are in "
            f"{run_path / 'logs'}; checkpoint.every may be too large for the time limit"
        )
    path = run_path / ATTEMPTS
    is_torn = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as stream:
        line = json.dumps({"attempt": attempt, "step": version})
        stream.write(("\n" if is_torn else "") + line + "\n")


def _work(
    recipe: Recipe,
    board: Board,
    layout: Layout,
    directory: Path,
    command: list[str],
    device: str,
    warning: TimeWarning,
) -> int:
    job = board.job
    logs = directory / f"node_{job.node}_{job.host}"
    logs.mkdir(parents=True, exist_ok=True)
    with _servers(recipe, board, layout, logs, device) as (own, everywhere):
        watch = Watch(board, own)
        code = 0
        if ranks := layout.ranks_of(job.node):
            rendezvous = {
                "MASTER_ADDR": board.leader,
                "MASTER_PORT": str(board.store.port),
                # The ranks meet in the launcher's store.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                SERVERS_VARIABLE: json.dumps(everywhere),
                ATTEMPT_VARIABLE: job.attempt,
            }
            seats = Seats(ranks, layout.world_size, rendezvous)
            code = run_ranks(command, seats, logs, watch.problem, warning)
            board.post_mine("trained", code)
        # The servers are in use until the ranks of every node have ended.
        return code or _wait_for_trainers(watch, layout)


@contextmanager
def _servers(
    recipe: Recipe, board: Board, layout: Layout, logs: Path, device: str
) -> Iterator[tuple[list[Server], list[dict[str, str]]]]:
    """This node's servers, started, and a description of the whole job's."""
    key_file = logs.parent / KEY_FILE
    os.environ[API_KEY_VARIABLE] = key_file.read_text()
    numbers = layout.servers_by_node[board.job.node]
    own: list[Server] = []
    try:
        if numbers:
            alone = len(board.job.nodes) == 1
            host = recipe.rollout.host if alone else board.address
            update = {"host": host, "servers": len(numbers)}
            rollout = recipe.rollout_to_launch.model_copy(update=update)
            own = launch_servers(rollout, recipe.model, logs, device, first=numbers[0])
        described = [
            {"name": s.name, "url": s.url, "log": str(s.log), "node": board.job.node} for s in own
        ]
        board.post_mine("servers", described)
        timeout_s = recipe.rollout.start_timeout_s
        everywhere = board.collect("servers", timeout_s, "start of the servers")
        key_file.unlink(missing_ok=True)  # all have it
        yield own, [server for node in everywhere for server in node]
    finally:
        close_servers(own)


class Watch:
    """Looks after this node's servers and the other launchers, every BEAT_SECONDS."""

    def __init__(self, board: Board, servers: list[Server]):
        self.board = board
        self._servers = servers
        self._next = 0.0
        self._beats = 0
        self._heard: dict[int, tuple[int, float]] = {}

    def problem(self) -> str | None:
        """What must end this node's part of the job, or None."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + BEAT_SECONDS
        for server in self._servers:
            if follow(server):
                print(f"warning: {server.describe_exit()}", file=sys.stderr)
        try:
            self._beats += 1
            self.board.post_mine("beat", self._beats)
            if failure := self.board.read("failure"):
                return f"{self.board.job.host} ends, since another node failed: {failure}"
            if failure := self.board.describe_lost() or self._silence(now):
                self.board.post("failure", failure)
                return failure
        except ClusterError as error:
            return str(error)
        return None

    def _silence(self, now: float) -> str | None:
        if self.board.job.node != 0:
            return None
        silent = []
        for node, beat in enumerate(self.board.read_all("beat")):
            last, since = self._heard.get(node, (None, now))
            if beat != last:
                self._heard[node] = beat, now
            elif now - since > SILENT_SECONDS:
                silent.append(self.board.job.nodes[node])
        if not silent:
            return None
        return f"no sign of life from {', '.join(silent)} for {SILENT_SECONDS:.0f} s"


def _wait_for_trainers(watch: Watch, layout: Layout) -> int:
    """The first exit code other than 0 of any node's ranks, or 0 when all have ended with it. Asked
    to stop, it still waits: Slurm asks the ranks, too, which write what is to be kept. The second
    time it does not."""
    asked = False
    while True:
        try:
            codes = watch.board.read_all("trained")[: layout.trainer_nodes]
            if any(codes) or all(code == 0 for code in codes):
                return next((code for code in codes if code), 0)
            if what := watch.problem():
                print(error_text(what), file=sys.stderr)
                return EXIT_CONSEQUENCE
            time.sleep(0.2)
        except Stopped as stopped:
            if asked:
                return 128 + stopped.args[0]
            asked = True


def _tell(board: Board, failure: str, code: int) -> None:
    """Let the others end, too; node 0 keeps the store until they have heard it."""
    with suppress(ClusterError):
        board.post("failure", failure)
        _depart(board, code)


def _depart(board: Board, code: int) -> int:
    """Leave together, since srun ends the whole step when one task fails; the code of all.

    A node's own reason for failing wins over what it is only the consequence of.
    """
    try:
        board.post_mine("exit", code)
        deadline = time.monotonic() + DEPART_SECONDS
        while None in (codes := board.read_all("exit")) and time.monotonic() < deadline:
            _say_who_is_lost(board)
            time.sleep(0.1)
        if board.job.node == 0:
            # The others still read.
            board.post_mine("read", True)
            while None in board.read_all("read") and time.monotonic() < deadline:
                _say_who_is_lost(board)
                time.sleep(0.1)
        else:
            board.post_mine("read", True)
    except ClusterError:
        return code or EXIT_CONSEQUENCE
    known = [c for c in codes if c]
    return next((c for c in known if c != EXIT_CONSEQUENCE), known[0] if known else code)


def _say_who_is_lost(board: Board) -> None:
    if (failure := board.describe_lost()) and board.read("failure") is None:
        board.post("failure", failure)
        print(error_text(failure), file=sys.stderr)
