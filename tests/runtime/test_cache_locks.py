"""A lock ends with its holder, a waiting process names the holder, and every wait has a time limit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kernelhub.errors import LockTimeout
from kernelhub.probes.toolchain import cxx_compiler
from kernelhub.runtime.caches import lock as locks
from kernelhub.runtime.caches import notices
from kernelhub.runtime.caches.fingerprint import fingerprint
from kernelhub.runtime.caches.lock import lock
from kernelhub.runtime.caches.store import Store
from tests.runtime.caches import PRELUDE, child, clean, mount_namespace

TOKEN = "a" * 32
HOLD = """
import sys, time
from pathlib import Path
from kernelhub.runtime.caches import lock as locks
locks._BEAT_S = 0.05
with locks.lock(Path(sys.argv[1]), timeout_s=30) as held:
    print(held.token, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.forget()
    yield
    notices.forget()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "entry.lock"


def codes() -> list[str]:
    return [notice.code for notice in notices.cache_notices()]


def start(path: Path, *before: str) -> subprocess.Popen:
    """A process that holds the lock until it is told to go on, or is killed."""
    command = [*before, sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean())
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def lock_of(path: Path, age_s: float = 0.0, **who: object) -> None:
    """A lock file as somebody else would have left it."""
    path.write_text(replace(locks.myself(TOKEN), **who).to_text())
    then = time.time() - age_s
    os.utime(path, (then, then))


class TestHolding:
    def test_is_one_at_a_time_and_leaves_nothing(self, path) -> None:
        inside, most = [], []

        def work() -> None:
            with lock(path, timeout_s=30):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert most == [1] * 16
        assert list(path.parent.iterdir()) == []

    def test_a_thread_that_waits_too_long_is_reported(self, path) -> None:
        told = pytest.raises(LockTimeout, match="another thread of this process")
        with lock(path, timeout_s=1), told, lock(path, timeout_s=0.05):
            raise AssertionError

    def test_the_holder_is_named_to_who_waits(self, path) -> None:
        process = start(path)
        waits = []
        try:
            with (
                pytest.raises(LockTimeout) as raised,
                lock(path, timeout_s=0.3, on_wait=lambda *told: waits.append(told)),
            ):
                raise AssertionError
        finally:
            process.communicate("\n")
        assert f"process {process.pid} on {socket.gethostname()}" in str(raised.value)
        assert str(path) in str(raised.value)
        assert raised.value.waited_s >= 0.3
        assert all(f"process {process.pid}" in words for words, _ in waits)
        assert [waited_s for _, waited_s in waits] == sorted(waited_s for _, waited_s in waits)
        assert len(waits) >= 2

    def test_is_had_once_the_holder_ends(self, path) -> None:
        process = start(path)
        threading.Timer(0.2, lambda: process.communicate("\n")).start()
        with lock(path, timeout_s=30) as held:
            assert held.after is None
        assert codes() == []
        process.wait(30)

    def test_a_long_wait_is_said(self, path, monkeypatch) -> None:
        monkeypatch.setattr(locks, "_SAY_AFTER_S", 0.1)
        process = start(path)
        with pytest.raises(LockTimeout), lock(path, timeout_s=0.5):
            raise AssertionError
        process.communicate("\n")
        (notice,) = notices.cache_notices()
        assert notice.code == "lock_wait"
        assert f"process {process.pid}" in notice.sentence

    def test_without_links_a_file_that_only_one_creates_will_do(self, path, monkeypatch) -> None:
        def refuse(*paths: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "link", refuse)
        with lock(path, timeout_s=1) as held:
            assert held.still()
            code = HOLD.replace("timeout_s=30", "timeout_s=0.2")
            done = subprocess.run(
                [sys.executable, "-c", code, str(path)],
                capture_output=True,
                text=True,
                env=clean(),
                stdin=subprocess.DEVNULL,
            )
            assert f"held by process {os.getpid()} on" in done.stderr
        assert list(path.parent.iterdir()) == []


class TestDeadHolders:
    @pytest.mark.fault("holder_killed")
    def test_one_that_was_killed_is_known_at_once(self, path) -> None:
        process = start(path)
        process.kill()  # it stays a zombie until we wait for it, which must not count as life
        begun = time.monotonic()
        with lock(path, timeout_s=30) as held:
            assert held.after is not None
        assert time.monotonic() - begun < locks.STALE_AFTER_S / 4
        process.communicate()
        (notice,) = notices.cache_notices()
        assert notice.code == "lock_dead_holder"
        assert f"process {process.pid} on" in notice.sentence

    @pytest.mark.fault("holder_pid_reused")
    def test_a_process_id_that_was_given_to_another_is_known(self, path) -> None:
        lock_of(path, started="1")  # our own id, of a process that started with the machine
        with lock(path, timeout_s=5):
            pass
        assert codes() == ["lock_reused_pid"]

    @pytest.mark.parametrize("who", [{"host": "node-7"}, {"boot": "another boot"}, {"container": "pid:[1]"}])
    @pytest.mark.fault("holder_elsewhere_dead")
    def test_one_elsewhere_is_reported_by_its_age_alone(self, path, who) -> None:
        lock_of(path, age_s=locks.STALE_AFTER_S - 30, pid=999_999_999, **who)
        with pytest.raises(LockTimeout) as raised, lock(path, timeout_s=0.2):
            raise AssertionError
        assert who.get("host", socket.gethostname()) in raised.value.holder
        assert codes() == []
        lock_of(path, age_s=locks.STALE_AFTER_S + 30, pid=999_999_999, **who)
        with lock(path, timeout_s=5) as held:
            assert held.after == TOKEN
        assert codes() == ["lock_expired"]

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "garbage"])
    @pytest.mark.fault("lock_garbage")
    def test_a_file_that_names_nobody_is_respected_for_a_moment_only(self, path, text) -> None:
        path.write_text(text)
        with pytest.raises(LockTimeout, match="an unnamed process"), lock(path, timeout_s=0.1):
            raise AssertionError
        then = time.time() - 60
        os.utime(path, (then, then))
        with lock(path, timeout_s=5):
            pass
        assert codes() == ["lock_unreadable"]

    def test_clocks_that_disagree_do_no_harm(self, path, monkeypatch) -> None:
        lock_of(path, host="node-7")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 1e6)
        with pytest.raises(LockTimeout), lock(path, timeout_s=0.2):
            raise AssertionError

    def test_signs_of_life_keep_the_lock_of_a_process_that_cannot_be_asked(self, path) -> None:
        """A holder in a container of its own: its process id means nothing here, and its lock is not taken."""
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if os.geteuid() != 0:
            command[1:1] = ["--user", "--map-root-user"]
        if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
            pytest.skip("no leave to make a namespace of process ids here: 1 case")
        process = start(path, *command)
        try:
            found = locks.Holder.read(path)
            assert found is not None
            assert (found.host, found.is_here()) == (socket.gethostname(), False)
            with pytest.raises(LockTimeout), lock(path, timeout_s=4, stale_after_s=2.5):
                raise AssertionError
            assert codes() == []
        finally:  # the holder before its pipe is closed, at whose end it would give the lock up
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                for child_pid in (task / "children").read_text().split():
                    os.kill(int(child_pid), signal.SIGKILL)
            process.wait(30)
            process.communicate()
        with lock(path, timeout_s=30, stale_after_s=2.5):
            pass
        assert codes() == ["lock_expired"]

    def test_of_many_who_find_it_dead_one_at_a_time_takes_it(self, path) -> None:
        for _ in range(5):
            lock_of(path, pid=999_999_999)
            inside, most = [], []
            barrier = threading.Barrier(8)

            def work(inside=inside, most=most, barrier=barrier) -> None:
                barrier.wait()
                held = locks._acquire(path, time.monotonic(), 30, 120, None)  # past the lock among threads
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.002)
                inside.pop()
                locks._release(held)

            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert most == [1] * 8
            assert list(path.parent.iterdir()) == []

    def test_one_that_was_ended_while_it_took_a_dead_holders_lock_hinders_nobody(self, path) -> None:
        lock_of(path, pid=999_999_999)
        breaker = path.with_name(f".{path.name}-breaker")
        lock_of(breaker, pid=999_999_998, age_s=60)
        with lock(path, timeout_s=5):
            pass
        assert list(path.parent.iterdir()) == []

    def test_who_lost_the_lock_does_not_end_the_next_ones(self, path) -> None:
        with lock(path, timeout_s=1):
            lock_of(path, token="b" * 32)
        assert path.exists()


