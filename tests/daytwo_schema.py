"""The JSON Schema of the fabric file, judged by Debian's python3-jsonschema: it takes every example and refuses wrong files."""

import json
import re
import subprocess
import tomllib

from lib import ROOT, Skip, scratch, timeout
from lib.fabric import PROGRAM

SCHEMA = ROOT / "docs/tombolo.schema.json"
ERRORS = ROOT / "crates/host/tests/files/errors"
# Debian's Python, which has Debian's validator, whatever Python runs this.
PYTHON = "/usr/bin/python3"
VALIDATE = """
import json, sys
import jsonschema
schema, documents = json.load(sys.stdin)
jsonschema.Draft7Validator.check_schema(schema)
validator = jsonschema.Draft7Validator(schema)
json.dump([[error.message for error in validator.iter_errors(document)] for document in documents], sys.stdout)
"""
# Faults that only the whole file or the machine shows; the schema's description says so.
BEYOND_IT = {
    "across-forward", "across-names", "ip6-of-the-network", "machines-none", "machines-one", "machines-versions", "bad-subnet", "container-ip6", "derived-doubled-name", "derived-no-lease", "derived-unknown-network", "derived-wrong-subnet", "dhcp-backwards",
    "doubled-device", "doubled-ip", "doubled-mac", "doubled-name", "forward-doubled-listener", "forward-ipv6-listener",
    "forward-ipv6-without-a-way", "forward-one-port-of-passt",
    "forward-to-a-member-of-another-network", "forward-to-address-outside", "forward-to-unknown-address", "forward-unknown-member",
    "forward-without-uplink", "gateway-outside", "guard-ip-without-address", "iommu-on-microvm", "ip-of-the-gateway", "ip-outside",
    "ip6-of-cells", "ip6-wrong", "ipv6-twice", "link-one-end", "link-region-too-small", "link-twice", "link-unknown-machine", "microvm-from-disk", "missing-guest",
    "missing-image", "more-macs-than-networks", "network-not-given-among-two", "no-network", "overlapping-subnets",
    "region-no-power-of-two", "reserved-name", "reserved-port-name", "router-is-gateway", "tap-address-beside-kernel-uplink",
    "tap-that-learns-its-own-router", "unknown-app", "uplink6-user",
    "unknown-network", "unknown-worker", "vm-missing-kernel-file", "vxlan-ends",
}


