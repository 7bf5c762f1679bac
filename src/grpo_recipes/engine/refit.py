"""Refit: the trainer's weights to every sampler, and the certificate that they are the ones it computes with.

The certificate compares three independent readings: checksums of a second gather of the trainer's live shards, on every
rank and after the weights were sent; checksums of what the sampler's loader was handed, and of the live parameters where
the sampler leaves them readable; and the logprobs of a probe by both models.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from grpo_recipes.cluster.contract import WorkerGroup
from grpo_recipes.engine.worker import EmbeddedReport
from grpo_recipes.generation.sync.checksum import differences
from grpo_recipes.generation.sync.contract import RefitError
from grpo_recipes.recipe.schema import Recipe

CERTIFIED = 2  # refits of every run, and after every restart of an engine
SHOWN = 5  # tensors that an error names
PROBE_LENGTH = 512  # tokens of a sequence of the probe
LATER_SHARE = 16  # refits that are certified after the first ones read one of so many sequences of the probe
LOOPBACK = "127.0.0.1"

Transport = Literal["ipc", "broadcast", "safetensors"]
Certify = Literal["first_two", "every", "never"]


@dataclass(frozen=True)
class ProbeLimits:
    """Of |sampler - trainer|, nats: largest and mean over the tokens of the probe."""

    largest: float
    mean: float


# float32: rounding alone; 1e-5 is seen. bfloat16: kernels round differently, and a router may choose another expert, so
# that only the mean is held to a narrow limit: weights of another layer, or of another step of training at a usual
# learning rate, are the checksums' to find.
PROBE_LIMITS = {"float32": ProbeLimits(1e-4, 1e-5), "bfloat16": ProbeLimits(math.inf, 0.1)}


@dataclass(frozen=True)
class RefitStats:
    """bytes: of all tensors, once, whatever the number of engines. seconds: without certifying them."""

    bytes: int
    seconds: float
    tensors: int
    certified: bool
    largest_gap: float | None = None  # of the probe, nats
    certify_seconds: float = 0.0
    unseen: tuple[str, ...] = ()  # live parameters that only the probe speaks for


class Engine(Protocol):
    """A sampler outside the trainer's processes (generation.vllm.backend.VllmGenerator)."""

    @property
    def receivers(self) -> int:
        """Its workers, each of which takes the weights."""

    def start_take(self, address: tuple[Any, ...], version: int, certify: bool) -> None: ...

    def finish_refit(self, version: int) -> list[dict[str, Any]]: ...

    def load_folder(self, folder: Path, version: int, *, certify: bool = False) -> list[dict[str, Any]]: ...

    def probe(self, sequences: list[list[int]]) -> list[list[float]]: ...


class Schedule:
    """Which refits are certified."""

    def __init__(self, certify: Certify) -> None:
        self.certify, self._done = certify, 0

    @property
    def due(self) -> bool:
        return self.certify == "every" or (self.certify == "first_two" and self.first)

    @property
    def first(self) -> bool:
        return self._done < CERTIFIED

    def done(self) -> None:
        self._done += 1

    def start_again(self) -> None:
        self._done = 0


class EmbeddedRefit:
    """To samplers in the trainer's own processes. One that computes with the trainer's parameters takes nothing, and
    there is nothing to certify; a copy is compared with a second gather as it was handed its weights and as it holds
    them."""

    def __init__(self, workers: WorkerGroup, certify: Certify) -> None:
        self._workers, self._schedule = workers, Schedule(certify)

    def __call__(self, version: int) -> RefitStats:
        """Raises RefitError; with the tensor's name."""
        certify = self._schedule.due
        began = time.perf_counter()
        reports: list[EmbeddedReport] = self._workers.call("refit", version, certify)
        seconds = time.perf_counter() - began
        self._schedule.done()
        if not (certify and reports[0].tensors):
            return RefitStats(reports[0].bytes, seconds, reports[0].tensors, certified=False)
        trainer = trainer_checksums(self._workers)
        for rank, report in enumerate(reports):
            for found, what in ((report.handed, "handed to"), (report.live, "held by")):
                faults = differences(trainer, found)
                if faults:
                    raise RefitError(f"refit {version}, {what} the sampler of rank {rank}: {shortened(faults)}")
        whole = time.perf_counter() - began
        return RefitStats(reports[0].bytes, seconds, reports[0].tensors, True, certify_seconds=whole - seconds)


