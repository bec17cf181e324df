"""Machines that boot from the network: firmware of others (iPXE in QEMU's boot ROM, OVMF) asks the gateway what to load, and loads it from
a TFTP or HTTP server that is a member."""

import contextlib
from pathlib import Path

from lib import Fabric, Namespace, Process, Skip, need_program, need_root, scratch, timeout, until

OVMF = Path("/usr/share/ovmf/OVMF.fd")
IPXE = Path("/usr/lib/ipxe/snponly.efi")
SERVER, SERVER6 = "10.236.0.5", "fd00:236::5"
FILE = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/24"
ipv6 = "fd00:236::/64"
[network.lan.boot]
{boot}
[tap.files]
netns = "/run/netns/{space}"
ip = "{server}"
"""


def script(words):
    """A script of iPXE that says where it came from, and stays."""
    return f"#!ipxe\necho {words}: ${{filename}} of ${{next-server}}\nsleep 600\n"


@contextlib.contextmanager
def files(name, boot, machines, content):
    """A fabric with a TFTP server (dnsmasq) and an HTTP server on one of its members."""
    need_root()
    need_program("dnsmasq")
    with contextlib.ExitStack() as stack:
        home, space = stack.enter_context(Namespace()), stack.enter_context(Namespace())
        folder = stack.enter_context(scratch())
        served = folder / "served"
        served.mkdir()
        for file, text in content.items():
            (served / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        served.chmod(0o755)
        text = FILE.format(name=name, boot=boot, space=space, server=SERVER) + machines
        fabric = stack.enter_context(Fabric(folder, text.split("[vm.")[0], netns=home))
        space.ip("address", "add", f"{SERVER6}/64", "dev", "files", "nodad")
        # --user=root: what a test makes is readable by its user alone.
        tftp = ["dnsmasq", "--keep-in-foreground", "--port=0", "--enable-tftp", f"--tftp-root={served}", "--user=root", "--conf-file=/dev/null",
                "--log-facility=-", "--pid-file"]
        tftp = stack.enter_context(Process(tftp, name="dnsmasq", netns=space))
        http = ["python3", "-u", "-m", "http.server", "80", "--bind", "::", "--directory", str(served)]
        http = stack.enter_context(Process(http, name="http", netns=space))
        http.wait_line(lambda line: "Serving" in line, 30)
        # The machines come once the servers are there.
        fabric.file.write_text(text)
        fabric.cli("apply", fabric.file)
        yield fabric, http, tftp


def says(fabric, machine, words, seconds):
    until(f"{words!r} on the console of {machine}", lambda: words in fabric.console(machine), seconds, every=0.2,
          seen=lambda: fabric.console(machine)[-3000:])


def count(fabric):
    return fabric.status()["networks"][0]["counters"]["boot_answers"]


@timeout(90)
def test_ipxe_loads_what_its_network_and_its_own_section_say():
    boot = f'server = "{SERVER}"\nfile = "no-such-file"\nipxe = "http://{SERVER}/start.ipxe"\n'
    machines = '[vm.all]\nboot = true\nmemory = "128M"\n' + '[vm.own]\nboot = { file = "own.ipxe" }\nmemory = "128M"\n'
    content = {"start.ipxe": script("over http"), "own.ipxe": script("over tftp"), "later.ipxe": script("changed")}
    with files("netboot", boot, machines, content) as (fabric, *_):
        says(fabric, "all", f"over http: http://{SERVER}/start.ipxe of {SERVER}", 60)
        says(fabric, "own", f"over tftp: own.ipxe of {SERVER}", 60)
        assert count(fabric) >= 4, "two messages of each"
        # Another file while the fabric runs: no machine is started again, and the next one that
        # boots loads it.
        pid = fabric.machine("all")["pid"]
        fabric.file.write_text(fabric.file.read_text().replace("start.ipxe", "later.ipxe"))
        assert "start.ipxe" in fabric.cli("apply", fabric.file).stdout
        assert fabric.machine("all")["pid"] == pid
        fabric.cli("cell", "restart", "all", "--fabric", "netboot")
        says(fabric, "all", f"changed: http://{SERVER}/later.ipxe", 60)


@timeout(120)
def test_uefi_loads_ipxe_by_its_architecture_and_ipxe_does_not_load_itself():
    if not OVMF.exists() or not IPXE.exists():
        raise Skip(f"{OVMF} or {IPXE} is missing: install ovmf and ipxe")
    boot = f'server = "{SERVER}"\nfile = "no-such-file"\nipxe = "http://{SERVER}/start.ipxe"\narch = {{ x86-64-uefi = "ipxe.efi" }}\n'
    machines = f'[vm.uefi]\nboot = true\nqemu = ["-bios", "{OVMF}"]\n'
    content = {"ipxe.efi": IPXE.read_bytes(), "start.ipxe": script("behind uefi")}
    with files("netboot4", boot, machines, content) as (fabric, *_):
        says(fabric, "uefi", f"behind uefi: http://{SERVER}/start.ipxe", 100)


@timeout(150)
def test_uefi_loads_by_ipv6_what_dhcpv6_says():
    if not OVMF.exists() or not IPXE.exists():
        raise Skip(f"{OVMF} or {IPXE} is missing: install ovmf and ipxe")
    boot = f'server = "{SERVER}"\nfile = "no-such-file"\n'
    own = f'{{ url6 = "tftp://[{SERVER6}]/no-such-file", arch6 = {{ x86-64-uefi = "tftp://[{SERVER6}]/six.efi" }} }}'
    machines = f'[vm.uefi]\nboot = {own}\nqemu = ["-bios", "{OVMF}"]\n'
    with files("netboot6", boot, machines, {"six.efi": IPXE.read_bytes()}) as (fabric, _, tftp):
        # The address is one of the prefix that the gateway advertises.
        tftp.wait_line(lambda line: "sent" in line and "six.efi to fd00:236::" in line, 120)
        says(fabric, "uefi", "iPXE initialising devices", 30)


def http_firmware():
    """What QEMU is told so that OVMF boots by HTTP, and by that alone: no boot ROM of QEMU's, which is iPXE, and no PXE."""
    if not OVMF.exists() or not IPXE.exists():
        raise Skip(f"{OVMF} or {IPXE} is missing: install ovmf and ipxe")
    words = ["-bios", OVMF, "-global", "virtio-net-pci.rombar=0"]
    for family in ("IPv4", "IPv6"):
        words += ["-fw_cfg", f"name=opt/org.tianocore/{family}PXESupport,string=n"]
    return "qemu = [" + ", ".join(f'"{word}"' for word in words) + "]\n"


