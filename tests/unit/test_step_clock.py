"""The clock of a step's parts, on a CPU and with a device that works behind its back."""

import time
from types import SimpleNamespace

import pytest
import torch

from vllm_medusa.calibration.clock import StepClock


def test_time_is_added_up_by_part():
    owner = SimpleNamespace(sleep=lambda: time.sleep(0.01), fail=lambda: 1 / 0)
    clock = StepClock()
    clock.time(owner, "sleep", "a")
    clock.time(owner, "fail", "b")
    owner.sleep(), owner.sleep()
    with pytest.raises(ZeroDivisionError):
        owner.fail()
    taken = clock.take()
    assert taken["a"] >= 0.02 and taken["b"] < 0.01
    assert clock.take() == {}


class Event:
    """Stands where CUDA's does: the device is through with it when the test says so."""

    now = 0.0
    through = float("inf")

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.now += 5.0
        self.at = Event.now

    def query(self):
        return self.at <= Event.through

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_part_on_a_device_counts_when_the_device_is_through(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    owner = SimpleNamespace(run=lambda: 7)
    clock = StepClock(on_cuda=True)
    clock.time(owner, "run", "a")
    assert (owner.run(), owner.run()) == (7, 7)
    Event.through = 10.0
    assert clock.take() == {"a": 0.005}
    assert clock.take() == {}
    Event.through = 20.0
    assert clock.take() == {"a": 0.005}
