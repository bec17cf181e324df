//! The sections and keys of a fabric file. One row per key: the parser refuses what is not here,
//! and docs/fabric-file.md is tested to describe exactly these.

/// One key of a section.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// As written before the `=`.
    pub name: &'static str,
    /// What a value looks like, in the words of a complaint.
    pub expects: &'static str,
    /// What it is if left out; empty for a key that must be given.
    pub default: &'static str,
    /// What it does, as docs/fabric-file.md says it.
    pub doc: &'static str,
}

/// A kind of section and the keys that it accepts.
#[derive(Debug, Clone, Copy)]
pub struct SectionSchema {
    /// `""` for the head of the file, else the word of `[WORD]`, `[WORD.NAME]` or `[[WORD]]`.
    pub name: &'static str,
    /// How it is written.
    pub form: &'static str,
    /// Keys that only this section has.
    pub own: &'static [Key],
    /// Keys that it has in common with other sections.
    pub shared: &'static [Key],
}

impl SectionSchema {
    /// Own keys first, then the shared ones.
    pub fn keys(&self) -> impl Iterator<Item = &'static Key> {
        self.own.iter().chain(self.shared)
    }
}

const fn key(name: &'static str, expects: &'static str, default: &'static str, doc: &'static str) -> Key {
    Key { name, expects, default, doc }
}

const TLS: Key = key(
    "tls",
    "true or false",
    "true",
    "false: nothing is encrypted, and no machine proves who it is; only where everyone is trusted",
);
const MACHINE: Key = key(
    "machine",
    "a machine's name, 1 to 63 of a-z, 0-9 and -",
    "the machine's section [machine.NAME]; without one it must be given with `tls`",
    "this machine's name in `keys`",
);
const MACHINES: &str = "the name of a machine of the file, or a list of them";
const ON: Key = key("on", MACHINES, "every machine", "in a file for several machines: where it runs");
const ON_OF_MEMBERS: Key = key(
    "on",
    MACHINES,
    "the machines that have the members it names",
    "in a file for several machines: where it applies",
);
const KEYS: Key = key(
    "keys",
    "the path of a folder",
    "`keys` of [span]; without one it must be given with `tls`",
    "where ca.pem and this machine's .pem and .key are (`tombolo service keys`)",
);
const ONE_NETWORK: Key = key("network", "the name of a network", "the only network of the file", "where it attaches");
const MAC: Key =
    key("mac", "a MAC address like \"52:54:00:12:34:56\"", "derived from the names", "its Ethernet address");
const GUARD: &str = "\"ip\", \"mac\" or \"off\"";
const GUARDS: &str = "which source addresses it may use: \"mac\" its own Ethernet address, \"ip\" besides that its own IPv4 address in IPv4 \
                      and ARP, \"off\" any";