@timeout(120)
def test_uefi_boots_by_http_what_dhcp_says():
    # The file for all is no URL, so an HTTP client is not told it.
    boot = (f'server = "{SERVER}"\nfile = "no-such-file"\nipxe = "http://{SERVER}/start.ipxe"\n'
            f'arch = {{ x86-64-uefi = "no-such-file", x86-64-uefi-http = "http://{SERVER}/http.efi" }}\n')
    machines = f"[vm.uefi]\nboot = true\n{http_firmware()}"
    content = {"http.efi": IPXE.read_bytes(), "start.ipxe": script("behind http")}
    with files("netboot5", boot, machines, content) as (fabric, http, _):
        http.wait_line(lambda line: '"GET /http.efi HTTP/1.1" 200' in line, 100)
        says(fabric, "uefi", f"behind http: http://{SERVER}/start.ipxe", 60)
        assert "UEFI HTTPv4" in fabric.console("uefi"), "the firmware itself fetched it"


@timeout(240)
def test_uefi_boots_by_http_over_ipv6_what_dhcpv6_says():
    # Of DHCP the client is told nothing, and gives up after a minute.
    boot = f'ipxe6 = "http://[{SERVER6}]/start.ipxe"\narch6 = {{ x86-64-uefi-http = "http://[{SERVER6}]/http.efi" }}\n'
    machines = f"[vm.uefi]\nboot = true\n{http_firmware()}"
    with files("netboot7", boot, machines, {"http.efi": IPXE.read_bytes()}) as (fabric, http, _):
        http.wait_line(lambda line: line.startswith("fd00:236::") and '"GET /http.efi HTTP/1.1" 200' in line, 200)
        says(fabric, "uefi", "iPXE initialising devices", 60)
        assert "UEFI HTTPv6" in fabric.console("uefi"), "the firmware itself fetched it"
