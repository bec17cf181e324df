/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * What the kernel made of a frame that was noted at the ingress, written into a flow: what changed, where it goes, and what that
 * was decided under. A flow is not learned where the kernel might treat another of its frames otherwise.
 */
#ifndef TOMBOLO_LEARN_H
#define TOMBOLO_LEARN_H

#include "controller.h"
#include "judges.h"
#include "sequence.h"

/* The longest packet that the kernel forwards whole. IPv4: the route's MTU, also one above the interface's, else the interface's
 * (ip_dst_mtu_maybe_forward). IPv6: the interface's, which a route's may only lower, unless it is locked (ip6_dst_mtu_maybe_forward, and
 * then ip6_fragment by the route's own). */
static __always_inline __u32 forward_mtu(struct sk_buff *skb, const struct dst_entry *dst, int family)
{
	const struct dst_metrics *metrics = READ_ONLY(struct dst_metrics, TYPE_DST_METRICS, FIELD(dst, _metrics) & DST_METRICS_PTRMASK);
	const struct net_device *dev = FIELD(skb, dev);
	__u32 route = FIELD(metrics, metrics[RTAX_MTU - 1]), device = FIELD(dev, mtu);
	bool is_locked = FIELD(metrics, metrics[RTAX_LOCK - 1]) & 1 << RTAX_MTU;

	if (family == AF_INET6 && FIELD(dev, ip6_ptr))
		device = FIELD(FIELD(dev, ip6_ptr), cnf.mtu6);
	if (!route)
		return device;
	return family == AF_INET || is_locked || route < device ? route : device;
}

/* Whether an ICMP error that locks the route's MTU decides instead (ip_mtu_locked). */
static __always_inline bool is_mtu_learned(const struct dst_entry *dst)
{
	struct rtable *route = READ_ONLY(struct rtable, TYPE_RTABLE, (__u64)dst);

	return BITFIELD(route, rt_mtu_locked);
}

/* The private part of a net_device follows it, aligned to 32 bytes; of a veth it begins with the other end (struct veth_priv, as long as
 * there have been veths). Its type is in no BTF that can be asked where veth is a module. */
static __always_inline __u64 veth_peer(__u64 device)
{
	__u64 peer = 0;

	bpf_probe_read_kernel(&peer, sizeof(peer), (void *)(device + ((bpf_core_type_size(struct net_device) + 31) & ~31ULL)));
	return peer;
}

/* What changed from `old` to `new`, as a one's complement sum. */
static __always_inline __u32 difference(__u32 old, __u32 new)
{
	__u64 sum = (__u64)(__u32)~old + new;

	return (sum >> 32) + (sum & 0xffffffff);
}

static __always_inline __u32 add(__u32 a, __u32 b)
{
	__u64 sum = (__u64)a + b;

	return (sum >> 32) + (sum & 0xffffffff);
}

static __always_inline bool differ(const __u32 *a, const __u32 *b)
{
	return (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]);
}

/* Puts into the flow what became of the addresses and ports. */
static __always_inline void note_translation(struct flow6 *whole, const struct key6 *in, const struct key6 *out, int family)
{
	struct flow *flow = &whole->flow;

	flow->addresses_diff = add(difference(in->saddr[0], out->saddr[0]), difference(in->daddr[0], out->daddr[0]));
	if (family == AF_INET6) {
#pragma unroll
		for (int n = 1; n < 4; n++)
			flow->addresses_diff = add(flow->addresses_diff, add(difference(in->saddr[n], out->saddr[n]),
									     difference(in->daddr[n], out->daddr[n])));
	}
	flow->ports_diff = in->ports == out->ports ? 0 : difference(in->ports, out->ports);
	/* Of IPv4 the other words are zero on both sides. */
	if (differ(in->saddr, out->saddr) || differ(in->daddr, out->daddr) || in->ports != out->ports)
		flow->flags |= FLOW_NAT;
	flow->saddr = out->saddr[0];
	flow->daddr = out->daddr[0];
	flow->ports = out->ports;
	__builtin_memcpy(whole->saddr, out->saddr, sizeof(whole->saddr));
	__builtin_memcpy(whole->daddr, out->daddr, sizeof(whole->daddr));
}

