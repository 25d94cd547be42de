"""Whatever happens to a folder, things are kept in the next best place, and a reason code of its own is said, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelhub.probes.toolchain import cxx_compiler
from tests.runtime.caches import PRELUDE, STRANGER, child, clean, mount_namespace

KEEP = """
store = Store("kind", fingerprint("sm_90a", cuda="13.0"), executable={executable})
first = store.get("entry", write("made"))
again = store.get("entry", write("made again"))
store.write("document", {{"value": 1}})
answer(path=first.path, text=again.file("made").read_text(), document=store.read("document"))
"""
mounting = pytest.mark.skipif(mount_namespace() is None, reason="no leave to mount file systems here: 1 case")
superuser = pytest.mark.skipif(os.geteuid() != 0, reason="only a superuser becomes another user: 1 case")


def keep(executable: bool = False) -> str:
    return KEEP.format(executable=executable)


class TestPlaces:
    @pytest.fixture
    def folders(self, tmp_path: Path) -> Path:
        """A folder for the named place, and one for what is next best, in a folder that everybody can write."""
        tmp_path.chmod(0o777)
        for folder in (tmp_path / "named", tmp_path / "xdg"):
            folder.mkdir()
            folder.chmod(0o755)
        for folder in tmp_path.parents:
            if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
                folder.chmod(folder.stat().st_mode | 0o011)
        return tmp_path

    @pytest.fixture
    def environment(self, folders: Path) -> dict[str, str]:
        return clean(KERNELHUB_CACHE_DIR=str(folders / "named"), XDG_CACHE_HOME=str(folders / "xdg"))

    @staticmethod
    def check(told: dict, place: Path, codes: list[str]) -> None:
        assert told["path"].startswith(str(place)), told
        assert (told["text"], told["document"]) == ("made", {"value": 1})
        assert told["said"] == codes
        for code in codes:
            assert told["stderr"].count(f"{code}: ") == 1, "said once"

    def test_a_good_folder_is_used_and_nothing_is_said(self, folders, environment) -> None:
        told = child(keep(), environment)
        self.check(told, folders / "named", [])
        assert (
            (folders / "named" / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
        )

    def test_a_folder_that_is_named_is_filled_whatever_is_elsewhere(self, folders, environment) -> None:
        """An image is made by naming a folder that becomes part of it."""
        (folders / "file").write_text("")
        self.check(
            child(keep(), environment | {"KERNELHUB_CACHE_DIR": str(folders / "file")}),
            folders / "xdg",
            ["cache_not_a_folder"],
        )
        self.check(child(keep(), environment), folders / "named", [])
        code = 'answer(found=Store("kind", fingerprint("sm_90a", cuda="13.0")).find("entry").path)'
        assert child(code, environment)["found"].startswith(str(folders / "named"))

    @pytest.mark.fault("file_in_the_way")
    def test_a_path_under_a_file(self, folders, environment) -> None:
        (folders / "file").write_text("")
        told = child(keep(), environment | {"KERNELHUB_CACHE_DIR": str(folders / "file" / "below")})
        self.check(told, folders / "xdg", ["cache_not_a_folder"])

    @pytest.mark.fault("file_in_the_way")
    def test_a_link_that_leads_nowhere(self, folders, environment) -> None:
        (folders / "link").symlink_to(folders / "gone")
        told = child(keep(), environment | {"KERNELHUB_CACHE_DIR": str(folders / "link")})
        self.check(told, folders / "xdg", ["cache_not_a_folder"])

    @pytest.mark.fault("folder_unwritable")
    def test_a_folder_without_permission_to_write(self, folders, environment) -> None:
        user = STRANGER if os.geteuid() == 0 else None
        if user is not None:
            os.chown(folders / "named", user, user)
            os.chown(folders / "xdg", user, user)
        (folders / "named").chmod(0o555)
        self.check(child(keep(), environment, user=user), folders / "xdg", ["cache_unwritable"])

    @superuser
    @pytest.mark.fault("folder_of_another")
    def test_a_named_folder_of_another_user_is_read_but_not_written(self, folders, environment) -> None:
        filled = child(keep(), environment)
        for path in ((folders / "named"), *(folders / "named").rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.chown(folders / "xdg", STRANGER, STRANGER)
        found = child(keep(), environment, user=STRANGER)
        assert found["path"] == filled["path"]
        assert found["said"] == ["cache_other_user"]  # said of the document, which had to be written elsewhere
        other = child(keep().replace("sm_90a", "sm_80"), environment, user=STRANGER)
        self.check(other, folders / "xdg", ["cache_other_user"])

    @superuser
    @pytest.mark.fault("folder_of_another")
    def test_a_home_of_another_user_is_neither_read_nor_filled(self, folders, environment) -> None:
        (folders / "xdg" / "kernelhub").mkdir()
        os.chown(folders / "xdg" / "kernelhub", STRANGER, STRANGER)
        del environment["KERNELHUB_CACHE_DIR"]
        told = child(keep(), environment | {"TMPDIR": str(folders)})
        self.check(told, folders / "kernelhub-0", ["cache_other_user"])
        assert list((folders / "xdg" / "kernelhub").iterdir()) == []

    @pytest.mark.fault("nowhere_to_write", "nowhere_for_files")
    def test_a_temporary_folder_that_somebody_prepared_for_us_is_not_trusted(self, folders, environment) -> None:
        (folders / "file").write_text("")
        prepared = folders / f"kernelhub-{os.geteuid()}"
        prepared.mkdir()
        prepared.chmod(0o777)
        named = {name: str(folders / "file") for name in ("KERNELHUB_CACHE_DIR", "XDG_CACHE_HOME")}
        code = (
            'store = Store("kind", fingerprint("any"))\n'
            'store.write("document", 1)\n'
            "try: store.get('entry', write('x')); error = ''\n"
            "except OSError as raised: error = type(raised).__name__ + str(raised)\n"
            "answer(document=store.read('document'), error=error)"
        )
        told = child(code, environment | named | {"TMPDIR": str(folders)})
        assert told["document"] == 1
        codes = [
            "cache_open_to_others", "cache_not_a_folder", "cache_not_a_folder", "cache_memory", "cache_unavailable"
        ]  # fmt: skip
        assert told["said"] == codes
        assert told["error"].startswith("CacheError")
        assert "set KERNELHUB_CACHE_DIR to a writable folder" in told["error"]
        assert list(prepared.iterdir()) == []

    @superuser
    @pytest.mark.fault("no_home")
    def test_no_home_at_all(self, folders) -> None:
        environment = clean(HOME=None, TMPDIR=str(folders))
        told = child(keep(), environment, user=STRANGER)
        self.check(told, folders / f"kernelhub-{STRANGER}", ["cache_no_home"])

    @pytest.mark.parametrize("home", [None, "", "relative"])
    def test_home_unset_or_nonsense_is_that_of_the_account(self, folders, home) -> None:
        import pwd

        code = "answer(paths=[place.path for place in root.places()])"
        told = child(code, clean(HOME=home, TMPDIR=str(folders)))
        assert told["paths"][0] == f"{pwd.getpwuid(os.getuid()).pw_dir}/.cache/kernelhub"

    @pytest.mark.parametrize("mode", [0o1777, 0o775], ids=oct)
    def test_a_named_folder_that_others_can_write_is_neither_read_nor_filled(self, folders, environment, mode) -> None:
        child(keep().replace('write("made")', 'write("planted")'), environment)
        (folders / "named").chmod(mode)
        before = sorted(folders.glob("named/**/*"))
        told = child(keep(), environment)
        self.check(told, folders / "xdg", ["cache_open_to_others"])
        assert sorted(folders.glob("named/**/*")) == before

    @superuser
    def test_roots_folder_that_this_user_cannot_enter_stops_nothing(self, folders, environment) -> None:
        """An image that root filled, run as another user: without `chmod -R a+rX` nothing in it is found."""
        child(keep(), environment)
        (folders / "named").chmod(0o700)
        os.chown(folders / "xdg", STRANGER, STRANGER)
        code = keep() + 'from kernelhub.runtime.caches.store import holds_any\nholds_any("kind", "sm_90a")\n'
        code += (
            'root.keeps("kind", executable=True)\nfrom kernelhub.runtime.caches import inventory\n'
            + "list(inventory.caches())\nlist(store.every())\nanswer(path=first.path)"
        )
        told = child(code, environment, user=STRANGER)
        assert told["path"].startswith(str(folders / "xdg"))
        assert told["said"] == ["cache_other_user"]

    @superuser
    def test_a_folder_of_another_user_is_read_and_not_written_where_that_is_said(self, folders, environment) -> None:
        child(keep(), environment)
        for path in (folders / "named", *(folders / "named").rglob("*")):
            os.chown(path, 23456, 23456)
            path.chmod(0o775 if path.is_dir() else 0o644)
        os.chown(folders / "xdg", STRANGER, STRANGER)
        shared = environment | {"KERNELHUB_CACHE_SHARED": "1"}
        told = child(keep().replace('write("made")', 'write("anew")'), shared, user=STRANGER)
        assert told["path"].startswith(str(folders / "named"))
        assert (told["text"], told["said"]) == ("made", ["cache_shared"])
        assert "user 23456" in told["stderr"]
        assert child(keep(), environment, user=STRANGER)["path"].startswith(str(folders / "xdg"))

    def test_what_is_made_is_for_this_user_alone_whatever_the_umask(self, folders, environment) -> None:
        code = (
            "for umask in (0o000, 0o002, 0o777):\n"
            "    os.umask(umask)\n"
            f"    os.environ['KERNELHUB_CACHE_DIR'] = f'{folders}/named/new-{{umask}}/cache'\n"
            "    store = Store('kind', fingerprint('sm_90a'))\n"
            "    store.get('entry', write('made'))\n"
            "    store.update('document', lambda document: 1)\n"
            "    variables.set_cache_variables(environ=dict(os.environ))\n"
            "answer()"
        )
        assert child(code, environment)["said"] == []
        made = list((folders / "named").rglob("*"))
        assert len(made) > 60
        assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
        assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}

    @mounting
    @pytest.mark.fault("read_only_mount")
    def test_a_read_only_mount(self, folders, environment) -> None:
        mounts = (f"mount -t tmpfs -o mode=700 tmpfs {folders}/named", f"mount -o remount,ro {folders}/named")
        self.check(child(keep(), environment, mounts=mounts), folders / "xdg", ["cache_read_only"])

    @mounting
    def test_a_read_only_mount_that_was_filled_before_serves_what_it_holds(self, folders, environment) -> None:
        filled = child(keep(), environment)
        bind = f"mount --bind {folders}/named {folders}/named"
        mounts = (bind, f"mount -o remount,ro,bind {folders}/named")
        code = keep().replace('store.write("document", {"value": 1})', "")
        told = child(code, environment, mounts=mounts)
        assert told["path"] == filled["path"]
        self.check(told, folders / "named", [])

    @mounting
    @pytest.mark.fault("full_disk")
    def test_a_full_disk(self, folders, environment) -> None:
        mounts = (f"mount -t tmpfs -o mode=700,size=64k tmpfs {folders}/named",)
        self.check(child(keep(), environment, mounts=mounts), folders / "xdg", ["cache_full"])

    @mounting
    @pytest.mark.fault("disk_fills_up")
    def test_a_disk_that_becomes_full_while_something_is_made(self, folders, environment) -> None:
        mounts = (f"mount -t tmpfs -o mode=700,size=1m tmpfs {folders}/named",)
        code = (
            'store = Store("kind", fingerprint("any"))\n'
            'entry = store.get("entry", lambda folder: (folder / "made").write_bytes(bytes(3 << 20)))\n'
            'named = os.environ["KERNELHUB_CACHE_DIR"]\n'
            'left = [path for path in Path(named).rglob("*") if path.is_file() and path.name != "CACHEDIR.TAG"]\n'
            'answer(path=entry.path, size=entry.file("made").stat().st_size, left=left)'
        )
        told = child(code, environment, mounts=mounts)
        assert told["path"].startswith(f"{folders}/xdg")
        assert (told["size"], told["left"], told["said"]) == (3 << 20, [], ["cache_full"])

    @pytest.mark.fault("limit_on_files")
    def test_a_limit_on_the_size_of_files(self, folders, environment) -> None:
        code = (
            "import resource\n"
            'store = Store("kind", fingerprint("any"))\n'
            "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))\n"
            'store.write("document", "x" * 100000)\n'
            "kept = len(store.read('document'))\n"
            "answer(kept=kept)"
        )
        told = child(code, environment)
        assert told["kept"] == 100000
        assert told["said"][-1] == "cache_memory"
        assert set(told["said"]) == {"cache_full", "cache_memory"}

    @mounting
    @pytest.mark.fault("noexec")
    def test_a_mount_from_which_nothing_may_be_executed(self, folders, environment) -> None:
        mounts = (f"mount -t tmpfs -o mode=700,noexec tmpfs {folders}/named",)
        self.check(child(keep(), environment, mounts=mounts), folders / "named", [])
        self.check(child(keep(executable=True), environment, mounts=mounts), folders / "xdg", ["cache_noexec"])

    @mounting
    @pytest.mark.fault("noexec")
    def test_a_library_that_is_on_such_a_mount_is_made_elsewhere(self, folders, environment) -> None:
        assert child(keep(), environment)["path"].startswith(f"{folders}/named")
        mounts = (f"mount --bind {folders}/named {folders}/named", f"mount -o remount,bind,noexec {folders}/named")
        self.check(child(keep(executable=True), environment, mounts=mounts), folders / "xdg", ["cache_noexec"])

    def test_nothing_is_asked_of_a_network(self, folders, environment) -> None:
        code = (
            "import socket\n"
            "def refuse(*arguments, **named): raise AssertionError('a socket')\n"
            "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        )
        self.check(child(code + keep(), environment), folders / "named", [])


@pytest.mark.fault("file_in_the_way")
def test_the_library_that_compiles_works_without_the_named_folder(tmp_path: Path) -> None:
    """Whole: a call of an op whose kernel is compiled, with a folder that cannot be written."""
    (tmp_path / "file").write_text("")
    code = (
        "import torch, kernelhub\n"
        "from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs\n"
        "from kernelhub.probes.toolchain import cxx_compiler\n"
        "if not cxx_compiler().ok: print('no compiler'); raise SystemExit\n"
        "kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=2, n=64, k=64), backend='cpp')\n"
        "print([notice.code for notice in kernelhub.cache_notices()])\n"
    )
    environment = clean(KERNELHUB_CACHE_DIR=str(tmp_path / "file"), XDG_CACHE_HOME=str(tmp_path / "xdg"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    if done.stdout.strip() == "no compiler":
        pytest.skip("no C++ compiler here: 1 case")
    assert done.stdout.strip() == "['cache_not_a_folder']", done.stderr
    assert done.stderr.count("cache_not_a_folder: ") == 1
    assert len(list((tmp_path / "xdg" / "kernelhub" / "cpp").rglob("*.so"))) == 1


FIRST_USE = """
import os, sys, threading, torch, kernelhub
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
torch.set_num_threads(1)
given = fp8_gemm_inputs(tokens=2, n=64, k=64)
def call():
    return kernelhub.fp8_gemm(**given, backend="cpp")
