"""Memory for weights that outlives the process that filled it, on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

from rayllm.parallel.shared_weights import SharedWeights

CPU = torch.device("cpu")
SHAPES = [((3, 5), torch.float32), ((7,), torch.bfloat16), ((2, 2), torch.float32)]


def filled() -> tuple[SharedWeights, list[torch.Tensor]]:
    owner = SharedWeights(CPU)
    assert all(owner.take(*each).device.type == "meta" for each in SHAPES)
    owner.allocate()
    made = [owner.take(*each) for each in SHAPES]
    for number, tensor in enumerate(made):
        tensor.fill_(number + 1)
    owner.note = b"a note"
    return owner, made


def test_another_process_has_the_same_memory_and_keeps_it():
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        owner, _ = filled()
        os.write(ready[1], owner.hand_out())
        os.read(go[0], 1)
        os._exit(0)
    other = SharedWeights(CPU)
    name = os.read(ready[0], 100)
    assert other.adopt(name)
    os.write(go[1], b".")
    os.waitpid(child, 0)
    assert other.is_filled
    assert other.note == b"a note"
    for number, (shape, dtype) in enumerate(SHAPES):
        assert torch.equal(other.take(shape, dtype), torch.full(shape, number + 1, dtype=dtype))
    with pytest.raises(RuntimeError, match="more than"):
        other.take((1000,), torch.float32)
    # Its process is gone, and so is the name; what was adopted is handed out in turn.
    assert not SharedWeights(CPU).adopt(name)
    third = SharedWeights(CPU)
    assert third.adopt(other.hand_out())
    assert torch.equal(third.take(*SHAPES[0]), torch.ones(3, 5))
    assert not [file for file in os.listdir("/dev/shm") if "rayllm-weights" in file]


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_other_users_get_nothing():
    owner, _ = filled()
    name = owner.hand_out()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os._exit(SharedWeights(CPU).adopt(name))
    assert os.waitpid(child, 0)[1] == 0
    assert SharedWeights(CPU).adopt(name)
