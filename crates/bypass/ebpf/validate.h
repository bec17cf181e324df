/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * Whether what was learned from the kernel is still what the kernel would do: read from the kernel's own memory, per
 * frame, so that it holds without anybody in user space.
 *
 * - Routes: IPv4's generation counter changes with every change of a route, a routing rule, an address, a link's state or its
 *   MTU. IPv6's serial number changes with what is added only: what goes is counted elsewhere, and a link's MTU moves IPv4's.
 * - Rules: nftables' generation, and the address of the hooks of the forward chain (another table's hook, or the legacy
 *   iptables' coming and going).
 * - Connections: the conntrack entry itself, at the address where it was. The memory may by now hold another entry or
 *   none: so both its tuples are compared, whole, with those that the flow was learned with.
 */
#ifndef TOMBOLO_TRUTH_H
#define TOMBOLO_TRUTH_H

#include "packet.h"

/* The bits of a connection's status that a flow is learned under; after a change of one it is learned again. */
#define STATUS_BITS (IPS_SEEN_REPLY | IPS_CONFIRMED | IPS_SRC_NAT | IPS_DST_NAT | IPS_SEQ_ADJUST | IPS_DYING | IPS_HELPER)

/* As it was before Linux 6.17. */
struct netns_nftables___old {
	__u8 gencursor;
} __attribute__((preserve_access_index));

/* Whether programs can read how often the rules changed (Linux 6.17). Before, there is one bit that flips with each change. */
static __always_inline bool has_rules_counter(void)
{
	const struct net *net = NULL;

	return bpf_core_field_exists(net->nft.base_seq);
}

static __always_inline __u32 rules_generation(struct net *net)
{
	if (has_rules_counter())
		return FIELD(net, nft.base_seq);
	return FIELD(net, nft.gencursor);
}

static __always_inline __u32 route_generation(struct net *net, int family)
{
	__u32 generation = FIELD(net, ipv4.rt_genid.counter);

	/* All of them only grow, so their sum changes with each. */
	if (family == AF_INET6)
		generation += FIELD(net, ipv6.fib6_sernum.counter) + FIELD(FIELD(net, ipv6.rt6_stats), fib_discarded_routes);
	return generation;
}

static __always_inline __u64 hooks(struct net *net, int family)
{
	return family == AF_INET ? (__u64)FIELD(net, nf.hooks_ipv4[NF_INET_FORWARD]) : (__u64)FIELD(net, nf.hooks_ipv6[NF_INET_FORWARD]);
}

/* What the kernel decides under now. */
static __always_inline void read_generations(struct generations *g, struct net *net, int family)
{
	g->hooks = hooks(net, family);
	g->routes = route_generation(net, family);
	g->rules = rules_generation(net);
	g->epoch = setting(SET_EPOCH);
}

/* Hooks of one chain that are looked at; with more of them there may be any. */
#define HOOKS_LOOKED_AT 12
/* NF_IP_PRI_CONNTRACK, NF_IP6_PRI_CONNTRACK */
#define PRIORITY_CONNTRACK (-200)

/* Whether connections are tracked here, by the hook of conntrack's priority. Behind the hooks' number lie, aligned, the hooks (two words
 * each), and behind them the addresses of what they were registered with, in the same order (nf_hook_entries_get_hook_ops). */
static __always_inline bool is_tracking(struct net *net, int family)
{
	__u64 at = family == AF_INET ? (__u64)FIELD(net, nf.hooks_ipv4[NF_INET_PRE_ROUTING]) : (__u64)FIELD(net, nf.hooks_ipv6[NF_INET_PRE_ROUTING]);
	const struct nf_hook_entries *entries = (const struct nf_hook_entries *)at;
	__u16 count = 0;

	if (!at)
		return false;
	if (bpf_core_read(&count, sizeof(count), &entries->num_hook_entries) || count > HOOKS_LOOKED_AT)
		return true;
	for (__u32 n = 0; n < HOOKS_LOOKED_AT && n < count; n++) {
		const struct nf_hook_ops *ops = NULL;
		int priority = 0;

		if (bpf_probe_read_kernel(&ops, sizeof(ops), (void *)(at + 8 + 16ULL * count + 8ULL * n)) ||
		    bpf_core_read(&priority, sizeof(priority), &ops->priority) || priority == PRIORITY_CONNTRACK)
			return true;
	}
	return false;
}

#ifdef OLD_KERNEL

/* A connection as it was when it was looked at, as long as any kernel's nf_conn up to the last member that is read. One at a time on each CPU. */
#define CONNECTION_BYTES 320
struct snapshot {
	__u64 words[CONNECTION_BYTES / 8];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct snapshot);
} snapshot SEC(".maps");

#define IS_MISSING(conn) (!(conn))

static __always_inline const struct nf_conn *connection(__u64 address)
{
	__u32 zero = 0;
	struct snapshot *copy = bpf_map_lookup_elem(&snapshot, &zero);

	if (!copy || bpf_probe_read_kernel(copy, sizeof(*copy), (void *)address))
		return NULL;
	return (const struct nf_conn *)copy;
}

