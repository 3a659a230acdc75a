"""What a kernel asks for of a multiprocessor's memory. The driver is a stand-in: GPUs alone have one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rayllm_kernels import carveout
from rayllm_kernels.device import Hardware

H200 = Hardware(132, 232448, (9, 0))


@pytest.fixture
def asked(monkeypatch):
    """(function, attribute, percent) of each call; the driver returns `asked.error`."""
    calls = []

    def set_attribute(function, attribute, percent):
        calls.append((function.value, attribute, percent))
        return found.error

    found = SimpleNamespace(calls=calls, error=0)
    monkeypatch.setattr(carveout, "_driver", lambda: SimpleNamespace(cuFuncSetAttribute=set_attribute))
    monkeypatch.setattr(carveout, "CompiledKernel", SimpleNamespace)
    monkeypatch.setattr(carveout, "_fitted", set())
    return found


def kernel(function: int, shared: int) -> SimpleNamespace:
    return SimpleNamespace(function=function, metadata=SimpleNamespace(shared=shared, name="a"))


def test_as_much_as_so_many_programs_need_and_once(asked):
    for _ in range(2):
        carveout.fit_carveout(kernel(7, 81920), 2, H200)
    assert asked.calls == [(7, 9, 72)]  # 2 x (80 + 1) KiB of 228, rounded up
    carveout.fit_carveout(kernel(8, 231424), 2, H200)
    assert asked.calls[1:] == [(8, 9, 100)]


def test_what_does_not_run_on_a_gpu_asks_for_nothing(asked):
    carveout.fit_carveout(None, 2, H200)
    carveout.fit_carveout(kernel(7, 81920), 2, H200._replace(capability=None))
    carveout.fit_carveout(kernel(None, 81920), 2, H200)
    assert asked.calls == []


def test_a_refusal_of_the_driver_is_an_error(asked):
    asked.error = 1
    with pytest.raises(RuntimeError, match="CUDA error 1: no shared memory of 36% for a"):
        carveout.fit_carveout(kernel(7, 81920), 1, H200)
