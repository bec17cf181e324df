"""What set-ups are made of: the test harness of the repository, and kernel settings and folders
that end with a run.

    from tombolo_lab import harness

    with harness.scratch() as folder, harness.Fabric(folder, TEXT) as fabric:
        ...

Names of `tests/lib` (Fabric, CellGuest, LinuxGuest, Namespace, Net, Process, until …) are
attributes of this module. They are imported when they are used, so a module that only imports
`harness` loads on a machine without the harness too.

The harness is found in this order: the folder in TOMBOLO_TREE, the checkout that this package lies
in, /usr/share/tombolo. Each is a folder with tests/lib within.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tombolo_lab import LabError, sandbox
from tombolo_lab.workloads import Skip

INSTALLED = Path("/usr/share/tombolo")
# Beside what tests/lib exports by itself.
_OF_LIB = {
    "cpu_seconds": "lib.process",
    "rss_bytes": "lib.process",
    "children": "lib.process",
    "core_share": "lib.process",
    "Console": "lib.fabric",
    "Guest": "lib.guest",
    "Mesh": "lib.mesh",
    "socket_in": "lib.http",
    "ip": "lib.netns",
    "inside": "lib.netns",
}
# Niceness of all that is measured, ours and peers alike: it comes before the machine's other work.
FIRST = -20
# What `./x xen` builds in build/xen and a boot takes.
XEN_FILES = ("version", "xen", "vmlinux", "dom0.cpio")


def tree() -> Path:
    """The folder that holds tests/lib; LabError when there is none."""
    named = os.environ.get("TOMBOLO_TREE")
    folders = [Path(named)] if named else [Path(__file__).resolve().parents[2], INSTALLED]
    for folder in folders:
        if (folder / "tests/lib/__init__.py").is_file():
            return folder.absolute()
    looked = ", ".join(map(str, folders))
    raise LabError(
        f"expected the test harness tests/lib in {looked}, found none: "
        "set TOMBOLO_TREE to a checkout of the repository"
    )


# The files that checks named, while a run asks for them.
_named: set[Path] | None = None


@contextlib.contextmanager
def naming() -> Iterator[set[Path]]:
    """The files that are named within the `with`: what is measured, and what measures."""
    global _named
    before, _named = _named, set()
    try:
        yield _named
    finally:
        _named = before


def measured(*paths: str | Path) -> None:
    """For check(): says that a run measures these files, or measures with them. A run is resumed
    with the same ones only. The functions of this module that find a file or need one say it
    themselves."""
    if _named is not None:
        _named.update(path for path in map(Path, paths) if path.is_file())


def program() -> Path:
    """The program tombolo: TOMBOLO_PROGRAM, the release build of the checkout, or the one on PATH.

    Skip when there is none.
    """
    named = os.environ.get("TOMBOLO_PROGRAM")
    if named:
        found = Path(named)
    else:
        with contextlib.suppress(LabError):
            built = tree() / "target/release/tombolo"
            if built.is_file():
                measured(built)
                return built
        found = Path(shutil.which("tombolo") or "")
    if not found.is_file():
        what = named or "tombolo"
        raise Skip(f"the program {what} is not there: run ./x build, or set TOMBOLO_PROGRAM")
    measured(found)
    return found.absolute()


def span_program() -> Path:
    """The program tombolo-span: TOMBOLO_SPAN, or the release build of the checkout.

    Skip when it is not there.
    """
    named = os.environ.get("TOMBOLO_SPAN")
    found = Path(named) if named else tree() / "span/target/release/tombolo-span"
    if not found.is_file():
        raise Skip(f"{found.name} is not built: run ./x span-program, or set TOMBOLO_SPAN")
    measured(found)
    return found.absolute()


def example(name: str) -> Path:
    """A measuring program of the repository: in TOMBOLO_EXAMPLES, or built by `./x lab run`.

    Skip when it is not there.
    """
    named = os.environ.get("TOMBOLO_EXAMPLES")
    found = (Path(named) if named else tree() / "target/release/examples") / name
    if not found.is_file():
        raise Skip(f"{found.name} is not built: `./x lab run` in a checkout builds it")
    measured(found)
    return found.absolute()


def lib() -> ModuleType:
    """The package tests/lib, which is called `lib`."""
    return _imported("lib", tree() / "tests")


def _imported(name: str, folder: Path) -> ModuleType:
    """A top-level module from `folder`; LabError when another one has its name."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise LabError(f"expected the module {name} in {folder}, found none") from None
    if folder.resolve() not in Path(module.__file__).resolve().parents:
        raise LabError(f"expected the module {name} from {folder}, found {module.__file__}")
    return module


