"""The vLLM generator as the driver sees it: the Generator contract over a pipe to the engine's process."""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from grpo_recipes.generation.contract import Completion, GeneratorDied, Request
from grpo_recipes.generation.sync.safetensors_folder import RefitError, write_folder
from grpo_recipes.generation.vllm.engine_process import main
from grpo_recipes.generation.vllm.messages import Call, EngineSetup, Failed, Finished, Reply, Submit

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_recipes.policy.contract import WeightSpec

START = 0  # number of the reply that says the engine is up
EXIT_S = 5.0
CALL_S = 120.0  # for calls that move no weights: a step of the engine, on a busy machine


class VllmGenerator:
    """One vLLM engine in a process of its own, which ends with this one. Also a Sampler: it can be handed weights.

    Args:
        setup: see generation.vllm.arguments.engine_setup.
        max_positions: most tokens of a sequence, prompt and completion together.
        time_limit_s: longest that the start, a refit or its probe may take; other calls have CALL_S.

    Raises:
        GeneratorDied: the engine did not start; its own output says more.
    """

    def __init__(self, setup: EngineSetup, *, max_positions: int, time_limit_s: float = 1800.0) -> None:
        self._max_positions, self._time_limit_s = max_positions, time_limit_s
        self._outstanding: set[int] = set()
        self._finished: deque[Completion] = deque()
        self._paused, self._number, self._asked, self._ended = False, START, "start", ""
        sizes = [setup.arguments.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data")]
        self.receivers: int = math.prod(sizes)  # vLLM's workers, each of which takes the weights
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        # Not daemonic: a daemon may have no children, and vLLM's engine starts some.
        self._process = spawn.Process(target=main, args=(theirs, setup), name="vllm")
        self._process.start()
        theirs.close()
        atexit.register(self.close)  # before multiprocessing's own, which would wait for the process
        self.finish_call(time_limit_s)

    # -- the Sampler contract ----------------------------------------------------------------------------------
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises:
            ValueError: a request id that is outstanding already, or a request that cannot be served.
        """
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or ids & self._outstanding:
            raise ValueError("request ids must differ from one another and from those outstanding")
        for request in requests:
            longest = len(request.prompt_ids) + request.sampling.max_new_tokens
            if not request.prompt_ids or request.sampling.max_new_tokens < 1 or longest > self._max_positions:
                raise ValueError(
                    f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens and "
                    f"{request.sampling.max_new_tokens} new ones; a sequence has at most {self._max_positions}"
                )
        self._send(Submit(list(requests)))
        self._outstanding |= ids

    @property
    def alive(self) -> bool:
        return not self._ended and self._process.is_alive()

    def waitables(self) -> list[Any]:
        """For multiprocessing.connection.wait: ready once something has come, or the process is gone."""
        return [self._pipe, self._process.sentinel] if not self._ended else []

    def completions(self) -> Iterator[Completion]:
        while True:
            while self._finished:
                completion = self._finished.popleft()
                self._outstanding.remove(completion.request_id)
                yield completion
            if self._paused or not self._outstanding:
                return
            self._receive(None)

    def poll(self, seconds: float) -> list[Completion]:
        if self._outstanding and not self._finished and not self._paused:
            wait([self._pipe, self._process.sentinel], seconds)
        while self._outstanding and wait([self._pipe, self._process.sentinel], 0):
            self._receive(0)
        found = list(self._finished)
        self._finished.clear()
        self._outstanding.difference_update(completion.request_id for completion in found)
        return found

    def abort(self, request_ids: Sequence[int]) -> None:
        gone = self._outstanding.intersection(request_ids)
        self._call("abort", sorted(gone))  # what came before the answer is put aside
        self._outstanding -= gone
        self._finished = deque(completion for completion in self._finished if completion.request_id not in gone)

    def pause(self) -> None:
        self._call("pause")
        self._paused = True

    def resume(self, version: int) -> None:
        self._call("resume", version)
        self._paused = False

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self) -> None:
        self._call("wake")

    def update_weights(self, plan: Sequence[WeightSpec], buckets: Iterator[dict[str, Tensor]], version: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="refit_"))
        try:
            write_folder(folder, plan, buckets)
            self.load_folder(folder, version)
        finally:
            shutil.rmtree(folder)

    def load_folder(self, folder: Path, version: int, *, certify: bool = False) -> list[dict[str, Any]]:
        """Take the weights that `write_folder` left there, forget every cached prefix, and take `version`.

        Returns what each of vLLM's workers says (weights_worker.WeightsFromTrainer).

        Raises:
            RefitError: the weights are not what the plan says, or vLLM could not load them; with the reason.
        """
        self.start_call("load_folder", folder, version, certify)
        return self.finish_refit(version)

    def start_take(self, address: tuple[Any, ...], version: int, certify: bool) -> None:
        """As `load_folder`, by a link (generation.sync.link) whose sender waits at `address`; returns at once.
        `finish_refit` must follow."""
        self.start_call("take_weights", address, version, certify)

    def finish_refit(self, version: int) -> list[dict[str, Any]]:
        """What `load_folder` returns, or raises."""
        try:
            return self.finish_call(self._time_limit_s)
        except CallFailed as error:
            raise RefitError(f"weights of version {version} did not reach vLLM: {error}") from None

    def probe(self, sequences: list[list[int]]) -> list[list[float]]:
        """For each sequence the logprob of every token but the first, at temperature 1, by the current weights."""
        self.start_call("probe", sequences)
        return self.finish_call(self._time_limit_s)

    # -- the process -------------------------------------------------------------------------------------------
    def _call(self, method: str, *arguments: Any) -> Any:
        self.start_call(method, *arguments)
        return self.finish_call(CALL_S)

    def start_call(self, method: str, *arguments: Any) -> None:
        """One at a time; `finish_call` waits for its answer."""
        self._number += 1
        self._asked = method
        self._send(Call(self._number, method, arguments))

    def finish_call(self, limit_s: float) -> Any:
        """Raises CallFailed; GeneratorDied also where there is no answer in time."""
        deadline = time.monotonic() + limit_s
        while True:
            left = deadline - time.monotonic()
            if not self._ended and not wait([self._pipe, self._process.sentinel], max(0.0, left)):
                self._die(f"no answer to {self._asked} within {limit_s:.0f} s")
            reply = self._receive(None)
            if reply is None or reply.number != self._number:  # the latter: to a call that was interrupted here
                continue
            if reply.error:
                raise CallFailed(reply.error)
            return reply.value

    def _send(self, message: Submit | Call) -> None:
        if self._ended:
            raise GeneratorDied(self._ended)
        try:
            self._pipe.send(message)
        except OSError:  # closed at the other end; why, it may have said
            self._receive(EXIT_S)
            self._die("its process ended")

    def _receive(self, seconds: float | None) -> Reply | None:
        """One message; completions are put aside. Raises GeneratorDied."""
        if self._ended:
            raise GeneratorDied(self._ended)
        ready = wait([self._pipe, self._process.sentinel], seconds)
        if self._pipe not in ready:
            self._die(f"its process ended with exit code {self._process.exitcode}")
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(EXIT_S)
            self._die(f"its process ended with exit code {self._process.exitcode}")
        if isinstance(message, Failed):
            self._die(message.error)
        if isinstance(message, Reply):
            return message
        self._finished.append(completion_of(message))
        return None

    def _die(self, reason: str) -> NoReturn:
        lost = f"; {len(self._outstanding)} requests are lost" if self._outstanding else ""
        self._ended = f"the vLLM engine is gone{lost}: {reason}"
        self._end()
        raise GeneratorDied(self._ended)

    def close(self) -> None:
        """End the engine's processes. May be called twice."""
        if not self._ended:
            self._ended = "the vLLM engine was closed"
            self._pipe.close()
            self._process.join(EXIT_S)  # the engine gives back what it shares between its processes
            self._end()

    def _end(self) -> None:
        atexit.unregister(self.close)
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):  # before it had a group of its own, or all are gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(EXIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class CallFailed(RuntimeError):
    """A call raised in the engine's process, which goes on."""


def completion_of(message: Finished) -> Completion:
    return Completion(
        request_id=message.request_id,
        token_ids=torch.tensor(message.token_ids, dtype=torch.int64),
        logprobs=torch.tensor(message.logprobs, dtype=torch.float32),
        weight_versions=torch.tensor(message.weight_versions, dtype=torch.int32),
        finish_reason=message.finish_reason,
    )
