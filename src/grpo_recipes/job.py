"""The process that trains: `python -m grpo_recipes.job RUN_FOLDER`. What to run is in the folder's recipe.yaml.

Exit status: 0 done, 1 crashed, 2 a mistake that the user can mend, 130 stopped on request (resume with --resume).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from grpo_recipes.cluster.contract import WorkerDied
from grpo_recipes.engine.interrupt import Interrupted, stop_requests
from grpo_recipes.errors import UserError
from grpo_recipes.generation.contract import GeneratorDied, GeneratorStalled
from grpo_recipes.recipe.compose import load_resolved
from grpo_recipes.runs.folder import RunFolder, next_attempt, open_run, write_pid

DONE, CRASHED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def main(path: Path) -> int:
    # Megatron-Core says at every start that GPTModel is frozen and how it would lay out its buffers.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    with stop_requests() as stop, contextlib.ExitStack() as held:
        try:
            folder = open_run(path)
            held.enter_context(only_job(folder))
            write_pid(folder)
            attempt = next_attempt(folder)
        except UserError as error:  # there is no telling what to report to
            print(f"error: {error}", file=sys.stderr, flush=True)
            return BAD_INPUT
        # After the process is on record and signals are heard: these imports take seconds.
        from grpo_recipes.engine.loop import Reporter
        from grpo_recipes.engine.run import first_progress, run

        reporter = Reporter(folder, first_progress(attempt))
        try:
            resolved = load_resolved(folder.recipe_path)
            run(resolved, folder, attempt, stop, reporter)
        except Interrupted:
            message = f"stopped after step {reporter.progress.step}; "
            message += (
                f"go on with: nemo-run recipe {resolved.name} --resume {shlex.quote(str(folder.path))}"
                if resolved.recipe.checkpointing.enabled
                else "there is no checkpoint to go on from (checkpointing.enabled=false)"
            )
            return finish(reporter, "interrupted", message, INTERRUPTED)
        except UserError as error:
            return finish(reporter, "failed", f"error: {error}", BAD_INPUT)
        except (
            WorkerDied,
            GeneratorDied,
            GeneratorStalled,
        ) as error:  # what it was doing is in the log of that process, not in a traceback of this one
            return finish(reporter, "failed", f"error: {error}", CRASHED)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL_DISK:
                full = UserError(
                    f"the disk is full ({error})",
                    where=str(folder.path),
                    mend="free disk space, then go on with --resume: the last checkpoint is intact",
                )
                return finish(reporter, "failed", f"error: {full}", BAD_INPUT)
            traceback.print_exc()
            return finish(reporter, "failed", f"{type(error).__name__}: {error}", CRASHED)
        return finish(reporter, "finished", "", DONE)


@contextlib.contextmanager
def only_job(folder: RunFolder) -> Iterator[None]:
    """Two processes in one run folder would tear each other's files apart. The lock goes with the process.

    Raises:
        UserError: another job holds the folder.
    """
    with (folder.path / "job.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("this run is still going", where=str(folder.path), mend="wait for it, or stop it") from None
        yield


def finish(reporter, status: str, message: str, code: int) -> int:
    if message:
        print(message, file=sys.stderr, flush=True)
    try:
        reporter.close(status, message)
    except OSError as error:  # a full disk has no room for the last word either; the exit status has it
        print(f"warning: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
