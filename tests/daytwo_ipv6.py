"""IPv6 between the gateway and real peers: Linux's own autoconfiguration, a stock DHCPv6 client, and a hostile neighbour. Taps of one
fabric, each in a namespace of its own."""

import contextlib
import ipaddress
import json
import os
import re
import socket
import struct
import threading

from lib import Fabric, Namespace, Process, need_program, need_root, scratch, timeout, until
from lib.containers import debian
from lib.frames import mac_bytes
from lib.tap import Inside

NAMES = ("auto", "client", "rogue")
MAC = {name: f"02:54:00:00:66:0{n + 1}" for n, name in enumerate(NAMES)}
FILE = """
name = "sixes"
[network.lan]
subnet = "10.235.0.0/24"
mtu = 1400
{ipv6}
"""
ALL_NODES, ALL_SERVERS = "ff02::1", "ff02::1:2"


def text(spaces, ipv6=""):
    taps = [f'[tap.{name}]\nnetns = "/run/netns/{spaces[name]}"\nmac = "{MAC[name]}"\nip = "10.235.0.{11 + n}"\nguard = "ip"\naccept_ra = true\n'
            for n, name in enumerate(NAMES)]
    return FILE.replace("{ipv6}", ipv6) + "".join(taps)


def local(mac):
    """The link-local address of a MAC address."""
    a, b, c, d, e, f = mac_bytes(mac)
    return ipaddress.IPv6Address(bytes([0xFE, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xFF, 0xFE, d, e, f])).compressed


@contextlib.contextmanager
def members(ipv6=""):
    need_root()
    with contextlib.ExitStack() as stack:
        spaces = {name: stack.enter_context(Namespace()) for name in NAMES}
        home = stack.enter_context(Namespace())
        folder = stack.enter_context(scratch())
        yield stack.enter_context(Fabric(folder, text(spaces, ipv6), netns=home)), spaces, folder


def addresses(space, device, scope="global"):
    return re.findall(r"inet6 ([0-9a-f:]+)/(\d+)", space.ip("-6", "address", "show", "dev", device, "scope", scope, "-tentative"))


def automatic(space, device):
    """The address that the kernel gave itself."""
    return until(f"an address of {device}", lambda: [a for a, bits in addresses(space, device) if bits == "64"])[0]


def gateway_of(fabric):
    """The gateway's address and MAC address, from the tables."""
    found = [p for p in fabric.status()["ports"] if p["name"] == "gateway-lan"]
    return found[0]["details"]["address6"].split("/")[0]


def resolve(space, server, name, kind):
    """The data of the answers to a question that is asked over IPv6."""
    query = b"\x00\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + b"".join(bytes([len(w)]) + w.encode() for w in name.split("."))
    query += b"\0" + struct.pack("!HH", kind, 1)
    with Inside(space):
        asker = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    with asker:
        asker.settimeout(20)
        asker.sendto(query, (server, 53))
        answer = asker.recv(2000)
    rest, out = answer[len(query):], []
    for _ in range(struct.unpack("!H", answer[6:8])[0]):
        length = struct.unpack("!H", rest[10:12])[0]
        out.append(rest[12:12 + length])
        rest = rest[12 + length:]
    return answer[3] & 15, out


def checksum(source, target, protocol, payload):
    whole = source.packed + target.packed + struct.pack("!II", len(payload), protocol) + payload + b"\0" * (len(payload) % 2)
    total = sum(struct.unpack(f"!{len(whole) // 2}H", whole))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def packet(mac, source, target, protocol, payload, at, to_mac=None, hops=255):
    """An IPv6 frame; the sum of the payload belongs at that place."""
    source, target = ipaddress.IPv6Address(source), ipaddress.IPv6Address(target)
    total = checksum(source, target, protocol, payload)
    payload = payload[:at] + struct.pack("!H", total) + payload[at + 2:]
    to = mac_bytes(to_mac) if to_mac else b"\x33\x33" + target.packed[-4:]
    header = struct.pack("!IHBB", 6 << 28, len(payload), protocol, hops) + source.packed + target.packed
    return to + mac_bytes(mac) + b"\x86\xdd" + header + payload


def send(space, device, frames):
    with Inside(space):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    with raw:
        raw.bind((device, 0))
        for frame in frames:
            raw.send(frame)


