"""What a program is made of: the crates that are linked into it, with their licences. tools/install.py writes it into packages.

`crates` walks cargo's graph from a package along normal dependencies, with the features of the lock file, for this platform.
"""

import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = "x86_64-unknown-linux-gnu"
# Files of a crate that a licence may ask to be handed on.
LICENCE_FILE = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense|authors)([.-].*)?", re.I)
HEAD = """The programs of this package contain the Rust crates below. After the list follow the licence files that
come with them, each once, with the crates that have it.
"""


# What licences ask for beside their text.
NOTES = {
    "MPL-2.0": "used unchanged; the source of its files is in the crate at https://crates.io/crates/{name}/{version}",
    "CDLA-Permissive-2.0": "data, used unchanged: root certificates that Mozilla trusts",
}

# What is in the program and no crate: scripts of its page
# (crates/host/src/web/assets/xterm/README.md).
VENDORED = {
    "tombolo-cli": [
        {"name": "@xterm/xterm", "version": "6.0.0", "license": "MIT", "authors": ["The xterm.js authors"], "purl": "pkg:npm/%40xterm/xterm@6.0.0"},
        {"name": "@xterm/addon-fit", "version": "0.11.0", "license": "MIT", "authors": ["The xterm.js authors"], "purl": "pkg:npm/%40xterm/addon-fit@0.11.0"},
    ]
}
XTERM = ROOT / "crates/host/src/web/assets/xterm"


def vendored(root):
    """The vendored packages in a program, in the form of cargo's metadata."""
    return [{**package, "manifest_path": str(XTERM / "README.md"), "source": "npm"} for package in VENDORED.get(root, [])]


def cargo():
    """Where cargo is, and as whom it runs: below sudo it is that of the user who called it, whose PATH and toolchain root lacks."""
    uid = int(os.environ.get("SUDO_UID", 0)) if os.geteuid() == 0 else 0
    if uid:
        user = pwd.getpwuid(uid)
        path = f"{user.pw_dir}/.cargo/bin{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        if found := shutil.which("cargo", path=path):
            environment = {**os.environ, "HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "PATH": path}
            return found, {"user": uid, "group": user.pw_gid, "extra_groups": [], "env": environment}
    if found := shutil.which("cargo"):
        return found, {}
    below = " nor in ~/.cargo/bin of the user who called sudo" if uid else ""
    sys.exit(f"install: no cargo in PATH{below}: it tells which crates the programs are made of; without root, "
             "`make install DESTDIR=FOLDER` installs into a folder that can be copied")


@cache
def metadata(folder):
    program, how = cargo()
    command = [program, "metadata", "--format-version", "1", "--locked", "--filter-platform", PLATFORM]
    # The same in a checkout and in a build of a distribution, where there may be no network.
    done = subprocess.run(command, cwd=ROOT / folder, stdout=subprocess.PIPE, **how)
    if done.returncode:
        sys.exit(f"install: `{' '.join(command)}` in {ROOT / folder} ended with {done.returncode}")
    return json.loads(done.stdout)


def crates(roots):
    """The crates of others that are linked into `roots`, [(workspace, package)], sorted by name and version."""
    found = {}
    for folder, root in roots:
        data = metadata(folder)
        found |= {(package["name"], package["version"]): package for package in vendored(root)}
        packages = {package["id"]: package for package in data["packages"]}
        nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
        waiting = [next(id for id, package in packages.items() if package["name"] == root)]
        seen = set(waiting)
        while waiting:
            id = waiting.pop()
            package = packages[id]
            if package["source"]:
                found[package["name"], package["version"]] = package
            for dependency in nodes[id]["deps"]:
                is_macro = any("proc-macro" in target["kind"] for target in packages[dependency["pkg"]]["targets"])
                is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"]) and not is_macro
                if is_linked and dependency["pkg"] not in seen:
                    seen.add(dependency["pkg"])
                    waiting.append(dependency["pkg"])
    return [found[key] for key in sorted(found)]


def licence(package):
    """Its SPDX expression; old manifests write "/" for OR."""
    return (package["license"] or "NOASSERTION").replace("/", " OR ").replace("  ", " ")


def licence_files(package):
    folder = Path(package["manifest_path"]).parent
    return [path for path in sorted(folder.iterdir()) if path.is_file() and LICENCE_FILE.fullmatch(path.name)]


def licences(packages):
    """The licences of these crates, for people."""
    lines, texts = [HEAD], {}
    for package in packages:
        name = f"{package['name']} {package['version']}"
        authors = ", ".join(re.sub(r"\s*<.*?>", "", author) for author in package["authors"])
        lines.append(f"{name}: {licence(package)}" + (f"; by {authors}" if authors else ""))
        if note := NOTES.get(licence(package)):
            lines.append("  " + note.format(**package))
        for path in licence_files(package):
            text = "\n".join(line.rstrip() for line in path.read_text(errors="replace").strip().splitlines())
            texts.setdefault(text, []).append(f"{name} ({path.name})")
    for text, names in texts.items():
        lines += ["", "=" * 100, *names, "=" * 100, text]
    return "\n".join(lines) + "\n"


def spdx(name, version, packages):
    """A document of SPDX 2.3, for machines. Its time is that of the sources, so that it is the same each time."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", 0)) or int(time.time())
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    own = {"SPDXID": "SPDXRef-Package", "name": name, "versionInfo": version, "licenseConcluded": "Apache-2.0", "licenseDeclared": "Apache-2.0",
           "copyrightText": "NOASSERTION", "downloadLocation": "NOASSERTION", "filesAnalyzed": False, "supplier": "Organization: The Tombolo maintainers"}
    entries, relations = [own], [("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-Package")]
    for package in packages:
        reference = "SPDXRef-crate-" + re.sub(r"[^A-Za-z0-9.-]", "-", f"{package['name']}-{package['version']}")
        entries.append({
            "SPDXID": reference, "name": package["name"], "versionInfo": package["version"], "licenseConcluded": licence(package),
            "licenseDeclared": licence(package), "copyrightText": "NOASSERTION", "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
            "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                              "referenceLocator": package.get("purl") or f"pkg:cargo/{package['name']}@{package['version']}"}],
        })
        relations.append(("SPDXRef-Package", "STATIC_LINK", reference))
    content = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    return {
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": f"{name}-{version}",
        "documentNamespace": f"https://github.com/tombolo-fabric/tombolo/spdx/{name}-{version}-{content[:16]}",
        "creationInfo": {"created": created, "creators": ["Tool: tombolo-tools-sbom"], "licenseListVersion": "3.20"},
        "packages": entries,
        "relationships": [{"spdxElementId": a, "relationshipType": how, "relatedSpdxElement": b} for a, how, b in relations],
    }
