/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * The maps, and what is in them. src/layout.rs has the same structures on the other side; sizes and offsets that it uses are
 * asserted below.
 *
 * Writers: `settings`, `ports`, `kept`, `judges`, `wanted` and `beats` are written by the controller and the commands only. The egress
 * program writes `flows4` and `flows6`: it replaces an entry whole or renews it in place. The ingress programs note in it when it was
 * used and, of TCP, how far it came. The controller and the commands only remove entries. `usages` is written by all programs while `flows` measures; the command only reads it.
 */
#ifndef TOMBOLO_TABLES_H
#define TOMBOLO_TABLES_H

#include "kernel.h"

/* Where a frame that came in at an interface went, and why. Order and names: layout.rs, `Verdict`. */
enum verdict {
	TAKEN_TCX,	/* redirected to the output's queue */
	TAKEN_PEER,	/* redirected straight into the other end of a veth pair */
	TAKEN_XDP,	/* redirected before there was an sk_buff */
	UP_OFF,		/* the interface is not bypassed now, or the required controller is gone */
	UP_NOT_OURS,	/* broadcast, multicast, or another's MAC address */
	UP_PROTOCOL,	/* neither IPv4 nor IPv6: ARP and the like */
	UP_VLAN,	/* it has a VLAN tag */
	UP_OPTIONS,	/* IPv4 options, IPv6 extension headers */
	UP_FRAGMENT,
	UP_TTL,		/* it ends here: the kernel answers */
	UP_TRANSPORT,	/* neither TCP, UDP nor an ICMP echo */
	UP_MALFORMED,	/* lengths or the header's checksum do not agree: the kernel drops it */
	UP_HANDSHAKE,	/* SYN, FIN, RST or no ACK: connection tracking must see it */
	UP_NO_FLOW,	/* the kernel has not forwarded one like it yet */
	UP_LEASE,	/* the flow's lease ended: the kernel is asked again */
	UP_CHANGED,	/* routes, rules or settings are not those the flow was learned under */
	UP_CONNTRACK,	/* the connection's entry is gone or is not what it was */
	UP_MTU,		/* too long for the way out: the kernel answers, or cuts it */
	/* These XDP hands on to tcx, which counts the frame again, under what it does with it. */
	HANDED_PARTIAL,	/* its checksum is not finished, or it might hold a packet whose checksum is not */
	HANDED_LARGE,	/* a segmentation frame, or another for which there is an sk_buff already, or too long for the way out */
	HANDED_OUTPUT,	/* only tcx serves the way out, or others' programs stand before ours there */
	HANDED_CAPTURE,	/* a process captures on this interface */
	UP_FAILED,	/* the kernel could not make room for the change */
	UP_FIELDS,	/* TTL, DF, id, flow label or mark differ from those of the frame that the flow was learned from */
	DROPPED_WINDOW,	/* FIN or RST outside of the window of a connection that is taken: conntrack calls that invalid */
	UP_DECRYPTED,	/* it came out of IPsec: the kernel checks that its policy wants it so */
};
/* A power of two, so that a mask keeps an index within; the verifier wants to see that. */
#define VERDICTS 32

/* Why the egress program did not learn from a frame that the kernel forwarded. */
enum unlearned {
	NOT_ALTERED_AS_WE_WOULD,	/* TTL, TOS, length or addresses are not what a plain forward makes of them */
	NOT_ESTABLISHED,	/* the connection is not established both ways (TCP) */
	NOT_LIBERAL,		/* TCP windows are still checked strictly: the controller is asked */
	NOT_A_PLAIN_CONNECTION,	/* a helper, sequence adjustment, a zone, an expectation */
	NOT_A_PLAIN_ROUTE,	/* a tunnel's encapsulation, a bridge's or bond's port, or back out where it came in */
	NOT_AT_ONCE,		/* it was held on its way, as by NFQUEUE: the program that judged it there judges each frame; or routes or rules changed meanwhile */
	NOT_KEPT,	/* TCP through conntrack, and no controller is at work */
	JUDGED,			/* a rule that judges each frame could apply to it, or the rules were not read yet */
};
#define UNLEARNED 8

