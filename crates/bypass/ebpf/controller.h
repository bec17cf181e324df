/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * What the programs and the controller (src/controller.rs) tell each other: until when frames are taken, whether the controller is at
 * work, and what it is to do with a connection's entry.
 */
#ifndef TOMBOLO_CONTROLLER_H
#define TOMBOLO_CONTROLLER_H

#include "packet.h"

/* How often one connection is wished for. */
#define WISH_NS 50000000ULL

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

/* Asks the controller to alter the entry of a connection, which is at this address. */
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

#endif