@pytest.mark.skipif(mount_namespace() is None, reason="no leave to mount file systems here: 1 case")
@pytest.mark.fault("mount_turns_read_only")
def test_a_mount_that_becomes_read_only_under_the_holder_is_said_and_nothing_is_lost(tmp_path) -> None:
    (tmp_path / "named").mkdir()
    code = f"""
import subprocess
from kernelhub.runtime.caches.lock import lock
with lock(Path("{tmp_path}/named/entry.lock"), timeout_s=5):
    subprocess.run(["mount", "-o", "remount,ro", "{tmp_path}/named"], check=True)
answer(survived=True)
"""
    told = child(code, clean(), mounts=(f"mount -t tmpfs tmpfs {tmp_path}/named",))
    assert (told["survived"], told["said"]) == (True, ["lock_left"])


class TestForks:
    def test_a_child_of_the_holder_neither_holds_nor_ends_it(self, path) -> None:
        with lock(path, timeout_s=1) as held:
            forked = os.fork()
            if forked == 0:
                try:
                    with lock(path, timeout_s=0.1):
                        os._exit(1)
                except LockTimeout as error:
                    os._exit(0 if f"process {os.getppid()} on" in str(error) else 2)
            assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
            assert held.still()

    @pytest.mark.fault("forked_while_threads_work")
    def test_children_forked_while_threads_are_at_work_can_work(self, tmp_path) -> None:
        """In a process of its own: fork while 8 threads hold locks, and use the cache in each child."""
        code = """
import threading
folder = Path(sys.argv[1])
threads_store = Store("kind", fingerprint("any", who="threads"), folder=folder)
def slow(made):
    time.sleep(0.3)
    (made / "made").write_text("x")
threads = [threading.Thread(target=lambda i=i: threads_store.get(f"entry{i}", slow)) for i in range(8)]
for thread in threads: thread.start()
children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        try:
            own = Store("kind", fingerprint("any", who="child"), folder=folder)
            good = own.get("entry", write("y")).file("made").read_text() == "y"
            good = good and threads_store.get("entry0", write("x"), patience_s=20).file("made").read_text() == "x"
            os._exit(0 if good else 1)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(2)
    children.append(child)
ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
for thread in threads: thread.join()
answer(ends=ends, entries=sorted(path.name for path in threads_store._folder(root.Place(folder, "x")).iterdir()))
"""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PRELUDE + code, str(tmp_path)],
            capture_output=True, text=True, env=clean(), timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["ends"] == [0] * 4, done.stderr
        assert told["entries"] == [f"entry{number}" for number in range(8)]
        assert set(told["said"]) <= {"lock_wait"}, "a slow machine waits long"


