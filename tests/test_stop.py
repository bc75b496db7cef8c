"""Being asked to stop: at once where that loses nothing, else at the next good moment."""

import os
import signal
import time

import pytest

from megatron_opo.stop import StopRequest


@pytest.fixture(autouse=True)
def default_signal():
    previous = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, previous)


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
