"""Virtual machines of containers at vhost-user sockets: Kata's by its DAN file, and others by the `socketPath` of the answer.

Kata is in no package of Debian, and needs KVM. So a stock QEMU with a stock Linux guest is in its place: it is started with what the file
says, as Kata's monitor in Rust is, and the guest is given the addresses and routes of the file, as Kata's agent does.
"""

import contextlib
import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

from lib import Fabric, LinuxGuest, Namespace, Net, alone, need_root, scratch, timeout, until
from lib.containers import Cni, Failed, of, path, plugin

FILE = """
name = "{name}"
[network.lan]
subnet = "10.236.0.0/22"
ipv6 = "fd12:3456:789a:d::/64"
uplink = "kernel"
mtu = 1400
"""


@contextlib.contextmanager
def fabric():
    need_root()
    plugin()
    with scratch() as folder, Namespace() as outside:
        outside.way_out()
        outside.ip("-6", "address", "add", "2001:db8:5::1/64", "dev", "out0", "nodad")
        outside.ip("-6", "route", "add", "default", "via", "2001:db8:5::2", "dev", "out0")
        with Fabric(folder, FILE.format(name=f"kata{os.getpid()}"), netns=outside, own_mounts=False) as fabric:
            yield fabric


def listens(socket):
    return socket.exists() and stat.S_ISSOCK(os.stat(socket).st_mode)


def configure(guest, info):
    """What Kata's agent does with the `network_info` of a device: MTU, addresses, routes."""
    guest.run(f"ip link set eth0 mtu {info['interface']['mtu']} up")
    for address in info["interface"]["ip_addresses"]:
        guest.run(f"ip address add {address} dev eth0")
    until("no address is tentative", lambda: "tentative" not in guest.run("ip address show dev eth0").text, 30, every=0.5)
    for route in info["routes"]:
        family = "-6 " if ":" in route["gateway"] else ""
        guest.run(f"ip {family}route replace {route['dest'] or 'default'} via {route['gateway']} dev eth0")


def guest_of(device, server):
    """A QEMU with the card that an entry of the file asks for."""
    at = device["device"]
    net = Net.vhost_user(at["path"], server=server, queues=at["queue_num"]).with_mac(device["guest_mac"])
    return LinuxGuest(net=net.with_device(f"rx_queue_size={at['queue_size']}"), address="none", serve="http")