struct counters {
	__u64 packets[VERDICTS];
	__u64 taken_bytes;
	__u64 taken_large;	/* segmentation frames among those taken */
	__u64 taken_able;	/* those taken by tcx that XDP could have taken */
	__u64 taken_partial;	/* those that it could, except for their unfinished checksums */
	__u64 learned;
	__u64 shortened;	/* learned with a shorter lease, for a conntrack timeout */
	__u64 unlearned[UNLEARNED];
	__u64 captured;	/* frames that a capture asked for */
	__u64 capture_lost;	/* of those, how many found no room */
	__u64 unlearned_ns[UNLEARNED];	/* when each of `unlearned` was counted last */
	__u64 shortened_ns;	/* the same of `shortened` */
};

/* Ports of an interface: bits of `flags`. */
#define PORT_TAKE (1 << 0)	/* frames that come in here may be taken */
#define PORT_PEER (1 << 1)	/* frames may go out straight into the veth peer */
#define PORT_XDP_OUT (1 << 2)	/* the driver takes frames from XDP */
#define PORT_CAPTURED (1 << 3)	/* a packet socket listens */
#define PORT_TWICE (1 << 4)	/* most flows here are of one frame: one is worth learning with its second */
#define PORT_QUEUED (1 << 5)	/* a process takes packets from NFQUEUE in this namespace */
#define PORT_PRECEDED (1 << 6)	/* others' tcx programs stand before ours at the ingress: XDP would pass them by */

struct port {
	__u32 slot;	/* of `counters` */
	__u32 flags;
	__u32 mode;	/* for people: layout.rs, `Mode` */
	__u32 why;	/* for people: chooser.rs, `Why` */
	__u64 since_ns;
};

/* Elements of `settings`. Each is a word of its own, so that two processes that write two of them do not undo each other's. */
enum setting {
	SET_EPOCH,	/* raised to have all flows learned again */
	SET_TRACE,	/* events are wanted up to this second of the clock; 0: not at all */
	SET_ACCOUNT,	/* frames are counted per flow up to this second of the clock; 0: not at all */
	SET_LEASE_NS,
	SET_TICK_NS,	/* of the kernel's jiffies, in which conntrack counts its timeouts */
	SET_CAPTURE,	/* frames are captured up to this second of the clock; 0: not at all */
	SET_OBSERVED_NS,	/* up to this time of the clock one of the three may be wanted: what is looked at for each frame */
	SET_RETRACK,	/* the nonce in the options of frames that `detach` injects (src/retrack.rs); 0: there are none */
	SETTINGS,
};

enum protocol {
	FLOW_UDP,
	FLOW_TCP,
	FLOW_ICMP,
};

/* 16 bytes: then a flow's value begins a cache line, behind the kernel's 48 of an element, and nothing of it is in a fourth one. */
struct key4 {
	__u32 input;	/* ifindex << 10 | TOS << 2 | enum protocol; higher ifindexes are not learned. Routes, priorities and rules depend on TOS */
	__u32 saddr;
	__u32 daddr;
	__u32 ports;	/* source, then destination, as on the wire; of an echo its id, then type and code */
};

struct key6 {
	__u32 iif;
	__u32 saddr[4];
	__u32 daddr[4];
	__u32 ports;
	__u8 proto;
	__u8 tos;
	__u16 zero;
};

#define FLOW_NAT (1 << 0)
#define FLOW_PEER (1 << 1)
#define FLOW_XDP (1 << 2)
#define FLOW_PARTIAL (1 << 3)	/* the checksums of its frames, or of packets within them, are left to others */
#define FLOW_ANY_ID (1 << 4)	/* frames with different IPv4 ids were forwarded unaltered, so no rule sets a constant id */

/* Bits of `sequence`. */
#define SEQUENCE_TRACKED (1 << 0)	/* TCP with a conntrack entry: its numbers are noted */
#define SEQUENCE_SURE (1 << 1)	/* they are in step with what the kernel had seen, or with the other direction */
#define SEQUENCE_ENDING (1 << 2)	/* a FIN or RST passed */

/* What the kernel did with a flow's last frame that it saw, and under what it did so. Two cache lines; of the first only what a renewal
 * alters is written. */
