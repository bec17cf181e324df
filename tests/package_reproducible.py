"""Two builds of the same sources in two folders: the programs are the same, byte for byte.

`./x package reproducible` builds all packages twice. These tests take a tiny workspace that is laid out as cells/ and span/.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from lib import ROOT, scratch, timeout

WRAPPER = "tools/rustc.sh"
FILES = {
    "apps/Cargo.toml": """
[workspace]
[package]
name = "apps"
version = "0.1.0"
edition = "2024"
[dependencies]
base = {{ path = "../crates/base"{features} }}
[profile.release]
debug = 1
""",
    "apps/src/main.rs": "fn main() { println!(\"{}\", base::sum(std::env::args().map(|word| word.len()))); }\n",
    "crates/base/Cargo.toml": """
[package]
name = "base"
version = "0.1.0"
edition = "2024"
[features]
large = []
""",
    "crates/base/src/lib.rs": "#[inline(never)]\npub fn sum(words: impl Iterator<Item = usize>) -> usize { one(words.sum()) }\n#[inline(never)]\npub fn one(sum: usize) -> usize { sum + 1 }\n",
}


def build(folder, wrapper=True, features=""):
    """Builds the workspace in `folder` as tools/release.sh builds cells; gives the program and what cargo ran."""
    for name, text in FILES.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "apps/Cargo.toml":
            text = text.format(features=features)
        # What is the same keeps its time, by which cargo knows it.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    (Path(folder) / "tools").mkdir(exist_ok=True)
    shutil.copy2(ROOT / WRAPPER, Path(folder) / WRAPPER)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CARGO_PROFILE", "CARGO_ENCODED", "RUSTC_", "RUSTFLAGS"))}
    environment |= {"CARGO_TARGET_DIR": f"{folder}/target", "RUSTFLAGS": f"--remap-path-prefix={folder}=/usr/src"}
    if wrapper:
        environment["RUSTC_WRAPPER"] = f"{folder}/{WRAPPER}"
    done = subprocess.run(["cargo", "build", "--release", "--offline"], cwd=f"{folder}/apps", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    program = Path(folder) / "target/release/apps"
    said = subprocess.run([program, "four"], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert said.strip() == str(len(str(program)) + 5), said
    return program.read_bytes(), done.stdout


def symbols_of_base(program):
    """The symbols of the crate `base`, which hold a hash that is made of `-C metadata`."""
    symbols = re.findall(rb"_RN[A-Za-z0-9_]*4base[A-Za-z0-9_]*|_ZN4base[A-Za-z0-9_$.]*", program)
    assert symbols, "no symbol of base in the program"
    return set(symbols)


@timeout(180)
def test_programs_do_not_depend_on_the_folder():
    with scratch() as folder:
        one, other = f"{folder}/a", f"{folder}/another-folder"
        assert build(one)[0] == build(other)[0], "the programs differ"
    # Without it they differ, so what it is made for still holds of cargo.
    with scratch() as folder:
        one, other = f"{folder}/a", f"{folder}/another-folder"
        assert build(one, wrapper=False)[0] != build(other, wrapper=False)[0], f"{WRAPPER} is needed no longer"


@timeout(180)
def test_cargo_still_knows_what_is_up_to_date():
    with scratch() as folder:
        first, said = build(folder)
        assert said.count("Compiling") == 2, said
        again, said = build(folder)
        assert "Compiling" not in said and again == first, said
        # Another feature is another crate: other symbols, built beside the first.
        large, said = build(folder, features=', features = ["large"]')
        assert said.count("Compiling") == 2, said
        assert not symbols_of_base(large) & symbols_of_base(first), "the same symbols with another feature"
        again, said = build(folder)
        assert again == first, "a build that came in between is seen"
