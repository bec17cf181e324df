#!/usr/bin/env python3
"""Builds what other languages call services with, into build/bindings: libtombolo, the calculator in each language, the tests of C
and of the C++ wrapper, and a Python with the wheel installed.

usage: tools/bindings.py [--debug]

Optimised, unless --debug. Needs cargo, cc, g++ and python3 with venv; nothing comes from a package index.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINDINGS = ROOT / "bindings"
OUT = ROOT / "build/bindings"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
# The name that programs look for (crates/ffi/build.rs).
SHARED = "libtombolo.so.0"
# What a static library of Rust's wants from the system.
STATIC = ["-lpthread", "-ldl", "-lm"]


def run(*command, **environment):
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True, env=dict(os.environ, **environment))


def main():
    debug = sys.argv[1:] == ["--debug"]
    if sys.argv[1:] and not debug:
        sys.exit(__doc__)
    # By the commands of ./x, so that what is there is not compiled again with other features.
    if debug:
        run("cargo", "build", "--quiet", "-p", "tombolo-ffi")
        run("cargo", "build", "--quiet", "-p", "tombolo-rpc", "--example", "calculator")
    else:
        run("bash", "x", "build")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / ("debug" if debug else "release")
    OUT.mkdir(parents=True, exist_ok=True)
    for name, source in {SHARED: "libtombolo.so", "libtombolo.a": "libtombolo.a", "calculator-rust": "examples/calculator"}.items():
        shutil.copy2(target / source, OUT / name)
    (OUT / "libtombolo.so").unlink(missing_ok=True)
    (OUT / "libtombolo.so").symlink_to(SHARED)

    # Found beside the program that needs it, wherever both are.
    shared = ["-L", OUT, "-ltombolo", "-Wl,-rpath,$ORIGIN"]
    c = ["cc", "-std=c99", "-O2", *WARNINGS, "-I", BINDINGS / "include"]
    cpp = ["g++", "-std=c++17", "-O2", *WARNINGS, "-I", BINDINGS / "include"]
    calculator = BINDINGS / "examples/calculator.c"
    run(*c, "-o", OUT / "calculator-c", calculator, *shared)
    run(*c, "-o", OUT / "calculator-c-static", calculator, OUT / "libtombolo.a", *STATIC)
    run(*c, "-o", OUT / "memory", BINDINGS / "tests/memory.c", *shared)
    run(*cpp, "-o", OUT / "calculator-cpp", BINDINGS / "examples/calculator.cpp", *shared)
    run(*cpp, "-pthread", "-o", OUT / "wrapper", BINDINGS / "tests/wrapper.cpp", *shared)

    wheels, venv = OUT / "wheels", OUT / "venv"
    for folder in (wheels, venv):
        shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", venv)
    pip = [venv / "bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    run(*pip, "wheel", "--no-deps", "--no-index", "--wheel-dir", wheels, BINDINGS / "python", TOMBOLO_LIBRARY=str(OUT / "libtombolo.so"))
    run(*pip, "install", "--no-index", *wheels.glob("*.whl"))


if __name__ == "__main__":
    main()