def drops(fabric, name, reason):
    return fabric.port(name)["counters"]["rx_drops"].get(reason, 0)


@timeout(120)
def test_linux_configures_itself_and_finds_names_and_down_withdraws():
    with members() as (fabric, spaces, _):
        space, gateway = spaces["auto"], gateway_of(fabric)
        own = automatic(space, "auto")
        prefix = ipaddress.IPv6Network(f"{gateway}/64", strict=False)
        assert ipaddress.IPv6Address(own) in prefix and prefix.subnet_of(ipaddress.IPv6Network("fd00::/8")), own
        assert space.answers(gateway) and space.answers(f"{local(MAC['client'])}%auto")
        assert space.ip("-6", "route", "show", "default") == "", "there is no way out"
        until("the MTU", lambda: "1400" in space.run("cat", "/proc/sys/net/ipv6/conf/auto/mtu").stdout)
        # Its name: of the file, for an address that only neighbour discovery told of. And back.
        packed = ipaddress.IPv6Address(own).packed
        until("its address under its name", lambda: packed in resolve(space, gateway, "auto.sixes.internal", 28)[1])
        reverse = ipaddress.IPv6Address(own).reverse_pointer
        assert resolve(space, gateway, reverse, 12) == (0, [b"\x04auto\x05sixes\x08internal\0"])
        assert resolve(space, gateway, "gateway", 28) == (0, [ipaddress.IPv6Address(gateway).packed])
        assert resolve(space, gateway, "nobody", 28)[0] == 3
        # The table of addresses has it, of each member that has one.
        other = automatic(spaces["client"], "client")
        rows = {"auto": own, "client": other}

        def listed():
            all_rows = json.loads(fabric.cli("table", "neighbours", "--json").stdout)["neighbours"]
            return {row["ip"]: row for row in all_rows if row["ip"] in rows.values()}
        found = until("the addresses in the table", lambda: (found := listed()) and len(found) == 2 and found)
        for name, ip in rows.items():
            row = found[ip]
            assert (row["name"], row["mac"], row["port"], row["source"], row["fixed"]) == (name, MAC[name], name, "learned", False), row
        # The other one reaches it, over the switch.
        assert spaces["client"].answers(own)
        [network] = fabric.status()["networks"]
        assert network["counters"]["router_solicitations"] >= 1, network["counters"]
        # `down` withdraws; a host that stays on the link hears it before the port is gone. Watched
        # in the namespace of a tap.
        with Inside(space):
            watch = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x86DD))
            watch.bind(("auto", 0))
        with watch:
            watch.settimeout(30)
            fabric.cli("down")
            heard = []
            # The device is gone, which is told once before what had come in.
            for _ in range(200):
                with contextlib.suppress(OSError):
                    watch.settimeout(1)
                    frame = watch.recv(2000)
                    heard += [frame] if frame[54] == 134 else []
                if heard:
                    break
        assert heard, "no withdrawal"
        at = heard[0].index(b"\x03\x04\x40\xc0")
        assert heard[0][at + 4:at + 12] == bytes(8), "the prefix is valid for no time"


@timeout(120)
def test_a_stock_client_reads_the_name_server_and_the_domain_of_an_advertisement():
    """rdisc6 of Debian's ndisc6, which asks and prints what the answer says."""
    program = debian("rdisc6", "ndisc6")
    with members() as (fabric, spaces, _):
        gateway = gateway_of(fabric)
        automatic(spaces["auto"], "auto")
        said = until("an answer", lambda: (found := spaces["auto"].run(program, "-1", "auto", check=False)).returncode == 0 and found.stdout)
        facts = dict(re.split(r"\s*:\s+", line.strip(), maxsplit=1) for line in said.splitlines() if " : " in line)
        assert facts["Recursive DNS server"] == gateway and facts["DNS search list"] == "sixes.internal", said
        assert facts["MTU"].startswith("1400 bytes") and facts["Prefix"] == f"{ipaddress.IPv6Network(f'{gateway}/64', strict=False)}", said