def validate(schema, documents):
    """What is wrong with each document."""
    if subprocess.run([PYTHON, "-c", "import jsonschema"], capture_output=True).returncode:
        raise Skip("python3-jsonschema is not installed")
    # Dates and the like are no JSON; they are wrong everywhere in a fabric file too.
    text = json.dumps([schema, documents], default=lambda value: {"date": str(value)})
    done = subprocess.run([PYTHON, "-c", VALIDATE], input=text, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_docs():
    """Every fabric file in the documentation, with its place. Pieces of one count: all sections are optional."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, block in enumerate(re.findall(r"^( *)```toml\n(.*?)^ *```", page.read_text(), re.M | re.S)):
            indent, text = block
            # Settings of an editor.
            if "[rule.schema]" in text:
                continue
            text = re.sub(rf"^{indent}", "", text, flags=re.M)
            yield f"{page.name} block {number}", text


@timeout(120)
def test_the_schema_takes_every_example():
    schema = json.loads(SCHEMA.read_text())
    named = [(path.name, path.read_text()) for path in sorted((ROOT / "examples").glob("*.toml"))]
    assert len(named) >= 6
    # Of the docs, what has a section of a fabric file; experiments of the lab and Cargo.toml are
    # TOML too.
    words = set(schema["properties"])
    read = []
    for name, text in [*named, *in_docs()]:
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            # A piece with … in it.
            assert "…" in text or "NAME" in text, (name, text)
            continue
        if set(document) & (words - {"name"}) and not set(document) - words:
            read.append((name, document))
    assert len(read) > 15, [name for name, _ in read]
    for (name, _), faults in zip(read, validate(schema, [document for _, document in read]), strict=True):
        assert not faults, f"{name}: {faults}"


@timeout(120)
def test_the_schema_refuses_wrong_files():
    schema = json.loads(SCHEMA.read_text())
    read = {}
    for path in sorted(ERRORS.glob("*.toml")):
        try:
            read[path.stem] = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError:
            continue
    found = dict(zip(read, validate(schema, list(read.values())), strict=True))
    taken = {name for name, faults in found.items() if not faults}
    assert taken == BEYOND_IT, f"taken: {sorted(taken - BEYOND_IT)}; refused by now: {sorted(BEYOND_IT - taken)}"
    assert len(found) - len(taken) > 30, sorted(set(found) - taken)
    # One fault each, in an example that is right otherwise: keys, types, ranges, conditions.
    good = {"name": "demo", "network": {"lan": {"uplink": "user"}}, "cell": {"web": {"app": "httpd"}}, "port": {"p": {"kind": "stream"}}}
    wrong = [
        {"nmae": "x"}, {"name": "Demo"}, {"network": {"lan": {"uplink": "usr"}}}, {"network": {"lan": {"mtu": 100}}},
        {"network": {"lan": {"mtu": "1500"}}}, {"network": {"Lan_1": {}}}, {"network": {"lan": {"bypass": True, "uplink": "user"}}},
        {"network": {"lan": {"uplink": {"bridge": "eth0", "x": 1}}}}, {"cell": {"web": {"app": "a", "image": "b"}}},
        {"cell": {"web": {"memory": "64"}}}, {"cell": {"web": {"xl": []}}}, {"cell": {"web": {"mac": "01:00:00:00:00:01"}}},
        {"cell": {"web": {"kernel": "x"}}}, {"vm": {"a": {}}}, {"vm": {"a": {"kernel": "k", "disk_format": "raw"}}},
        {"port": {"p": {}}}, {"port": {"p": {"kind": "packet"}}}, {"port": {"p": {"kind": "stream", "queues": 2}}},
        {"port": {"p": {"kind": "stream", "ip": "10.0.0.2"}}}, {"tap": {"t": {"device": "a/b"}}}, {"tap": {"t": {"adopt": True, "accept_ra": True}}},
        {"link": {"l": {}}}, {"forward": {"listen": "x"}}, {"forward": [{"listen": "127.0.0.1:80"}]}, {"rule": [{"action": "maybe"}]},
        {"rule": [{"action": "deny", "ports": [0]}]}, {"mirror": [{"of": "web"}]}, {"worker": {"w": {"cpu": -1}}},
        {"cell": {"web": {"storm": {"broadcast": "x"}}}}, {"cell": {"web": {"rate": {"send": "1T"}}}}, {"cell": {"web": {"groups": "outside"}}},
    ]
    results = validate(schema, [good] + [good | change for change in wrong])
    assert not results[0], results[0]
    for change, faults in zip(wrong, results[1:], strict=True):
        assert faults, f"the schema takes {change}"


@timeout(60)
def test_the_program_prints_the_published_schema_and_agrees_with_it_on_examples():
    printed = json.loads(subprocess.run([PROGRAM, "schema"], check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert printed == json.loads(SCHEMA.read_text())
    # What the schema refuses in an example with a fault, `tombolo check` refuses too.
    with scratch() as folder:
        path = folder / "x.toml"
        for text in ('[network.lan]\nmtu = 100\n', '[network.lan]\n[port.p]\nkind = "packet"\n', '[network.lan]\n[vm.a]\n'):
            path.write_text('name = "x"\n' + text)
            assert validate(printed, [tomllib.loads(path.read_text())])[0], text
            done = subprocess.run([PROGRAM, "check", path], capture_output=True, text=True)
            assert done.returncode == 2, done
