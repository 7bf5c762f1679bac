"""The process of a vLLM engine: its asynchronous engine, driven by messages over a pipe.

vLLM starts processes of its own below this one. All are one process group, so that they end together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import threading
import traceback
from collections.abc import Coroutine
from functools import partial
from multiprocessing import connection as mp_connection
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.generation.contract import Request
from grpo_recipes.generation.sync.safetensors_folder import check_folder
from grpo_recipes.generation.vllm.messages import Call, EngineSetup, Failed, Finished, Reply, Submit

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from vllm.v1.engine.async_llm import AsyncLLM

PARENT_POLL_S = 1.0
SHUTDOWN_S = 2.0
DEATH_POLL_S = 1.0


def main(pipe: Connection, setup: EngineSetup) -> None:
    os.setsid()  # the driver can end the whole group, and Ctrl-C reaches only the driver
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    os.environ.update(setup.environment)
    outbox = Outbox(pipe)
    try:
        asyncio.run(_serve(pipe, outbox, setup))
    except BaseException as error:  # whatever it is, the driver must hear of it
        outbox.send(Failed(told(error)))
    finally:
        outbox.finish()
        pipe.close()
        os.killpg(0, signal.SIGKILL)  # vLLM's processes too, whatever state they are in


class Outbox:
    """Sends in a thread: a driver that is training does not read, and a full pipe must not stop the engine."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        self._messages.put(message)

    def finish(self) -> None:
        """Wait a while for what is to be sent."""
        self._messages.put(None)
        self._thread.join(SHUTDOWN_S)

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # the driver has closed its end
            while (message := self._messages.get()) is not None:
                self._pipe.send(message)


