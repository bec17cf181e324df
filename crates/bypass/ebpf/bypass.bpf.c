/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * The bypass: what the kernel did with a flow's last frame is done again with the next ones, without the kernel's work.
 *
 * `tcx_in`, at an interface's ingress, looks a frame's flow up. Known and still true: the headers are altered as the kernel
 * altered them, and the frame is redirected. Anything else goes up, unaltered; where it is of the kind that may be
 * taken, a note of it stays on this CPU.
 * `tcx_out`, at an interface's egress, sees what the kernel made of such a frame, at the end of the forward path and behind
 * all chains, and writes the flow from the difference. So a flow that the firewall refuses never has an entry, and
 * routes, translation and neighbours are the kernel's own.
 * A flow holds for a lease (one second by default), then one frame goes up again: that keeps conntrack's timers, the
 * neighbour's state and the rules' counters alive, and bounds what no generation counter tells.
 *
 * A frame is dropped here in two cases only: the redirect itself fails (the output vanished or is full), as it would in the kernel's
 * own transmit; and a FIN or RST outside of the window of a connection that is taken (sequence.h). What `detach` injects ends at the egress.
 */
#include "judges.h"
#include "observe.h"
#include "sequence.h"

#include <linux/pkt_cls.h>

/* In skb->cb of what we redirect, so that the egress program does not take it for the kernel's. */
#define OURS_0 0x746f6d62
#define OURS_1 0x6f6c6f21
/* A note older than this is of another frame at the same address. Coarse clock: a few milliseconds at least. */
#define PENDING_NS 100000000ULL
/* Kind and length of the TCP option that the frames of `detach` have first: one for experiments (RFC 4727 section 7.2), with the nonce. */
#define RETRACK_OPTION 0xfd0a
/* How often one connection is wished for. */
#define WISH_NS 50000000ULL

static __always_inline __u32 pending_slot(__u64 skb)
{
	/* sk_buffs lie 256 bytes apart. */
	return skb >> 8 & (PENDING_SLOTS - 1);
}

/* Whether an earlier program, or the map of a VLAN interface, has given the frame a priority that the kernel keeps when it forwards it. IPv4's
 * comes from its TOS instead. */
static __always_inline bool has_priority(const struct __sk_buff *skb, int family)
{
	return family == AF_INET6 && skb->priority;
}

/* Whether a frame of the flow was seen not long ago; from now on it was, or it was not: a coin decides whether it takes the place of another flow. Without
 * the coin two flows of one place, frame by frame in turn, would never be seen. */
static __always_inline bool was_seen(const struct key6 *key)
{
	__u32 hash = key->ports * 0x9e3779b1 + key->proto, slot, *sight;

#pragma unroll
	for (int n = 0; n < 4; n++)
		hash = (hash ^ key->saddr[n] ^ (key->daddr[n] << 16 | key->daddr[n] >> 16)) * 0x85ebca6b;
	hash ^= hash >> 15;
	slot = hash & (SIGHTS - 1);
	sight = bpf_map_lookup_elem(&sights, &slot);
	if (!sight || *sight == (hash | 1))
		return true;
	if (!*sight || bpf_get_prandom_u32() & 1)
		*sight = hash | 1;
	return false;
}

/* Up to when frames are taken without another word of the controller's. */
static __always_inline __u64 kept_until(void)
{
	__u32 zero = 0;
	__u64 *until = bpf_map_lookup_elem(&kept, &zero);

	return until && *until ? *until : ~0ULL;
}

/* Whether frames are taken now. Where no controller is needed that costs a look at a map's word, and no reading of the clock. */
static __always_inline bool is_kept(void)
{
	__u64 until = kept_until();

	return until == ~0ULL || bpf_ktime_get_coarse_ns() < until;
}