struct flow {
	__u64 until_ns;		/* CLOCK_MONOTONIC (coarse); then the kernel is asked again */
	__u64 hooks;		/* the address of the netfilter hooks of the forward chain */
	__u64 conn;		/* the address of the conntrack entry; 0: there was none */
	__u32 route_gen;
	__u32 rules_gen;
	__u32 epoch;
	__u32 oif;
	__u32 mark;
	__u32 priority;
	__u32 in_mark;		/* the mark that it came in with, set by a tcx program before ours */
	__u16 slot;		/* of the input's counters */
	__u16 flags;
	__u16 conn_status;
	__u16 mtu;		/* no IP packet is longer than 65535 bytes */
	__u8 ttl;		/* of the frame that came in; a frame with another one may be altered otherwise */
	__u8 direction;		/* of the connection: 0 as its first frame, 1 the answers */
	__u8 scale;		/* of the windows in its frames */
	__u8 sequence;		/* SEQUENCE_* */

	__u32 saddr;		/* IPv4 after translation */
	__u32 daddr;
	__u32 ports;
	__u32 addresses_diff;	/* one's complement sum of what changed in the addresses */
	__u32 ports_diff;
	__u32 rest;		/* as in struct frame, of the frame that came in */
	__u8 mac[12];		/* destination and source of the frame that goes out */
	__u8 in_mac[6];		/* destination of the frame that came in */
	__u16 window;		/* in its last frame, as it is there */
	__u32 used;		/* in USED_NS, to a sixteenth of a lease: with thousands of flows each line that is written must leave the caches again */
	__u32 end;		/* TCP: the highest sequence number sent, behind its data */
	__u32 ack;		/* TCP: the highest acknowledgement sent */
	__u64 peer;		/* FLOW_PEER: the address of the net_device at the veth's other end */
};
#define USED_SHIFT 20	/* the unit of `used`: about a millisecond. It wraps after 52 days, so only differences count */

struct flow6 {
	struct flow flow;
	__u32 saddr[4];		/* after translation */
	__u32 daddr[4];
};

/* Numbers of the routes, rules and settings that the kernel decides under at one moment. */
struct generations {
	__u64 hooks;
	__u32 routes;
	__u32 rules;
	__u32 epoch;
};

/* A frame that was sent up by the ingress program on this CPU, for the egress program to recognise. */
struct pending {
	struct generations generations;	/* when it came in: the kernel decided under these or later ones */
	__u64 skb;
	__u64 at_ns;
	struct key6 key;	/* IPv4 in the first words of the addresses */
	__u32 length;
	__u8 ttl;
	__u8 tos;
	__u8 in_mac[6];
	__u32 rest;		/* as in struct frame */
	__u32 mark;
	__u16 check;
	__u16 family;
	bool has_priority;	/* one that depends on the frame */
};
#define PENDING_SLOTS 8

/* What the controller is to do with a TCP connection. */
enum wish_kind {
	WISH_LIBERAL,	/* window checks are to be liberal */
	WISH_ACKNOWLEDGED,	/* the flag for unacknowledged data is to go: the kernel will not see the acknowledgement */
	WISH_CLOSED,	/* a RST ended it that the kernel could not recognise as exact */
};

/* By its first direction. */
struct wish {
	__u32 saddr[4];
	__u32 daddr[4];
	__u32 ports;
	__u8 family;
	__u8 proto;
	__u16 kind;
};

/* The flows of one direction of a TCP connection: one for each interface and TOS that its frames came with lately. */
#define VARIANTS 4
struct variants {
	__u32 input[VARIANTS];	/* ifindex << 8 | TOS; 0: none */
};

/* A line of `trace`. */
struct event {
	__u64 at_ns;
	struct key6 key;
	__u32 oif;
	__u32 length;
	__u8 family;
	__u8 kind;	/* 0 seen (code: verdict), 1 learned, 2 not learned (code: unlearned) */
	__u8 code;
	__u8 pad;
	__u32 pad2;
};

/* What passed of one flow while `flows` measured. All counts are monotonic. */
struct usage {
	__u64 taken_packets;
	__u64 taken_bytes;
	__u64 passed_packets;
	__u64 passed_bytes;
	__u32 oif;	/* where it goes out; 0: not known */
	__u8 taken_by;	/* 1 + enum verdict of the last frame that was taken; 0: none was */
	__u8 passed_for;	/* 1 + enum verdict of the last frame that took the kernel's path */
	__u8 refused;	/* 1 + enum unlearned: why the last forwarded frame was not learned; 0: it was */
	__u8 pad;
};

