"""The lock on a folder: one process at a time, taken over from a dead one, refused with the name of a live one."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from smoothgrad_jax.data import folder_lock
from smoothgrad_jax.data.durable_files import SaveError
from smoothgrad_jax.data.folder_lock import FolderInUseError, FolderLock, locked

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from smoothgrad_jax.data.folder_lock import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture(name="holder")
def another_process(tmp_path):
    command = [sys.executable, "-W", "error", "-c", HOLDER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_with_the_name_of_the_first_and_a_dead_one_is_replaced(tmp_path, holder):
    message = rf"out: process {holder.pid} on host {socket.gethostname()} has been writing here since 20\d\d-.*; wait"
    with pytest.raises(FolderInUseError, match=message):
        FolderLock(tmp_path / "out")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "out" / folder_lock.NAME).exists()
    with locked(tmp_path / "out"):
        assert json.loads((tmp_path / "out" / folder_lock.NAME).read_text())["process"] == os.getpid()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_process_shares_its_locks_and_leaves_nothing(tmp_path):
    with locked(tmp_path / "new"):
        with locked(tmp_path / "new"):
            pass
        assert (tmp_path / "new" / folder_lock.NAME).exists()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        (tmp_path / "model").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_lock_ends_with_its_object(tmp_path):
    lock = FolderLock(tmp_path)
    assert (tmp_path / folder_lock.NAME).exists()
    del lock
    assert not (tmp_path / folder_lock.NAME).exists()


def this_process(**changes):
    return folder_lock._this_process() | changes


@pytest.mark.parametrize(
    ("holder", "refused"),
    [
        (this_process(), True),
        (this_process(started="1"), False),  # another process has its number now
        (this_process(boot="of yesterday"), False),
        (this_process(process=2**22 + 1), False),  # larger than any number of a process
        (this_process(host="another"), True),
        ({}, False),
        ({"process": "x", "host": socket.gethostname()}, True),
    ],
)
@pytest.mark.parametrize("local", [True, False])
def test_where_locks_of_the_system_lie_the_content_decides(tmp_path, monkeypatch, holder, refused, local):
    monkeypatch.setattr(folder_lock, "_is_local", lambda path: local)
    (tmp_path / folder_lock.NAME).write_text(json.dumps(holder))
    if refused and not local:
        with pytest.raises(FolderInUseError, match="has been writing here since"):
            FolderLock(tmp_path)
    else:
        FolderLock(tmp_path).release()


def test_a_lock_of_another_host_names_the_file_to_remove(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_is_local", lambda path: False)
    (tmp_path / folder_lock.NAME).write_text(json.dumps(this_process(host="far")))
    with pytest.raises(FolderInUseError, match=rf"if it has ended, .*, remove {tmp_path / folder_lock.NAME}"):
        FolderLock(tmp_path)


def test_a_path_that_cannot_be_locked_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(SaveError, match=f"{path}: could not be written"):
            locked(path).__enter__()
    (tmp_path / "private").write_text("unchanged")
    (tmp_path / folder_lock.NAME).symlink_to(tmp_path / "private")
    with pytest.raises(SaveError, match="could not be written"):
        locked(tmp_path).__enter__()
    assert (tmp_path / "private").read_text() == "unchanged"
