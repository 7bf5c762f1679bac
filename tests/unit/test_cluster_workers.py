"""What needs no second process: the inline group, objects as bytes, replies."""

import os
import pickle
from dataclasses import dataclass

import pytest
import torch

from grpo_recipes.cluster import wire
from grpo_recipes.cluster.contract import Placement
from grpo_recipes.cluster.inline import InlineGroup
from grpo_recipes.cluster.process import exit_status
from grpo_recipes.cluster.process_worker import Reply, attempt, encode
from grpo_recipes.errors import UserError


@dataclass
class Worker:
    placement: Placement

    def pid(self):
        return os.getpid()

    def threads(self):
        return torch.get_num_threads()

    def tripled(self, tensor):
        return 3 * tensor

    def fail(self):
        raise KeyError("planted")


class Unpicklable(Exception):
    def __init__(self, *, needed):
        super().__init__("no way back")


def test_inline_group_is_one_worker_in_this_process():
    before = torch.get_num_threads()
    with InlineGroup(Worker) as group:
        assert group.world_size == 1
        assert group.call("pid") == [os.getpid()]
        assert group.scatter("tripled", [(torch.tensor(2),)]) == [6]
        assert group.call("threads") == [group.threads]
        with pytest.raises(KeyError, match="planted"):
            group.call("fail")
        with pytest.raises(ValueError, match="too many values"):
            group.scatter("tripled", [(1,), (2,)])
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.tensor(3.5),
        torch.empty(0, 4, dtype=torch.int32),
        torch.tensor([[1.5, float("nan")], [float("inf"), -0.0]], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(12).view(3, 4).t(),
        torch.arange(1_000_000)[10:12],
    ],
)
def test_tensors_travel_exactly_and_alone(tensor):
    data = wire.dumps({"value": [tensor]})
    back = wire.loads(data)["value"][0]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
    assert len(data) < 1_000
    back[...] = back.clone()  # writable


def test_a_tensor_with_gradient_does_not_travel():
    with pytest.raises(ValueError, match="detach"):
        wire.dumps(torch.ones(2, requires_grad=True))


def fail(error):
    raise error


def test_an_exception_travels_with_its_traceback():
    reply = wire.loads(encode(attempt(7, lambda: fail(UserError("planted", where="here", mend="mend it")))))
    assert reply.call == 7
    assert "raise error" in reply.traceback
    error = pickle.loads(reply.error)
    assert (str(error), error.where, error.mend) == ("here: planted\n  -> mend it", "here", "mend it")


def test_an_exception_that_cannot_travel_leaves_its_traceback():
    reply = wire.loads(encode(attempt(7, lambda: fail(Unpicklable(needed=1)))))
    assert reply.error is None
    assert "no way back" in reply.traceback


def test_a_result_that_cannot_travel_is_an_error_and_not_a_hang():
    reply = wire.loads(encode(attempt(7, lambda: lambda: None)))
    assert reply == Reply(7, error=reply.error, traceback=reply.traceback)
    assert "lambda" in reply.traceback


def test_exit_status_in_words():
    assert exit_status(7) == "exited with status 7"
    assert exit_status(-9) == "was killed by SIGKILL (out of memory?)"
    assert exit_status(-11) == "was killed by SIGSEGV"
    assert exit_status(None) == "closed its pipe"