/* Where a frame was captured. */
enum point {
	POINT_IN,	/* as it came in; code: enum verdict */
	POINT_OUT,	/* as it goes out, after it was taken; code: enum verdict */
	POINT_KERNEL,	/* as the kernel sends it, forwarded or this host's own */
	POINT_FAILED,	/* as POINT_IN; and if this CPU captured it before as one that is taken, it was not */
};

/* What precedes a captured frame's bytes. */
struct captured {
	__u64 at_ns;
	__u32 interface;	/* where it came in or goes out */
	__u32 other;	/* the other one of the two; 0: not known, or this host */
	__u32 length;	/* of the frame */
	__u32 kept;	/* bytes that follow */
	__u16 segment;	/* bytes of payload of each packet in a segmentation frame; 0: it is none */
	__u16 tag;	/* VLAN, where has_tag */
	__u8 has_tag;
	__u8 point;
	__u8 code;
	__u8 pad;
};

/* Which frames are captured. */
struct end {
	__u32 address[4];
	__u32 mask[4];
	__u32 port;	/* as on the wire; 0: any */
};

struct wanted {
	__u32 interface;	/* 0: any */
	__u32 family;	/* 0: any */
	__u32 proto;	/* 0: any; IPPROTO_ICMP stands for both of them */
	__u32 snap;	/* bytes that are kept of each frame */
	struct end ends[2];	/* in either order */
};

/* What of a frame the filter is compared with. */
struct ends {
	__u32 source[4];
	__u32 destination[4];
	__u32 ports;	/* 0 where there are none */
	__u32 family;	/* 0: not IP */
	__u32 proto;
};

/* Room for a program while it runs, on each CPU: its stack is too small. */
struct scratch {
	struct flow6 flow;
	struct generations generations;
	struct captured record;
	struct ends ends;
	__u32 header[10];
};

/* What layout.rs counts on. */
_Static_assert(sizeof(struct captured) == 32 && offsetof(struct captured, segment) == 24 && offsetof(struct captured, point) == 29, "layout.rs");
_Static_assert(sizeof(struct wanted) == 88 && offsetof(struct wanted, ends) == 16, "layout.rs");
_Static_assert(SETTINGS == 8 && sizeof(struct usage) == 40 && offsetof(struct usage, oif) == 32, "layout.rs");
_Static_assert(sizeof(struct port) == 24 && sizeof(struct key4) == 16, "layout.rs");
_Static_assert(sizeof(struct key6) == 44 && sizeof(struct flow) == 128 && sizeof(struct wish) == 40, "layout.rs");
_Static_assert(sizeof(struct event) == 72 && sizeof(struct counters) == 8 * (VERDICTS + 6 + UNLEARNED + 2 + UNLEARNED + 1), "layout.rs");
_Static_assert(offsetof(struct flow, conn) == 16 && offsetof(struct flow, epoch) == 32 && offsetof(struct flow, oif) == 36, "layout.rs");
_Static_assert(offsetof(struct flow, direction) == 61 && offsetof(struct flow, scale) == 62 && offsetof(struct flow, window) == 106 && offsetof(struct flow, sequence) == 63 && offsetof(struct flow, saddr) == 64, "layout.rs");
_Static_assert(offsetof(struct flow, mac) == 88, "layout.rs");
_Static_assert(offsetof(struct flow, used) == 108 && offsetof(struct flow, end) == 112 && offsetof(struct flow, ack) == 116, "layout.rs");
_Static_assert(offsetof(struct port, since_ns) == 16 && offsetof(struct wish, kind) == 38, "layout.rs");
_Static_assert(offsetof(struct key6, daddr) == 20 && offsetof(struct key6, ports) == 36 && offsetof(struct key4, ports) == 12, "layout.rs");
_Static_assert(offsetof(struct key6, proto) == 40, "layout.rs");
_Static_assert(offsetof(struct event, key) == 8 && offsetof(struct event, family) == 60 && offsetof(struct wish, ports) == 32, "layout.rs");
_Static_assert(sizeof(struct flow6) == 160 && offsetof(struct flow6, flow) == 0, "layout.rs");
_Static_assert(HANDED_PARTIAL == 18 && HANDED_LARGE == 19 && DROPPED_WINDOW == 24, "layout.rs");

