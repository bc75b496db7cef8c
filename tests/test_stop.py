"""Being asked to stop: at once where that loses nothing, else at the next good moment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_opo.stop import StopRequest, Terminated


@pytest.fixture(autouse=True)
def default_signals():
    previous = {s: signal.getsignal(s) for s in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)}
    # Tests that run in the background inherit an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for signum, handler in previous.items():
        signal.signal(signum, handler)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_work_is_given_up_when_asked():
    with StopRequest() as stop:
        steps = []

        def work() -> str:
            steps.append("begun")
            ask()
            time.sleep(60)
            return "done"

        assert stop.unless_asked(work) is None
        assert stop.asked
        assert stop.unless_asked(lambda: steps.append("begun again")) is None
        assert steps == ["begun"]


def test_what_is_not_to_be_interrupted_is_finished():
    with StopRequest() as stop:
        assert stop.unless_asked(lambda: 7) == 7
        ask()
        time.sleep(0.01)
        assert stop.asked
        assert stop.unless_asked(lambda: 7) is None


def test_errors_pass_and_disarm():
    with StopRequest() as stop:
        with pytest.raises(KeyError):
            stop.unless_asked(lambda: {}[0])
        ask()
        time.sleep(0.01)
        assert stop.asked


def test_a_warning_while_closing_is_ignored():
    with StopRequest():
        pass
    ask()
    time.sleep(0.01)


@pytest.mark.parametrize(
    ("signum", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_before_there_is_anything_to_keep_an_interrupt_ends_it(signum, kind):
    with pytest.raises(kind), StopRequest():
        os.kill(os.getpid(), signum)
        time.sleep(60)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_comes_twice_is_one_wish(signum):
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        stop.keep_from_now_on()
        assert stop.unless_asked(lambda: os.kill(os.getpid(), signum) or time.sleep(60)) is None
        os.kill(os.getpid(), signum)
        time.sleep(0.01)
        assert stop.signum == signum
    assert signal.getsignal(signum) == before


TWICE = """
import os, signal, sys, time
from megatron_opo.stop import StopRequest

signal.signal(signal.SIGINT, signal.default_int_handler)
with StopRequest() as stop:
    stop.keep_from_now_on()
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_stops_at_once(signum):
    process = subprocess.Popen(
        [sys.executable, "-c", TWICE],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        assert process.stderr.readline().startswith("stopping after a checkpoint; once more")
        while process.poll() is None:
            process.send_signal(signum)
            time.sleep(0.2)
        assert process.returncode == -signum
    finally:
        process.kill()
        process.communicate()


def test_an_ignored_interrupt_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest() as stop:
        stop.keep_from_now_on()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert not stop.asked