@timeout(120)
def test_a_stock_client_leases_by_dhcpv6_and_has_its_name():
    need_program("dhclient")
    with members('ipv6 = "fd12:3456:789a:1::/64"') as (fabric, spaces, folder):
        space = spaces["client"]
        until("a link-local address", lambda: addresses(space, "client", "link"))
        leases = folder / "dhclient6.leases"
        script = folder / "script"
        script.write_text("#!/bin/sh\n[ -z \"$new_ip6_address\" ] || ip -6 address replace $new_ip6_address/128 dev $interface\n"
                          "echo \"$reason $new_ip6_address $new_dhcp6_name_servers $new_dhcp6_domain_search\" >>" + f"{folder}/said\n")
        script.chmod(0o755)
        words = ["dhclient", "-6", "-1", "-v", "-lf", leases, "-pf", folder / "pid", "-sf", script, "client"]
        done = space.run(*words, seconds=60, check=False)
        assert done.returncode == 0, done.stderr
        try:
            said = (folder / "said").read_text()
            address = re.search(r"BOUND6 (\S+) fd12:3456:789a:1::1 sixes\.internal", said)
            assert address, said
            address = address[1]
            assert ipaddress.IPv6Address(address) in ipaddress.IPv6Network("fd12:3456:789a:1::/64")
            [network] = fabric.status()["networks"]
            lease = [one for one in network["leases"] if one["ip"] == address]
            assert lease and lease[0]["mac"] == MAC["client"], network["leases"]
            packed = ipaddress.IPv6Address(address).packed
            assert packed in resolve(space, "fd12:3456:789a:1::1", "client.sixes.internal", 28)[1]
            automatic(spaces["auto"], "auto")
            assert spaces["auto"].answers(address)
        finally:
            space.run("dhclient", "-6", "-r", "-lf", leases, "-pf", folder / "pid", "-sf", script, "client", seconds=60, check=False)
        until("the lease to end", lambda: all(one["ip"] != address for one in fabric.status()["networks"][0]["leases"]))


@timeout(120)
def test_a_stock_client_that_configures_itself_asks_dhcpv6_for_the_rest():
    need_program("dhclient")
    with members('ipv6 = "fd12:3456:789a:1::/64"') as (fabric, spaces, folder):
        space = spaces["client"]
        own = automatic(space, "client")
        until("a link-local address", lambda: addresses(space, "client", "link"))
        before = fabric.status()["networks"][0]["counters"]["dhcp6_informations"]
        script = folder / "script"
        script.write_text(f"#!/bin/sh\necho \"$reason:$new_ip6_address:$new_dhcp6_name_servers:$new_dhcp6_domain_search\" >>{folder}/said\n")
        script.chmod(0o755)
        words = ["dhclient", "-6", "-S", "-d", "-v", "-lf", folder / "leases", "-pf", folder / "pid", "-sf", script, "client"]
        with Process(words, name="dhclient", netns=space) as client:
            said = lambda: (folder / "said").read_text() if (folder / "said").exists() else ""  # noqa: E731
            until("the name server and the domain, and no address", lambda: "::fd12:3456:789a:1::1:sixes.internal" in said(), 60,
                  seen=lambda: f"dhclient: {said()}\n{client.tail()}")
        [network] = fabric.status()["networks"]
        assert network["counters"]["dhcp6_informations"] > before, network["counters"]
        assert not [lease for lease in network["leases"] if ":" in lease["ip"] and lease["mac"] == MAC["client"]], network["leases"]
        assert automatic(space, "client") == own


