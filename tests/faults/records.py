"""Every fault that is injected somewhere in the tests, and the code that must come of it."""

from __future__ import annotations

from kernelhub.runtime.caches.notices import CODES
from tests.faults.record import NOTHING, Fault

_VERSION = "install a version in the named range"
_ERROR = "follow the message"
_LIBRARY = "fix or remove the package, or disable its backend"


def _all(fixture: str, *rows: tuple[str, str, str, str]) -> tuple[Fault, ...]:
    return tuple(Fault(key, fixture, injected, code, remedy) for key, injected, code, remedy in rows)


def _none(fixture: str, *rows: tuple[str, str]) -> tuple[Fault, ...]:
    return tuple(Fault(key, fixture, injected, NOTHING, "nothing to do") for key, injected in rows)


def _kept(*rows: tuple[str, str, str]) -> tuple[Fault, ...]:
    """Faults of caches, whose remedies stand with their codes."""
    return tuple(Fault(key, "FX4", injected, code, CODES[code][1]) for key, injected, code in rows)


_PACKAGES = _all(
    "FX1",
    ("package_absent", "the package is not there", "package_missing", "install it"),
    ("package_without_code", "a folder with the package's name but without code", "package_broken", "reinstall it"),
    ("version_as_text", "0.6.1 if 0.6.2 to 0.6.10 are supported", "package_version", _VERSION),
    ("version_prerelease", "0.6.7rc1 where 0.6.7 is needed", "package_version", _VERSION),
    ("version_too_new", "0.8.0 where less than 0.7 is needed", "package_version", _VERSION),
    ("version_unknown", "version 0.0.0+unknown", "package_version", _VERSION),
    ("version_empty", "an empty version", "package_version", _VERSION),
    ("version_none", "metadata without a version", "package_version", _VERSION),
    ("no_dist_info", "a package without metadata", "package_version", _VERSION),
    (
        "undefined_symbol",
        "a compiled library with an undefined symbol",
        "load_symbol",
        "install the build for this torch",
    ),
    (
        "missing_library",
        "a compiled library whose dependency is missing",
        "load_library",
        "install the library that it names",
    ),
    ("damaged_library", "a truncated compiled library", "load_file", "reinstall it for this processor"),
    ("import_raises", "an import that raises, exits, or is not valid Python", "load_failed", _LIBRARY),
    ("import_hangs", "an import that does not return", "load_timeout", "disable its backend, or wait longer"),
    ("libraries_that_fail", "every external library in turn, each failing in five ways", "load_failed", _LIBRARY),
    ("signature_changed", "a function with parameters renamed, moved, added", "signature_changed", "install a version"),
    ("symbol_missing", "a function that is missing", "symbol_missing", "install a version or build that has it"),
) + _none("FX1", ("version_that_fits", "0.6.10, 0.6.16.post3, 0.6.7+cu130, which must not be compared as text"))

_DEVICES = _all(
    "FX2",
    ("unknown_arch", "sm_137, an unknown architecture", "capability", "nothing to do: a portable kernel runs"),
    (
        "sibling_arch",
        "sm_121 for a kernel that is compiled for sm_120",
        "capability",
        "nothing to do: a portable kernel runs",
    ),
    ("other_vendor", "an MI300X for kernels of CUDA", "vendor", "nothing to do: a portable kernel runs"),
) + _none(
    "FX2",
    ("odd_visible_devices", "CUDA_VISIBLE_DEVICES with GPU-, MIG-, an empty word, -1, 0,0 and 9"),
    ("cuda_that_explodes", "a torch.cuda of which every function raises"),
)

_TOOLCHAINS = _all(
    "FX3",
    ("nvcc_missing", "no nvcc", "toolkit_missing", "install a toolkit and set CUDA_HOME"),
    ("nvcc_old", "nvcc of CUDA 11.5", "toolkit_version", "install a newer toolkit"),
    ("nvcc_hangs", "nvcc that does not end", "toolkit_hangs", "find out what it waits for"),
    ("nvcc_killed", "nvcc that ends with 137", "toolkit_killed", "raise the memory limit"),
    ("nvcc_broken", "nvcc that fails, or prints no version", "toolkit_broken", "set CUDA_HOME to another toolkit"),
    ("headers_missing", "a toolkit without cuda_runtime.h", "toolkit_headers", "install the headers of that CUDA"),
    ("headers_of_another", "nvcc 13.3 with headers of 13.0", "toolkit_headers", "install the headers of that CUDA"),
    ("driver_old", "code and PTX of CUDA 13 for a driver of CUDA 12", "driver_old", "install a newer driver"),
    ("cxx_missing", "no C++ compiler", "compiler_missing", "install g++ or clang++"),
    ("cxx_fails", "a C++ compiler that fails", "load_failed", _LIBRARY),
    ("cxx_killed", "a C++ compiler that ends with 137", "load_killed", "raise the memory limit"),
    ("cxx_hangs", "a C++ compiler that does not end", "load_hangs", "find out what the program waits for"),
) + _none("FX3", ("nvcc_noise", "nvcc that prints a warning first"))

