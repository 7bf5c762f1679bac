import hashlib
import os
import resource
import signal

import pytest

from grpo_recipes.engine.checkpoint import CheckpointStore
from grpo_recipes.errors import UserError


def store(folder, keep_last=2, keep_top_k=1):
    folder.mkdir(exist_ok=True)
    return CheckpointStore(folder, keep_last=keep_last, keep_top_k=keep_top_k, higher_is_better=True)


def writer(size):
    def write(folder):
        content = os.urandom(size)
        (folder / "weights").write_bytes(content)
        return {"weights": hashlib.sha256(content).hexdigest()}

    return write


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_keeps_the_best_and_the_last(tmp_path):
    checkpoints = store(tmp_path / "c")
    for step, metric in [(1, 0.3), (2, 0.9), (3, 0.5), (4, None), (5, 0.6)]:
        checkpoints.save(step, {"cursor": step}, metric, writer(10))
    assert names(tmp_path / "c") == ["step_000002", "step_000004", "step_000005"]
    latest = checkpoints.latest(pytest.fail)
    assert (latest.step, latest.state, latest.metric) == (5, {"cursor": 5}, 0.6)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "listing"])
def test_falls_back_to_the_previous_checkpoint_and_says_so(tmp_path, damage):
    checkpoints = store(tmp_path / "c")
    checkpoints.save(1, {}, None, writer(100))
    newest = checkpoints.save(2, {}, None, writer(100))
    weights = newest / "policy" / "weights"
    match damage:
        case "flip":
            weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
        case "truncate":
            weights.write_bytes(weights.read_bytes()[:50])
        case "remove":
            weights.unlink()
        case "listing":
            (newest / "files.json").unlink()
    said = []
    assert checkpoints.latest(said.append).step == 1
    assert len(said) == 1 and "step_000002 is damaged" in said[0]


def test_refuses_to_start_over_when_all_are_damaged(tmp_path):
    checkpoints = store(tmp_path / "c")
    (checkpoints.save(1, {}, None, writer(5)) / "state.json").unlink()
    with pytest.raises(UserError, match="every checkpoint is damaged: step_000001"):
        checkpoints.latest(lambda _: None)


def test_no_checkpoint_is_none(tmp_path):
    assert store(tmp_path / "c").latest(pytest.fail) is None


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    """The kernel refuses to write more than 4 KiB to a file, as it does on a full disk."""
    checkpoints = store(tmp_path / "c")
    checkpoints.save(1, {}, None, writer(100))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError, match=r"could not write the checkpoint of step 2 .*intact: step_000001"):
            checkpoints.save(2, {}, None, writer(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path / "c") == ["step_000001"]
    assert checkpoints.latest(pytest.fail).step == 1


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    checkpoints = store(tmp_path / "c")
    (tmp_path / "c" / ".writing_step_000007" / "policy").mkdir(parents=True)
    assert checkpoints.latest(pytest.fail) is None
    checkpoints.save(8, {}, None, writer(5))
    assert names(tmp_path / "c") == ["step_000008"]


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_nothing_that_looks_like_one(tmp_path, monkeypatch):
    checkpoints = store(tmp_path / "c", keep_last=1, keep_top_k=0)
    first = checkpoints.save(1, {}, None, writer(5))

    def killed(path, **_):
        (path / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("grpo_recipes.engine.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, {}, None, writer(5))
    assert not first.exists()
    assert checkpoints.latest(pytest.fail).step == 2
    checkpoints.save(3, {}, None, writer(5))
    assert names(tmp_path / "c") == ["step_000003"]


def test_a_damaged_checkpoint_is_put_aside_and_does_not_count_as_kept(tmp_path):
    checkpoints = store(tmp_path / "c", keep_last=1)
    checkpoints.save(1, {}, 0.5, writer(5))
    (checkpoints.save(4, {}, None, writer(5)) / "state.json").write_text("{")
    assert checkpoints.latest(lambda _: None).step == 1
    checkpoints.save(2, {}, None, writer(5))
    assert names(tmp_path / "c") == ["damaged_step_000004", "step_000001", "step_000002"]
    assert checkpoints.latest(pytest.fail).step == 2
    checkpoints.save(4, {}, None, writer(5))
    assert checkpoints.latest(pytest.fail).step == 4


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    checkpoints = store(tmp_path / "c", keep_last=1)
    checkpoints.save(3, {}, None, writer(5))
    checkpoints.save(3, {}, 0.7, writer(5))
    assert names(tmp_path / "c") == ["step_000003"]
    assert checkpoints.latest(pytest.fail).metric == 0.7
