"""TensorBoard, wandb, MLflow and trackio, read back by what they bring along themselves."""

import json
import os
import shutil
import socket
import struct
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_opo.early import started_servers
from megatron_opo.errors import LogError, UnfitEnvironmentError
from megatron_opo.observe import loggers as loggers_module
from megatron_opo.observe.files import read_metrics
from megatron_opo.observe.logger_backends import shown_address
from megatron_opo.observe.loggers import check_loggers, is_installed
from megatron_opo.observe.run_log import RunLog
from megatron_opo.recipe import Recipe

EVERY = ("tensorboard", "wandb", "mlflow", "trackio")
SERVERS = (
    "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL",
)  # fmt: skip
REWARD, PASS = "critic/rewards/mean", "eval/avg@4"
RECIPE = "name: r\nmodel: {path: m, dtype: float32}\ndata: {}\n"


@pytest.fixture(scope="module", autouse=True)
def no_servers():
    with pytest.MonkeyPatch.context() as patch:
        for name in SERVERS:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    """Of MLflow, which takes seconds to make one; a run that was given up is in it."""
    path = tmp_path_factory.mktemp("earlier")
    write(path, ("mlflow",), 0, {1: 9.0})
    return path / "mlflow" / "mlflow.db"


def open_log(path: Path, **options) -> RunLog:
    options = {"recipe_text": RECIPE, "versions": {}, "total_steps": 5, "project": "p"} | options
    return RunLog(path, quiet=True, **options)


def copy_to(path: Path, database: Path) -> None:
    (path / "mlflow").mkdir()
    shutil.copy(database, path / "mlflow")


def write(path: Path, loggers: tuple[str, ...], first: int, values: dict[int, float]) -> str:
    """Train steps with these rewards; the id of the run."""
    with open_log(path, loggers=loggers, first_step=first) as log:
        if first == 0:
            log.eval(0, {PASS: 0.25})
        for step, value in values.items():
            log.step(step, {REWARD: value, "actor/entropy": float("nan")})
        log.eval(max(values), {PASS: 0.75})
    return log.run_id


# --- read back


def of_tensorboard(path: Path, metric: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(metric)]