@timeout(120)
def test_a_hostile_neighbour_routes_serves_and_claims_nothing():
    with members() as (fabric, spaces, _):
        victim, mac = automatic(spaces["auto"], "auto"), MAC["rogue"]
        automatic(spaces["rogue"], "rogue")
        me = local(mac)
        option = b"\x02\x01" + mac_bytes(mac)
        advert = bytes([134, 0, 0, 0, 64, 0, 7, 8]) + bytes(8) + bytes([3, 4, 64, 0xC0]) + b"\xff" * 8 + bytes(4)
        advert += ipaddress.IPv6Address("fd66:6::").packed
        reply = struct.pack("!HHHH", 547, 546, 12, 0) + b"\x02abc"

        def about(address, kind=136):
            return bytes([kind, 0, 0, 0, 0x20, 0, 0, 0]) + ipaddress.IPv6Address(address).packed + (option if kind == 136 else b"")

        derived = ipaddress.IPv6Network(f"{victim}/64", strict=False)[int(ipaddress.IPv4Address("10.235.0.12"))]
        # The question, at the time of the victim's own, has it give its address up.
        detection = packet(mac, "::", f"ff02::1:ff{ipaddress.IPv6Address(victim).exploded[-7:]}", 58, about(victim, 135), 2)
        attacks = (
            ("rogue_router", packet(mac, me, ALL_NODES, 58, advert, 2)),
            ("rogue_dhcp", packet(mac, me, local(MAC["client"]), 17, reply, 6, to_mac=MAC["client"])),
            ("nd_inspection", packet(mac, me, ALL_NODES, 58, about(victim), 2)),
            ("gateway_claim", packet(mac, me, ALL_NODES, 58, about(gateway_of(fabric)), 2)),
            ("source6", packet(mac, victim, ALL_NODES, 58, b"\x80\0\0\0\0\1\0\1", 2, hops=64)),
            ("nd_inspection", detection),
            # What follows from the IPv4 address of a member that has not used it yet.
            ("source6", packet(mac, derived, ALL_NODES, 58, b"\x80\0\0\0\0\1\0\1", 2, hops=64)),
        )
        for reason, frame in attacks:
            before = drops(fabric, "rogue", reason)
            send(spaces["rogue"], "rogue", [frame] * 3)
            until(reason, lambda: drops(fabric, "rogue", reason) >= before + 3)
        # As many addresses as it may have, and no more.
        prefix = ipaddress.IPv6Network(f"{victim}/64", strict=False)
        many = [bytes([135, 0, 0, 0, 0, 0, 0, 0]) + prefix[0x9000 + n].packed for n in range(40)]
        send(spaces["rogue"], "rogue", [packet(mac, "::", "ff02::1:ff00:9", 58, one, 2) for one in many])
        until("the limit", lambda: drops(fabric, "rogue", "address_limit") >= 20)
        assert not [a for a, _ in addresses(spaces["auto"], "auto") if a.startswith("fd66:6:")]
        assert spaces["auto"].ip("-6", "route", "show", "default") == ""
        assert spaces["client"].answers(victim), "its neighbours notice nothing"


@timeout(120)
def test_a_port_claims_as_many_addresses_as_the_file_says():
    with members() as (fabric, spaces, _):
        mac, whole = MAC["rogue"], text(spaces)
        own = automatic(spaces["rogue"], "rogue")
        prefix = ipaddress.IPv6Network(f"{own}/64", strict=False)
        claims = [packet(mac, "::", "ff02::1:ff00:9", 58, bytes([135, 0, 0, 0, 0, 0, 0, 0]) + prefix[0x9000 + n].packed, 2) for n in range(10)]
        # Its own address is one of them; what it has stays when the number changes.
        for limit, dropped in ((3, 8), (6, 5), (11, 0)):
            fabric.file.write_text(whole.replace(f'mac = "{mac}"\n', f'mac = "{mac}"\nip6_limit = {limit}\n'))
            said = fabric.cli("apply", fabric.file).stdout
            assert f"→ {limit}" in said and "ip6_limit" in said and "restarted" not in said.splitlines()[0], said
            before, rogue = drops(fabric, "rogue", "address_limit"), drops(fabric, "rogue", "rogue_router")
            last = packet(mac, local(mac), ALL_NODES, 58, bytes([134]) + bytes(15), 2)
            send(spaces["rogue"], "rogue", [*claims, last])
            until("all were looked at", lambda: drops(fabric, "rogue", "rogue_router") > rogue)  # noqa: B023
            assert drops(fabric, "rogue", "address_limit") - before == dropped, limit
        assert any(f"11 of {prefix}" in words for words in fabric.port("rogue")["guard"]), fabric.port("rogue")["guard"]