_FILES = _kept(
    ("file_in_the_way", "the folder's path leads below a file, or through a dangling link", "cache_not_a_folder"),
    ("folder_unwritable", "a folder without permission to write", "cache_unwritable"),
    ("folder_of_another", "a folder of another user", "cache_other_user"),
    ("no_home", "no HOME, and a user without an account", "cache_no_home"),
    ("read_only_mount", "a file system that is mounted read-only", "cache_read_only"),
    ("full_disk", "a full file system", "cache_full"),
    ("disk_fills_up", "a file system that becomes full while an entry is made", "cache_full"),
    ("limit_on_files", "a limit on the size of files", "cache_full"),
    ("noexec", "a file system that is mounted noexec", "cache_noexec"),
    ("nowhere_to_write", "no writable folder: documents", "cache_memory"),
    ("nowhere_for_files", "no writable folder: compiled files", "cache_unavailable"),
    *((code, CODES[code][0].rstrip("."), code) for code in CODES if code.startswith(("manifest_", "file_"))),
    ("entry_symlink", "a link in place of an entry, or of a file in it", "entry_symlink"),
    ("entry_unreadable", "an entry that cannot be read", "entry_unreadable"),
    ("stale_handle", "a stale handle of NFS", "entry_unreadable"),
    ("holder_killed", "the holder of a lock, killed", "lock_dead_holder"),
    ("holder_pid_reused", "a dead holder whose process id belongs to another process", "lock_reused_pid"),
    ("holder_elsewhere_dead", "a holder on another machine without a heartbeat", "lock_expired"),
    ("lock_garbage", "a lock that names no holder", "lock_unreadable"),
    ("holder_hangs", "a stopped holder", "lock_timeout"),
    ("mount_turns_read_only", "a mount that becomes read-only under the holder", "lock_left"),
    ("maker_killed", "a process that is killed while it makes an entry", "lock_dead_holder"),
) + _none(
    "FX4",
    ("same_mtime", "a header edited without a change of its modification time"),
    ("evidence_blocked", "results of verification in a folder that is not writable"),
    ("evidence_writer_killed", "a process that writes results of verification, killed repeatedly"),
)

_SOCKETS = "set TMPDIR to a short path on a local file system, the same for all ranks"
_HANDLES = _all(
    "FX4",
    ("socket_folder", "a temporary folder that is missing, is a file, or takes no sockets", "socket_folder", _SOCKETS),
    ("socket_path", "a temporary folder with a path too long for a socket", "socket_path", _SOCKETS),
    ("descriptor_refused", "a socket through which no descriptor comes", "descriptor_refused", _SOCKETS),
    ("handle_probe_hangs", "a probe of descriptors that does not end", "probe_timeout", _SOCKETS),
    ("handle_probe_fails", "a probe of descriptors that cannot be run", "probe_failed", _SOCKETS),
    (
        "ptrace_refused",
        "a process that may not take descriptors of another",
        "ptrace_refused",
        "start the container with --cap-add SYS_PTRACE, or set kernel.yama.ptrace_scope to 0",
    ),
)

_NETWORK = _none(
    "FX5",
    ("no_network", "no network: calls, explain, verify and doctor make no connection attempt"),
    ("black_hole", "proxies and hubs that do not exist"),
) + _all(
    "FX5",
    ("cubins_absent", "binaries of FlashInfer that would be downloaded", "cubins_missing", "install its binaries"),
    (
        "download_after_seal",
        "a download for a call after seal()",
        "download",
        "add the line of the error before seal()",
    ),
)

_TENSORS = _all(
    "FX6",
    ("bad_operand", "operands of wrong shape, dtype, layout, device, range", "InvalidArgument", _ERROR),
) + _none("FX6", ("unreadable_tensors", "tensors that raise when the host reads them"))

_RANKS = _all(
    "FX7",
    ("rank_never_came", "a rank killed before it joins", "rank_missing", "find out why that rank did not start"),
    ("rank_killed", "a rank killed during selection", "rank_dead", "find out why that rank ended, and restart"),
    ("rank_stopped", "a stopped rank", "rank_silent", "find out what that process waits for"),
    ("lead_stopped", "the rank that holds the store, stopped", "store_silent", "check the process of that rank"),
    (
        "rank_too_late",
        "a rank that joins after the time-out",
        "too_late",
        "start it with the others, or wait longer",
    ),
    ("rank_slow", "a rank whose selection takes too long", "rank_slow", "warm up first, or wait longer"),
    ("rank_without_package", "one rank without the library", "refused_by_rank", "install it on all ranks"),
)