const IP6: Key = key(
    "ip6",
    "\"any\", an IPv6 address or prefix like \"fd00::7\" or \"2001:db8:1::/64\", or a list of them",
    "what it claims first of the network's prefix, at most `ip6_limit` addresses; [] with `ipv6` off where its IPv4 address is known",
    "guard \"ip\": the IPv6 addresses that it may use in IPv6 and neighbour discovery, besides the link-local one of its MAC",
);
const IP6_LIMIT: Key = key(
    "ip6_limit",
    "a number from 1 to 255",
    "16",
    "guard \"ip\" without `ip6`: how many IPv6 addresses it may claim; one that it has not used for an hour does not count",
);
const ALLOW: Key = key(
    "allow",
    "a list of \"router-advertisements\", \"dhcp-server\" and \"gateway-addresses\"",
    "[]",
    "what it may do that ordinary members may not: be a router for others, answer DHCP clients, use the addresses of the \
     gateway and the router",
);
const STORM: Key = key(
    "storm",
    "false, or { broadcast = …, multicast = …, unknown = … } with frames per second or false",
    "1000 each",
    "limits for frames from it that are copied to all ports; false: no limit",
);
const RATE: Key = key(
    "rate",
    "{ send = \"100M\", send_burst = \"1M\", send_frames = 50000, send_urgent = \"10M\", … }, receive alike, each if wanted",
    "no limit",
    "limits in bits and frames per second, also by class: what it sends beyond that waits, and what it should \
     receive waits as long as its queue has room; what is beyond a limit of its class is dropped",
);
const CLASS: Key = key(
    "class",
    "\"urgent\", \"high\", \"normal\", \"background\" or \"marked\"",
    "\"normal\"",
    "how soon its frames go where frames wait; marked: as their 802.1p priority or DSCP says",
);
const GROUPS: Key = key(
    "groups",
    "a name of 1 to 24 of a-z, 0-9 and -, or a list of them; not \"outside\"",
    "[]",
    "names by which rules and mirrors know it, besides its own",
);
const ISOLATED: Key = key(
    "isolated",
    "true, false, or the name of a community",
    "false",
    "true: it can reach only members that are not isolated; a name: also the isolated ones with the same name here",
);
const VLAN: Key = key(
    "vlan",
    "a number from 1 to 4094",
    "1, if other members have VLANs",
    "the VLAN that it is in; it sends and gets frames without a tag",
);
const TRUNK: Key = key(
    "trunk",
    "\"all\", a number from 1 to 4094, a range like \"100-199\", or a list of them",
    "no trunk",
    "the VLANs that it is in at the same time; its frames have tags",
);
const NATIVE: Key = key(
    "native",
    "a number from 1 to 4094",
    "none: such frames are dropped",
    "the VLAN of its frames without a tag, besides those of `trunk`",
);
const BOOT: Key = key(
    "boot",
    "{ server = \"10.0.0.5\", file = \"undionly.kpxe\", arch = { x86-64-uefi = \"ipxe.efi\" }, ipxe = \"boot.ipxe\", url6 = \"…\", \
     arch6 = { … }, ipxe6 = \"…\" }, each if wanted",
    "what the network says",
    "what it boots from the network, in place of what the network says; without `server`, from the network's (docs/boot.md)",
);
const ACTION: &str = "\"allow\" or \"deny\"";
const WHO: &str = "a member, a group, \"outside\", an address or a prefix, or a list of them";
const EVERY_NETWORK: Key = key("network", "the name of a network", "every network of the file", "where it applies");
const REGION: Key = key(
    "region",
    "a power of two from \"1M\" to \"16M\"",
    "\"1M\"",
    "ivshmem: shared memory of each device, and so the size of its rings",
);
const VECTORS: Key = key("vectors", "a number from 1 to 16", "2", "ivshmem: doorbells of each peer");
const QUEUES: Key = key("queues", "a number from 1 to 8", "1", "queue pairs of each device (vhost-user, xen)");