def told(error: BaseException) -> str:
    """What the driver is told, in a line; all of it goes to this process's output."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def _follow_parent(parent_pid: int) -> None:
    parent = parent_process()
    assert parent is not None
    while not mp_connection.wait([parent.sentinel], PARENT_POLL_S) and os.getppid() == parent_pid:
        pass
    os.killpg(0, signal.SIGKILL)


async def _serve(pipe: Connection, outbox: Outbox, setup: EngineSetup) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**setup.arguments))
    session = Session(engine, outbox)
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    # A daemon, not an executor of the loop: the end of the loop would wait for its read.
    threading.Thread(target=_read, args=(pipe, loop, inbox), daemon=True).start()
    outbox.send(Reply(0))
    while (message := await inbox.get()) is not None:
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, Submit):
            for request in message.requests:
                task = asyncio.create_task(session.draw(request))
                session.drawing[request.request_id] = task
                task.add_done_callback(partial(_drawn, session.drawing, request.request_id, inbox))
        else:
            await session.answer(message)
    engine.shutdown(timeout=SHUTDOWN_S)  # closed: what is still being drawn has no reader


def _drawn(
    drawing: dict[int, asyncio.Task[None]], request_id: int, inbox: asyncio.Queue[Any], task: asyncio.Task[None]
) -> None:
    """An error in one request ends all."""
    del drawing[request_id]
    if not task.cancelled() and (error := task.exception()) is not None:
        inbox.put_nowait(error)


def _read(pipe: Connection, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Any]) -> None:
    """Hand each message to the loop; None once the driver has closed the pipe."""
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = None
        loop.call_soon_threadsafe(inbox.put_nowait, message)
        if message is None:
            return


class EngineDeath(Exception):
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Session:
    """What the driver may ask of the engine. `version` is that of the weights the next token is drawn by."""

    def __init__(self, engine: AsyncLLM, outbox: Outbox) -> None:
        self.engine, self.outbox = engine, outbox
        self.version, self.paused = 0, False
        self.torn: int | None = None  # version of the refit that broke off
        self.drawing: dict[int, asyncio.Task[None]] = {}  # by request id

    async def answer(self, call: Call) -> None:
        try:
            value = await self._unless_dead(getattr(self, call.method)(*call.arguments))
        except EngineDeath as death:  # not an answer: the end
            raise death.error from None
        except Exception as error:  # the driver's to see
            self.outbox.send(Reply(call.number, error=told(error)))
        else:
            self.outbox.send(Reply(call.number, value))

    async def _unless_dead(self, work: Coroutine[Any, Any, Any]) -> Any:
        """vLLM leaves a call unanswered for ever if its engine dies meanwhile."""
        task = asyncio.create_task(work)
        while not (await asyncio.wait({task}, timeout=DEATH_POLL_S))[0]:
            if self.engine.errored:
                raise EngineDeath(self.engine.dead_error)
        return task.result()

    async def draw(self, request: Request) -> None:
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason: Any = None
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        async for output in self.engine.generate(prompt, sampling_params(request), str(request.request_id)):
            [part] = output.outputs
            token_ids += part.token_ids
            logprobs += [at[token].logprob for token, at in zip(part.token_ids, part.logprobs, strict=True)]
            versions += [self.version] * len(part.token_ids)
            reason = part.finish_reason or reason
        self.outbox.send(Finished(request.request_id, token_ids, logprobs, versions, reason))

    async def abort(self, request_ids: list[int]) -> None:
        """None of these is sent after this call's answer."""
        tasks = [self.drawing[request_id] for request_id in request_ids if request_id in self.drawing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def pause(self) -> None:
        self.paused = True
        await self.engine.pause_generation(mode="keep", clear_cache=False)

    async def resume(self, version: int) -> None:
        self.paused, self.version = False, version
        await self.engine.resume_generation()

    async def sleep(self) -> None:
        await self.engine.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        await self.engine.wake_up()

    async def load_folder(self, folder: Path, version: int, certify: bool = False) -> list[dict[str, Any]]:
        """As `take_weights`, from what `write_folder` wrote."""
        check_folder(folder)
        return await self._take("take_folder", version, str(folder), certify)

    async def take_weights(self, address: tuple[Any, ...], version: int, certify: bool) -> list[dict[str, Any]]:
        """New weights by a link, for whatever is drawn from now on; unfinished requests are read again by them.
        Returns what weights_worker.WeightsFromTrainer says, of each of vLLM's workers."""
        return await self._take("take_weights", version, list(address), certify)

    async def _take(self, method: str, version: int, *arguments: Any) -> list[dict[str, Any]]:
        """If loading raises, some layers have no weights: the engine stays paused, and must be started anew."""
        if self.torn is not None:
            raise RuntimeError(f"the engine was left without weights by refit {self.torn}, and must be started anew")
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        self.torn = version
        found = await self.engine.collective_rpc(method, args=arguments)
        self.torn = None
        if not await self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache: prompts would be read by the old weights")
        self.version = version
        if not self.paused:
            await self.engine.resume_generation()
        return found

    async def probe(self, sequences: list[list[int]]) -> list[list[float]]:
        """For each sequence the logprob of every token but the first, at temperature 1."""
        if self.paused:
            await self.engine.resume_generation()
        found = await asyncio.gather(*(self._read(number, tokens) for number, tokens in enumerate(sequences)))
        if self.paused:
            await self.engine.pause_generation(mode="keep", clear_cache=False)
        return found

    async def _read(self, number: int, tokens: list[int]) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        async for output in self.engine.generate({"prompt_token_ids": tokens}, params, f"probe {number}"):
            read = output.prompt_logprobs
        return [at[token].logprob for token, at in zip(tokens[1:], read[1:], strict=True)]


def sampling_params(request: Request) -> Any:
    """vLLM's SamplingParams: nothing but what the trainer mirrors. Stop tokens are the request's own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    greedy = sampling.temperature == 0
    return SamplingParams(
        temperature=sampling.temperature,
        seed=None if greedy else request.seed,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,  # of the drawn token only
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,  # so that each token is counted to the weights it was drawn by
    )
