"""What another user may have done to a cache: nothing of theirs is loaded, executed or believed, or touches the rest.

Attacks are generated from a seed. Those of another user need a superuser, who gives files away and becomes others.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kernelhub.cli.main import main
from kernelhub.errors import CacheError, LockTimeout
from kernelhub.probes.toolchain import cxx_compiler
from kernelhub.runtime.caches import inventory, manifest, notices
from kernelhub.runtime.caches.fingerprint import Fingerprint, fingerprint
from kernelhub.runtime.caches.lock import lock, myself
from kernelhub.runtime.caches.store import Store
from kernelhub.runtime.caches.trusted import load, tree
from kernelhub.runtime.caches.variables import set_cache_variables
from tests.fuzz.counting import Attacks
from tests.runtime.caches import clean

SEED = int(os.environ.get("FUZZ_SEED", "0"))
MANY = int(os.environ.get("FUZZ_CASES", "90"))
LONGEST_S = 5.0  # of one use of a cache that was attacked; it takes milliseconds
OTHER = 65534
USERS = "with" if os.geteuid() == 0 else "without"
superuser = pytest.mark.skipif(os.geteuid() != 0, reason="only a superuser gives files to another user: 1 case")
MADE_FOR = fingerprint("sm_90a", cuda="13.0")


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.forget()
    yield
    notices.forget()


@pytest.fixture
def counts(request):
    """What becomes of attacks, told in one line at the end."""
    counted = Attacks()
    yield counted
    counted.note(request.node, f"hostile caches, seed {SEED}, {USERS} other users")


def make(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "library.so").write_text(text)


class Attacker:
    """Another user, who does one thing to one place of a cache. What is planted says so."""

    def __init__(self, random: Random, outside: Path) -> None:
        self.random, self.outside = random, outside
        self.is_root = os.geteuid() == 0

    def strike(self, root: Path) -> str:
        """One attack, by its name; nothing where the place is gone."""
        places = [path for path in (root, *root.rglob("*")) if path.exists() and not path.is_symlink()]
        path = self.random.choice(places)
        ways = [
            self.open_to_group,
            self.open_to_all,
            self.link,
            self.pipe,
            self.folder,
            self.socket,
            self.lock,
            self.token,
        ]
        ways += [self.own, self.replant, self.own_above, self.fifo_lock] if self.is_root else []
        ways += [self.append, self.empty] if path.is_file() else []
        way = self.random.choice(ways)
        way(path, root)
        return way.__name__

    def open_to_group(self, path: Path, root: Path) -> None:
        path.chmod(path.stat().st_mode | 0o020)

    def open_to_all(self, path: Path, root: Path) -> None:
        path.chmod(path.stat().st_mode | self.random.choice((0o002, 0o777, 0o1777)))

    def own(self, path: Path, root: Path) -> None:
        os.chown(path, OTHER, OTHER)

    def own_above(self, path: Path, root: Path) -> None:
        os.chown(path.parent if path != root else path, OTHER, OTHER)

    def append(self, path: Path, root: Path) -> None:
        with path.open("a") as file:
            file.write("planted")

    def empty(self, path: Path, root: Path) -> None:
        path.write_text("")

    def link(self, path: Path, root: Path) -> None:
        target = self.outside / f"target{self.random.random()}"
        if path == root:
            return
        if self.random.random() < 0.5:
            os.rename(path, target)  # the same contents, elsewhere
        self._gone(path)
        path.symlink_to(target)

    def pipe(self, path: Path, root: Path) -> None:
        if path != root:
            self._gone(path)
            os.mkfifo(path)

    def socket(self, path: Path, root: Path) -> None:
        if path != root and len(str(path)) < 100:
            self._gone(path)
            socket.socket(socket.AF_UNIX).bind(str(path))

    def folder(self, path: Path, root: Path) -> None:
        if path != root:
            self._gone(path)
            path.mkdir()
            (path / "inside").mkdir()

    def replant(self, path: Path, root: Path) -> None:
        """A whole entry of the attacker's, in which everything holds but its owner."""
        for entry in root.rglob("manifest.json"):
            folder = entry.parent
            if not folder.is_dir() or not os.path.isfile(entry):
                continue
            self._gone(folder / "library.so")
            (folder / "library.so").write_text("planted")
            entry.unlink()
            manifest.write(folder, "kind", folder.name, MADE_FOR)
            for one in (folder, entry, folder / "library.so"):
                os.chown(one, OTHER, OTHER)
                one.chmod(0o755)

    def lock(self, path: Path, root: Path) -> None:
        """A lock that is old, from the future, held by nobody, or by somebody it cannot be."""
        where = self._lock_file(root)
        told = json.loads(myself("a" * 32).to_text())
        told |= self.random.choice(
            ({"pid": 0}, {"pid": -1}, {"pid": 1}, {"pid": 2**31}, {"started": "1"}, {"host": "node"})
        )
        if where is not None:
            where.write_text(json.dumps(told))
            ahead = self.random.choice((-86400, 86400, 10**9))
            os.utime(where, (time.time() + ahead,) * 2)

    def fifo_lock(self, path: Path, root: Path) -> None:
        where = self._lock_file(root)
        if where is not None:
            self.random.choice((os.mkfifo, os.mkdir, lambda at: os.symlink("/nowhere", at)))(where)

    def token(self, path: Path, root: Path) -> None:
        """The lock of a dead process whose token leads out of the cache."""
        where = self._lock_file(root)
        if where is not None:
            gone = json.loads(myself("a" * 32).to_text()) | {"pid": 999_999_999}
            up = "/../" * 12
            where.write_text(json.dumps(gone | {"token": f"x{up}{str(self.outside / 'precious')[1:]}"}))
            os.utime(where, (time.time() - 86400,) * 2)

    def _lock_file(self, root: Path) -> Path | None:
        folder = next((path.parent for path in root.rglob("entry*") if path.parent.is_dir()), None)
        where = None if folder is None else folder / "entry.lock"
        return None if where is None or os.path.lexists(where) else where

    @staticmethod
    def _gone(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("strikes", [1, 3])
def test_nothing_of_another_user_is_loaded_and_nothing_outside_is_touched(tmp_path, counts, strikes) -> None:
    outside = tmp_path / "outside"
    (outside / "precious").mkdir(parents=True)
    (outside / "precious" / "thesis.tex").write_text("x")
    attacker = Attacker(Random(SEED + strikes), outside)
    for number in range(MANY // 3):
        root = tmp_path / f"cache{number}"
        root.mkdir(mode=0o700)
        store = Store("kind", MADE_FOR, folder=root)
        store.get("entry", make("made"))
        store.write("document", {"who": "made"})
        names = "+".join(attacker.strike(root) for _ in range(strikes))
        begun = time.monotonic()
        list(inventory._items(inventory.root.Place(root, "test"), thorough=True, differs=inventory._differs))
        read = store.read("document")
        assert read in (None, {"who": "made"}), names
        try:
            entry = store.get("entry", make("made"), patience_s=0.2)
        except CacheError:
            counts["refused"] += 1
        else:
            with entry.opened("library.so") as file:
                assert os.pread(file, 100, 0) == b"made", names
                assert os.fstat(file).st_uid == os.geteuid(), names
            counts["made again" if notices.cache_notices() else "harmless"] += 1
        store.write("document", {"who": "made"})
        inventory.size_of(root)
        assert time.monotonic() - begun < LONGEST_S, names
        assert (outside / "precious" / "thesis.tex").read_text() == "x", names
        notices.forget()
        shutil.rmtree(root)


@superuser
def test_an_entry_that_is_swapped_while_it_is_loaded_is_never_the_attackers(tmp_path, counts) -> None:
    """The check and the use are of one descriptor."""
    store = Store("kind", MADE_FOR, folder=tmp_path / "cache")
    entry = store.get("entry", make("made"))
    planted = tmp_path / "planted"
    shutil.copytree(entry.path, planted)
    (planted / "library.so").write_text("evil")  # as many bytes
    (planted / "manifest.json").unlink()
    manifest.write(planted, "kind", "entry", MADE_FOR)
    for path in (planted, *planted.iterdir()):
        os.chown(path, OTHER, OTHER)
    spare, ended = tmp_path / "spare", threading.Event()

    def swap() -> None:
        while not ended.is_set():
            for source in (planted, spare):
                here = spare if source is planted else planted
                try:
                    os.rename(entry.path, here)
                    os.rename(source, entry.path)
                except OSError:
                    continue

    thread = threading.Thread(target=swap)
    thread.start()
    loaded = 0
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            found = store.find("entry")
            if found is None:
                counts["refused"] += 1
                continue
            try:
                with found.opened("library.so") as file:
                    assert os.pread(file, 100, 0) == b"made"
                    loaded += 1
            except (CacheError, OSError):
                counts["refused"] += 1
    finally:
        ended.set()
        thread.join()
    counts["harmless"] += loaded


@pytest.mark.skipif(not cxx_compiler().ok, reason="no C++ compiler here: 1 case")
def test_the_library_that_is_loaded_is_the_one_that_was_checked(tmp_path) -> None:
    store, numbers = Store("cpp", MADE_FOR, folder=tmp_path / "cache", executable=True), (7, 8)

    def compiled(number: int) -> Callable[[Path], object]:
        def run(folder: Path) -> None:
            source = tmp_path / f"{number}.cpp"
            source.write_text(f'extern "C" int number() {{ return {number}; }}\n')
            command = [cxx_compiler().value, "-shared", "-fPIC", str(source), "-o", str(folder / "library.so")]
            subprocess.run(command, check=True)

        return run

    entries = [store.get(f"number{number}", compiled(number)) for number in numbers]
    libraries: list[ctypes.CDLL] = []
    for entry in entries:
        with entry.opened("library.so") as file:
            shutil.copy(entries[1].file("library.so"), tmp_path / "planted.so")
            os.replace(tmp_path / "planted.so", entry.file("library.so"))  # after the check
            libraries.append(load(file, entry.file("library.so")))
    assert [library.number() for library in libraries] == [7, 8]


def test_a_listing_imports_nothing_that_a_file_names(tmp_path, monkeypatch, counts) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("planted", "planted_too"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        (tmp_path / name / "inner.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    names = [
        "planted",
        "planted.inner",
        "planted_too.inner.deep",
        "",
        ".",
        "..",
        "a b",
        "/etc/passwd",
        "x" * 5000,
        "\0",
    ]
    parts = [{f"{kind} {name}": "1.0 abc"} for kind in ("library", "version") for name in names]
    parts += [{"compiler": f"{path} abc"} for path in ("/dev/zero", "/proc/kcore", "\0", "", str(tmp_path), "x" * 5000)]
    parts += [{"library": ""}, {"version": ""}, {"library planted": ""}]
    for number, part in enumerate(parts):
        store = Store("kind", Fingerprint("sm_90a", tuple(sorted({"n": str(number), **part}.items()))))
        store.write("document", 1)
        store.get("entry", make("made"))
    (cache,) = inventory.caches(thorough=True)
    assert len(cache.items) == 2 * len(parts)
    assert not (tmp_path / "ran").exists()
    assert not {"planted", "planted_too"} & set(sys.modules)
    counts["harmless"] += len(cache.items)


def test_a_variable_of_a_library_never_leads_where_others_can_write(tmp_path) -> None:
    environment = {"KERNELHUB_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    assert set_cache_variables(environ=environment).finding.ok
    triton = Path(environment["TRITON_CACHE_DIR"])
    for path in (triton, *triton.parents[:3]):
        mode = path.stat().st_mode
        path.chmod(0o777)
        again = {"KERNELHUB_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
        told = set_cache_variables(environ=again)
        led = again.get("TRITON_CACHE_DIR", "")
        assert not led.startswith(str(path)), path
        assert told.finding.code == "cache_open_to_others" or not led.startswith(str(tmp_path / "cache"))
        path.chmod(mode)


@pytest.mark.parametrize("plant", ["dangling link", "link", "pipe", "folder", "socket", "future", "device"])
def test_what_is_no_lock_of_ours_keeps_nobody_waiting(tmp_path, plant, counts) -> None:
    path, begun = tmp_path / "entry.lock", time.monotonic()
    (tmp_path / "target").write_text(myself("a" * 32).to_text())
    if plant == "device" and os.geteuid() != 0:
        pytest.skip("only a superuser makes a device: 1 case")
    plants = {
        "dangling link": lambda: path.symlink_to("/nowhere"),
        "link": lambda: path.symlink_to(tmp_path / "target"),
        "pipe": lambda: os.mkfifo(path),
        "folder": lambda: (path / "inside").mkdir(parents=True),
        "socket": lambda: os.mkfifo(path) if len(str(path)) > 100 else socket.socket(socket.AF_UNIX).bind(str(path)),
        "future": lambda: (path.write_text("x"), os.utime(path, (time.time() + 10**6,) * 2)),
        "device": lambda: os.mknod(path, 0o020666, os.makedev(1, 5)),
    }
    plants[plant]()
    with lock(path, timeout_s=LONGEST_S) as held:
        assert held.still()
    assert (tmp_path / "target").read_text() == myself("a" * 32).to_text()
    assert time.monotonic() - begun < LONGEST_S
    counts["refused"] += 1


@pytest.mark.parametrize("who", [{"pid": 1, "started": ""}, {"pid": 1, "started": "99"}, {"pid": 1.5}, {"pid": "1"}])
def test_a_lock_that_claims_a_process_it_cannot_be_of_is_taken_over(tmp_path, who) -> None:
    path = tmp_path / "entry.lock"
    path.write_text(json.dumps(json.loads(myself("a" * 32).to_text()) | who))
    os.utime(path, (time.time() - 60,) * 2)
    with lock(path, timeout_s=2.0) as held:
        assert held.still()


def test_a_holder_that_beats_is_still_waited_for(tmp_path) -> None:
    path = tmp_path / "entry.lock"
    path.write_text(myself("a" * 32).to_text())
    with pytest.raises(LockTimeout), lock(path, timeout_s=0.2):
        raise AssertionError


LONG = "/tmp/" + "n" * 300
DEEP = "/deep" * 1200


ANSWERS = [
    pytest.param("cache list", LONG, id="list, long name"),
    pytest.param("cache env", LONG, id="env, long name"),
    pytest.param("cache list", DEEP, id="list, long path"),
    pytest.param("cache list", "~nouser/x", id="list, nobody's home"),
    pytest.param("cache list", "gone", id="list, no working directory"),
    pytest.param("cache check", "gone", id="check, no working directory"),
    pytest.param("cache list", "few descriptors", id="list, few descriptors"),
]


@pytest.mark.parametrize(("command", "where"), ANSWERS)
def test_a_command_ends_in_an_answer(tmp_path, command, where, counts) -> None:
    """And in no traceback: where the cache cannot be named, or the process can open hardly anything."""
    gone = tmp_path / "gone"
    gone.mkdir()
    names = ("KERNELHUB_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
    environment = clean(HOME=str(tmp_path), **{name: where for name in names if where != "few descriptors"})
    before = {"gone": f"cd {gone} && rmdir {gone} && ", "few descriptors": "ulimit -n 16 && "}.get(where, "")
    code = f"import sys; from kernelhub.cli.main import main; sys.exit(main({command.split()!r}))"
    line = ["sh", "-c", f'{before}exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
    assert "TRITON_CACHE_DIR" in done.stdout or command == "cache check"
    counts["refused"] += 1


@pytest.mark.parametrize("command", ["verify attention", "doctor"])
def test_without_a_working_directory_a_command_says_so(tmp_path, monkeypatch, capsys, command) -> None:
    """torch cannot be loaded there: oneMKL ends the process."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(command.split()) == 2
    assert "the working directory was removed" in capsys.readouterr().err


@superuser
@pytest.mark.parametrize("how", ["folder", "open folder", "link", "below"])
def test_another_users_cache_is_not_read_in_a_process_of_ones_own(tmp_path, how, counts) -> None:
    """As the issue tells it: the victim names, or has at home, a folder that another user prepared."""
    victim, planted = tmp_path / "victim", tmp_path / "planted"
    victim.mkdir()
    Store("kind", MADE_FOR, folder=planted).get("entry", make("planted"))
    for path in (planted, *planted.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
        if how != "open folder":
            os.chown(path, OTHER, OTHER)
    home = victim / ".cache"
    home.mkdir()
    if how == "link":
        (home / "kernelhub").symlink_to(planted)
    elif how == "below":
        Store("kind", MADE_FOR, folder=home / "kernelhub").write("document", 1)
        (home / "kernelhub" / "kind").chmod(0o777)
        shutil.rmtree(home / "kernelhub" / "kind" / "sm_90a")
        os.rename(planted / "kind" / "sm_90a", home / "kernelhub" / "kind" / "sm_90a")
    named = str(planted) if "folder" in how else None
    code = (
        "from kernelhub.runtime.caches.store import Store\n"
        "from kernelhub.runtime.caches.fingerprint import fingerprint\n"
        "entry = Store('kind', fingerprint('sm_90a', cuda='13.0')).get('entry', lambda folder: (folder / 'library.so')"
        ".write_text('made'))\n"
        "print(entry.file('library.so').read_text())"
    )
    environment = clean(HOME=str(victim), KERNELHUB_CACHE_DIR=named, TMPDIR=str(victim))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "made", done.stderr
    assert "cache_other_user" in done.stderr or "cache_open_to_others" in done.stderr
    counts["refused"] += 1


def test_trees_refuse_to_be_left(tmp_path) -> None:
    here = tree(tmp_path)
    for name in ("../x", "a/../../x"):
        with pytest.raises(OSError, match="is outside of the cache"):
            here.make(tmp_path / name)
    with pytest.raises(ValueError, match="subpath"):
        here.make(Path("/etc/x"))