/// The keys of a machine, for everything that it can boot.
const MACHINE_KEYS: &[Key] = &[
    ON,
    key(
        "count",
        "a number from 1 to 256",
        "one machine of the section's name",
        "that many machines, NAME-1, NAME-2 and so on; {n} in `args`, `cmdline`, `disk`, `disks` and `cloud_init` is the number of each",
    ),
    key(
        "network",
        "the name of a network, or a list of them (one device each)",
        "the only network of the file; none in a file without networks",
        "where it attaches; [] is a machine without a network device",
    ),
    MAC,
    key("ip", "an IPv4 address inside the network", "chosen from the DHCP range", "the address leased to it"),
    key("memory", "a size like \"64M\" or \"1G\"", "\"32M\" for a cell, \"256M\" for a VM", "its memory"),
    key("cpus", "a number from 1 to 64", "1", "virtual CPUs"),
    key("machine", "\"microvm\" or \"q35\"", "\"microvm\" for a cell, \"q35\" for a VM", "QEMU's machine type"),
    key(
        "accel",
        "\"auto\", \"kvm\" or \"tcg\"",
        "\"auto\"",
        "\"auto\" is KVM where it really runs a guest, else emulation",
    ),
    key("qemu", "a list of strings", "[]", "more arguments for QEMU, as they are"),
    key(
        "attach",
        "\"vhost-user\", \"stream\", \"ivshmem\", \"ivshmem-plain\" or \"xen\"",
        "\"vhost-user\"",
        "how its devices reach the fabric; all but stream survive a restart of the fabric (docs/ivshmem.md). \"xen\" runs the \
         machine as a domain of this Xen host instead of in QEMU (docs/xen.md)",
    ),
    key(
        "xl",
        "a list of strings",
        "[]",
        "xen: more lines for the configuration that `xl` gets, as they are, like \"tsc_mode='native'\"",
    ),
    REGION,
    QUEUES,
    key("guard", GUARD, "\"ip\" where its address is known, else \"mac\"", GUARDS),
    IP6,
    IP6_LIMIT,
    ALLOW,
    STORM,
    RATE,
    GROUPS,
    ISOLATED,
    CLASS,
    VLAN,
    TRUNK,
    NATIVE,
    key(
        "restart",
        "\"no\", \"on-failure\" or \"always\"",
        "\"no\"",
        "whether a machine that failed, or that ended in any way, is started again: after 1 s, and after twice as long for each failure in a row up to 60 s; once it has \
         run for 60 s it begins with 1 s again",
    ),
    key(
        "depends_on",
        "the name of a cell or VM, or a list of them",
        "[]",
        "it is started once all ports of these machines are up",
    ),
];

