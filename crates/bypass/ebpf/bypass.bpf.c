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
#include "learn.h"
#include "observe.h"

#include <linux/pkt_cls.h>

/* In skb->cb of what we redirect, so that the egress program does not take it for the kernel's. */
#define OURS_0 0x746f6d62
#define OURS_1 0x6f6c6f21
/* A note older than this is of another frame at the same address. Coarse clock: a few milliseconds at least. */
#define PENDING_NS 100000000ULL
/* Kind and length of the TCP option that the frames of `detach` have first: one for experiments (RFC 4727 section 7.2), with the nonce. */
#define RETRACK_OPTION 0xfd0a

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

/* Whether a frame of the flow was seen not long ago. From now on it was, unless another flow has its place: then a coin decides which of
 * the two keeps it. Without the coin two flows of one place, frame by frame in turn, would never be seen. */
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

/* Decides what becomes of a frame: an enum verdict. `by` is set only where the frame is taken; then its headers are altered, and it is
 * counted and captured. */
static __always_inline int attempt(struct __sk_buff *skb, struct frame *f, int family, struct flow **by)
{
	struct flow *flow;
	struct sk_buff *kernel_skb;
	struct counters *c;
	__u32 segments, bytes;
	__u64 now;
	enum standing standing = STANDING_UP;
	bool observed;
	int verdict;

	f->key.iif = skb->ifindex;
	kernel_skb = kernel_context(skb);
	if (skb->pkt_type != PACKET_HOST)
		return UP_NOT_OURS;
	if (is_decrypted(kernel_skb))
		return UP_DECRYPTED;
	if (skb->vlan_present)
		return UP_VLAN;
	verdict = parse((void *)(long)skb->data, (void *)(long)skb->data_end, family, skb->len, f);
	if (verdict == SHORT) {
		__u32 want = ETH_HLEN + IP6_BYTES + TCP_BYTES;

		if (bpf_skb_pull_data(skb, skb->len < want ? skb->len : want))
			return UP_FAILED;
		verdict = parse((void *)(long)skb->data, (void *)(long)skb->data_end, family, skb->len, f);
		if (verdict == SHORT)
			verdict = UP_MALFORMED;
	}
	if (verdict == UP_HANDSHAKE && is_valid_end(f->tcp_flags)) {
		standing = classify(f, family);
		if (standing == STANDING_DROP)
			return DROPPED_WINDOW;
		if (standing != STANDING_UP)
			verdict = 0;
	}
	if (verdict)
		return verdict;
	/* Its numbers are not to be taken for those of a host. */
	if (is_injected(skb))
		return UP_HANDSHAKE;
	flow = look_up(&f->key, family);
	if (!flow && standing == STANDING_IGNORE)
		return DROPPED_WINDOW;
	if (!flow) {
		if (standing == STANDING_UP && f->key.proto == IPPROTO_TCP)
			note_elsewhere(f, family);
		return UP_NO_FLOW;
	}
	if (standing == STANDING_UP)
		note_sequence(flow, f);
	now = bpf_ktime_get_coarse_ns();
	verdict = holds(flow, f, family, FIELD(FIELD(kernel_skb, dev), nd_net.net), now);
	/* The kernel must not see what is to leave its entry alone, so what it did last is done once more. */
	if (standing == STANDING_IGNORE && verdict == UP_LEASE)
		verdict = 0;
	if (verdict == UP_LEASE) {
		/* A lease that no frame makes use of costs more than it gives: such a flow is learned again with its next quick frame. */
		f->slow = unused_ns(flow, now) >= setting(SET_LEASE_NS);
		flow->used = now >> USED_SHIFT;
	}
	if (verdict && standing == STANDING_IGNORE)
		return DROPPED_WINDOW;
	if (verdict)
		return verdict;
	segments = skb->gso_size;
	if ((segments ? segments + segment_headers(skb, kernel_skb, f) : f->length) > flow->mtu)
		return UP_MTU;
	if (flow->flags & FLOW_PEER && !segments && !fits_peer(flow, f->length))
		return UP_MTU;
	if (differs_in_fields(flow, f, family, skb->mark) || has_priority(skb, family))
		return standing == STANDING_IGNORE ? DROPPED_WINDOW : UP_FIELDS;
	/* A segmentation frame has no padding; one that says so is for the kernel to judge. */
	if (segments && skb->len != ETH_HLEN + f->length)
		return UP_MALFORMED;
	bytes = ETH_HLEN + f->length;
	if (is_checksum_in_padding(skb, kernel_skb, bytes))
		return UP_MALFORMED;
	observed = is_observed(now);
	if (observed)
		capture(skb, POINT_IN, flow->flags & FLOW_PEER ? TAKEN_PEER : TAKEN_TCX, flow->oif);
	verdict = alter(skb, flow, f, family);
	if (verdict)
		return verdict;
	skb->mark = flow->mark;
	skb->priority = flow->priority;
	note_use(flow, now);
	c = counters_of(flow->slot);
	if (c) {
		c->taken_bytes += bytes;
		if (segments)
			c->taken_large++;
		if (flow->flags & FLOW_XDP) {
			if (is_partial(kernel_skb) || may_be_partial(f, family))
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
		tell(f, family, flow->oif, KIND_SEEN, flow->flags & FLOW_PEER ? TAKEN_PEER : TAKEN_TCX);
		capture(skb, POINT_OUT, flow->flags & FLOW_PEER ? TAKEN_PEER : TAKEN_TCX, flow->oif);
	}
	*by = flow;
	return flow->flags & FLOW_PEER ? TAKEN_PEER : TAKEN_TCX;
}

/* Does what was decided: the only place where a frame goes up, out or away. */
static __always_inline int take(struct __sk_buff *skb, int family)
{
	struct frame f = {};
	struct flow *flow = NULL;
	int verdict = attempt(skb, &f, family, &flow);

	if (verdict == DROPPED_WINDOW)
		return drop(skb, &f, family);
	if (!flow)
		return up(skb, &f, family, verdict);
	if (verdict == TAKEN_PEER)
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
