"""flanneld at the other end of a tunnel: a node of flannel (docs/span.md). It is no package of Debian 12: `./x span-peers` builds it from its Go
module, and unpacks Debian's etcd, where nodes of flannel tell each other what they have."""

import contextlib
import json
import os
from pathlib import Path

from lib import ROOT, Process, Skip, scratch, timeout, until
from lib.fabric import Fabric
from span_vxlan import OURS, UNDERLAYS, VNI, bulk, cable, drops, text

FLANNEL = Path(os.environ.get("TOMBOLO_FLANNEL", ROOT / "build/flannel"))
FLANNELD, ETCD, ETCDCTL = (FLANNEL / name for name in ("flanneld", "etcd/usr/bin/etcd", "etcd/usr/bin/etcdctl"))
KEYS = "/coreos.com/network"


class Etcd:
    """One member of etcd, on loopback of a namespace."""

    def __init__(self, folder, space):
        self.space = space
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        words = [ETCD, "--data-dir", folder / "data", "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
                 "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        self.process = Process(words, name="etcd", netns=space)

    def __enter__(self):
        until("etcd", lambda: self.ask("endpoint", "health", check=False).returncode == 0)
        return self

    def __exit__(self, *_):
        self.process.kill()

    def ask(self, *words, check=True):
        return self.space.run("env", "ETCDCTL_API=3", ETCDCTL, *words, check=check)

    def put(self, key, value):
        self.ask("put", f"{KEYS}/{key}", json.dumps(value))

    def leases(self):
        """What each node has said, by its subnet."""
        lines = self.ask("get", "--prefix", f"{KEYS}/subnets/").stdout.splitlines()
        return {key.rpartition("/")[2].replace("-", "/"): json.loads(value) for key, value in zip(lines[::2], lines[1::2], strict=True)}


def needed():
    for program in (FLANNELD, ETCD, ETCDCTL):
        if not program.exists():
            raise Skip(f"{program} is not built: run ./x span-peers")


@timeout(300)
def test_a_node_with_flanneld_is_the_other_end_and_forgets_this_one_when_told():
    needed()
    ours, theirs, _, overhead = UNDERLAYS[4]
    mtu = 1500 - overhead
    file = text("one", mtu, OURS, ours, theirs).replace(f"vni = {VNI}", "vni = 1\nudp_port = 8472")
    with contextlib.ExitStack() as stack:
        a, b = stack.enter_context(cable())
        folder, state = (stack.enter_context(scratch()) for _ in range(2))
        fabric = stack.enter_context(Fabric(folder, file, netns=a))
        etcd = stack.enter_context(Etcd(state, b))
        # This node has no flanneld: what it would do is done here.
        mac = a.run("cat", "/sys/class/net/host/address").stdout.strip()
        etcd.put("config", {"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan", "VNI": 1, "Port": 8472}})
        etcd.put("subnets/10.244.1.0-24", {"PublicIP": ours, "BackendType": "vxlan", "BackendData": {"VNI": 1, "VtepMAC": mac}})
        words = [FLANNELD, "-etcd-endpoints", "http://127.0.0.1:2379", "-iface", "eth0", "-subnet-file", state / "subnet.env",
                 "-iptables-forward-rules=false", "-healthz-port", "0"]
        flanneld = Process(words, name="flanneld", netns=b)
        stack.callback(flanneld.kill)
        found = {}

        def told():
            assert flanneld.alive(), flanneld.tail()
            found.update({subnet: lease for subnet, lease in etcd.leases().items() if lease["PublicIP"] == theirs})
            return found

        until("the lease of flanneld", told)
        [(subnet, lease)] = found.items()
        assert lease["BackendType"] == "vxlan" and lease["BackendData"]["VNI"] == 1, lease
        base = subnet.partition("/")[0]
        pod = base.rpartition(".")[0] + ".1"
        b.ip("address", "add", f"{pod}/32", "dev", "lo")
        for address, device in (("10.244.1.0", "host"), ("10.244.1.1", "lo")):
            a.ip("address", "add", f"{address}/32", "dev", device)
        a.ip("neighbour", "replace", base, "lladdr", lease["BackendData"]["VtepMAC"], "dev", "host", "nud", "permanent")
        a.ip("route", "replace", subnet, "via", base, "dev", "host", "onlink", "src", "10.244.1.1")
        # Its own device, with the MTU that the tunnel leaves, and the entries that it made of our lease.
        until("the pod on the node with flanneld", lambda: a.answers(pod))
        shown = json.loads(b.run("ip", "-j", "-d", "link", "show", "flannel.1").stdout)[0]
        assert (shown["mtu"], shown["linkinfo"]["info_data"]["id"], shown["linkinfo"]["info_data"]["port"]) == (mtu, 1, 8472), shown
        assert b.answers("10.244.1.1")
        bulk(a, b, pod)
        bulk(b, a, "10.244.1.1")
        assert not {"wrong_vni", "unknown_remote", "bad_tunnel", "tunnel_too_long"} & drops(fabric).keys(), drops(fabric)
        # Without the lease flanneld takes its entries back.
        etcd.ask("del", f"{KEYS}/subnets/10.244.1.0-24")
        until("no route to this node", lambda: "10.244.1.0" not in b.run("ip", "route").stdout)
        assert not a.pings(pod)