def wandb_records(path: Path):
    """Of the one run that `wandb sync` finds: a log in LevelDB's format, of wandb's messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (path / "wandb").glob("offline-run-*/*.wandb")
    data, at, part, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(part))
            part = b""
    return records


def of_wandb(path: Path, metric: str) -> list[tuple[int, float]]:
    found = []
    for record in wandb_records(path):
        for item in record.history.item:
            if item.key == metric or "/".join(item.nested_key) == metric:
                found.append((record.history.step.num, json.loads(item.value_json)))
    return found


def mlflow_client(path: Path):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{path}/mlflow/mlflow.db")


def mlflow_run(path: Path):
    client = mlflow_client(path)
    experiment = client.get_experiment_by_name("p")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def of_mlflow(path: Path, metric: str) -> list[tuple[int, float]]:
    name = metric.replace("@", "_at_")
    history = mlflow_client(path).get_metric_history(mlflow_run(path).info.run_id, name)
    return [(point.step, point.value) for point in history]


def of_trackio(path: Path, metric: str) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("p")
    values = SQLiteStorage.get_metric_values("p", run, metric)
    return [(value["step"], value["value"]) for value in values]


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}
READERS["trackio"] = of_trackio


def test_each_has_every_step_once_after_a_resume_and_only_new_ones_after_a_fresh_start(
    tmp_path, database
):
    copy_to(tmp_path, database)
    first_id = write(tmp_path, EVERY, 0, {1: 0.125, 2: 0.25, 3: 0.375})
    first_mlflow = mlflow_run(tmp_path).info.run_id
    assert write(tmp_path, EVERY, 2, {3: 0.5, 4: 0.625, 5: 0.75}) == first_id
    for name, read in READERS.items():
        curve = [(1, 0.125), (2, 0.25), (3, 0.5), (4, 0.625), (5, 0.75)]
        assert read(tmp_path, REWARD) == curve, name
        assert read(tmp_path, PASS) == [(0, 0.25), (5, 0.75)], name
    run = mlflow_run(tmp_path)
    assert (run.info.run_id, run.info.run_name) == (first_mlflow, tmp_path.name)
    assert (run.info.status, run.data.metrics[REWARD]) == ("FINISHED", 0.75)
    assert run.data.params["model.dtype"] == "float32"
    (started,) = [r.run for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"]
    names = (started.run_id, started.project, started.display_name)
    assert names == (first_id, "p", tmp_path.name)

    assert write(tmp_path, EVERY, 0, {1: 0.875}) != first_id
    for name, read in READERS.items():
        assert read(tmp_path, REWARD) == [(1, 0.875)], name
    assert "warning" not in (tmp_path / "run.log").read_text()
    assert "TRACKIO_DIR" not in os.environ, "it is for this run only"


def test_a_run_keeps_its_id_and_a_checkpoint_knows_it_where_the_directory_does_not(tmp_path):
    def id_of(**options) -> str:
        with open_log(tmp_path, loggers=(), **options) as log:
            return log.run_id

    first = id_of()
    assert id_of(first_step=2, run_id="other") == first
    (tmp_path / "run_id.txt").unlink()
    assert id_of(first_step=2, run_id="other") == "other"
    assert id_of(run_id="other") not in (first, "other"), "a run that starts anew is another one"


def test_only_the_loggers_that_are_named_write(tmp_path):
    open_log(tmp_path, loggers=()).close()
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"recipe.yaml", "versions.json", "run.log", "run_id.txt", "samples"}


# --- what fails


def warnings(path: Path) -> list[str]:
    lines = (path / "run.log").read_text().splitlines()
    return [line.partition("warning: ")[2] for line in lines if "warning: " in line]


def test_a_logger_that_fails_in_the_middle_is_one_warning(tmp_path, database):
    copy_to(tmp_path, database)
    with open_log(tmp_path, loggers=("mlflow", "tensorboard")) as log:
        log.step(1, {REWARD: 0.0})
        until = time.monotonic() + 20
        while of_mlflow(tmp_path, REWARD) == [] and time.monotonic() < until:
            pass
        database = tmp_path / "mlflow" / "mlflow.db"
        database.write_bytes(b"no database" * (database.stat().st_size // 11))
        for step in (2, 3, 4):
            log.step(step, {REWARD: 1.0})
    (warning,) = warnings(tmp_path)
    assert "mlflow failed, and the run goes on without it" in warning
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert [step for step, _ in of_tensorboard(tmp_path, REWARD)] == [1, 2, 3, 4]


def test_a_run_that_failed_is_shown_as_such(tmp_path, database):
    copy_to(tmp_path, database)
    with pytest.raises(RuntimeError), open_log(tmp_path, loggers=("mlflow",)) as log:
        log.step(1, {REWARD: 0.5})
        raise RuntimeError("lost a server")
    assert mlflow_run(tmp_path).info.status == "FAILED"
    assert of_mlflow(tmp_path, REWARD) == [(1, 0.5)]


def test_addresses_are_shown_without_secrets():
    assert shown_address("https://me:word@host:5000/a?write_token=b") == "https://host:5000/a"
    assert shown_address("sqlite:////runs/a/mlflow.db") == "sqlite:////runs/a/mlflow.db"
    assert shown_address("runs/a@b/trackio") == "runs/a@b/trackio"


def test_a_server_that_is_away_is_one_warning(tmp_path, monkeypatch):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with open_log(tmp_path, loggers=("mlflow",)) as log:
        log.step(1, {REWARD: 0.0})
        log.step(2, {REWARD: 0.0})
    (warning,) = warnings(tmp_path)
    assert str(port) in warning


def test_a_server_that_never_answers_holds_nothing_up(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers_module, "START_SECONDS", 0.05)
    monkeypatch.setattr(loggers_module, "CLOSE_SECONDS", 0.05)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        began = time.monotonic()
        with open_log(tmp_path, loggers=("mlflow",)) as log:
            for step in range(1, 6):
                log.step(step, {REWARD: 0.0})
        assert time.monotonic() - began < 1.5
    (warning,) = warnings(tmp_path)
    assert "did not finish in 0 s" in warning


def test_records_that_nobody_takes_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers_module, "MOST_WAITING", 3)
    monkeypatch.setattr(loggers_module, "START_SECONDS", 0.05)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        with open_log(tmp_path, loggers=("mlflow",)) as log:
            for step in range(1, 9):
                log.step(step, {REWARD: 0.0})
            (warning,) = warnings(tmp_path)
    assert "has not taken 3 records" in warning
    assert len(warnings(tmp_path)) == 1


# --- before anything starts


def recipe(tmp_path: Path, **log) -> Recipe:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    return Recipe.model_validate(
        {
            "name": "r",
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": {"files": [str(tmp_path / "data.jsonl")]}},
            "log": log,
        }
    )


@pytest.mark.parametrize(
    ("logger", "module", "cure"),
    [
        ("tensorboard", "tensorboard", "pip install tensorboard`"),
        ("wandb", "wandb", "pip install wandb`"),
        ("mlflow", "sqlalchemy", "pip install mlflow-skinny sqlalchemy alembic`"),
        ("trackio", "trackio", "pip install trackio`"),
    ],
)
def test_a_missing_package_is_named_before_a_server_starts(
    tmp_path, monkeypatch, logger, module, cure
):
    monkeypatch.setitem(sys.modules, module, None)
    begun = started_servers(recipe(tmp_path, loggers=[logger]), "cpu")
    with pytest.raises(UnfitEnvironmentError) as caught, begun:
        pass
    assert f"log.loggers names {logger}, but {module} cannot be imported" in str(caught.value)
    assert cure in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_server_of_mlflow_needs_no_database(monkeypatch):
    monkeypatch.setitem(sys.modules, "alembic", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    check_loggers(["mlflow"])


def test_a_directory_of_that_name_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb_left_this").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("wandb_left_this")
    assert is_installed("yaml")


def test_a_taken_port_is_told_before_a_server_starts(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(
                LogError, match=rf"prometheus_port: cannot listen on 127\.0\.0\.1:{port}"
            ),
            started_servers(recipe(tmp_path, prometheus_port=port), "cpu"),
        ):
            pass
    assert not (tmp_path / "run" / "logs").exists()