#else

#define IS_MISSING(conn) false

static __always_inline const struct nf_conn *connection(__u64 address)
{
	return READ_ONLY(struct nf_conn, TYPE_NF_CONN, address);
}

#endif

/* Whether tuple `t` goes from s to d with these ports. */
static __always_inline bool tuple_is(const struct nf_conntrack_tuple *t, int family, __u32 proto, const __u32 *s,
				     const __u32 *d, __u16 sport, __u16 dport)
{
	if (t->dst.protonum != proto || t->src.l3num != family || t->src.u.all != sport || t->dst.u.all != dport)
		return false;
	if (t->src.u3.all[0] != s[0] || t->dst.u3.all[0] != d[0])
		return false;
	if (family == AF_INET)
		return true;
	return t->src.u3.all[1] == s[1] && t->src.u3.all[2] == s[2] && t->src.u3.all[3] == s[3] &&
	       t->dst.u3.all[1] == d[1] && t->dst.u3.all[2] == d[2] && t->dst.u3.all[3] == d[3];
}

/* Whether the entry is of the connection that has `in` on its way in and `saddr, daddr, ports` on its way out. */
static __always_inline bool connection_is(const struct nf_conn *conn, int family, __u8 direction, const struct key6 *in,
					  const __u32 *saddr, const __u32 *daddr, __u32 ports)
{
	const struct nf_conntrack_tuple *there = direction ? &conn->tuplehash[1].tuple : &conn->tuplehash[0].tuple;
	const struct nf_conntrack_tuple *back = direction ? &conn->tuplehash[0].tuple : &conn->tuplehash[1].tuple;

	/* An echo has the same id both ways, and its type where a port would be. */
	if (is_icmp(in->proto))
		return tuple_is(there, family, in->proto, in->saddr, in->daddr, first_of(in->ports), second_of(in->ports)) &&
		       tuple_is(back, family, in->proto, daddr, saddr, first_of(ports), answer_of(second_of(ports), family));
	return tuple_is(there, family, in->proto, in->saddr, in->daddr, first_of(in->ports), second_of(in->ports)) &&
	       tuple_is(back, family, in->proto, daddr, saddr, second_of(ports), first_of(ports));
}

/* By its own flags alone: the sysctl of the same name holds for a moment only where a `detach` sets it (src/retrack.rs). */
static __always_inline bool is_liberal(const struct nf_conn *conn)
{
	return conn->proto.tcp.seen[0].flags & conn->proto.tcp.seen[1].flags & IP_CT_TCP_FLAG_BE_LIBERAL;
}

/* Whether a rule that rewrites a field may do something else to this frame than to the one that the flow was learned from: one that sets
 * the TTL to 63 looks like a plain hop on a frame with 64. So the fields are to be the same; an IPv4 id may differ where different ones
 * were seen to pass unaltered. The mark is 0 for XDP, which no program of the tc hook precedes. */
static __always_inline bool differs_in_fields(const struct flow *flow, const struct frame *f, int family, __u32 mark)
{
	__u32 mask = family == AF_INET && flow->flags & FLOW_ANY_ID ? pair(0, 0xffff) : ~0U;

	return f->ttl != flow->ttl || (f->rest ^ flow->rest) & mask || mark != flow->in_mark;
}

/* The timeout that conntrack has set for the connection with the frame that it just saw, in ns; 0 if it is over. */
static __always_inline __u64 timeout_ns(const struct nf_conn *conn)
{
	__s32 ticks = conn->timeout - (__u32)bpf_jiffies64();

	return ticks > 0 ? ticks * setting(SET_TICK_NS) : 0;
}

/* 0, or why the flow does not hold for this frame now. */
static __always_inline int holds(const struct flow *flow, const struct frame *f, int family, struct net *net,
				 __u64 now)
{
	if (now >= flow->until_ns)
		return UP_LEASE;
	if (flow->route_gen != route_generation(net, family) || flow->rules_gen != rules_generation(net) ||
	    flow->hooks != hooks(net, family) || flow->epoch != (__u32)setting(SET_EPOCH))
		return UP_CHANGED;
	if (flow->conn) {
		const struct nf_conn *conn = connection(flow->conn);
		const __u32 *saddr = family == AF_INET ? &flow->saddr : ((const struct flow6 *)flow)->saddr;
		const __u32 *daddr = family == AF_INET ? &flow->daddr : ((const struct flow6 *)flow)->daddr;

		if (IS_MISSING(conn) || (conn->status & STATUS_BITS) != flow->conn_status)
			return UP_CONNTRACK;
		if (!connection_is(conn, family, flow->direction, &f->key, saddr, daddr, flow->ports))
			return UP_CONNTRACK;
		if (f->key.proto == IPPROTO_TCP && conn->proto.tcp.state != TCP_CONNTRACK_ESTABLISHED)
			return UP_CONNTRACK;
	}
	return 0;
}

#endif
