"""TensorBoard, wandb, MLflow and trackio as `observe.loggers.Logger`.

All write below the run directory unless the environment names a server. Steps that a resumed run
trains again are dropped first where a logger's files are the run's own.
"""

import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_opo.observe.loggers import LoggedRun, Logger

ID_TAG = "megatron_opo.run_id"
# What a record of metrics.jsonl has beside metrics.
NO_METRICS = {"step", "kind", "time", "elapsed_s"}
MLFLOW_BATCH = 500


class TensorBoard:
    def __init__(self, run: LoggedRun):
        from torch.utils.tensorboard import SummaryWriter

        events = run.path / "tensorboard"
        _date_back(events)
        self.place = str(events)
        self._writer = SummaryWriter(
            str(events), purge_step=run.first_step + 1 if run.first_step else 0
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


def _date_back(events: Path) -> None:
    """See to it that TensorBoard reads these files before one that is made now: it reads them in
    the order of their names, which begin with a second of a clock that may have been set back."""
    files = sorted(events.glob("events.out.tfevents.*"))
    now = int(time.time())
    if files and int(files[-1].name.split(".")[3]) >= now:
        for i, file in enumerate(files, now - len(files)):
            parts = file.name.split(".")
            file.rename(events / ".".join([*parts[:3], f"{i:010d}", *parts[4:]]))


class Wandb:
    """Offline unless WANDB_MODE says otherwise.

    An offline run cannot be continued by wandb, so a resumed one is written anew, with the steps
    that are kept; the directory of the earlier start is moved aside. A server takes a step once:
    what it has of steps that are trained again stays.
    """

    def __init__(self, run: LoggedRun):
        mode = os.environ.get("WANDB_MODE") or "offline"
        is_offline = mode in ("offline", "dryrun")
        if is_offline:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            _move_aside_offline_runs(run)
        import wandb  # pyright: ignore[reportMissingImports]

        # It would ask for a login otherwise, and wait.
        wandb.setup(wandb.Settings(silent=True))
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume=None if is_offline else "allow",
            dir=str(run.path),
            mode="offline" if is_offline else None,
            config=run.recipe,
            settings=wandb.Settings(console="off", silent=True),
        )
        self.place = f"{run.path / 'wandb'} (offline)" if is_offline else str(self._run.url or mode)
        if is_offline:
            for record in run.kept:
                self.log(record["step"], _metrics_of(record))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def _move_aside_offline_runs(run: LoggedRun) -> None:
    """`wandb sync` would otherwise send the run twice."""
    for directory in sorted((run.path / "wandb").glob("offline-run-*")):
        directory.rename(directory.with_name("superseded-" + directory.name))


def _metrics_of(record: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if k not in NO_METRICS and v is not None}


class MlFlow:
    """Below the run directory unless MLFLOW_TRACKING_URI names a server. On a server, whose metrics
    cannot be removed, steps that are trained again have two values."""

    def __init__(self, run: LoggedRun):
        directory = run.path / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            directory.mkdir(exist_ok=True)
            database = (directory / "mlflow.db").absolute()
            _forget_mlflow_steps(database, run)
            uri = f"sqlite:///{database}"
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        if "MLFLOW_LOGGING_LEVEL" not in os.environ:
            logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        self.place = shown_address(uri)
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._new_experiment(run, directory)
        earlier = self._client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run.run_id}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            return
        tags = {ID_TAG: run.run_id}
        self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        for key, value in _flat(run.recipe).items():
            self._client.log_param(self._id, key, value, synchronous=True)

    def _new_experiment(self, run: LoggedRun, directory: Path) -> str:
        is_local = not os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = (directory / "artifacts").absolute().as_uri() if is_local else None
        return self._client.create_experiment(run.project, artifact_location=artifacts)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        named = [self._metric(mlflow_name(k), v, now, step) for k, v in metrics.items()]
        for start in range(0, len(named), MLFLOW_BATCH):
            self._client.log_batch(self._id, named[start : start + MLFLOW_BATCH], synchronous=True)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def shown_address(address: str) -> str:
    """Without what may be secret: https://me:word@host/a?write_token=b -> https://host/a."""
    return re.sub(r"\?.*", "", re.sub(r"//[^/]*@", "//", address))


def mlflow_name(metric: str) -> str:
    """eval/avg@4 -> eval/avg_at_4."""
    return re.sub(r"[^\w.\-:/ ]", "_", metric.replace("@", "_at_"), flags=re.ASCII)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}; what is empty has no value to show."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[mlflow_name(prefix + str(key))] = str(value)[:500]
    return flat


def _forget_mlflow_steps(database: Path, run: LoggedRun) -> None:
    """Those that are trained again; MLflow itself only adds. A run that starts anew puts what was
    there where MLflow puts deleted runs."""
    if not database.exists():
        return
    with closing(sqlite3.connect(database)) as connection, connection:
        if run.first_step == 0:
            connection.execute("UPDATE runs SET lifecycle_stage = 'deleted'")
            return
        connection.execute("DELETE FROM metrics WHERE step > ?", (run.first_step,))
        connection.execute("DELETE FROM latest_metrics")
        connection.execute(
            "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
            "SELECT key, value, max(timestamp), step, is_nan, run_uuid FROM metrics m WHERE step = "
            "(SELECT max(step) FROM metrics WHERE key = m.key AND run_uuid = m.run_uuid) "
            "GROUP BY key, run_uuid"
        )


class Trackio:
    """Below the run directory unless the environment names a Space, a server or a directory. There,
    steps that are trained again have two values."""

    def __init__(self, run: LoggedRun):
        names = ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
        elsewhere = next((os.environ[name] for name in names if os.environ.get(name)), None)
        directory = (run.path / "trackio").absolute()
        if elsewhere is None:
            _forget_trackio_steps(directory, run)
            os.environ["TRACKIO_DIR"] = str(directory)  # read at the import
        import trackio  # pyright: ignore[reportMissingImports]

        if elsewhere is None:
            del os.environ["TRACKIO_DIR"]
        self.place = shown_address(elsewhere or str(directory))
        # It knows a run by its name; others may write there, too.
        name = f"{run.name}-{run.run_id[:6]}" if elsewhere else run.name
        self._run = trackio.init(
            project=run.project,
            name=name,
            resume="allow",
            config=run.recipe,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


def _forget_trackio_steps(directory: Path, run: LoggedRun) -> None:
    """Those that are trained again, or all of them; trackio itself only adds."""
    last = run.first_step or -1
    for database in directory.glob("*.db"):
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("DELETE FROM metrics WHERE step > ?", (last,))


BACKENDS: dict[str, Callable[[LoggedRun], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MlFlow,
    "trackio": Trackio,
}