@timeout(120)
def test_an_address_that_was_claimed_before_it_is_listed_for_another_port_is_lost_to_it():
    with members() as (fabric, spaces, _), Namespace() as home:
        mac = MAC["rogue"]
        prefix = ipaddress.IPv6Network(f"{automatic(spaces['rogue'], 'rogue')}/64", strict=False)
        automatic(spaces["auto"], "auto")
        web_mac = "02:54:00:00:66:77"
        # The rogue neighbour takes an address that nobody has, and the one that a later MAC address
        # would show.
        shown = ipaddress.IPv6Address(prefix.network_address.packed[:8] + ipaddress.IPv6Address(local(web_mac)).packed[8:])
        taken = [prefix[0x7777], shown]
        for address in taken:
            spaces["rogue"].ip("address", "add", f"{address}/64", "dev", "rogue", "nodad")
            assert spaces["auto"].answers(str(address)), "the address was free"
        # Then a port comes whose list has the first and whose MAC address the second shows.
        fabric.file.write_text(text(spaces) + f'[tap.web]\nnetns = "/run/netns/{home}"\nmac = "{web_mac}"\nip = "10.235.0.77"\nguard = "ip"\n'
                                              f'ip6 = ["{taken[0]}", "{shown}"]\n')
        fabric.cli("apply", fabric.file)
        for address in taken:
            before = drops(fabric, "rogue", "source6"), drops(fabric, "rogue", "nd_inspection")
            send(spaces["rogue"], "rogue", [packet(mac, str(address), ALL_NODES, 58, b"\x80\0\0\0\0\1\0\1", 2, hops=64)] * 3)
            option = b"\x02\x01" + mac_bytes(mac)
            send(spaces["rogue"], "rogue", [packet(mac, local(mac), ALL_NODES, 58, bytes([136, 0, 0, 0, 0x20, 0, 0, 0]) + address.packed + option, 2)] * 3)
            until("none of it passes", lambda: drops(fabric, "rogue", "source6") >= before[0] + 3)  # noqa: B023
            until("nor is it advertised", lambda: drops(fabric, "rogue", "nd_inspection") >= before[1] + 3)  # noqa: B023
            home.ip("address", "add", f"{address}/64", "dev", "web", "nodad")
            spaces["auto"].ip("-6", "neighbour", "flush", "dev", "auto")
            assert spaces["auto"].answers(str(address))
            shown_mac = spaces["auto"].ip("-6", "neighbour", "show", str(address), "dev", "auto")
            assert web_mac in shown_mac, shown_mac


@timeout(120)
def test_a_member_without_a_guard_does_not_fill_the_hosts_table_of_neighbours():
    need_root()
    need_program("nft")
    with scratch() as folder, Namespace() as host, Namespace() as rogue, Namespace() as other:
        prefix, mac = ipaddress.IPv6Network("fd12:3456:789a:9::/64"), "02:54:00:00:66:41"
        text = (f'name = "fill{os.getpid()}"\n[network.lan]\nsubnet = "10.235.4.0/24"\nipv6 = "{prefix}"\nuplink = "kernel"\n'
                f'[tap.rogue]\nnetns = "/run/netns/{rogue}"\naccept_ra = true\nmac = "{mac}"\n'
                f'[tap.other]\nnetns = "/run/netns/{other}"\naccept_ra = true\n')
        with Fabric(folder, text, netns=host) as fabric:
            automatic(rogue, "rogue")
            automatic(other, "other")
            made_up = {str(prefix[0x9000 + n]) for n in range(600)}
            question = bytes([135, 0, 0, 0, 0, 0, 0, 0]) + prefix[2].packed + b"\x01\x01" + mac_bytes(mac)
            send(rogue, "rogue", [packet(mac, source, "ff02::1:ff00:2", 58, question, 2) for source in made_up])
            until("all were looked at", lambda: fabric.port("rogue")["counters"]["rx_frames"] >= 600)
            dropped = drops(fabric, "rogue", "address_limit")
            assert 400 <= dropped <= 540, dropped
            until("the host has heard the rest", lambda: made_up & known(host))
            assert len(made_up & known(host)) <= 600 - dropped, len(made_up & known(host))
            # What it has used before goes on, and so do its neighbours.
            assert rogue.answers(str(prefix[2])) and other.answers(str(prefix[2]))


def known(host):
    return {entry["dst"] for entry in json.loads(host.ip("-j", "-6", "neighbour", "show"))}