/// Every section of the file.
pub const SECTIONS: &[SectionSchema] = &[
    SectionSchema {
        name: "",
        form: "at the head of the file",
        own: &[key(
            "name",
            "1 to 24 of a-z, 0-9 and -, not services",
            "the name of the file's folder",
            "the fabric's name: of its runtime directory, rules and devices",
        )],
        shared: &[],
    },
    SectionSchema {
        name: "machine",
        form: "[machine.NAME]",
        own: &[key(
            "address",
            "an IP address of one machine",
            "",
            "where the other machines of the file reach this one; all of one IP version",
        )],
        shared: &[],
    },
    SectionSchema {
        name: "span",
        form: "[span]",
        own: &[
            key(
                "keys",
                "the path of a folder",
                "must be given with `tls`",
                "where ca.pem and each machine's .pem and .key are (`tombolo service keys`)",
            ),
            key(
                "tls",
                "true or false",
                "true",
                "false: nothing is encrypted, and each machine's name is believed; only where everyone is trusted",
            ),
            key(
                "port",
                "a number from 1024 to 65535",
                "7447",
                "the TCP port at which tombolo-span listens, on every machine",
            ),
            key("site", "1 to 63 of a-z, 0-9 and -", "\"default\"", "name that all machines have in common"),
            key(
                "lease",
                "a number from 5 to 3600",
                "15",
                "seconds after which a machine that is not heard is forgotten",
            ),
        ],
        shared: &[],
    },
    SectionSchema {
        name: "worker",
        form: "[worker.NAME]",
        own: &[
            key("cpu", "a CPU number", "the scheduler's choice", "CPU that the thread stays on"),
            key("budget", "a number from 1 to 256", "64", "frames taken from one port in a turn"),
            key("busy_poll_us", "microseconds, 0 to 1000000", "0", "polling with nothing to do before sleeping"),
        ],
        shared: &[],
    },
    SectionSchema {
        name: "network",
        form: "[network.NAME]",
        own: &[
            key(
                "subnet",
                "an IPv4 network like \"10.87.0.0/24\", /8 to /29",
                "\"10.87.N.0/24\", N counting from 0",
                "its addresses",
            ),
            key(
                "gateway",
                "an IPv4 address inside the subnet",
                "the first of the subnet; none with a bridge, unless `dhcp` is asked for",
                "address of the gateway: DHCP, DNS, ICMP",
            ),
            key(
                "router",
                "an IPv4 address inside the subnet",
                "the second of the subnet",
                "address that guests route through (uplink user and kernel)",
            ),
            key(
                "dhcp",
                "true, false, or { from = \"…\", to = \"…\", lease_s = … }",
                "true; false with a bridge",
                "the DHCP server and its range",
            ),
            key("uplink", "\"none\", \"user\", \"kernel\" or { bridge = \"INTERFACE\" }", "\"none\"", "the way out"),
            key(
                "domain",
                "a domain name",
                "the fabric's name + \".internal\"",
                "domain of the members' names, which the gateway serves",
            ),
            key(
                "mtu",
                "a number from 576 to 9216",
                "1500; with `span` 1450, and 1430 between IPv6 addresses",
                "MTU in bytes",
            ),
            key(
                "span",
                "a number from 0 to 16777215, or { vni = …, udp_port = … }",
                "each machine has a network of its own",
                "one network on all machines of the file: its VXLAN identifier (VNI), and UDP port, 4789 if left out (docs/span.md)",
            ),
            key(
                "ipv6",
                "\"auto\", an IPv6 prefix like \"fd00:1:2:3::/64\", or \"off\"",
                "\"auto\"; \"off\" with a bridge",
                "its IPv6 prefix, which the gateway advertises; \"auto\" derives a unique local one from the names of the fabric and the \
                 network (docs/ipv6.md)",
            ),
            key(
                "uplink6",
                "\"masquerade\", \"routed\", \"off\" or { prefix = \"2001:db8:1:2::/64\" }",
                "\"masquerade\" with uplink user or kernel, `ipv6` on and an `mtu` of at least 1280",
                "its way out for IPv6: by the host's address; with uplink kernel also by the members' own, or those of another prefix \
                 (docs/ipv6.md)",
            ),
            key(
                "dns",
                "a list of addresses like \"9.9.9.9\" or \"9.9.9.9:53\"",
                "the host's, from /etc/resolv.conf",
                "upstream name servers of the gateway, with an uplink",
            ),
            key(
                "worker",
                "the name of a worker",
                "the first of the file, or one of its own making",
                "the thread that runs its switch",
            ),
            key(
                "boot",
                BOOT.expects,
                "nothing",
                "what clients that boot from the network are told: TFTP server, file, files by architecture, what iPXE loads, and the \
                 URLs over IPv6 (docs/boot.md)",
            ),
            key(
                "policy",
                ACTION,
                "\"allow\"",
                "what happens to a connection between members that no `[[rule]]` is about",
            ),
            key(
                "bypass",
                "true, false, or a list of interfaces like [\"eth0\"]",
                "false",
                "uplink kernel: between the network and these interfaces (true: those of the host's default route) traffic skips the \
                 kernel's forwarding; docs/bypass.md",
            ),
        ],
        shared: &[],
    },
    SectionSchema {
        name: "cell",
        form: "[cell.NAME]",
        own: &[
            key("app", "the name of an app, like \"httpd\"", "the cell's name", "which of the project's apps it runs"),
            key("image", "the path of a file", "the app's image", "an image of your own instead of `app`"),
            key("args", "a string of words", "\"\"", "words for the cell's command line, like \"budget=32\""),
        ],
        shared: MACHINE_KEYS,
    },
    SectionSchema {
        name: "vm",
        form: "[vm.NAME]",
        own: &[
            key(
                "kernel",
                "the path of a file",
                "none; then `disk` is needed; must be given with attach \"xen\"",
                "kernel image",
            ),
            key("initrd", "the path of a file", "none", "initial file system"),
            key(
                "cmdline",
                "a string",
                "\"console=ttyS0\"; \"console=hvc0\" with `attach` \"xen\"",
                "kernel command line",
            ),
            key("disk", "the path of a file", "none; then `kernel` is needed", "disk image"),
            key("disk_format", "\"raw\" or \"qcow2\"", "\"raw\"", "format of the disk image"),
            key(
                "disks",
                "the path of a file, or a list of them",
                "[]",
                "further disk images: qcow2 where the name ends in .qcow2, else raw",
            ),
            key(
                "cloud_init",
                "the path of a file",
                "none",
                "user-data for cloud-init in the guest, on a read-only disk of its NoCloud source, with the VM's name as host name and the settings of all its network devices",
            ),
            key(
                "boot",
                "true, false, or { server = \"…\", file = \"…\", arch = { … }, ipxe = \"…\", url6 = \"…\", arch6 = { … }, ipxe6 = \"…\" }",
                "false",
                "whether its firmware boots from the network, before it tries disks; a table says what, in place of what its network says \
                 (docs/boot.md)",
            ),
            key("iommu", "true or false", "false", "an IOMMU (q35): vfio in the guest needs one; docs/ivshmem.md"),
            key(
                "agent",
                "true or false",
                "false",
                "a device by which `tombolo exec` runs commands in the guest, where qemu-guest-agent answers",
            ),
        ],
        shared: MACHINE_KEYS,
    },
    SectionSchema {
        name: "tap",
        form: "[tap.NAME]",
        own: &[
            key("device", "an interface name, 1 to 15 characters", "the tap's name", "name of the device"),
            key("adopt", "true or false", "false", "true: use an existing device, and keep it when the fabric ends"),
            key(
                "netns",
                "the name or path of a network namespace",
                "the fabric's own",
                "namespace that holds the device",
            ),
            ONE_NETWORK,
            MAC,
            key("ip", "an IPv4 address inside the network", "none", "address set on the device"),
            key("guard", GUARD, "\"off\"", GUARDS),
            IP6,
            IP6_LIMIT,
            ALLOW,
            STORM,
            RATE,
            GROUPS,
            ISOLATED,
            CLASS,
            VLAN,
            TRUNK,
            NATIVE,
            key(
                "accept_ra",
                "true or false",
                "false",
                "whether the device takes IPv6 addresses and routes from router advertisements (not where `adopt` is true)",
            ),
            key(
                "container",
                "text of letters, digits and -_./, at most 400",
                "none",
                "the container that the device belongs to; needs `adopt` and `netns`: the tap is removed when the namespace is removed; docs/kubernetes.md",
            ),
            key(
                "monitor",
                "true or false",
                "false",
                "true: a virtual machine monitor, such as Firecracker, opens the device, and `mac` and `ip` are its guest's; needs `adopt`",
            ),
            BOOT,
        ],
        shared: &[ON],
    },
    SectionSchema {
        name: "port",
        form: "[port.NAME]",
        own: &[
            key(
                "kind",
                "\"vhost-user\", \"stream\", \"packet\", \"ivshmem\", \"xen\" or \"vxlan\"",
                "",
                "what it speaks",
            ),
            key(
                "socket",
                "a path",
                "NAME.sock in the runtime directory",
                "socket of a vhost-user, stream or ivshmem port",
            ),
            key(
                "connect",
                "true or false",
                "false",
                "vhost-user, stream: connect to the socket instead of listening on it; the peer then listens",
            ),
            key("device", "an interface name", "", "packet: the interface that joins the network"),
            key(
                "domain",
                "the name of a Xen domain",
                "the port's name",
                "xen: the guest, by its name in `xl list`; docs/xen.md",
            ),
            key(
                "vif",
                "a number from 0 to 255",
                "0",
                "xen: which of the guest's devices: its place in the `vif` list, from 0",
            ),
            key("queues", "a number from 1 to 8", "1", "queue pairs of each device (vhost-user, xen)"),
            key(
                "vni",
                "a number from 0 to 16777215",
                "",
                "vxlan: the network's identifier (VNI), the same at all ends",
            ),
            key("local", "an IP address", "", "vxlan: the address of this machine that the other ends send to"),
            key(
                "remotes",
                "a list of IP addresses",
                "",
                "vxlan: the other ends, 1 to 128; packets from other addresses are dropped",
            ),
            key(
                "udp_port",
                "a number from 1 to 65535",
                "4789",
                "vxlan: the UDP port of all ends; Linux without `dstport`, and flannel, use 8472",
            ),
            key(
                "learning",
                "true or false",
                "true",
                "vxlan: learn which remote has which MAC address; false: every frame goes to all remotes",
            ),
            key("version", "1 or 2", "1", "ivshmem: the server protocol; 1 is stock QEMU's"),
            REGION,
            VECTORS,
            ONE_NETWORK,
            key(
                "mac",
                "a MAC address like \"52:54:00:12:34:56\"",
                "unknown",
                "the peer's Ethernet address: for guard and lease",
            ),
            key("ip", "an IPv4 address inside the network", "from DHCP", "the address leased to `mac`"),
            BOOT,
            key("guard", GUARD, "\"ip\" with `ip`, \"mac\" with `mac` alone, else \"off\"", GUARDS),
            IP6,
            IP6_LIMIT,
            ALLOW,
            STORM,
            RATE,
            GROUPS,
            ISOLATED,
            CLASS,
            VLAN,
            TRUNK,
            NATIVE,
            key(
                "container",
                "text of letters, digits and -_./, at most 400",
                "none",
                "vhost-user: the container whose virtual machine the peer is; needs `netns`: the port is removed when the namespace is removed; docs/kubernetes.md",
            ),
            key(
                "netns",
                "the name or path of a network namespace",
                "",
                "vhost-user: the namespace of `container`; the port has nothing in it",
            ),
        ],
        shared: &[ON],
    },
    SectionSchema {
        name: "link",
        form: "[link.NAME]",
        own: &[
            key(
                "between",
                "a list of names of cells and VMs",
                "",
                "the machines that share the memory; its order numbers them from 0",
            ),
            key("plain", "true or false", "false", "true: no doorbells, the machines poll"),
            key(
                "seats",
                "a number from 0 to 62",
                "0",
                "places for processes of your own, at NAME.link.sock in the runtime directory",
            ),
            key("region", "a power of two from \"64K\" to \"1G\"", "\"1M\"", "the shared memory, with its header page"),
            key("rw", "a size like \"64K\" or \"1M\", or \"0\"", "\"0\"", "of it, the section that all may write"),
            key(
                "protocol",
                "a number from 0 to 65535",
                "0x4001, the record channel",
                "what is spoken in it; 0x4000 to 0x7fff are your own",
            ),
            VECTORS,
            key(
                "service",
                "a name of a-z A-Z 0-9 . _ -",
                "none",
                "what the one machine of the link serves is the service of that name, for `tombolo call` and the libraries",
            ),
            key("to", "a name of a-z A-Z 0-9 . _ -", "none", "calls of the machine go to the service of this name"),
            key("callers", "\"owner\" or \"everybody\"", "\"owner\"", "which users of the host may call `service`"),
        ],
        shared: &[ON_OF_MEMBERS],
    },
    SectionSchema {
        name: "export",
        form: "[export.NAME]",
        own: &[
            key(
                "services",
                "a name of a-z A-Z 0-9 . _ -, or a list of them",
                "the section's name",
                "services of this machine that other machines may use; they need not run yet",
            ),
            key(
                "listen",
                "an address and port like \"192.0.2.1:7000\" or \"[2001:db8::1]:7000\"",
                "",
                "where this machine listens for the others",
            ),
            key(
                "allow",
                "a machine's name, 1 to 63 of a-z, 0-9 and -, or a list of them",
                "each machine with a key of the same authority",
                "the machines that may use them",
            ),
            MACHINE,
            KEYS,
            TLS,
        ],
        shared: &[ON],
    },
    SectionSchema {
        name: "import",
        form: "[import.NAME]",
        own: &[
            key(
                "from",
                "a text like \"node-2=192.0.2.2:7000\", or a list of them",
                "the machines of the file that export the service; without one it must be given",
                "the machines that export the service: name, and address and port; without `tls` the address and port alone",
            ),
            key("service", "a name of a-z A-Z 0-9 . _ -", "the section's name", "its name at those machines"),
            key("as", "a name of a-z A-Z 0-9 . _ -", "the same", "its name here, for `tombolo call` and the libraries"),
            key(
                "pick",
                "\"nearest\", \"least-loaded\" or \"sticky\"",
                "\"nearest\"",
                "which machine a call goes to, of several: the one with the shortest round trip, with the fewest calls \
                 from here, or the first that was there until it goes",
            ),
            key("callers", "\"owner\" or \"everybody\"", "\"owner\"", "which users of the host may call it"),
            MACHINE,
            KEYS,
            TLS,
        ],
        shared: &[ON],
    },
    SectionSchema {
        name: "forward",
        form: "[[forward]]",
        own: &[
            key("proto", "\"tcp\" or \"udp\"", "\"tcp\"", "transport"),
            key(
                "listen",
                "an address and port like \"127.0.0.1:8080\" or \"[::1]:8080\"",
                "",
                "where the host listens; [::] is all its IPv6 addresses, 0.0.0.0 all its IPv4 addresses",
            ),
            key(
                "to",
                "a member and port like \"web:80\" or \"[fd00::9]:80\"",
                "",
                "the member it goes to: a name or an address, and a port",
            ),
            key("network", "the name of a network", "the member's network", "which, for a member of several"),
        ],
        shared: &[ON_OF_MEMBERS],
    },
    SectionSchema {
        name: "rule",
        form: "[[rule]]",
        own: &[
            key("action", ACTION, "", "what happens to the connections that the rule is about"),
            key("from", WHO, "everybody", "who opens the connection; \"outside\" is the network's uplink"),
            key("to", WHO, "everybody", "who it is opened to"),
            key(
                "protocol",
                "\"tcp\", \"udp\", \"icmp\" or a number from 0 to 255",
                "every one",
                "\"icmp\" is that of both address families",
            ),
            key(
                "ports",
                "a port number, a range like \"6000-6010\", or a list of them",
                "every port",
                "ports that the connection is opened to",
            ),
            EVERY_NETWORK,
        ],
        shared: &[ON_OF_MEMBERS],
    },
    SectionSchema {
        name: "mirror",
        form: "[[mirror]]",
        own: &[
            key("of", "a member or a group, or a list of them", "everybody", "whose frames are copied"),
            key("to", "the name of a member", "", "who gets the copies; it sends nothing"),
            key("frames", "\"both\", \"sent\" or \"received\"", "\"both\"", "which of their frames"),
            EVERY_NETWORK,
        ],
        shared: &[ON_OF_MEMBERS],
    },
];