class TestStoreAndLocks:
    @pytest.mark.fault("holder_hangs")
    def test_a_holder_that_hangs_does_not_block_the_store(self, tmp_path) -> None:
        store = Store("kind", fingerprint("any"), folder=tmp_path)
        folder = tmp_path / "kind" / "any" / store.fingerprint.digest
        folder.mkdir(parents=True)
        process = start(folder / "entry.lock")
        os.kill(process.pid, signal.SIGSTOP)
        entry = store.get("entry", lambda made: (made / "x").write_text("x"), patience_s=0.3)
        assert entry.file("x").read_text() == "x"
        (notice,) = notices.cache_notices()
        assert notice.code == "lock_timeout"
        assert f"process {process.pid} on" in notice.sentence
        os.kill(process.pid, signal.SIGCONT)
        process.communicate("\n")
        assert [path.name for path in folder.iterdir()] == ["entry"]

    @pytest.mark.fault("maker_killed")
    def test_what_a_killed_maker_began_is_cleared_away(self, tmp_path) -> None:
        code = """
store = Store("kind", fingerprint("any"), folder=Path(sys.argv[1]))
def make(folder):
    (folder / "half").write_text("...")
    print("begun", flush=True)
    time.sleep(60)
store.get("entry", make)
"""
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=clean()
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.kill()
        process.communicate()
        store = Store("kind", fingerprint("any"), folder=tmp_path)
        path = store.get("entry", lambda made: (made / "x").write_text("x")).path
        assert [entry.name for entry in path.parent.iterdir()] == ["entry"]
        assert codes() == ["lock_dead_holder"]


