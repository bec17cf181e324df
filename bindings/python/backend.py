"""Builds the wheel: this package and libtombolo.so in a zip file, as PEP 517 asks a build backend to.

`pip wheel bindings/python` and `pip install bindings/python` call it. It needs cargo, and nothing from any package index: the library is
built from this repository, or is the file that TOMBOLO_LIBRARY names.
"""

import base64
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NAME, VERSION = "tombolo", "0.1.0"
INFO = f"{NAME}-{VERSION}.dist-info"
SUMMARY = "Calls with deadlines between processes of one machine, over shared memory"


def tag():
    """Any Python 3, no ABI of Python's, this machine's kind."""
    return f"py3-none-linux_{platform.machine()}"


def library():
    """The library, optimised, unless the environment names one."""
    named = os.environ.get("TOMBOLO_LIBRARY")
    if named:
        # pip calls from another folder than its user did.
        if not Path(named).is_absolute() or not Path(named).is_file():
            raise FileNotFoundError(f"TOMBOLO_LIBRARY is {named}: expected the absolute path of a libtombolo.so")
        return Path(named)
    command = ["cargo", "build", "--release", "-p", "tombolo-ffi", "--manifest-path", ROOT / "Cargo.toml"]
    subprocess.run(command, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/libtombolo.so"


def stripped(path):
    """Its bytes, without what only a debugger needs where there is a tool for that."""
    if not shutil.which("strip"):
        return path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        smaller = Path(folder) / path.name
        subprocess.run(["strip", "--strip-unneeded", "-o", smaller, path], check=True)
        return smaller.read_bytes()


def metadata():
    return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: {SUMMARY}\nLicense: Apache-2.0\nRequires-Python: >=3.9\n"


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """What pip wants to know first; without it the wheel would be built twice."""
    folder = Path(metadata_directory) / INFO
    folder.mkdir()
    (folder / "METADATA").write_text(metadata())
    return INFO


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    files = {f"{NAME}/{path.name}": path.read_bytes() for path in sorted((HERE / NAME).glob("*.py"))}
    files[f"{NAME}/libtombolo.so"] = stripped(library())
    files[f"{INFO}/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    files[f"{INFO}/METADATA"] = metadata().encode()
    files[f"{INFO}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: {NAME} {VERSION}\nRoot-Is-Purelib: false\nTag: {tag()}\n".encode()
    record = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(content)}")
    files[f"{INFO}/RECORD"] = "\n".join([*record, f"{INFO}/RECORD,,", ""]).encode()
    wheel = f"{NAME}-{VERSION}-{tag()}.whl"
    with zipfile.ZipFile(Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            # The same bytes for the same input: no time of today, and permissions that pip expects.
            entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return wheel
