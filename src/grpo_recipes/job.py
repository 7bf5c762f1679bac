"""The process that trains: `python -m grpo_recipes.job RUN_FOLDER`. What to run is in the folder's recipe.yaml.

Exit status: 0 done, 1 crashed, 2 a mistake that the user can mend, 130 stopped on request (resume with --resume).
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path

from grpo_recipes.engine.interrupt import Interrupted, stop_requests
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.compose import load_resolved
from grpo_recipes.runs.folder import next_attempt, open_run, write_pid

DONE, CRASHED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(path: Path) -> int:
    # Megatron-Core says at every start that GPTModel is frozen and how it would lay out its buffers.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    with stop_requests() as stop:
        try:
            folder = open_run(path)
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
            run(load_resolved(folder.recipe_path), folder, attempt, stop, reporter)
        except Interrupted:
            message = f"stopped after step {reporter.progress.step}; go on with: nemo-run recipe --resume {folder.path}"
            return finish(reporter, "interrupted", message, INTERRUPTED)
        except UserError as error:
            return finish(reporter, "failed", f"error: {error}", BAD_INPUT)
        except Exception as error:
            traceback.print_exc()
            return finish(reporter, "failed", f"{type(error).__name__}: {error}", CRASHED)
    return finish(reporter, "finished", "", DONE)


def finish(reporter, status: str, message: str, code: int) -> int:
    if message:
        print(message, file=sys.stderr, flush=True)
    reporter.close(status, message)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