def __getattr__(name: str) -> object:
    """Names of the harness; called for those that this module does not define itself."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _OF_LIB:
        lib()
        return getattr(importlib.import_module(_OF_LIB[name]), name)
    exported = lib()
    if name in exported.__all__:
        return getattr(exported, name)
    raise AttributeError(f"{name}: neither in tombolo_lab.harness nor in tests/lib")


def skips() -> tuple[type[Exception], ...]:
    """The exceptions that say why something cannot run here: ours, and that of tests/lib."""
    loaded = sys.modules.get("lib")
    other = getattr(loaded, "Skip", None)
    return (Skip, other) if isinstance(other, type) else (Skip,)


# ---- for check() ---------------------------------------------------------------------------------
def need_program(name: str, package: str | None = None) -> str:
    """The path of a program; Skip that names it and the package that brings it."""
    places = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    path = shutil.which(name, path=places)
    if not path:
        raise Skip(f"{name} is missing: apt-get install {package or name}")
    # tests/lib starts the QEMU that this names.
    named = os.environ.get("TOMBOLO_QEMU") if name.startswith("qemu-system") else None
    measured(named or path)
    return path


def need_root() -> None:
    """Skip for other users: namespaces, taps and XDP need root."""
    if os.geteuid() != 0:
        raise Skip("needs root: it makes network namespaces and devices")


def need_cell(app: str) -> Path:
    """The image of a cell's app; Skip when it is not built."""
    image = lib().CellGuest.IMAGES / app
    if not image.is_file():
        raise Skip(f"the cell {app} is not built: run ./x cells")
    measured(image)
    return image


def need_guest() -> Path:
    """The folder of the stock Linux guest; Skip when it is not built."""
    folder = lib().BUILD / "guest"
    if not (folder / "vmlinux").is_file():
        raise Skip("build/guest is not there: run ./x guest")
    measured(*(path for path in folder.iterdir() if path.name.startswith(("vmlinu", "initramfs"))))
    return folder


# ---- for open() ----------------------------------------------------------------------------------
@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone after the `with`, and also when the run is killed. Its path is short,
    since that of a socket ends at 107 bytes."""
    if sandbox.current is None:
        with lib().scratch() as folder:
            yield folder
        return
    count = 0
    while True:
        folder = sandbox.current.folder / str(count)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
        count += 1
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fabric_of(folder: Path, text: str, netns: object = None) -> object:
    """A fabric that comes before other work, with its files in a new folder within `folder`. Use it
    in a `with`, or end its process."""
    found = lib().Fabric(Path(tempfile.mkdtemp(dir=folder)), text, netns=netns, nice=FIRST)
    return found


@contextlib.contextmanager
def group_first(niceness: int = FIRST) -> Iterator[None]:
    """Within the `with` this session's processes come before those of other sessions: where the
    kernel groups tasks by session, niceness counts only within a group. The user's shell is in this
    session too, so it is restored as `kernel_setting` does: to what it was, also after a kill."""
    group = Path("/proc/self/autogroup")
    if not group.exists() or os.geteuid() != 0:
        yield
        return
    with kernel_setting(group, niceness):
        yield


@contextlib.contextmanager
def kernel_setting(path: str | Path, value: object) -> Iterator[str]:
    """Writes a setting of this machine's kernel within the `with`; yields what it was before.

    It is restored when the run is killed too, so it works in a run only: LabError elsewhere.
    """
    if sandbox.current is None:
        raise LabError(f"{path}: kernel settings are changed only within a run")
    with sandbox.current.setting(Path(path), value) as before:
        yield before
