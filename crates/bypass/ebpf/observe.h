/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * What `trace`, `flows` and `capture` see of frames. Nothing here runs, and one word is compared with the clock, while none of them does.
 *
 * `capture` and `capture_raw` are functions of their own, which the verifier checks once: written out at each place where they are
 * called, they would make the programs several times as long. They look at the frame by themselves, since what is captured need not be
 * of the kind that may be taken. Frames go into perf buffers, which the command that captures makes: while none runs there is no
 * memory for them, and with its end, however it ends, they are gone.
 */
#ifndef TOMBOLO_OBSERVE_H
#define TOMBOLO_OBSERVE_H

#include "packet.h"

static __always_inline struct counters *counters_of(__u32 slot)
{
	return bpf_map_lookup_elem(&counters, &slot);
}

/* An index below `size`, in a way that the compiler cannot reason away and the verifier sees. */
static __always_inline __u32 masked(__u32 index, __u32 size)
{
	asm volatile("" : "+r"(index));
	return index & (size - 1);
}

/* What `tell` reports. */
enum kind {
	KIND_SEEN,	/* code: enum verdict */
	KIND_LEARNED,
	KIND_REFUSED,	/* code: enum unlearned */
};

/* Whether `trace`, `flows` or `capture` asks for each frame now: one word for all three. */
static __always_inline bool is_observed(__u64 now)
{
	return now < setting(SET_OBSERVED_NS);
}

/* The same where the time is not known yet: the clock is read only where somebody has asked. */
static __always_inline bool is_observed_now(void)
{
	__u64 until = setting(SET_OBSERVED_NS);

	return until && bpf_ktime_get_coarse_ns() < until;
}

/* Adds a frame to its flow's usage. Learned or refused: the same frame was counted when it was seen. */
static __always_inline void account(const struct frame *f, int family, __u32 oif, enum kind kind, __u8 code)
{
	static const struct usage none;
	struct key6 key = f->key;
	struct usage *u;

	key.zero = family;
	u = bpf_map_lookup_elem(&usages, &key);
	if (!u) {
		bpf_map_update_elem(&usages, &key, &none, BPF_NOEXIST);
		u = bpf_map_lookup_elem(&usages, &key);
		if (!u)
			return;
	}
	if (oif)
		u->oif = oif;
	if (kind != KIND_SEEN) {
		u->refused = kind == KIND_REFUSED ? code + 1 : 0;
	} else if (code <= TAKEN_XDP) {
		/* A flow's frames may come on several CPUs. */
		__sync_fetch_and_add(&u->taken_packets, 1);
		__sync_fetch_and_add(&u->taken_bytes, ETH_HLEN + f->length);
		u->taken_by = code + 1;
	} else {
		__sync_fetch_and_add(&u->passed_packets, 1);
		__sync_fetch_and_add(&u->passed_bytes, ETH_HLEN + f->length);
		u->passed_for = code + 1;
	}
}

static __always_inline void tell(const struct frame *f, int family, __u32 oif, enum kind kind, __u8 code)
{
	__u64 second = bpf_ktime_get_coarse_ns() / 1000000000;
	struct event *e;
	__u32 zero = 0;
	__u64 *n;

	if (second <= setting(SET_ACCOUNT))
		account(f, family, oif, kind, code);
	if (!setting(SET_TRACE) || second > setting(SET_TRACE))
		return;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e) {
		n = bpf_map_lookup_elem(&lost, &zero);
		if (n)
			(*n)++;
		return;
	}
	e->at_ns = bpf_ktime_get_ns();
	e->key = f->key;
	e->oif = oif;
	e->length = f->length;
	e->family = family;
	e->kind = kind;
	e->code = code;
	e->pad = 0;
	e->pad2 = 0;
	bpf_ringbuf_submit(e, 0);
}

/* Whether an address and port are those of one end of the filter. Not unrolled: that takes more stack than there is. */
static __always_inline bool is_end(const struct end *end, const __u32 *address, __u16 port)
{
	__u32 differs = end->port && end->port != port;

#pragma clang loop unroll(disable)
	for (int n = 0; n < 4; n++)
		differs |= (address[n] ^ end->address[n]) & end->mask[n];
	return !differs;
}

static __always_inline bool is_wanted(const struct wanted *w, const struct ends *e, __u32 interface)
{
	__u32 proto = e->proto == IPPROTO_ICMPV6 ? IPPROTO_ICMP : e->proto;
	__u16 from = first_of(e->ports), to = second_of(e->ports);

	if ((w->interface && w->interface != interface) || (w->family && w->family != e->family) || (w->proto && w->proto != proto))
		return false;
	return (is_end(&w->ends[0], e->source, from) && is_end(&w->ends[1], e->destination, to)) ||
	       (is_end(&w->ends[1], e->source, from) && is_end(&w->ends[0], e->destination, to));
}

