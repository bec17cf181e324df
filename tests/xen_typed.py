"""docs/xen.md, typed: the ten commands from a bare Xen host to a network of cells, on real Xen under emulation.

The test bed has made the programs of the first command already. What `scp` copies to dom0 is in its ramdisk when it boots.
"""

import re
import subprocess

from lib import scratch, timeout
from lib.machine import ROOT
from lib.process import until
from lib.xen import PROGRAM, host, program_files, program_in_guest

PAGE = ROOT / "docs/xen.md"
BUILT = "./x build && ./x cells"
# Of a member of the network, not of its gateway.
ADDRESS = r"\b10\.87\.0\.(?!1\b)\d+\b(?!/)"


def commands():
    """The section's commands in order: those of the source tree, and those of dom0."""
    section = PAGE.read_text().split("\n## From a bare Xen host to a network of cells\n")[1].split("\n## ")[0]
    found = {"$": [], "#": []}
    for block in re.findall(r"```console\n(.*?)```", section, re.S):
        for line in block.splitlines():
            if line[:2] in ("$ ", "# "):
                last = found[line[0]]
                last.append(line[2:])
            else:
                last[-1] += "\n" + line
    return found["$"], found["#"]


def copied(in_tree):
    """What the commands in the source tree put into dom0, by its name there."""
    assert in_tree[0] == BUILT, in_tree
    with scratch() as folder:
        for name in ("cells", "target"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "dom0/usr/local/bin").mkdir(parents=True)
        for command in in_tree[1:]:
            line = command.replace("ssh root@dom0 mkdir -p /", "mkdir -p dom0/").replace("root@dom0:/", "dom0/").replace("scp ", "cp ")
            subprocess.run(["bash", "-ec", line], cwd=folder, check=True)
        files = [path for path in (folder / "dom0").rglob("*") if path.is_file()]
        return {str(path.relative_to(folder / "dom0")): path.read_bytes() for path in files}


@timeout(600)
def test_the_ten_commands_lead_to_a_network_of_cells():
    """Each command of the page is typed as it stands there, and ends well; at the end both cells run, answer and have their addresses."""
    in_tree, in_dom0 = commands()
    assert len(in_tree) + len(in_dom0) == 10, (in_tree, in_dom0)
    # With what a Debian has by itself: the libraries, and iproute2, which `doctor` uses.
    files = copied(in_tree) | {name: data for name, data in program_in_guest(PROGRAM).items() if name.startswith("lib")}
    files |= {name: path.read_bytes() for name, path in program_files("ip")}
    [load, unload, doctor, write, up, until_it_answers, status] = in_dom0
    with host(files=files) as xen:
        # As on Debian: the folder is there, login shells have /usr/local/bin in their PATH, and
        # modules are where modprobe looks. This kernel's are loaded from the first.
        xen.run("mkdir -p /etc/modprobe.d /lib/modules/$(uname -r); mv /lib/modules/*.ko /lib/modules/$(uname -r)/; depmod")
        xen.run("rmmod tun")

        def typed(line, check=True):
            return xen.run(f"export PATH=/usr/local/bin:$PATH; cd /root\n{line}", 240, check)

        typed(load)
        assert not xen.run("ls /dev/net/tun", check=False).code
        typed(unload)
        assert xen.run("lsmod | grep netback", check=False).code and xen.run("cat /etc/modprobe.d/tombolo.conf").text == "blacklist xen-netback"
        said = typed(doctor).text
        works = set(re.findall(r"^works +(.+?)  ", said, re.M))
        assert works >= {"Xen", "Xen devices", "the kernel's backend", "xl", "tap devices"}, said
        typed(write)
        typed(up)
        # The test bed's wget is busybox's, which crashes with -T in Debian 12.
        assert "accepted_connections" in typed(until_it_answers.replace("wget -q -T 2", "timeout 2 wget -q")).text
        # The page says that it shows the address which the other cell has by DHCP.
        said = until("all addresses", lambda: len(set(re.findall(ADDRESS, text := typed(status).text))) == 3 and text, 60)
        assert all(re.search(rf"Xen domain demo\.{name}, number \d+", said) for name in ("web", "echo")), said
        [address] = set(re.findall(ADDRESS, said)) - {"10.87.0.3", "10.87.0.20"}
        assert xen.run(f"echo typed | nc -w 20 {address} 7 | head -n 1").text == "typed"
        xen.run("/usr/local/bin/tombolo down", 120)