/* Whether the flow is known with the very same answer: then its lease is renewed in place, which is one store. Another entry
 * would cost more than the frame. */
static __always_inline bool renew(struct flow *known, struct flow *flow, int family)
{
	const __u64 *old = (const __u64 *)known, *new = (const __u64 *)flow;
	__u64 differs = 0;

	if (!known)
		return false;
	/* What is known of ids holds as long as all else does. */
	flow->flags |= known->flags & FLOW_ANY_ID;
	/* `until_ns` is what is new, and `hooks` is to the verifier a pointer, with which nothing is reckoned. */
#pragma unroll
	for (unsigned int n = offsetof(struct flow, conn) / 8; n < offsetof(struct flow, conn_status) / 8; n++)
		differs |= old[n] ^ new[n];
	differs |= (known->conn_status ^ flow->conn_status) | (known->mtu ^ flow->mtu) | (known->ttl ^ flow->ttl) |
		   (known->direction ^ flow->direction) | (known->ports_diff ^ flow->ports_diff);
#pragma unroll
	for (unsigned int n = offsetof(struct flow, saddr) / 8; n < offsetof(struct flow, ports_diff) / 8; n++)
		differs |= old[n] ^ new[n];
#pragma unroll
	for (unsigned int n = offsetof(struct flow, mac) / 8; n < offsetof(struct flow, window) / 8; n++)
		differs |= old[n] ^ new[n];
	if (known->in_mac[4] != flow->in_mac[4] || known->in_mac[5] != flow->in_mac[5])
		differs = 1;
	if (known->hooks != flow->hooks || known->peer != flow->peer)
		differs = 1;
	if (family == AF_INET ? (known->rest ^ flow->rest) & pair(0, 0xffff) : known->rest != flow->rest)
		differs = 1;
	if (differs)
		return false;
	if (family == AF_INET && known->rest != flow->rest)
		known->flags |= FLOW_ANY_ID;
	/* What is sure has been noted when the frame came in, and perhaps more since. */
	if (flow->sequence && !(known->sequence & SEQUENCE_SURE && is_near(known, flow->end, flow->ack))) {
		known->end = flow->end;
		known->ack = flow->ack;
		known->window = flow->window;
		known->scale = flow->scale;
		known->sequence = flow->sequence;
	}
	known->until_ns = flow->until_ns;
	return true;
}

/* Whether the transport's checksum is the one that came in, except for the translation: it tells what else of the packet a rule has altered. */
static __always_inline bool check_follows(const struct flow *flow, const struct pending *p, const struct frame *out, bool partial)
{
	__u32 addresses = out->key.proto == IPPROTO_ICMP ? 0 : flow->addresses_diff, was, is;

	if (out->key.proto == IPPROTO_UDP && !p->check)
		return !out->check;
	if (partial) {
		was = fold((__u64)p->check + addresses);
		is = out->check;
	} else {
		was = fold((__u64)(__u16)~p->check + addresses + flow->ports_diff);
		is = (__u16)~out->check;
	}
	/* Zero has two forms. */
	return was % 0xffff == is % 0xffff;
}