"""
SIXTEEN_THREADS = """
barrier, results = threading.Barrier(16), []
def work():
    barrier.wait()
    results.append(call())
threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(results), all(torch.equal(result, results[0]) for result in results))
"""
EIGHT_FORKS = """
children = []
for _ in range(8):
    forked = os.fork()
    if forked == 0:
        try:
            os._exit(0 if call().isfinite().all() else 1)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(2)
    children.append(forked)
print(8, all(os.waitpid(forked, 0)[1] == 0 for forked in children))
"""


@pytest.mark.skipif(not cxx_compiler().ok, reason="no C++ compiler here: 2 cases")
@pytest.mark.parametrize(("users", "count"), [(SIXTEEN_THREADS, 16), (EIGHT_FORKS, 8)], ids=["threads", "forks"])
@pytest.mark.fault("compiling_threads")
def test_many_at_first_use_compile_once(tmp_path: Path, users: str, count: int) -> None:
    """Sixteen threads, or eight children forked after the import, call an op whose kernel was never compiled."""
    counting = tmp_path / "g++"
    counting.write_text(f'#!/bin/sh\necho >>{tmp_path}/count\nexec {cxx_compiler().value} "$@"\n')
    counting.chmod(0o755)
    environment = clean(KERNELHUB_CACHE_DIR=str(tmp_path / "cache"), CXX=str(counting))
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE + users], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.stdout.strip() == f"{count} True", done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("lock_wait: ")] == [], "but for slow ones"
    assert (tmp_path / "count").read_text() == "\n"


def test_the_prelude_of_these_tests_says_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + "answer()"], capture_output=True, text=True, env=clean(), timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ('{"said": []}', "")


@mounting
@pytest.mark.skipif(not cxx_compiler().ok, reason="no C++ compiler here: 2 cases")
@pytest.mark.parametrize(("options", "code"), [("ro,mode=755", "cache_read_only"), ("noexec,mode=700", "cache_noexec")])
def test_a_slower_kernel_for_want_of_a_place_is_said_with_its_code(tmp_path: Path, options: str, code: str) -> None:
    """A home and a temporary folder from which no library can be loaded: fp8 runs ten times slower, and says why."""
    (tmp_path / "home").mkdir()
    environment = clean(HOME=str(tmp_path / "home"), TMPDIR=str(tmp_path / "home"))
    program = (
        "import torch, kernelhub\n"
        "from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs\n"
        "given = fp8_gemm_inputs(tokens=2, n=64, k=64)\n"
        "kernelhub.fp8_gemm(**given)\n"
        "chosen = kernelhub.fp8_gemm.explain(**given)\n"
        "refused = [line for line in str(chosen).splitlines() if 'cpp.fp8_gemm' in line]\n"
        "answer(selected=chosen.selected, refused=refused)\n"
    )
    told = child(program, environment, mounts=(f"mount -t tmpfs -o {options} tmpfs {tmp_path}/home",))
    assert told["selected"] == "torch.dequantized"
    assert code in told["refused"][0]
    assert told["said"] == ["cache_unavailable"]
    assert f"slower kernels run: {code}" in told["stderr"]