class EngineRefit:
    """What brings the trainer's weights to the engines: `Parts.refit`.

    Args:
        workers: of `engine.worker.Worker`.
        engines: those that are there now; asked for at each refit.
        vocab_size: of the model, for the probe.
        longest: most tokens of a sequence, for the probe.
        host: an address of the trainer's first rank that engines reach; empty: its own idea of its address.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        engines: Callable[[], Sequence[Engine]],
        *,
        transport: Transport,
        certify: Certify,
        precision: str,
        vocab_size: int,
        longest: int,
        host: str = LOOPBACK,
    ) -> None:
        self._workers, self._engines, self._transport = workers, engines, transport
        self._schedule = Schedule(certify)
        self._limits, self._vocab_size, self._longest = PROBE_LIMITS[precision], vocab_size, longest
        self._host = host

    def __call__(self, version: int) -> RefitStats:
        """All engines draw by the trainer's weights, as `version`, from here on.

        Raises:
            RefitError: on the trainer's or a sampler's side; with the tensor's name.
            GeneratorDied: an engine is gone.
        """
        stats = self.bring(version, self._engines(), certify=self._schedule.due)
        self._schedule.done()
        return stats

    def catch_up(self, version: int, engine: Engine) -> RefitStats:
        """An engine that was started anew, with the weights that the others have; the next refits are certified again."""
        self._schedule.start_again()
        return self.bring(version, [engine], certify=self._schedule.due)

    def bring(self, version: int, engines: Sequence[Engine], *, certify: bool) -> RefitStats:
        began = time.perf_counter()
        send = self._by_folder if self._transport == "safetensors" else self._by_link
        sent, reports = send(version, engines, certify)
        seconds = time.perf_counter() - began
        if not certify:
            return RefitStats(sent, seconds, reports[0]["tensors"], certified=False)
        self._compare(version, reports)
        gap = self._probe(version, engines)
        unseen = tuple(sorted({name for report in reports for name in report["unseen"]}))
        whole = time.perf_counter() - began
        return RefitStats(sent, seconds, reports[0]["tensors"], True, gap, whole - seconds, unseen)

    def _by_folder(self, version: int, engines: Sequence[Engine], certify: bool) -> tuple[int, list[dict[str, Any]]]:
        with weights_folder(self._workers) as (folder, sent):
            return sent, [r for engine in engines for r in engine.load_folder(folder, version, certify=certify)]

    def _by_link(self, version: int, engines: Sequence[Engine], certify: bool) -> tuple[int, list[dict[str, Any]]]:
        receivers = sum(engine.receivers for engine in engines)
        [address] = [
            a for a in self._workers.call("open_link", self._transport, receivers, self._host) if a is not None
        ]
        for engine in engines:
            engine.start_take(address, version, certify)
        try:
            sent = max(self._workers.call("send_weights"))
        except Exception as error:
            for number, engine in enumerate(engines):  # why it failed, if it failed first
                try:
                    engine.finish_refit(version)
                except Exception as reason:
                    error.add_note(f"engine {number}: {reason}")
            raise
        return sent, [report for engine in engines for report in engine.finish_refit(version)]

    def _compare(self, version: int, reports: Sequence[dict[str, Any]]) -> None:
        trainer = trainer_checksums(self._workers)
        for number, report in enumerate(reports):
            faults = [
                *differences(trainer, report["handed"]),
                *(f"{name} is not, in the model that draws, what was handed over" for name in report["wrong"]),
            ]
            if faults:
                raise RefitError(f"refit {version}, worker {number} of the samplers: {shortened(faults)}")

    def _probe(self, version: int, engines: Sequence[Engine]) -> float:
        sequences = probe_sequences(self._vocab_size, self._longest, seed=version)
        if not self._schedule.first:
            sequences = sequences[: -(-len(sequences) // LATER_SHARE)]
        wanted = torch.tensor([p for s in self._workers.call("probe_logprobs", sequences)[0] for p in s])
        largest = 0.0
        for number, engine in enumerate(engines):
            found = torch.tensor([p for s in engine.probe(sequences) for p in s])
            gaps = (found - wanted).abs()
            worst, mean = float(gaps.max()), float(gaps.mean())
            if not (worst <= self._limits.largest and mean <= self._limits.mean):
                raise RefitError(
                    f"refit {version}, engine {number}: logprobs of the probe differ from the trainer's by up to "
                    f"{worst:.3g} nats, {mean:.3g} on average ({self._limits.largest:g} and {self._limits.mean:g} are "
                    "allowed), though every checksum agrees: weights are used in the wrong place, or the models compute "
                    "something different"
                )
            largest = max(largest, worst)
        return largest


def trainer_checksums(workers: WorkerGroup) -> dict[str, str]:
    """Of the trainer's live weights, by Hugging Face name. Every rank gathers them anew; all must find the same.

    Raises:
        RefitError: names tensors of which ranks hold different copies.
    """
    digests = workers.call("sum_weights")
    if len(set(digests)) > 1:
        first, *others = workers.call("weight_sums")
        faults = [f"{d} (rank {r})" for r, found in enumerate(others, start=1) for d in differences(first, found)]
        raise RefitError(f"the trainer's ranks hold different weights: {shortened(faults)}")
    return workers.scatter("weight_sums", [(rank == 0,) for rank in range(workers.world_size)])[0]


def probe_sequences(vocab_size: int, longest: int, *, seed: int) -> list[list[int]]:
    """Every token once, in an order of its own for each seed; an output layer is read whole at every token anyway."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed)).tolist()
    length = max(2, min(PROBE_LENGTH, longest - 1))
    cut = [order[start : start + length] for start in range(0, vocab_size, length)]
    return [piece if len(piece) > 1 else [order[0], *piece] for piece in cut]


def shortened(faults: Sequence[str]) -> str:
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "; ".join(faults[:SHOWN]) + more


@contextmanager
def weights_folder(workers: WorkerGroup) -> Iterator[tuple[Path, int]]:
    """The trainer's weights as they are now, in a folder that is gone after the block; and their bytes."""
    folder = Path(tempfile.mkdtemp(prefix="refit_"))
    try:
        yield folder, max(workers.call("write_weights", folder))
    finally:
        shutil.rmtree(folder)


def transport_of(recipe: Recipe) -> Transport:
    """What `auto` stands for: handles within a machine, a broadcast between machines."""
    asked = recipe.policy.generation.refit.transport
    if asked != "auto":
        return asked
    return "ipc" if recipe.cluster.num_nodes == 1 else "broadcast"
