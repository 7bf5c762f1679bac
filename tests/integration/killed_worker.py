"""A job one of whose workers is killed: `python killed_worker.py RUN_FOLDER RANK STEP`, as it trains after STEP steps."""

import os
import signal
import sys
from pathlib import Path

from grpo_recipes import job
from grpo_recipes.engine import policy_group

train = policy_group.PolicyGroup.train
calls = 0


def watched_train(self, index, loss):
    global calls
    calls += index == 0
    if calls == int(sys.argv[3]) + 1:
        os.kill(self.workers._processes[int(sys.argv[2])].pid, signal.SIGKILL)
    return train(self, index, loss)


if __name__ == "__main__":
    policy_group.PolicyGroup.train = watched_train
    sys.exit(job.main(Path(sys.argv[1])))