/* A frame goes up: counted, and noted where the kernel's answer to it is worth learning. */
static __always_inline int up(struct __sk_buff *skb, const struct frame *f, int family, int verdict)
{
	__u32 iif = skb->ifindex;
	struct port *port = bpf_map_lookup_elem(&ports, &iif);
	__u64 address = number_of(kernel_context(skb));
	__u32 pend = pending_slot(address);
	struct pending *p = bpf_map_lookup_elem(&pending, &pend);
	bool is_parsed = verdict >= UP_TTL && verdict != UP_DECRYPTED, is_worth_learning;
	struct counters *c;

	if (!port)
		return TCX_NEXT;
	c = counters_of(port->slot);
	if (!c)
		return TCX_NEXT;
	/* Flows end with their leases, and no lease is longer than that. */
	if (!(port->flags & PORT_TAKE) || !is_kept())
		verdict = UP_OFF;
	c->packets[masked(verdict, VERDICTS)]++;
	is_worth_learning = (verdict == UP_NO_FLOW && !(port->flags & PORT_TWICE && !was_seen(&f->key))) || (verdict == UP_LEASE && !f->slow) ||
			    verdict == UP_CHANGED || verdict == UP_CONNTRACK || verdict == UP_FIELDS;
	if (p && is_worth_learning) {
		void *data = (void *)(long)skb->data;
		struct sk_buff *kernel_skb = kernel_context(skb);

		read_generations(&p->generations, FIELD(FIELD(kernel_skb, dev), nd_net.net), family);
		p->skb = address;
		p->at_ns = bpf_ktime_get_coarse_ns();
		p->key = f->key;
		p->length = f->length;
		p->ttl = f->ttl;
		p->tos = f->tos;
		p->family = family;
		p->rest = f->rest;
		p->mark = skb->mark;
		p->has_priority = has_priority(skb, family);
		p->check = f->check;
		if (data + ETH_HLEN <= (void *)(long)skb->data_end)
			__builtin_memcpy(p->in_mac, data, sizeof(p->in_mac));
	} else if (p && p->skb == address) {
		/* A frame that the kernel dropped had this sk_buff before: the egress program must not take this one for it. */
		p->skb = 0;
	}
	if (is_observed_now()) {
		if (is_parsed)
			tell(f, family, 0, KIND_SEEN, verdict);
		capture(skb, verdict == UP_FAILED ? POINT_FAILED : POINT_IN, verdict, 0);
	}
	return TCX_NEXT;
}

/* Where the checksum is in a transport's header. */
static __always_inline __u32 check_offset(__u32 proto)
{
	if (proto == IPPROTO_UDP)
		return offsetof(struct transport, udp.check);
	return is_icmp(proto) ? offsetof(struct echo, check) : offsetof(struct transport, tcp.check);
}

/* Alters the frame as the flow says. 0, or UP_FAILED: unaltered, or altered in its checksum only where it will not matter. */
static __always_inline int alter(struct __sk_buff *skb, const struct flow *flow, const struct frame *f, int family)
{
	__u32 header = family == AF_INET ? IP4_BYTES : IP6_BYTES;
	void *data, *end;

	if (skb->len > ETH_HLEN + f->length && bpf_skb_change_tail(skb, ETH_HLEN + f->length, 0))
		return UP_FAILED;
	if (flow->flags & FLOW_NAT) {
		__u32 proto = f->key.proto, at = ETH_HLEN + header + check_offset(proto);
		__u64 how = (proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0);
		__u64 family_flag = family == AF_INET6 ? F_IPV6 : 0;

		/* The helper knows the checksum's state: whole, the pseudo header's only, or the card's. ICMP of IPv4 has no pseudo header. */
		if (proto != IPPROTO_ICMP &&
		    bpf_l4_csum_replace(skb, at, 0, flow->addresses_diff, BPF_F_PSEUDO_HDR | how | family_flag))
			return UP_FAILED;
		if (flow->ports_diff && bpf_l4_csum_replace(skb, at, 0, flow->ports_diff, how))
			return UP_FAILED;
	}
	if (family == AF_INET6)
		/* A card's sum over the packet has the hop limit in it; IPv4's header sums to the same as before. */
		bpf_csum_update(skb, (__u16)~bpf_htons(1));
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (data + ETH_HLEN + header + UDP_BYTES > end)
		return UP_FAILED;
	if (flow->flags & FLOW_NAT)
		translate(data + ETH_HLEN, data + ETH_HLEN + header, flow, f->key.proto, family);
	count_hop(data + ETH_HLEN, family);
	__builtin_memcpy(data, flow->mac, sizeof(flow->mac));
	return 0;
}

/* Whether IPsec has opened the packet: it comes in a second time then, at the interface that brought the tunnel's. Whether it had to be protected is
 * checked behind the ingress, for each frame. What was learned from it would hold for one from the wire, too. */