@timeout(300)
def test_a_virtual_machine_of_kata_is_on_the_fabric_by_its_file():
    with fabric() as f, Namespace() as pod, Namespace() as two:
        dans = f.folder / "dans"
        vms, cni = Cni(f, "1.1.0", vm="vhost-user", dan=str(dans)), Cni(f, "1.1.0")
        mapped = {"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}}
        result = vms("ADD", "sandbox1", path(pod), args="K8S_POD_NAME=web", **mapped)
        other = cni("ADD", "c2", path(two))
        file = json.loads((dans / "sandbox1.json").read_text())
        [device] = file["devices"]
        socket = Path(device["device"]["path"])
        assert device["device"]["type"] == "vhost-user" and device["name"] == "eth0" and "netns" not in file, file
        # Kata refuses a path at which there is something, and listens there itself.
        assert not socket.exists()
        assert result["interfaces"] == [{"name": "eth0", "mac": device["guest_mac"], "mtu": 1400, "sandbox": "sandbox1", "socketPath": str(socket)}]
        assert device["network_info"]["interface"]["ip_addresses"] == [ip["address"] for ip in result["ips"]]
        assert [route["gateway"] for route in device["network_info"]["routes"]] == [route["gw"] for route in result["routes"]]
        assert "eth0" not in pod.ip("link"), "it is the guest's interface alone"
        assert vms.ports()["web"]["details"]["netns"] == path(pod)
        vms("CHECK", "sandbox1", path(pod), prevResult=result, **mapped)
        with guest_of(device, server=True) as guest:
            guest.wait_control(120)
            configure(guest, device["network_info"])
            until("the port is up", lambda: vms.ports()["web"]["up"], 60)
            for n in range(2):
                assert guest.ping(of(other, n)) and two.answers(of(result, n))
            assert guest.ping("198.51.100.2") and guest.ping("2001:db8:5::1"), "the world, by the default routes"
            asked = two.run("busybox", "nslookup", f"web.{result['dns']['domain']}", result["dns"]["nameservers"][0]).stdout
            assert of(result, 0) in asked and of(result, 1) in asked, asked
            fetched = lambda: f.netns.run("busybox", "timeout", "5", "busybox", "wget", "-q", "-O", "-", "http://198.51.100.2:8080/bytes/1024", check=False)  # noqa: E731
            until("its port mapping leads there", lambda: len(fetched().stdout) == 1024, 60)
            # The guard holds the guest to its addresses.
            guest.run("ip address add 10.236.3.200/32 dev eth0")
            guest.run(f"ping -c 1 -W 1 -I 10.236.3.200 {of(other, 0)}", check=False)
            assert "guard" in vms.ports()["web"]["counters"]["rx_drops"], vms.ports()["web"]["counters"]
            # The daemon may be killed under it.
            f.kill()
            f.start()
            until("the port is up again", lambda: vms.ports()["web"]["up"], 60)
            until("the guest is back", lambda: two.answers(of(result, 0)), 60)
            vms("CHECK", "sandbox1", path(pod), prevResult=result, **mapped)
        (dans / "sandbox1.json").write_text('{"devices": []}')
        refusal(101, "sandbox1.json", vms, "CHECK", "sandbox1", path(pod), prevResult=result, **mapped)
        for _ in range(2):
            vms("DEL", "sandbox1", path(pod), **mapped)
        assert set(cni.ports()) == {"c2"} and not f.status()["forwards"]
        assert not list(dans.iterdir()) and not socket.exists(), "the monitor's socket is removed too"


def refusal(code, word, call, *words, **more):
    try:
        call(*words, **more)
    except Failed as error:
        assert error.code == code and word in error.text, (error.code, error.text)
        return
    raise AssertionError(f"{words} was not refused")


@timeout(120)
def test_a_virtual_machine_ends_with_its_namespace_though_another_has_the_path_when_the_next_daemon_looks():
    with fabric() as f, Namespace() as pod, Namespace() as stays:
        vms = Cni(f, "1.1.0", vm="vhost-user")
        vms("ADD", "vm1", path(pod))
        vms("ADD", "vm2", path(stays))
        f.kill()
        # As with /proc/PID/ns/net, whose number another process has by then.
        subprocess.run(["ip", "netns", "del", str(pod)], check=True)
        subprocess.run(["ip", "netns", "add", str(pod)], check=True)
        f.start()
        assert set(vms.ports()) == {"vm2"}
        # The record goes on from daemon to daemon, and a name that is used again is of the new
        # namespace.
        vms("ADD", "vm1", path(pod))
        f.kill()
        f.start()
        assert set(vms.ports()) == {"vm1", "vm2"}
        time.sleep(2.5)
        assert set(vms.ports()) == {"vm1", "vm2"}, "the daemon has looked at them"


# Namespaces that other tests make meanwhile take the number.
@alone
@timeout(180)
def test_a_virtual_machine_ends_with_its_namespace_though_another_has_its_path_and_inode():
    with fabric() as f, Namespace() as one:
        cni = Cni(f, "1.1.0", vm="vhost-user")
        cni("ADD", "vm1", path(one))
        assert len(cni.ports()) == 1
        inode = one.number()
        f.process.signal(signal.SIGSTOP)
        try:
            until("a namespace with the same inode", lambda: one.has_again(inode), 60)
        finally:
            f.process.signal(signal.SIGCONT)
        until("the port goes with the first namespace", lambda: not cni.ports(), 30)


@timeout(240)
def test_a_monitor_connects_to_the_socket_of_the_answer():
    with fabric() as f, Namespace() as pod, Namespace() as two:
        vms, cni = Cni(f, "1.1.0", vm="vhost-user"), Cni(f, "1.1.0")
        result, other = vms("ADD", "vm1", path(pod)), cni("ADD", "c2", path(two))
        interface = result["interfaces"][0]
        socket = Path(interface["socketPath"])
        assert listens(socket) and stat.S_IMODE(os.stat(socket).st_mode) == 0o600
        net = Net.vhost_user(socket).with_mac(interface["mac"])
        # The gateway leases it the address of the answer.
        with LinuxGuest(net=net) as guest:
            assert guest.wait_address(120).startswith(of(result, 0))
            assert guest.ping(of(other, 0)) and two.answers(of(result, 0))
            vms("CHECK", "vm1", path(pod), prevResult=result)
            vms("DEL", "vm1", path(pod))
            assert not socket.exists() and set(cni.ports()) == {"c2"}
        # An answer of an earlier version has no place for the path.
        refusal(7, "1.1.0", Cni(f, "1.0.0", vm="vhost-user"), "ADD", "vm1", path(pod))


@timeout(120)
def test_a_virtual_machine_goes_with_its_namespace_and_gc_removes_its_file():
    with fabric() as f, Namespace() as stays:
        dans = f.folder / "dans"
        vms = Cni(f, "1.1.0", vm="vhost-user", dan=str(dans))
        vms("ADD", "stays", path(stays))
        with Namespace() as pod:
            vms("ADD", "s1", path(pod))
            assert set(vms.ports()) == {"s1", "stays"}
        until("the port goes with the namespace", lambda: set(vms.ports()) == {"stays"}, 60)
        # So it does where the namespace goes while no daemon runs.
        with Namespace() as pod:
            vms("ADD", "s2", path(pod))
            f.kill()
        f.start()
        assert set(vms.ports()) == {"stays"}
        # With the daemon away DEL removes file and socket.
        with Namespace() as pod:
            vms("ADD", "s3", path(pod))
            f.kill()
            vms("DEL", "s3", path(pod))
            f.start()
            assert sorted(file.name for file in dans.iterdir()) == ["s1.json", "s2.json", "stays.json"]
            assert set(vms.ports()) == {"stays", "s3"}
        until("the port goes with the namespace", lambda: set(vms.ports()) == {"stays"}, 60)
        vms("GC", **{"cni.dev/valid-attachments": [{"containerID": "stays", "ifname": "eth0"}]})
        assert [file.name for file in dans.iterdir()] == ["stays.json"]
        # What is there of another plugin stays, and a second network of the sandbox has its place
        # beside it.
        other = {"name": "net1", "device": {"type": "vfio", "pci_device_id": "0000:85:02.5"}}
        (dans / "s4.json").write_text(json.dumps({"devices": [other]}))
        vms("ADD", "s4", path(stays), "eth1")
        vms("ADD", "s4", path(stays), "eth2")
        names = lambda: [device["name"] for device in json.loads((dans / "s4.json").read_text())["devices"]]  # noqa: E731
        assert names() == ["net1", "eth1", "eth2"]
        vms("DEL", "s4", path(stays), "eth1")
        vms("DEL", "s4", path(stays), "eth2")
        assert names() == ["net1"]
        # A file that is none, and a folder that is another's to write: nothing is added.
        (dans / "s5.json").write_text("no JSON")
        refusal(5, "s5.json", vms, "ADD", "s5", path(stays), "eth1")
        dans.chmod(0o777)
        refusal(5, "mode 777", vms, "ADD", "s6", path(stays), "eth1")
        assert set(vms.ports()) == {"stays"}