/// A key that means something only where another key of its section has one of a few values.
#[derive(Debug, Clone, Copy)]
pub struct Condition {
    /// The word of its section.
    pub section: &'static str,
    /// The key that applies only under this condition.
    pub key: &'static str,
    /// The key that decides.
    pub on: &'static str,
    /// The values of `on` with which `key` applies; none for any value that is given.
    pub values: &'static [&'static str],
}

const fn only(
    section: &'static str,
    key: &'static str,
    on: &'static str,
    values: &'static [&'static str],
) -> Condition {
    Condition { section, key, on, values }
}

/// Values of `attach` with which QEMU runs a machine.
const QEMU: &[&str] = &["vhost-user", "stream", "ivshmem", "ivshmem-plain"];

/// Every key that does not always apply, and that one other key of its section decides about. The
/// parser complains about one in a place where it has no effect. Conditions of several keys or
/// sections are in `check`.
pub const CONDITIONS: &[Condition] = &[
    only("network", "router", "uplink", &["user", "kernel"]),
    only("network", "bypass", "uplink", &["kernel"]),
    only("network", "uplink6", "uplink", &["user", "kernel"]),
    only("cell", "machine", "attach", QEMU),
    only("cell", "accel", "attach", QEMU),
    only("cell", "qemu", "attach", QEMU),
    only("cell", "xl", "attach", &["xen"]),
    only("cell", "queues", "attach", &["vhost-user", "xen"]),
    only("cell", "region", "attach", &["ivshmem", "ivshmem-plain"]),
    only("vm", "machine", "attach", QEMU),
    only("vm", "accel", "attach", QEMU),
    only("vm", "qemu", "attach", QEMU),
    only("vm", "iommu", "attach", QEMU),
    only("vm", "agent", "attach", QEMU),
    only("vm", "disk", "attach", QEMU),
    only("vm", "disks", "attach", QEMU),
    only("vm", "cloud_init", "attach", QEMU),
    only("vm", "xl", "attach", &["xen"]),
    only("vm", "queues", "attach", &["vhost-user", "xen"]),
    only("vm", "region", "attach", &["ivshmem", "ivshmem-plain"]),
    only("vm", "boot", "attach", &["vhost-user", "stream"]),
    only("tap", "boot", "monitor", &["true"]),
    only("vm", "initrd", "kernel", &[]),
    only("vm", "cmdline", "kernel", &[]),
    only("vm", "disk_format", "disk", &[]),
    only("cell", "native", "trunk", &[]),
    only("vm", "native", "trunk", &[]),
    only("tap", "native", "trunk", &[]),
    only("port", "native", "trunk", &[]),
    only("tap", "accept_ra", "adopt", &["false"]),
    only("tap", "container", "adopt", &["true"]),
    only("tap", "monitor", "adopt", &["true"]),
    only("port", "socket", "kind", &["vhost-user", "stream", "ivshmem"]),
    only("port", "connect", "kind", &["vhost-user", "stream"]),
    only("port", "device", "kind", &["packet"]),
    only("port", "domain", "kind", &["xen"]),
    only("port", "vif", "kind", &["xen"]),
    only("port", "queues", "kind", &["vhost-user", "xen"]),
    only("port", "container", "kind", &["vhost-user"]),
    only("port", "netns", "container", &[]),
    only("port", "vni", "kind", &["vxlan"]),
    only("port", "local", "kind", &["vxlan"]),
    only("port", "remotes", "kind", &["vxlan"]),
    only("port", "udp_port", "kind", &["vxlan"]),
    only("port", "learning", "kind", &["vxlan"]),
    only("port", "version", "kind", &["ivshmem"]),
    only("port", "region", "kind", &["ivshmem"]),
    only("port", "vectors", "kind", &["ivshmem"]),
    only("span", "keys", "tls", &["true"]),
    only("export", "allow", "tls", &["true"]),
    only("export", "machine", "tls", &["true"]),
    only("export", "keys", "tls", &["true"]),
    only("import", "machine", "tls", &["true"]),
    only("import", "keys", "tls", &["true"]),
    only("link", "callers", "service", &[]),
    only("link", "vectors", "plain", &["false"]),
    only("link", "seats", "plain", &["false"]),
];

/// The section of that name, which must exist.
pub(super) fn section(name: &str) -> &'static SectionSchema {
    SECTIONS.iter().find(|s| s.name == name).expect("callers name sections of the table above")
}

/// The place of a key that the section at hand does not know, as a hint.
pub(super) fn at_home(name: &str) -> Option<String> {
    let homes = SECTIONS.iter().filter(|s| s.keys().any(|k| k.name == name));
    let homes: Vec<_> =
        homes.map(|s| if s.name.is_empty() { s.form.into() } else { format!("in {}", s.form) }).collect();
    (!homes.is_empty()).then(|| format!("its place is {}", homes.join(" or ")))
}
