"""Two builds of the same sources: the programs are the same, byte for byte.

`./x package reproducible` builds all packages twice. These tests take a tiny workspace that is laid out as cells/ and span/.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from lib import ROOT, scratch, timeout

WRAPPER = "tools/rustc.sh"
APPS = """
[workspace]
[package]
name = "apps"
version = "0.1.0"
edition = "2024"
[dependencies]
base = { path = "../crates/base", features = FEATURES }
[profile.release]
lto = "thin"
codegen-units = 4
debug = 1
"""
MAIN = """
fn main() {
    let words = std::env::args().count();
    println!("{}", base::sum(words) + base::other(words));
}
"""
BASE = """
[package]
name = "base"
version = "0.1.0"
edition = "2024"
[features]
large = []
"""
# ThinLTO makes `hidden` known to the module of `main`, by a name that no other module has.
LIB = """
#[inline(never)]
fn hidden(sum: usize) -> usize { std::hint::black_box(sum) + STEP }
pub fn sum(words: usize) -> usize { hidden(words) }
pub fn other(words: usize) -> usize { hidden(words) * 3 }
"""


def names():
    """The flag of tools/release.sh that names what ThinLTO makes known to other modules."""
    [flag] = re.findall(r"-Cllvm-args=[a-z-]+", (ROOT / "tools/release.sh").read_text())
    return flag


def build(folder, wrapper=True, flag="", features="[]", step="1"):
    """Builds the workspace in `folder` as tools/release.sh does; gives the program and what cargo said."""
    folder = Path(folder)
    files = {"apps/Cargo.toml": APPS.replace("FEATURES", features), "apps/src/main.rs": MAIN, "crates/base/Cargo.toml": BASE, "crates/base/src/lib.rs": LIB.replace("STEP", step)}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # What is the same keeps its time, by which cargo knows it.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    (folder / "tools").mkdir(exist_ok=True)
    shutil.copy2(ROOT / WRAPPER, folder / WRAPPER)
    of_cargo = ("CARGO_PROFILE", "CARGO_ENCODED", "RUSTC_", "RUSTFLAGS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_cargo)}
    environment |= {"CARGO_TARGET_DIR": f"{folder}/target", "RUSTFLAGS": f"--remap-path-prefix={folder}=/usr/src {flag}"}
    if wrapper:
        environment["RUSTC_WRAPPER"] = f"{folder}/{WRAPPER}"
    done = subprocess.run(["cargo", "build", "--release", "--offline"], cwd=folder / "apps", env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    program = folder / "target/release/apps"
    said = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    assert said == str(4 * (1 + int(step))), said
    return program.read_bytes(), done.stdout


def hidden(program):
    """The name of `hidden` in the program, with what ThinLTO added: `NAME.llvm.SUFFIX`."""
    found = set(re.findall(rb"\0(_[A-Za-z0-9_]*4base6hidden[A-Za-z0-9_.]*)", program))
    # In debug information it stands without that too.
    [name] = {name.decode() for name in found if b".llvm." in name}
    return name


@timeout(180)
def test_programs_do_not_depend_on_the_folder():
    assert f'RUSTC_WRAPPER="$here/{WRAPPER}"' in (ROOT / "tools/release.sh").read_text(), "tools/release.sh does not use it"
    with scratch() as folder:
        assert build(f"{folder}/a")[0] == build(f"{folder}/another-folder")[0], "the programs differ"
    # Without it they differ, so what it is made for still holds of cargo.
    with scratch() as folder:
        one, other = build(f"{folder}/a", wrapper=False)[0], build(f"{folder}/another-folder", wrapper=False)[0]
        assert one != other, f"{WRAPPER} is needed no longer"


@timeout(180)
def test_names_do_not_depend_on_what_else_is_in_a_module():
    with scratch() as folder:
        one, other = (hidden(build(f"{folder}/{step}", flag=names(), step=step)[0]) for step in "12")
        assert one == other, f"{one} and {other}"
        one, other = (hidden(build(f"{folder}/{step}", step=step)[0]) for step in "12")
        assert one != other, f"{names()} is needed no longer"


@timeout(180)
def test_cargo_still_knows_what_is_up_to_date():
    with scratch() as folder:
        first, said = build(folder)
        assert said.count("Compiling") == 2, said
        again, said = build(folder)
        assert "Compiling" not in said and again == first, said
        # Another feature is another crate: other symbols, built beside the first.
        large, said = build(folder, features='["large"]')
        assert said.count("Compiling") == 2, said
        assert hidden(large).split(".")[0] != hidden(first).split(".")[0], "the same symbols with another feature"
        again, said = build(folder)
        assert again == first, "a build that came in between is seen"