/* 0 when the flow was written (or there was no room for it), or 1 + why not. */
static __always_inline int learn(struct __sk_buff *skb, const struct pending *p, const struct frame *out,
				 int family, __u64 now, bool *shortened)
{
	struct sk_buff *kernel_skb = kernel_context(skb);
	struct net_device *dev = FIELD(kernel_skb, dev);
	struct net *net = FIELD(dev, nd_net.net);
	const struct dst_entry *dst;
	__u64 lease = setting(SET_LEASE_NS);
	unsigned long nfct = FIELD(kernel_skb, _nfct), refdst = FIELD(kernel_skb, _skb_refdst);
	/* On the stack there is no room for it beside a call. */
	struct scratch *scratch = scratch_here();
	struct flow6 *whole;
	struct flow *flow, *known;
	struct port *in, *output;
	__u32 iif = p->key.iif, oif = skb->ifindex, mtu, slots;
	__u64 until;
	void *data;

	if (!scratch)
		return 0;
	whole = &scratch->flow;
	__builtin_memset(whole, 0, sizeof(*whole));
	flow = &whole->flow;
	if (p->family != family || out->key.proto != p->key.proto || out->length != p->length || out->tos != p->tos ||
	    out->rest != p->rest || out->ttl != p->ttl - 1 || p->has_priority)
		return 1 + NOT_ALTERED_AS_WE_WOULD;
	if (iif == oif || iif >= MAX_IFINDEX || !(refdst & SKB_DST_PTRMASK))
		return 1 + NOT_A_PLAIN_ROUTE;
	dst = READ_ONLY(struct dst_entry, TYPE_DST_ENTRY, refdst & SKB_DST_PTRMASK);
	if (FIELD(dst, lwtstate) || FIELD(net, ipv4.sysctl_ip_fwd_use_pmtu) || (family == AF_INET && is_mtu_learned(dst)))
		return 1 + NOT_A_PLAIN_ROUTE;
	/* The port of a bridge or bond, or what a macvlan is on: the device above chooses one of them again for each frame. */
	if (FIELD(FIELD(dst, dev), ifindex) != FIELD(dev, ifindex))
		return 1 + NOT_A_PLAIN_ROUTE;
	in = bpf_map_lookup_elem(&ports, &iif);
	output = bpf_map_lookup_elem(&ports, &oif);
	data = (void *)(long)skb->data;
	if (!in || !output || !(in->flags & PORT_TAKE) || data + ETH_HLEN > (void *)(long)skb->data_end)
		return 1 + NOT_A_PLAIN_ROUTE;
	note_translation(whole, &p->key, &out->key, family);
	if (!check_follows(flow, p, out, is_partial(kernel_skb)))
		return 1 + NOT_ALTERED_AS_WE_WOULD;
	if (nfct & ~NFCT_INFOMASK) {
		const struct nf_conn *conn = connection(nfct & ~NFCT_INFOMASK);

		if (IS_MISSING(conn))
			return 1 + NOT_A_PLAIN_CONNECTION;
		flow->conn = nfct & ~NFCT_INFOMASK;
		flow->conn_status = conn->status & STATUS_BITS;
		flow->direction = (nfct & NFCT_INFOMASK) >= IP_CT_IS_REPLY;
		if (!(flow->conn_status & IPS_CONFIRMED) || flow->conn_status & (IPS_DYING | IPS_SEQ_ADJUST | IPS_HELPER) ||
		    conn->zone.id)
			return 1 + NOT_A_PLAIN_CONNECTION;
		if (!connection_is(conn, family, flow->direction, &p->key, out->key.saddr, out->key.daddr, out->key.ports))
			return 1 + NOT_ALTERED_AS_WE_WOULD;
		if (p->key.proto == IPPROTO_TCP) {
			if (!(conn->status & IPS_ASSURED) || conn->proto.tcp.state != TCP_CONNTRACK_ESTABLISHED)
				return 1 + NOT_ESTABLISHED;
			if (!is_liberal(conn)) {
				wish(conn, family, flow->conn, WISH_LIBERAL);
				return 1 + NOT_LIBERAL;
			}
			/* From here on the kernel sees all of them, and is in step again if it has not missed more than a window. */
			if (!has_controller(now))
				return 1 + NOT_KEPT;
			begin_sequence(flow, out, conn);
			if (waits_in_vain(flow, out, conn))
				wish(conn, family, flow->conn, WISH_ACKNOWLEDGED);
		}
		/* The kernel is to see a frame before the entry expires. */
		if (timeout_ns(conn) / 2 < lease)
			lease = timeout_ns(conn) / 2;
		*shortened = lease < setting(SET_LEASE_NS);
	} else if (flow->flags & FLOW_NAT) {
		/* Addresses changed by rules that track nothing. */
		return 1 + NOT_ALTERED_AS_WE_WOULD;
	} else if (nfct != IP_CT_UNTRACKED && is_tracking(net, family)) {
		/* Conntrack calls it invalid. It is not translated, as the next frame may be. */
		return 1 + NOT_A_PLAIN_CONNECTION;
	}
	/* A frame may wait, as for its neighbour's address: what the kernel decided before that need not hold any more. */
	read_generations(&scratch->generations, net, family);
	if (p->generations.hooks != scratch->generations.hooks || p->generations.routes != scratch->generations.routes ||
	    p->generations.rules != scratch->generations.rules || p->generations.epoch != scratch->generations.epoch)
		return 1 + NOT_AT_ONCE;
	/* Code that holds a frame back takes a reference to its route; so does the first frame after a change of routes, which is as well. */
	if (in->flags & PORT_QUEUED && !(refdst & SKB_DST_NOREF))
		return 1 + NOT_AT_ONCE;
	__builtin_memcpy(flow->mac, data, sizeof(flow->mac));
	__builtin_memcpy(flow->in_mac, p->in_mac, sizeof(flow->in_mac));
	until = kept_until();
	flow->until_ns = now + lease < until ? now + lease : until;
	flow->ttl = p->ttl;
	flow->rest = p->rest;
	flow->in_mark = p->mark;
	flow->hooks = scratch->generations.hooks;
	flow->route_gen = scratch->generations.routes;
	flow->rules_gen = scratch->generations.rules;
	flow->epoch = scratch->generations.epoch;
	flow->oif = oif;
	flow->slot = in->slot;
	mtu = forward_mtu(kernel_skb, dst, family);
	flow->mtu = mtu < 0xffff ? mtu : 0xffff;
	if (output->flags & PORT_PEER && !(output->flags & PORT_CAPTURED)) {
		flow->peer = veth_peer((__u64)dev);
		if (flow->peer && veth_peer(flow->peer) == (__u64)dev)
			flow->flags |= FLOW_PEER;
	}
	/* XDP neither queues nor marks, and refuses what is longer than the interface's MTU. What captures at the output would miss its
	 * frames, as would programs that see frames before tcx_in does. */
	if (output->flags & PORT_XDP_OUT && !(in->flags & PORT_PRECEDED) && !(output->flags & PORT_CAPTURED) && !(flow->flags & FLOW_PEER) &&
	    !skb->mark && !p->mark && flow->mtu <= FIELD(dev, mtu))
		flow->flags |= FLOW_XDP;
	if (is_partial(kernel_skb))
		flow->flags |= FLOW_PARTIAL;
	/* Neither goes along into another namespace. */
	if (!(flow->flags & FLOW_PEER)) {
		flow->mark = skb->mark;
		flow->priority = skb->priority;
	}
	flow->used = now >> USED_SHIFT;
	/* Behind the reading of the epoch: who writes other filters raises it afterwards. */
	slots = in->slot << 16 | output->slot;
	if (is_judged(&p->key, &out->key, flow->rules_gen, slots, world_of(family, p->key.proto, nfct)))
		return 1 + JUDGED;
	known = look_up(&p->key, family);
	if (flow->sequence) {
		continue_sequence(flow, known, family);
		guard(&p->key, family);
	}
	if (family == AF_INET) {
		struct key4 k;

		key4(&k, &p->key);
		if (!renew(known, flow, family)) {
			flow->flags &= ~FLOW_ANY_ID;
			bpf_map_update_elem(&flows4, &k, flow, BPF_ANY);
		}
	} else {
		struct key6 k = p->key;
		const struct flow6 *known6 = (const struct flow6 *)known;
		bool same = known && !differ(known6->saddr, whole->saddr) && !differ(known6->daddr, whole->daddr);

		if (!renew(known, flow, family) || !same)
			bpf_map_update_elem(&flows6, &k, whole, BPF_ANY);
	}
	return 0;
}

#endif
