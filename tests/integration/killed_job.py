"""A job that kills itself: `python killed_job.py RUN_FOLDER POINT STEP`, or to its end with POINT `never`.

POINT is a phase (killed as it begins) or one of the points below (killed in the middle of it). STEP counts completed
steps. SIGKILL leaves no chance to tidy up, as when a machine is lost.
"""

import os
import signal
import sys
from pathlib import Path

from grpo_recipes import job
from grpo_recipes.engine import checkpoint, loop, policy_group
from grpo_recipes.policy import safetensors_stream

folder, point, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def die_at(place: str, current: int) -> None:
    if (place, current) == (point, step):
        os.kill(os.getpid(), signal.SIGKILL)


update = loop.Reporter.update
train = policy_group.PolicyGroup.train
write_json = checkpoint.write_json
write_stream = safetensors_stream.write_stream
done = 0


def watched_update(self, **changes):
    global done
    update(self, **changes)
    done = self.progress.step
    if "phase" in changes:
        die_at(changes["phase"], done)


def watched_train(self, index, loss):
    if index == 1:
        die_at("between optimizer steps", done)
    return train(self, index, loss)


def watched_write_json(path, content):
    if path.name == checkpoint.STATE:
        die_at("half a checkpoint", done)
    write_json(path, content)
    if path.name == checkpoint.FILES:
        die_at("before the rename", done)


def watched_write_stream(path, tensors, metadata):
    if (point, step) == ("half a file", done):
        path.write_bytes(b"half")
    die_at("half a file", done)
    return write_stream(path, tensors, metadata)


safetensors_stream.write_stream = watched_write_stream
loop.Reporter.update = watched_update
policy_group.PolicyGroup.train = watched_train
checkpoint.write_json = watched_write_json
sys.exit(job.main(folder))
