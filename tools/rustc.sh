#!/bin/sh
# Calls rustc, so that symbols do not depend on the folder of the sources. tools/release.sh names it to cargo (RUSTC_WRAPPER).
#
# Cargo gives rustc a hash per crate, `-C metadata=HASH`, from which rustc makes the hashes in symbols and the order of code.
# For a crate outside of its workspace's root (`../crates/ring` of cells/ and span/), cargo hashes the absolute path. So two
# builds in two folders differ. This program replaces that hash for the crates of this tree by one of what tells them apart:
# name, version, place in the tree, kind, features, target and profile. Cargo's names of files (`-C extra-filename`) stay, so
# cargo's record of what is up to date holds. If two builds of one crate had the same hash in one program, rustc would stop
# with "two different crates with name ... that are not distinguished by differing `-C metadata`".
#
# usage: tools/rustc.sh RUSTC ARGUMENT...
set -eu
tree=$(cd "$(dirname "$0")/.." && pwd -P)
crate=${CARGO_MANIFEST_DIR:-}
# Crates of a registry have hashes without a path, also where they are unpacked below this tree.
case $crate/ in
    "$tree"/*) if [ -e "$crate/.cargo-checksum.json" ] || [ -e "$crate/.cargo-ok" ]; then exec "$@"; fi ;;
    *) exec "$@" ;;
esac

described="${CARGO_PKG_NAME:-} ${CARGO_PKG_VERSION:-} ${crate#"$tree"}"
before=
for word; do
    case $before,$word in
        --crate-name,* | --crate-type,* | --cfg,* | --target,* | *,--test | *,opt-level=* | *,panic=*) described="$described
$before $word" ;;
    esac
    before=$word
done
hash=$(printf '%s\n' "$described" | sha256sum | cut -c 1-16)
for word; do
    shift
    case $word in metadata=*) word=metadata=$hash ;; esac
    set -- "$@" "$word"
done
exec "$@"