/* The filter, if a capture runs that wants frames of this interface. */
static __always_inline const struct wanted *capturing(__u32 interface)
{
	__u32 zero = 0;
	const struct wanted *w = bpf_map_lookup_elem(&wanted, &zero);

	if (!w || (w->interface && w->interface != interface))
		return NULL;
	return bpf_ktime_get_coarse_ns() / 1000000000 > setting(SET_CAPTURE) ? NULL : w;
}

/* Writes the record, and behind it the first bytes of the frame of `context`. */
static __always_inline void put(void *context, struct captured *r, const struct wanted *w)
{
	__u32 interface = r->interface;
	struct port *port = bpf_map_lookup_elem(&ports, &interface);
	struct counters *c = port ? counters_of(port->slot) : NULL;

	if (!c)
		return;
	r->at_ns = bpf_ktime_get_ns();
	r->kept = r->length < w->snap ? r->length : w->snap;
	c->captured++;
	if (bpf_perf_event_output(context, &captures, BPF_F_CURRENT_CPU | (__u64)r->kept << 32, r, sizeof(*r)))
		c->capture_lost++;
}

/* Captures a frame, if a capture asks for it: as it came in (`other`: where it goes out, 0: not known), or as it goes out (`other`:
 * POINT_OUT: where; POINT_KERNEL: where it came in). */
__noinline int capture(struct __sk_buff *skb, __u32 point, __u32 code, __u32 other)
{
	__u32 interface = point == POINT_OUT ? other : skb->ifindex, at = 0;
	const struct wanted *w = capturing(interface);
	struct scratch *s = scratch_here();
	struct captured *r;
	struct ends *e;

	if (!w || !s)
		return 0;
	r = &s->record;
	e = &s->ends;
	__builtin_memset(e, 0, sizeof(*e));
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct ip4 *ip = (struct ip4 *)s->header;

		if (!bpf_skb_load_bytes(skb, ETH_HLEN, ip, sizeof(*ip))) {
			e->family = AF_INET;
			e->proto = ip->proto;
			e->source[0] = ip->saddr;
			e->destination[0] = ip->daddr;
			/* Only the first fragment has ports. */
			if (!(ip->fragment & bpf_htons(IP4_OFFSET)))
				at = ETH_HLEN + (ip->version_ihl & 15) * 4;
		}
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ip6 *ip = (struct ip6 *)s->header;

		if (!bpf_skb_load_bytes(skb, ETH_HLEN, ip, sizeof(*ip))) {
			e->family = AF_INET6;
			e->proto = ip->proto;
			__builtin_memcpy(e->source, ip->saddr, sizeof(ip->saddr));
			__builtin_memcpy(e->destination, ip->daddr, sizeof(ip->daddr));
			at = ETH_HLEN + IP6_BYTES;
		}
	}
	if (at && (e->proto == IPPROTO_TCP || e->proto == IPPROTO_UDP))
		bpf_skb_load_bytes(skb, at, &e->ports, sizeof(e->ports));
	if (!is_wanted(w, e, interface))
		return 0;
	r->interface = interface;
	r->other = point == POINT_OUT ? skb->ifindex : other;
	r->length = skb->len;
	r->segment = skb->gso_size;
	r->has_tag = !!skb->vlan_present;
	r->tag = skb->vlan_tci;
	r->point = point;
	r->code = code;
	r->pad = 0;
	put(skb, r, w);
	return 0;
}

/* The same for a frame that XDP takes: its headers are as `parse` wants them. */
__noinline int capture_raw(struct xdp_md *ctx, __u32 point, __u32 output)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 input = ctx->ingress_ifindex, interface = point == POINT_OUT ? output : input;
	const struct wanted *w = capturing(interface);
	struct scratch *s = scratch_here();
	struct captured *r;
	struct ends *e;

	if (!w || !s || data + ETH_HLEN + IP4_BYTES + sizeof(e->ports) > end)
		return 0;
	r = &s->record;
	e = &s->ends;
	__builtin_memset(e, 0, sizeof(*e));
	if (*(__be16 *)(data + 12) == bpf_htons(ETH_P_IP)) {
		const struct ip4 *ip = data + ETH_HLEN;

		e->family = AF_INET;
		e->proto = ip->proto;
		e->source[0] = ip->saddr;
		e->destination[0] = ip->daddr;
		e->ports = *(__u32 *)(ip + 1);
	} else {
		const struct ip6 *ip = data + ETH_HLEN;

		if (data + ETH_HLEN + IP6_BYTES + sizeof(e->ports) > end)
			return 0;
		e->family = AF_INET6;
		e->proto = ip->proto;
		__builtin_memcpy(e->source, ip->saddr, sizeof(ip->saddr));
		__builtin_memcpy(e->destination, ip->daddr, sizeof(ip->daddr));
		e->ports = *(__u32 *)(ip + 1);
	}
	if (is_icmp(e->proto))
		e->ports = 0;
	if (!is_wanted(w, e, interface))
		return 0;
	__builtin_memset(r, 0, sizeof(*r));
	r->interface = interface;
	r->other = point == POINT_OUT ? input : output;
	r->length = end - data;
	r->point = point;
	r->code = TAKEN_XDP;
	put(ctx, r, w);
	return 0;
}

#endif