static __always_inline bool is_decrypted(const struct sk_buff *skb)
{
	if (!bpf_core_field_exists(skb->active_extensions) || !bpf_core_enum_value_exists(enum skb_ext_id, SKB_EXT_SEC_PATH))
		return false;
	return FIELD(skb, active_extensions) >> bpf_core_enum_value(enum skb_ext_id, SKB_EXT_SEC_PATH) & 1;
}

static __always_inline bool is_partial(const struct sk_buff *skb)
{
	return BITFIELD(skb, ip_summed) == CHECKSUM_PARTIAL;
}

/*
 * Whether the field of an unfinished checksum lies in the padding. The kernel drops such a frame when
 * it removes the padding (pskb_trim_rcsum). bpf_skb_change_tail used to refuse it. Since Linux 6.1.189
 * it shortens the frame and calls its checksum finished. `bytes` is the length without padding.
 */
static __always_inline bool is_checksum_in_padding(const struct __sk_buff *skb, const struct sk_buff *kernel_skb, __u32 bytes)
{
	__u32 end, linear;

	if (skb->len <= bytes || !is_partial(kernel_skb))
		return false;
	/* Both are counted from the buffer's beginning. */
	end = FIELD(kernel_skb, csum_start) - FIELD(kernel_skb, mac_header) + FIELD(kernel_skb, csum_offset) + sizeof(__u16);
	linear = skb->len - FIELD(kernel_skb, data_len);
	return end > (linear < bytes ? linear : bytes);
}

/* XDP has no sk_buff that says so. Whether the checksum's field holds the sum of the pseudo header only, as the sender leaves it to a card; a
 * tunnel's packet within may be such a one. */
static __always_inline bool may_be_partial(const struct frame *f, int family)
{
	__u64 sum = (__u64)bpf_htons(f->length - (family == AF_INET ? IP4_BYTES : IP6_BYTES)) + bpf_htons(f->key.proto);

	sum += (__u64)f->key.saddr[0] + f->key.daddr[0];
	if (family == AF_INET6)
		sum += (__u64)f->key.saddr[1] + f->key.saddr[2] + f->key.saddr[3] + f->key.daddr[1] + f->key.daddr[2] +
		       f->key.daddr[3];
	return f->check == fold(sum) || f->tunnel;
}

/* The headers that each packet of a segmentation frame has: a tunnel's are all up to the end of the inner transport's. */
static __always_inline __u32 segment_headers(struct __sk_buff *skb, const struct sk_buff *kernel_skb, const struct frame *f)
{
	__u32 inner, header;
	__u8 offset = 0;

	if (!BITFIELD(kernel_skb, encapsulation))
		return f->headers;
	inner = FIELD(kernel_skb, inner_transport_header) - FIELD(kernel_skb, network_header);
	bpf_skb_load_bytes(skb, ETH_HLEN + inner + offsetof(struct transport, tcp.offset), &offset, sizeof(offset));
	/* UDP's is shorter than any of TCP's: what is taken for TCP then is judged too long by a few bytes. */
	header = (offset >> 4) * 4;
	return inner + (header > TCP_BYTES ? header : TCP_BYTES);
}

/* How long the flow was not used. */
static __always_inline __u64 unused_ns(const struct flow *flow, __u64 now)
{
	return (__u64)((__u32)(now >> USED_SHIFT) - flow->used) << USED_SHIFT;
}

/* Notes that the flow was used, as seldom as does: see `used`. */
static __always_inline void note_use(struct flow *flow, __u64 now)
{
	if (unused_ns(flow, now) >= setting(SET_LEASE_NS) / 16)
		flow->used = now >> USED_SHIFT;
}

/* Whether a veth would take the packet: its driver checks the other end's MTU, with room for a tag (is_skb_forwardable), and
 * bpf_redirect_peer does not. */
static __always_inline bool fits_peer(const struct flow *flow, __u32 length)
{
	const struct net_device *peer = READ_ONLY(struct net_device, TYPE_NET_DEVICE, flow->peer);

	return length <= FIELD(peer, mtu) + VLAN_HLEN;
}