_SEAL = _all(
    "FX8",
    ("decide_after_seal", "a new kind of call", "decide", "add the line of the error before seal()"),
    ("compile_after_seal", "a kernel that is not compiled", "compile", "add the line of the error before seal()"),
    ("load_after_seal", "a kernel that is not loaded", "load", "add the line of the error before seal()"),
    ("tune_after_seal", "a library that would tune", "tune", "add the line of the error before seal()"),
    ("pack_after_seal", "a weight that is not packed", "pack", "pack while the model is loaded"),
    ("sync_after_seal", "lengths only on the device", "sync", "pass them on the host"),
)

_RECORDS = _all(
    "FX9",
    ("feature_undeclared", "a feature that the record does not list", "feature", "nothing to do: another kernel runs"),
    ("constraint_raises", "a condition that raises", "constraint_error", "report it to the author of the record"),
    ("wrong_record", "a record that contradicts its op", "RegistrationError", "fix the record"),
    ("known_bad", "a kernel known to be wrong on the device", "known_bad", "install a version without the error"),
)

_ENVIRONMENT = _all(
    "FX10",
    ("wrong_variable", "misspelt variables, or invalid values", "ConfigurationError", _ERROR),
    ("everything_disabled", "every kernel disabled", "NoKernel", "enable one of the listed kernels"),
    ("unavailable_forced", "a kernel forced that cannot be loaded", "NoKernel", "enable one of the listed kernels"),
)

_PROCESSES = _none(
    "FX11",
    ("sixteen_threads", "16 threads at first use"),
    ("compiling_threads", "16 threads at first use of a kernel that is compiled"),
    ("fork_after_import", "8 children forked after the import and after a call"),
    ("forked_while_threads_work", "children forked while threads hold locks"),
    ("forked_while_a_kernel_loads", "children forked while another thread loads or imports a kernel"),
) + _all(
    "FX11",
    (
        "sixteen_processes_one_killed",
        "16 processes that compile the same entry; the compiling one is killed",
        "lock_dead_holder",
        CODES["lock_dead_holder"][1],
    ),
)

_KERNELS = _all(
    "FX12",
    ("zeros", "a kernel that gives zeros", "zeros", "quarantined: report it"),
    ("nan", "a kernel that gives NaN", "nan", "quarantined: report it"),
    ("wrong_numbers", "a kernel with an error of 30 %", "wrong_numbers", "quarantined: report it"),
    ("not_written", "a kernel that writes nothing, or not all", "not_written", "quarantined: report it"),
    ("past_workspace", "a kernel that writes past its workspace", "past_workspace", "quarantined: report it"),
    ("past_output", "a kernel that writes past its output", "past_output", "quarantined: report it"),
    ("input_changed", "a kernel that changes an input", "input_changed", "quarantined: report it"),
    ("feature_ignored", "a kernel that ignores a feature of its record", "feature_ignored", "quarantined: report it"),
    ("token_count", "a kernel that is wrong for odd token counts", "token_count", "quarantined: report it"),
    ("raised", "a kernel that raises at launch", "raised", "quarantined: report it"),
    ("other_bits", "a kernel that gives different bits each time", "other_bits", "quarantined: report it"),
    ("strides", "a kernel that ignores the strides of parts of wider tensors", "strides", "quarantined: report it"),
    ("own_result", "a kernel that is wrong without `out=`", "own_result", "quarantined: report it"),
    ("in_place", "a kernel that writes before it reads, in place", "in_place", "quarantined: report it"),
    ("stale", "a kernel that caches values of the first call", "stale", "quarantined: report it"),
    ("packing", "a kernel that packs incorrectly", "packing", "quarantined: report it"),
    ("device_error", "a kernel with an illegal memory access", "DeviceLost", "end the process and start another"),
    ("launch_refused", "a kernel that refuses a call: later ones run", "RuntimeError", "follow the message"),
)

FAULTS: dict[str, Fault] = {
    fault.key: fault
    for part in (
        *(_PACKAGES, _DEVICES, _TOOLCHAINS, _FILES, _HANDLES, _NETWORK, _TENSORS),
        *(_RANKS, _SEAL, _RECORDS, _ENVIRONMENT, _PROCESSES, _KERNELS),
    )
    for fault in part
}