@timeout(240)
def test_a_cell_has_the_address_that_the_file_gives_it_and_no_other_of_the_prefix():
    with scratch() as folder, Namespace() as home:
        prefix, mac = ipaddress.IPv6Network("fd12:3456:789a:5::/64"), "02:54:00:00:66:99"
        text = (f'name = "cells{os.getpid()}"\n[network.lan]\nsubnet = "10.235.0.0/24"\nipv6 = "{prefix}"\n'
                f'[tap.home]\nnetns = "/run/netns/{home}"\naccept_ra = true\n'
                f'[cell.web]\napp = "httpd"\naccel = "tcg"\nmac = "{mac}"\nip6 = "{{}}"\n')
        with Fabric(folder, text.format(prefix[0x77]), netns=home) as fabric:
            automatic(home, "home")
            gateway = gateway_of(fabric)
            for address in (prefix[0x77], prefix[0x5555 << 40 | 9]):
                if address != prefix[0x77]:
                    fabric.file.write_text(text.format(address))
                    said = fabric.cli("apply", fabric.file).stdout
                    assert "`ip6`: read when it starts" in said, said
                until("the cell's answer", lambda: home.pings(str(address)), 120)  # noqa: B023
                assert resolve(home, gateway, "web", 28) == (0, [address.packed]), "the name has this one address"
                page = home.run("busybox", "wget", "-q", "-O", "-", f"http://[{address}]/").stdout
                assert page, "and the page is there"
            # With a source that the guard does not let pass it would not be heard.
            formed = prefix.network_address.packed[:8] + ipaddress.IPv6Address(local(mac)).packed[8:]
            assert not home.pings(str(ipaddress.IPv6Address(formed)))
            counted = fabric.port("web")["counters"]["rx_drops"]
            assert not {"guard", "source6", "nd_inspection"} & counted.keys(), counted


@timeout(240)
def test_a_cell_that_is_told_that_its_address_is_taken_uses_it_once_nobody_says_so():
    with scratch() as folder, Namespace() as home:
        mac = "02:54:00:00:66:99"
        text = (f'name = "liar{os.getpid()}"\n[network.lan]\nsubnet = "10.235.0.0/24"\nipv6 = "fd12:3456:789a:5::/64"\n'
                f'[tap.home]\nnetns = "/run/netns/{home}"\naccept_ra = true\nguard = "off"\n'
                'allow = ["router-advertisements"]\n')
        own = ipaddress.IPv6Address(ipaddress.IPv6Address("fd12:3456:789a:5::").packed[:8] + ipaddress.IPv6Address(local(mac)).packed[8:])
        with Fabric(folder, text, netns=home) as fabric:
            automatic(home, "home")
            home_mac = json.loads(home.ip("-j", "link", "show", "dev", "home"))[0]["address"]
            with Inside(home):
                raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x86DD))

            def answer():
                # The first question is answered with a lie, from a port that may have any hosts behind it. Others may not announce what
                # the cell's port holds.
                while (frame := raw.recv(2000))[22:38] != bytes(16) or frame[54] != 135 or frame[62:78] != own.packed:
                    pass
                lie = bytes([136, 0, 0, 0, 0x20, 0, 0, 0]) + own.packed + b"\x02\x01" + mac_bytes(home_mac)
                raw.send(packet(home_mac, own, ALL_NODES, 58, lie, 2))

            with raw:
                raw.bind(("home", 0))
                raw.settimeout(100)
                liar = threading.Thread(target=answer)
                liar.start()
                fabric.file.write_text(text + f'[cell.web]\napp = "httpd"\naccel = "tcg"\nmac = "{mac}"\n')
                fabric.cli("apply", fabric.file)
                liar.join()
            until("the cell believes it", lambda: f"another host on this network has {own}" in fabric.cli("logs", "web").stdout)
            until("and asks again", lambda: home.pings(str(own)), 60)


@timeout(120)
def test_another_prefix_takes_the_place_of_the_first_while_the_fabric_runs():
    with members('ipv6 = "fd12:3456:789a:1::/64"') as (fabric, spaces, _):
        first = automatic(spaces["auto"], "auto")
        assert first.startswith("fd12:3456:789a:1:")
        fabric.file.write_text(text(spaces, 'ipv6 = "fd12:3456:789a:2::/64"'))
        done = fabric.cli("apply", fabric.file)
        assert "ipv6" in done.stdout + done.stderr, done

        def moved():
            shown = spaces["auto"].ip("-6", "address", "show", "dev", "auto", "scope", "global")
            return "fd12:3456:789a:2:" in shown and re.search(r"fd12:3456:789a:1:\S+ .*deprecated", shown)

        until("the new prefix in place of the old", moved)
        # It uses the new address once it has looked for others that have it.
        until("an answer at the new address", lambda: spaces["auto"].pings("fd12:3456:789a:2::1"))
