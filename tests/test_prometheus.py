"""What Prometheus is shown, parsed by the parser of its own client."""

import math
import re
import socket
import urllib.request
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from megatron_opo.errors import LogError
from megatron_opo.observe.prometheus import Exposed, claim_metrics_port, prometheus_name
from megatron_opo.observe.run_log import RunLog
from megatron_opo.recipe import Recipe
from megatron_opo.rollout.server import command_line, server_options


@contextmanager
def served(exposed: Exposed, port: int = 0):
    end = exposed.serve("127.0.0.1", port)
    try:
        yield
    finally:
        end()


def scraped(exposed: Exposed) -> dict[tuple[str, str], float]:
    """By name and phase; all samples are of one run."""
    with urllib.request.urlopen(exposed.address, timeout=10) as answer:
        text = answer.read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {sample.labels["run"] for sample in samples} == {'a "run"\\'}
    return {(s.name, s.labels.get("phase", "")): s.value for s in samples}


def test_a_run_shows_its_newest_metrics_its_step_and_its_phase(tmp_path):
    exposed = Exposed('a "run"\\', total_steps=9, first_step=3)
    options = {"recipe_text": "", "versions": {}, "total_steps": 9, "loggers": (), "quiet": True}
    with served(exposed), RunLog(tmp_path, first_step=3, exposed=exposed, **options) as log:
        at_start = scraped(exposed)
        with log.phase("generate"):
            assert scraped(exposed)["megatron_opo_phase", "generate"] == 1
        log.step(4, {"critic/rewards/mean": 0.25, "actor/entropy": 2.0})
        with log.phase("eval"):
            during_eval = scraped(exposed)
        log.step(5, {"critic/rewards/mean": 0.5, "actor/grad_norm": math.inf})
        log.eval(5, {"eval/avg@4": 0.75})
        at_end = scraped(exposed)
    assert at_start == {
        ("megatron_opo_step", ""): 3, ("megatron_opo_steps_planned", ""): 9,
        ("megatron_opo_steps_total", ""): 0,
    }  # fmt: skip
    assert during_eval["megatron_opo_phase", "eval"] == 1
    assert during_eval["megatron_opo_phase", "generate"] == 0
    assert during_eval["megatron_opo_critic_rewards_mean", ""] == 0.25
    expected = {
        "megatron_opo_step": 5, "megatron_opo_steps_total": 2,
        "megatron_opo_critic_rewards_mean": 0.5, "megatron_opo_actor_entropy": 2.0,
        "megatron_opo_actor_grad_norm": math.inf, "megatron_opo_eval_avg_at_4": 0.75,
    }  # fmt: skip
    assert {name: at_end[name, ""] for name in expected} == expected


def test_nothing_answers_when_the_run_has_ended():
    exposed = Exposed('a "run"\\', total_steps=1)
    with served(exposed):
        scraped(exposed)
    with pytest.raises(OSError, match="refused"):
        scraped(exposed)


@given(st.text(min_size=1))
def test_every_metric_has_a_name_that_prometheus_takes(metric):
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prometheus_name(metric))


def test_a_port_that_is_held_can_be_served_on_but_not_twice():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    with claim_metrics_port("127.0.0.1", port):
        exposed = Exposed('a "run"\\', total_steps=1)
        with served(exposed, port):
            assert f":{port}/metrics" in exposed.address
            scraped(exposed)
            with pytest.raises(LogError, match=rf"127\.0\.0\.1:{port}"):
                exposed.serve("127.0.0.1", port)
            with pytest.raises(LogError, match=rf"127\.0\.0\.1:{port}.*prometheus_host"):
                claim_metrics_port("127.0.0.1", port)


def recipe(log: dict, rollout: dict) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "model": {"path": "m"},
            "data": {"train": {"files": ["f"]}},
            "log": log,
            "rollout": rollout,
        }
    )


@pytest.mark.parametrize(
    ("log", "server_args", "shown"),
    [
        ({}, {}, False),
        ({"prometheus_port": 9400}, {}, True),
        ({"prometheus_port": 9400}, {"enable_metrics": False}, False),
        ({}, {"enable_metrics": True}, True),
    ],
)
def test_servers_show_their_metrics_when_asked(log, server_args, shown):
    asked = recipe(log, {"server_args": server_args})
    options = server_options(asked.rollout_to_launch, asked.model, "cpu", 0, 30000)
    assert ("--enable-metrics" in command_line(options)) == shown
