"""Packages of Debian's backports on a Debian 12 machine, without root and without touching the system's apt."""

import subprocess
import sys
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SUITE = "bookworm-backports"


def output(*argv, **kwargs):
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, **kwargs).stdout


def mirror(who):
    """Where this system gets Debian from, as it is configured here; ends the program `who` where it does not."""
    targets = output("apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)", "Created-By: Packages")
    for line in targets.splitlines():
        uri, codename, component = line.split()
        if codename == "bookworm" and component == "main":
            return uri
    sys.exit(f"{who}: the system's apt knows no Debian bookworm to take the backports from")


def backports(who, apt: Path):
    """An apt configuration of its own below the folder `apt`, with current lists; gives the options that name it."""
    for folder in ("etc", "state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "etc/sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror(who)} {SUITE} main\n")
    options = []
    for option in (
        f"Dir::Etc::sourcelist={apt}/etc/sources.list",
        "Dir::Etc::sourceparts=/dev/null",
        f"Dir::State={apt}/state",
        "Dir::State::status=/var/lib/dpkg/status",
        f"Dir::Cache={apt}/cache",
        "APT::Sandbox::User=root",
    ):
        options += ["-o", option]
    output("apt-get", "-q", *options, "update")
    return options