static __always_inline void wish(const struct nf_conn *conn, int family, __u64 address, enum wish_kind kind)
{
	/* Entries lie further apart than there are kinds. */
	__u64 key = address + kind, now = bpf_ktime_get_coarse_ns(), *last = bpf_map_lookup_elem(&wished, &key);
	const struct nf_conntrack_tuple *t = &conn->tuplehash[0].tuple;
	struct wish *w;

	if (last && now - *last < WISH_NS)
		return;
	bpf_map_update_elem(&wished, &key, &now, BPF_ANY);
	w = bpf_ringbuf_reserve(&wishes, sizeof(*w), 0);
	if (!w)
		return;
	w->saddr[0] = t->src.u3.all[0];
	w->saddr[1] = t->src.u3.all[1];
	w->saddr[2] = t->src.u3.all[2];
	w->saddr[3] = t->src.u3.all[3];
	w->daddr[0] = t->dst.u3.all[0];
	w->daddr[1] = t->dst.u3.all[1];
	w->daddr[2] = t->dst.u3.all[2];
	w->daddr[3] = t->dst.u3.all[3];
	w->ports = pair(t->src.u.all, t->dst.u.all);
	w->family = family;
	w->proto = t->dst.protonum;
	w->kind = kind;
	bpf_ringbuf_submit(w, 0);
}

static __always_inline enum standing classify(struct frame *f, int family)
{
	__u64 exact = 0;
	enum standing standing = classify_end(f, family, &exact);

	if (exact) {
		const struct nf_conn *conn = connection(exact);

		if (!IS_MISSING(conn))
			wish(conn, family, exact, WISH_CLOSED);
	}
	return standing;
}

static __always_inline int drop(struct __sk_buff *skb, const struct frame *f, int family)
{
	__u32 iif = skb->ifindex;
	struct port *port = bpf_map_lookup_elem(&ports, &iif);
	struct counters *c = port ? counters_of(port->slot) : NULL;

	if (c)
		c->packets[DROPPED_WINDOW]++;
	if (is_observed_now()) {
		tell(f, family, 0, KIND_SEEN, DROPPED_WINDOW);
		capture(skb, POINT_IN, DROPPED_WINDOW, 0);
	}
	return TCX_DROP;
}

/* Whether `detach` injected the frame (src/retrack.rs): then conntrack has seen it, which is all that it is for. Guests cannot guess the nonce. */
static __always_inline bool is_injected(struct __sk_buff *skb)
{
	__u32 header = skb->protocol == bpf_htons(ETH_P_IP) ? IP4_BYTES : IP6_BYTES;
	__u64 nonce = setting(SET_RETRACK);
	struct {
		__u16 kind_and_length;
		__u32 low, high;
	} __attribute__((packed)) option;

	if (!nonce || bpf_skb_load_bytes(skb, ETH_HLEN + header + TCP_BYTES, &option, sizeof(option)))
		return false;
	return option.kind_and_length == bpf_htons(RETRACK_OPTION) && option.low == (__u32)nonce && option.high == nonce >> 32;
}

