"""Weights from one process to two others by each transport, and what everybody is told when something goes wrong.

Covers: a failing refit only prints and the trainer hangs.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest
import torch

from grpo_recipes.generation.sync.broadcast import Group
from grpo_recipes.generation.sync.checksum import Checksums, differences
from grpo_recipes.generation.sync.contract import RefitError, layouts_of
from grpo_recipes.generation.sync.link import Receiver, Sender
from grpo_recipes.policy.contract import WeightSpec

LIMIT_S = 30
NAMES = ["embed", "norm", "up", "down", "head"]
SHAPES = [(7, 5), (3,), (64, 33), (33, 64), (1,)]
DTYPES = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
PLAN = [
    WeightSpec(name, shape, dtype, (0,), bucket)
    for name, shape, dtype, bucket in zip(NAMES, SHAPES, DTYPES, [0, 0, 1, 2, 2], strict=True)
]
transports = pytest.mark.parametrize("transport", ["ipc", "broadcast"])


def left_in_shared_memory():
    """By this process: other tests may run beside it."""
    return list(Path("/dev/shm").glob(f"refit_{os.getpid()}_*"))


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    """The first process of a fork server imports torch, which takes long on a busy machine."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "grpo_recipes.generation.sync.link"])
    process = context.Process(target=int)
    process.start()
    process.join()


def weights(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=draw).to(s.dtype) for s in PLAN}


def buckets(tensors):
    return [{s.name: tensors[s.name] for s in PLAN if s.bucket == n and s.name in tensors} for n in range(3)]


def receive(pipe, address, plant):
    kept, sums = {}, Checksums()

    def load(tensors):
        for name, tensor in sums.over(tensors):
            if plant == f"raise at {name}":
                raise ValueError("cannot load")
            if plant == f"die at {name}":
                os._exit(1)
            if plant == f"stop at {name}":
                return
            kept[name] = tensor  # not copied: a loader keeps what it is handed until a layer is complete

    began = time.monotonic()
    try:
        receiver = Receiver(address, torch.device("cpu"))
        receiver.load(load)
        error = ""
    except RefitError as told:
        error = str(told)
    seconds = time.monotonic() - began
    file = io.BytesIO()
    torch.save(
        {} if error else {name: tensor.clone() for name, tensor in kept.items()}, file
    )  # a pickle of tensors would need this process to live on
    pipe.send((error, file.getvalue(), sums.result(), seconds))


def refit(transport, bucket_list, plants=("", "")):
    """What the sender and each of two processes found: error or "", and for the receivers tensors and checksums."""
    context = multiprocessing.get_context("forkserver")
    sender = Sender(transport, len(plants), host="127.0.0.1", device=torch.device("cpu"))
    pipes, processes = [], []
    for plant in plants:
        mine, theirs = context.Pipe()
        process = context.Process(target=receive, args=(theirs, sender.address, plant))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    began = time.monotonic()
    try:
        sent, error = sender.send(PLAN, bucket_list), ""
    except RefitError as told:
        sent, error = 0, str(told)
    assert time.monotonic() - began < LIMIT_S
    found = []
    for pipe, process in zip(pipes, processes, strict=True):
        try:
            found.append(pipe.recv())
        except EOFError:
            found.append(None)  # it died
        process.join(LIMIT_S)
        assert process.exitcode is not None
    assert all(f is None or f[3] < LIMIT_S for f in found)
    return sent, error, found


@transports
def test_every_tensor_arrives_bit_for_bit(transport):
    for seed in (0, 1):  # the second refit, too
        tensors = weights(seed)
        sums = Checksums()
        for name, tensor in tensors.items():
            sums.add(name, tensor)
        sent, error, found = refit(transport, buckets(tensors))
        assert error == "" and sent == sum(t.nbytes for t in tensors.values())
        for told, kept, received, _ in found:
            kept = torch.load(io.BytesIO(kept))
            assert told == "" and list(kept) == NAMES
            assert all(torch.equal(kept[name], tensors[name]) for name in NAMES)
            assert differences(sums.result(), received) == []
    assert left_in_shared_memory() == []


@transports
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("down"), "down is missing"),
        (lambda t: t.update(up=t["up"].T), "up has shape [33, 64] and not [64, 33]"),
        (lambda t: t.update(up=t["up"].float()), "up is torch.float32 and not torch.bfloat16"),
    ],
)
def test_what_the_trainer_lacks_is_named_on_all_sides(transport, change, words):
    tensors = weights()
    change(tensors)
    _, error, found = refit(transport, buckets(tensors))
    assert words in error
    assert all(f"the trainer: {words}" in told for told, *_ in found)


@transports
def test_buckets_that_end_early_or_hold_more_are_named(transport):
    _, error, found = refit(transport, buckets(weights())[:2])
    assert "down is missing, and whatever comes after it" in error and all(error in told for told, *_ in found)
    more = buckets(weights())
    more[1]["bias"] = torch.zeros(1)
    _, error, _ = refit(transport, more)
    assert "bias is not of the plan" in error


@transports
def test_a_loader_that_fails_ends_the_refit_on_all_sides(transport):
    _, error, found = refit(transport, buckets(weights()), ("", "raise at up"))
    assert re.search(r"the sampler's worker \d: ValueError: cannot load, while up was loaded", error)
    assert all("cannot load, while up was loaded" in told for told, *_ in found)  # the other sampler hears of it
    _, error, _ = refit(transport, buckets(weights()), ("stop at down", ""))
    assert "the loader did not ask for head" in error


@transports
def test_a_receiver_that_dies_ends_the_refit_on_all_sides(transport):
    _, error, found = refit(transport, buckets(weights()), ("die at norm", ""))
    assert re.search(r"the sampler's worker \d is gone, while up travelled", error)
    assert found[0] is None and error in found[1][0]


def test_a_broadcast_that_breaks_off_names_who_ended_it():
    """The socket of the broadcast may be seen closed before the one that names a process."""

    class Broken:
        def broadcast(self, tensors, options):
            return self

        def is_completed(self):
            return True

        def wait(self):
            raise RuntimeError("connection closed by peer")

    class Dying:
        checks = 0

        def check(self):
            self.checks += 1
            if self.checks == 3:
                raise RefitError("worker 1 is gone")

    group = Group.__new__(Group)
    group.device, group._backend = torch.device("cpu"), Broken()
    with pytest.raises(RefitError, match="worker 1 is gone"):
        group.broadcast(torch.zeros(1), [Dying()])


def test_a_receiver_that_does_not_come_is_said(monkeypatch):
    monkeypatch.setattr("grpo_recipes.generation.sync.link.CONNECT_S", 0.2)
    sender = Sender("ipc", 1, host="127.0.0.1", device=torch.device("cpu"))
    with pytest.raises(RefitError, match="0 of 1 workers of samplers connected"):
        sender.send(PLAN, buckets(weights()))


def test_shared_memory_that_is_full_is_an_error_and_no_crash(monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender = Sender("ipc", 0, host="127.0.0.1", device=torch.device("cpu"))
    with pytest.raises(RefitError, match=r"no room for .* bytes \(No space left on device\)"):
        sender.send(PLAN, buckets(weights()))
    assert left_in_shared_memory() == []


def test_a_layout_has_every_tensor_in_its_bucket_and_none_on_another():
    first, second, third = layouts_of(PLAN)
    assert [s.name for layout in (first, second, third) for s in layout.slots] == NAMES
    assert [(s.start, s.stop) for s in first.slots] == [(0, 70), (256, 268)]
    assert second.nbytes == 64 * 33 * 2 and third.slots[1].start % 256 == 0