SIXTEEN = """
import sys
from pathlib import Path
from kernelhub.backends.cpp import build
from kernelhub.runtime.caches import notices
import ctypes, json
Path(sys.argv[2], str(__import__("os").getpid())).touch()
sys.stdin.readline()
path = build.built(Path(sys.argv[1]))
seven = ctypes.CDLL(str(path)).seven()
print(json.dumps({"path": str(path), "seven": seven, "said": [n.code for n in notices.cache_notices()]}))
"""


@pytest.mark.skipif(not cxx_compiler().ok, reason="no C++ compiler here: 1 case")
@pytest.mark.fault("sixteen_processes_one_killed")
def test_sixteen_processes_compile_the_same_and_the_one_that_does_is_killed(tmp_path: Path) -> None:
    """One compiles; killed, it is followed by one other; the 15 that are left load the same library."""
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    begun = tmp_path / "begun"
    begun.mkdir()
    slow = tmp_path / "g++"
    slow.write_text(f'#!/bin/sh\ntouch {begun}/compiler-$$\nsleep 1\nexec {cxx_compiler().value} "$@"\n')
    slow.chmod(0o755)
    environment = clean(KERNELHUB_CACHE_DIR=str(tmp_path / "cache"), CXX=str(slow))
    command = [sys.executable, "-c", SIXTEEN, str(source), str(begun)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, env=environment, **pipes) for _ in range(16)]
    _until(lambda: all((begun / str(process.pid)).exists() for process in processes))
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    _until(lambda: list(begun.glob("compiler-*")))
    (path,) = (tmp_path / "cache").rglob("seven.lock")
    found = locks.Holder.read(path)
    assert found is not None
    os.kill(found.pid, signal.SIGKILL)

    answers = {process.pid: process.communicate(timeout=120) for process in processes}
    assert [process.pid for process in processes if process.returncode == -signal.SIGKILL] == [found.pid]
    told = [json.loads(out) for pid, (out, _) in answers.items() if pid != found.pid]
    assert [item["seven"] for item in told] == [7] * 15, answers
    assert len({item["path"] for item in told}) == 1
    assert len(list(begun.glob("compiler-*"))) == 2, "the killed one and one other compiled"
    said = Counter(code for item in told for code in item["said"] if code != "lock_wait")  # a slow machine waits long
    assert said == {"lock_dead_holder": 1}
    folder = Path(told[0]["path"]).parents[1]
    assert [entry.name for entry in folder.iterdir()] == ["seven"]
    assert re.fullmatch(r"[0-9a-f]{24}", folder.name)


def _until(ready, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