#define MAX_IFINDEX (1 << 22)
#define MAX_PORTS 1024	/* below 1 << 16: judges.h */
#define MAX_FLOWS 65536	/* layout.rs */
#define SIGHTS 65536

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SETTINGS);
	__type(key, __u32);
	__type(value, __u64);
} settings SEC(".maps");

static __always_inline __u64 setting(enum setting which)
{
	__u32 index = which;
	__u64 *value = bpf_map_lookup_elem(&settings, &index);

	return value ? *value : 0;
}

/* Up to when frames are taken, if the controller does not say more; 0: for ever. On its own, since the controller writes it again and again. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} kept SEC(".maps");

/* When each thread of the controller was at work last, on the monotonic clock. Written by it alone. */
#define BEATS 2
#define SILENT_NS 5000000000ULL	/* controller.rs, SILENT */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BEATS);
	__type(key, __u32);
	__type(value, __u64);
} beats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_PORTS);
	__type(key, __u32);
	__type(value, struct port);
} ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_PORTS);
	__type(key, __u32);
	__type(value, struct counters);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_FLOWS);
	__type(key, struct key4);
	__type(value, struct flow);
} flows4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_FLOWS);
	__type(key, struct key6);
	__type(value, struct flow6);
} flows6 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PENDING_SLOTS);
	__type(key, __u32);
	__type(value, struct pending);
} pending SEC(".maps");

/* Which flows were seen lately, by a hash: for PORT_TWICE. All CPUs share it, since a sender that moves between CPUs sends
 * its second frame from another one. A race between two of them costs at most one more frame on the kernel's path. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SIGHTS);
	__type(key, __u32);
	__type(value, __u32);
} sights SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} wishes SEC(".maps");

/* When a connection was last wished for, so that one is asked for once and not with every frame. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, __u64);
} wished SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} events SEC(".maps");

/* By the addresses and ports that a direction's frames come in with; interface and TOS are zero, the address family is in `zero`. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_FLOWS);
	__type(key, struct key6);
	__type(value, struct variants);
} guarded SEC(".maps");

/* By flow, as in an event: the address family is in `zero`. Not by CPU: the kernel would allocate all entries for each CPU that the
 * machine could have, when the map is made. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_FLOWS);
	__type(key, struct key6);
	__type(value, struct usage);
} usages SEC(".maps");

/* Events that found no room in the ring. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} lost SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratch SEC(".maps");

static __always_inline struct scratch *scratch_here(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scratch, &zero);
}

/* Captured frames. Which CPU's buffers are in it only the command knows that put them there, and they go with it. */
struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} captures SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct wanted);
} wanted SEC(".maps");

/* Flows that a firewall rule could judge frame by frame. Written by the controller and the commands: src/rules/filter.rs. */
#define MAX_JUDGES 32
#define SLOT_WORDS (MAX_PORTS / 32)

struct judge {
	__u32 worlds;		/* a bit for each kind of flow: judges.h, world_of */
	__u32 source_is_out;	/* all bits or none: the address and port behind the translation are meant */
	__u32 destination_is_out;
	__u32 pad;
	__u32 source[4];
	__u32 source_mask[4];
	__u32 destination[4];
	__u32 destination_mask[4];
	__u16 source_first;	/* ports, in the machine's byte order */
	__u16 source_last;
	__u16 destination_first;
	__u16 destination_last;
	__u32 inputs[SLOT_WORDS];	/* a bit for each slot of an interface's counters */
	__u32 outputs[SLOT_WORDS];
};

enum rules_state {
	RULES_UNREAD,	/* nothing is learned */
	RULES_READ,	/* under this generation of the ruleset */
	RULES_SKIPPED,	/* the user does not mind */
};

struct judges {
	__u32 count;
	__u32 generation;
	__u32 state;
	__u32 pad;
	struct judge judges[MAX_JUDGES];
};

_Static_assert(sizeof(struct judge) == 344 && sizeof(struct judges) == 16 + MAX_JUDGES * 344, "rules/filter.rs");
_Static_assert(offsetof(struct judge, source) == 16 && offsetof(struct judge, source_first) == 80, "rules/filter.rs");
_Static_assert(offsetof(struct judge, inputs) == 88 && offsetof(struct judges, judges) == 16, "rules/filter.rs");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct judges);
} judges SEC(".maps");

#endif
