#!/bin/sh
# Builds the programs, the library and the cells that packages hold, with nothing of this machine's folders in them: two builds of
# the same sources in two folders are the same, byte for byte.
#
# usage: tools/release.sh TARGET CELLS SPAN    (three folders of cargo; results are in TARGET/release, CELLS/.../release and SPAN/release)
#
# Takes crates from cargo's cache or from vendored sources, and the network only where both lack one.
set -eu
cd "$(dirname "$0")/.."
command -v cargo >/dev/null || {
    echo "release.sh: no cargo: install Rust $(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml) or later, by rustup or your distribution" >&2
    exit 1
}
# Cargo has these wherever they were given; set here, they would replace the flags below and those of the cells.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_TARGET_DIR
# Where clang compiles the programs of the bypass, and rustc everything else.
here=$(pwd -P)
flags="'--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/usr/src/cargo', '--remap-path-prefix=$here=/usr/src/tombolo'"
# ThinLTO ends the names of what it shares between modules with a hash of a whole module, whose content is not always the same: LLVM is not
# deterministic there (rust-lang/rust#126976). The name of the module ends them as well.
names="'-Cllvm-args=-use-source-filename-for-promoted-locals'"
target=$(rustc -vV | sed -n 's/^host: //p')
# An absolute folder, since the cells are built in a folder of theirs.
programs=$(realpath -m "$1")
cells=$(realpath -m "$2")
span=$(realpath -m "$3")
cargo build --release --locked --config "build.rustflags=[$flags, $names]" --target-dir "$programs" -p tombolo-cli -p tombolo-agent -p tombolo-cni -p tombolo-ffi
# Crates outside of a workspace's folder, which these two have, would get hashes of where they are.
export RUSTC_WRAPPER="$here/tools/rustc.sh"
(cd span && cargo build --release --locked --config "build.rustflags=[$flags, $names]" --target-dir "$span")
cd cells
cargo build --release --locked --config "target.$target.rustflags=[$flags]" --target-dir "$cells"