static __always_inline int take(struct __sk_buff *skb, int family)
{
	struct frame f = {};
	struct flow *flow;
	struct sk_buff *kernel_skb;
	struct counters *c;
	__u32 segments, bytes;
	__u64 now;
	enum standing standing = STANDING_UP;
	bool observed;
	int verdict;

	f.key.iif = skb->ifindex;
	kernel_skb = kernel_context(skb);
	if (skb->pkt_type != PACKET_HOST)
		return up(skb, &f, family, UP_NOT_OURS);
	if (is_decrypted(kernel_skb))
		return up(skb, &f, family, UP_DECRYPTED);
	if (skb->vlan_present)
		return up(skb, &f, family, UP_VLAN);
	verdict = parse((void *)(long)skb->data, (void *)(long)skb->data_end, family, skb->len, &f);
	if (verdict == SHORT) {
		__u32 want = ETH_HLEN + IP6_BYTES + TCP_BYTES;

		if (bpf_skb_pull_data(skb, skb->len < want ? skb->len : want))
			return up(skb, &f, family, UP_FAILED);
		verdict = parse((void *)(long)skb->data, (void *)(long)skb->data_end, family, skb->len, &f);
		if (verdict == SHORT)
			verdict = UP_MALFORMED;
	}
	if (verdict == UP_HANDSHAKE && is_valid_end(f.tcp_flags)) {
		standing = classify(&f, family);
		if (standing == STANDING_DROP)
			return drop(skb, &f, family);
		if (standing != STANDING_UP)
			verdict = 0;
	}
	if (verdict)
		return up(skb, &f, family, verdict);
	/* Its numbers are not to be taken for those of a host. */
	if (is_injected(skb))
		return up(skb, &f, family, UP_HANDSHAKE);
	flow = look_up(&f.key, family);
	if (!flow && standing == STANDING_IGNORE)
		return drop(skb, &f, family);
	if (!flow) {
		if (standing == STANDING_UP && f.key.proto == IPPROTO_TCP)
			note_elsewhere(&f, family);
		return up(skb, &f, family, UP_NO_FLOW);
	}
	if (standing == STANDING_UP)
		note_sequence(flow, &f);
	now = bpf_ktime_get_coarse_ns();
	verdict = holds(flow, &f, family, FIELD(FIELD(kernel_skb, dev), nd_net.net), now);
	/* The kernel must not see what is to leave its entry alone, so what it did last is done once more. */
	if (standing == STANDING_IGNORE && verdict == UP_LEASE)
		verdict = 0;
	if (verdict == UP_LEASE) {
		/* A lease that no frame makes use of costs more than it gives: such a flow is learned again with its next quick frame. */
		f.slow = unused_ns(flow, now) >= setting(SET_LEASE_NS);
		flow->used = now >> USED_SHIFT;
	}
	if (verdict && standing == STANDING_IGNORE)
		return drop(skb, &f, family);
	if (verdict)
		return up(skb, &f, family, verdict);
	segments = skb->gso_size;
	if ((segments ? segments + segment_headers(skb, kernel_skb, &f) : f.length) > flow->mtu)
		return up(skb, &f, family, UP_MTU);
	if (flow->flags & FLOW_PEER && !segments && !fits_peer(flow, f.length))
		return up(skb, &f, family, UP_MTU);
	if (differs_in_fields(flow, &f, family, skb->mark) || has_priority(skb, family))
		return standing == STANDING_IGNORE ? drop(skb, &f, family) : up(skb, &f, family, UP_FIELDS);
	/* A segmentation frame has no padding; one that says so is for the kernel to judge. */
	if (segments && skb->len != ETH_HLEN + f.length)
		return up(skb, &f, family, UP_MALFORMED);
	bytes = ETH_HLEN + f.length;
	if (is_checksum_in_padding(skb, kernel_skb, bytes))
		return up(skb, &f, family, UP_MALFORMED);
	observed = is_observed(now);
	if (observed)
		capture(skb, POINT_IN, flow->flags & FLOW_PEER ? TAKEN_PEER : TAKEN_TCX, flow->oif);
	verdict = alter(skb, flow, &f, family);
	if (verdict)
		return up(skb, &f, family, verdict);
	skb->mark = flow->mark;
	skb->priority = flow->priority;
	note_use(flow, now);
	c = counters_of(flow->slot);
	if (c) {
		c->taken_bytes += bytes;
		if (segments)
			c->taken_large++;
		if (flow->flags & FLOW_XDP) {
			if (is_partial(kernel_skb) || may_be_partial(&f, family))
				c->taken_partial++;
			else
				c->taken_able++;
		}
		if (flow->flags & FLOW_PEER)
			c->packets[TAKEN_PEER]++;
		else
			c->packets[TAKEN_TCX]++;
	}
	if (observed) {
		tell(&f, family, flow->oif, KIND_SEEN, flow->flags & FLOW_PEER ? TAKEN_PEER : TAKEN_TCX);
		capture(skb, POINT_OUT, flow->flags & FLOW_PEER ? TAKEN_PEER : TAKEN_TCX, flow->oif);
	}
	if (flow->flags & FLOW_PEER)
		return bpf_redirect_peer(flow->oif, 0);
	skb->cb[0] = OURS_0;
	skb->cb[1] = OURS_1;
	return bpf_redirect(flow->oif, 0);
}

SEC("classifier")
int tcx_in(struct __sk_buff *skb)
{
	struct frame f = {};

	if (skb->protocol == bpf_htons(ETH_P_IP))
		return take(skb, AF_INET);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return take(skb, AF_INET6);
	f.key.iif = skb->ifindex;
	return up(skb, &f, 0, UP_PROTOCOL);
}

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

