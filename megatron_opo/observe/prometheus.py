"""The newest metrics of a run, for Prometheus to scrape."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from megatron_opo.errors import LogError, UnfitEnvironmentError
from megatron_opo.observe.loggers import is_installed
from megatron_opo.ports import claim_port

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily, Metric

PREFIX = "megatron_opo_"


class Exposed:
    """Gauges of what was logged last, and how far the run is; all with the label `run`.

    megatron_opo_step            newest version of the policy
    megatron_opo_steps_total     steps that this process has trained
    megatron_opo_steps_planned   those of the whole run
    megatron_opo_phase           1 for the phase that goes on, 0 for those that there were
    megatron_opo_<metric>        each metric of metrics.jsonl: see `prometheus_name`
    """

    def __init__(self, run: str, total_steps: int, first_step: int = 0):
        self.address = ""
        self._run = run
        self._planned = total_steps
        self._step = first_step
        self._trained = 0
        self._phases: dict[str, float] = {}
        self._values: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Answer on `port` (0: a free one) at `address`, in a thread; what is returned ends it.

        Raises:
            LogError: as of `claim_metrics_port`.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)  # pyright: ignore[reportArgumentType]
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise LogError(_taken(host, port, error)) from None
        self.address = f"http://{host}:{server.server_port}/metrics"

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return end

    def enter(self, phase: str) -> None:
        with self._lock:
            self._phases = dict.fromkeys(self._phases, 0.0) | {phase: 1.0}

    def update(self, step: int, kind: str, metrics: dict[str, float]) -> None:
        """What metrics.jsonl gets: a step that was trained, or an evaluation."""
        with self._lock:
            self._step = step
            self._trained += kind == "train"
            for name, value in metrics.items():
                self._values[prometheus_name(name)] = (name, value)

    def collect(self) -> Iterator["Metric"]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            values, phases = dict(self._values), dict(self._phases)
            step, trained = self._step, self._trained
        yield self._gauge("step", "Newest version of the policy", step)
        yield self._gauge("steps_planned", "Steps of the whole run", self._planned)
        steps = CounterMetricFamily(
            PREFIX + "steps", "Steps that this process has trained", labels=["run"]
        )
        steps.add_metric([self._run], trained)
        yield steps
        now = GaugeMetricFamily(PREFIX + "phase", "What goes on now", labels=["run", "phase"])
        for phase, value in phases.items():
            now.add_metric([self._run, phase], value)
        yield now
        for name, (metric, value) in values.items():
            yield self._gauge(name.removeprefix(PREFIX), f"{metric} of metrics.jsonl", value)

    def _gauge(self, name: str, about: str, value: float) -> "GaugeMetricFamily":
        from prometheus_client.core import GaugeMetricFamily

        gauge = GaugeMetricFamily(PREFIX + name, about, labels=["run"])
        gauge.add_metric([self._run], value)
        return gauge


def prometheus_name(metric: str) -> str:
    """critic/rewards/mean -> megatron_opo_critic_rewards_mean; eval/avg@4 -> ..._avg_at_4."""
    return PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", metric.replace("@", "_at_"))


def claim_metrics_port(host: str, port: int | None) -> AbstractContextManager:
    """Holds the port, for `Exposed.serve`; without one, or with 0, there is nothing to hold.

    Raises:
        LogError: it is taken, or the host is not of this machine.
        UnfitEnvironmentError: prometheus_client is not installed.
    """
    if port is not None and not is_installed("prometheus_client"):
        raise UnfitEnvironmentError(
            f"log.prometheus_port is {port}, but prometheus_client cannot be imported: `pip "
            "install prometheus_client`, or set it to null"
        )
    try:
        return claim_port(host, port) if port else nullcontext()
    except OSError as error:
        raise LogError(_taken(host, port, error)) from None


def _taken(host: str, port: int | None, error: OSError) -> str:
    return (
        f"log.prometheus_port: cannot listen on {host}:{port}: {error.strerror or error}. Stop "
        "what uses the port, choose another (0: a free one), set it to null, or change "
        "log.prometheus_host"
    )