/* Whether the controller is at work: without it nothing settles what conntrack holds of a TCP connection. */
static __always_inline bool has_controller(__u64 now)
{
#pragma unroll
	for (__u32 n = 0; n < BEATS; n++) {
		__u32 index = n;
		__u64 *beat = bpf_map_lookup_elem(&beats, &index);

		/* The beat may be later than the coarse clock. */
		if (!beat || now > *beat + SILENT_NS)
			return false;
	}
	return true;
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
	__u32 iif = p->key.iif, oif = skb->ifindex, mtu;
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
	/* XDP neither queues nor marks, refuses what is longer than the interface's MTU, and what captures at the output would miss it, as would programs that see frames before tcx_in does. */
	if (output->flags & PORT_XDP_OUT && !(in->flags & PORT_PRECEDED) && !(output->flags & PORT_CAPTURED) && !(flow->flags & FLOW_PEER) && !skb->mark &&
	    !p->mark && flow->mtu <= FIELD(dev, mtu))
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
	if (is_judged(net, flow->rules_gen, in->slot, output->slot, &p->key, &out->key, world_of(family, p->key.proto, nfct)))
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

static __always_inline void watch(struct __sk_buff *skb, int family)
{
	__u64 address = number_of(kernel_context(skb));
	__u32 slot = pending_slot(address);
	struct pending *p = bpf_map_lookup_elem(&pending, &slot);
	__u64 now = bpf_ktime_get_coarse_ns();
	struct frame f = {};
	struct counters *c;
	struct port *port;
	bool shortened = false;
	__u32 iif;
	int refused, verdict;

	if (!p || p->skb != address || p->key.iif != skb->ingress_ifindex || now - p->at_ns > PENDING_NS)
		return;
	p->skb = 0;
	if (skb->vlan_present)
		return;
	/* What the kernel cuts into fragments, or has given options, is not parsed, and so not learned. That the hops end
	 * with the next router is its business: TTL is what is looked at last. */
	verdict = parse((void *)(long)skb->data, (void *)(long)skb->data_end, family, skb->len, &f);
	if (verdict && verdict != UP_TTL)
		return;
	refused = learn(skb, p, &f, family, now, &shortened);
	iif = p->key.iif;
	port = bpf_map_lookup_elem(&ports, &iif);
	c = port ? counters_of(port->slot) : NULL;
	if (c) {
		if (refused) {
			c->unlearned[masked(refused - 1, UNLEARNED)]++;
			c->unlearned_ns[masked(refused - 1, UNLEARNED)] = now;
		} else {
			c->learned++;
		}
		if (!refused && shortened) {
			c->shortened++;
			c->shortened_ns = now;
		}
	}
	if (is_observed(now)) {
		/* As it came in: what rules made of it is another flow to an observer. */
		f.key = p->key;
		tell(&f, family, skb->ifindex, refused ? KIND_REFUSED : KIND_LEARNED, refused ? refused - 1 : 0);
	}
}

/* Run by `detach` alone (BPF_PROG_TEST_RUN): the frame comes in at the interface whose number is in its source address. */
SEC("classifier")
int inject(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data;

	if (data + ETH_HLEN > (void *)(long)skb->data_end)
		return -1;
	return bpf_clone_redirect(skb, bpf_ntohl(*(__be32 *)(data + 8)), BPF_F_INGRESS);
}

SEC("classifier")
int tcx_out(struct __sk_buff *skb)
{
	if (skb->cb[0] == OURS_0 && skb->cb[1] == OURS_1)
		return TCX_NEXT;
	if (is_observed_now())
		capture(skb, POINT_KERNEL, 0, skb->ingress_ifindex);
	if (!skb->ingress_ifindex)
		return TCX_NEXT;
	if (is_injected(skb))
		return TCX_DROP;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		watch(skb, AF_INET);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		watch(skb, AF_INET6);
	return TCX_NEXT;
}

static __always_inline int hand_on(const struct flow *flow, __u32 why)
{
	struct counters *c = counters_of(flow->slot);

	if (c)
		c->packets[masked(why, VERDICTS)]++;
	return XDP_PASS;
}

/* Whether the program runs on an sk_buff, as for what a tap gets as a segmentation frame or from a writer that blocks: those have queues of
 * their own in the device, which no driver uses. Of the offloads of an sk_buff nothing is seen here. */
static __always_inline bool is_generic(const struct xdp_rxq_info *rxq, const struct net_device *dev)
{
	return (__u64)rxq - (__u64)FIELD(dev, _rx) < (__u64)FIELD(dev, num_rx_queues) * bpf_core_type_size(struct netdev_rx_queue);
}

static __always_inline int take_raw(struct xdp_md *ctx, int family)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 header = family == AF_INET ? IP4_BYTES : IP6_BYTES, bytes = end - data, padding;
	struct xdp_buff *buff = kernel_context(ctx);
	struct xdp_rxq_info *rxq = FIELD(buff, rxq);
	struct net_device *dev = FIELD(rxq, dev);
	const __u16 *mac, *known;
	struct transport *t;
	struct counters *c;
	struct frame f = {};
	struct flow *flow;
	bool observed;
	__u64 now;

	f.key.iif = ctx->ingress_ifindex;
	/* tcx judges again, and counts, all frames that are not taken here. */
	if (parse(data, end, family, bytes, &f))
		return XDP_PASS;
	flow = look_up(&f.key, family);
	if (!flow)
		return XDP_PASS;
	now = bpf_ktime_get_coarse_ns();
	if (holds(flow, &f, family, FIELD(dev, nd_net.net), now))
		return XDP_PASS;
	if (differs_in_fields(flow, &f, family, 0))
		return XDP_PASS;
	mac = data;
	known = (const __u16 *)flow->in_mac;
	if (data + ETH_HLEN > end || mac[0] != known[0] || mac[1] != known[1] || mac[2] != known[2])
		return XDP_PASS;
	if (!(flow->flags & FLOW_XDP))
		return hand_on(flow, HANDED_OUTPUT);
	if (f.length > flow->mtu || is_generic(rxq, dev))
		return hand_on(flow, HANDED_LARGE);
	/* One in 65536 whole frames looks so too; it takes the slower way. */
	if (flow->flags & FLOW_PARTIAL || may_be_partial(&f, family))
		return hand_on(flow, HANDED_PARTIAL);
	if ((__u64)FIELD(dev, ptype_all.next) != (__u64)__builtin_preserve_access_index(&dev->ptype_all))
		return hand_on(flow, HANDED_CAPTURE);
	observed = is_observed(now);
	if (observed)
		capture_raw(ctx, POINT_IN, flow->oif);
	padding = bytes - ETH_HLEN - f.length;
	if (padding) {
		if (bpf_xdp_adjust_tail(ctx, -(int)padding))
			return XDP_PASS;
		data = (void *)(long)ctx->data;
		end = (void *)(long)ctx->data_end;
	}
	t = data + ETH_HLEN + header;
	if ((void *)t + (f.key.proto == IPPROTO_TCP ? TCP_BYTES : UDP_BYTES) > end)
		return XDP_PASS;
	if (flow->flags & FLOW_NAT) {
		__u32 in_addresses = f.key.proto == IPPROTO_ICMP ? 0 : flow->addresses_diff;
		__u32 check = ~fold((__u64)(__u16)~f.check + in_addresses + flow->ports_diff);

		translate(data + ETH_HLEN, t, flow, f.key.proto, family);
		if (f.key.proto == IPPROTO_TCP) {
			/* Once more for the verifier, which has forgotten which of the two it is. */
			if ((void *)t + TCP_BYTES > end)
				return XDP_ABORTED;
			t->tcp.check = check;
		} else if (is_icmp(f.key.proto)) {
			((struct echo *)t)->check = check;
		} else if (f.check) {
			t->udp.check = (__u16)check ? check : 0xffff;
		}
	}
	count_hop(data + ETH_HLEN, family);
	__builtin_memcpy(data, flow->mac, sizeof(flow->mac));
	note_use(flow, now);
	note_sequence(flow, &f);
	c = counters_of(flow->slot);
	if (c) {
		c->packets[TAKEN_XDP]++;
		c->taken_bytes += ETH_HLEN + f.length;
	}
	if (observed) {
		tell(&f, family, flow->oif, KIND_SEEN, TAKEN_XDP);
		capture_raw(ctx, POINT_OUT, flow->oif);
	}
	return bpf_redirect(flow->oif, 0);
}

SEC("xdp")
int xdp_in(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__be16 kind;

	if (data + ETH_HLEN > end)
		return XDP_PASS;
	kind = *(__be16 *)(data + 12);
	if (kind == bpf_htons(ETH_P_IP))
		return take_raw(ctx, AF_INET);
	if (kind == bpf_htons(ETH_P_IPV6))
		return take_raw(ctx, AF_INET6);
	return XDP_PASS;
}

/* The kernel gives helpers and types of its own to programs under its licence only. */
char licence[] SEC("license") = "GPL";
