/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * TCP's sequence numbers, where conntrack cannot follow them.
 *
 * The kernel sees one frame per lease of a connection that is taken, so it is told to accept frames outside of its window ("liberal").
 * Then any FIN or RST would end the connection's entry, also one that somebody guesses. So each flow notes how far its own
 * direction has come, in the cache line that is written anyway, and a FIN or RST is judged here before the kernel sees it,
 * by what the other direction has acknowledged and the window that it offers.
 *
 * A frame is noted only if its numbers are near those of the frames before it, so that guessed data does not move them. Where
 * they begin is sure only while the kernel itself was in step, or once both directions agree; nothing is judged before that.
 */
#ifndef TOMBOLO_SEQUENCE_H
#define TOMBOLO_SEQUENCE_H

#include "validate.h"

/* The least window to judge by: some stacks send a little more than they were offered (conntrack's MAXACKWINCONST). */
#define LEAST_WINDOW 66000
/* How far the numbers of two frames in a row may be apart: a receiver whose program does not read acknowledges a whole window at once. Both
 * numbers of a frame are to be near, so of guessed frames one in 16384 moves them, and by no more than that. */
#define NEAR (1 << 24)

static __always_inline bool is_before(__u32 a, __u32 b)
{
	return (__s32)(a - b) < 0;
}

static __always_inline bool is_within(__u32 a, __u32 b, __u32 distance)
{
	return a - b + distance <= 2 * distance;
}

static __always_inline bool is_near(const struct flow *flow, __u32 end, __u32 ack)
{
	return is_within(end, flow->end, NEAR) && is_within(ack, flow->ack, NEAR);
}

/* Notes a frame that came, taken or not: the kernel has it then, and the other direction answers it. */
static __always_inline void note_sequence(struct flow *flow, const struct frame *f)
{
	if (!(flow->sequence & SEQUENCE_TRACKED) || (flow->sequence & SEQUENCE_SURE && !is_near(flow, f->end, f->ack)))
		return;
	if (!(flow->sequence & SEQUENCE_SURE) || is_before(flow->end, f->end))
		flow->end = f->end;
	if (!(flow->sequence & SEQUENCE_SURE) || !is_before(f->ack, flow->ack)) {
		if (flow->ack != f->ack)
			flow->ack = f->ack;
		if (flow->window != f->window)
			flow->window = f->window;
	}
}

/* How far a direction has come, over all its flows. */
struct progress {
	__u32 end;
	__u32 ack;
	__u32 window;	/* in bytes */
	bool is_known;
};

/* Adds up the flows of the direction whose frames come in with these addresses and ports. Gives one of them, sure or not. What else is
 * in `tuple` is overwritten: the stack has no room for another one. */
static __always_inline struct flow *progress_of(struct key6 *tuple, int family, struct progress *p)
{
	const struct variants *v;
	struct flow *any = NULL;

	tuple->iif = 0;
	tuple->tos = 0;
	tuple->zero = family;
	v = bpf_map_lookup_elem(&guarded, tuple);
	tuple->zero = 0;

	if (!v)
		return NULL;
#pragma unroll
	for (int n = 0; n < VARIANTS; n++) {
		__u32 window, input = v->input[n];
		struct flow *flow;

		tuple->iif = input >> 8;
		tuple->tos = input;
		flow = input ? look_up(tuple, family) : NULL;
		if (!flow || !(flow->sequence & SEQUENCE_TRACKED))
			continue;
		any = flow;
		if (!(flow->sequence & SEQUENCE_SURE))
			continue;
		window = (__u32)flow->window << (flow->scale & 15);
		if (!p->is_known || is_before(p->end, flow->end))
			p->end = flow->end;
		if (!p->is_known || is_before(p->ack, flow->ack)) {
			p->ack = flow->ack;
			p->window = window;
		} else if (p->ack == flow->ack && window > p->window) {
			p->window = window;
		}
		p->is_known = true;
	}
	return any;
}

/* The addresses and ports of the answers to a flow's frames. */
static __always_inline void answers_of(struct key6 *tuple, const struct flow *flow, int family)
{
	const struct flow6 *flow6 = (const struct flow6 *)flow;

	__builtin_memset(tuple, 0, sizeof(*tuple));
	if (family == AF_INET) {
		tuple->saddr[0] = flow->daddr;
		tuple->daddr[0] = flow->saddr;
	} else {
		__builtin_memcpy(tuple->saddr, flow6->daddr, sizeof(tuple->saddr));
		__builtin_memcpy(tuple->daddr, flow6->saddr, sizeof(tuple->daddr));
	}
	tuple->ports = pair(second_of(flow->ports), first_of(flow->ports));
	tuple->proto = IPPROTO_TCP;
}

/* As the kernel's tcp_in_window has it for connections that it follows. */
enum standing {
	STANDING_UP,	/* right, or not to be judged: the kernel may see it */
	JUDGED_TAKE,	/* right, but the kernel would take it for a stale one: by the flow, if there is one */
	STANDING_IGNORE,	/* old or a little early: it passes, and the connection's entry stays as it is */
	STANDING_DROP,	/* invalid */
};

/* What a frame is that is old or a little early. Linux before 6.1 calls it invalid; its tcp_in_window knows two verdicts. */
static __always_inline enum standing stale(void)
{
	return bpf_core_enum_value_exists(enum nf_ct_tcp_action, NFCT_TCP_IGNORE) ? STANDING_IGNORE : STANDING_DROP;
}

/* In which window a FIN or RST is. */
static __always_inline enum standing place_of(const struct frame *f, const struct progress *own, const struct progress *other)
{
	__u32 last = other->ack + other->window, window = other->window > LEAST_WINDOW ? other->window : LEAST_WINDOW;
	__u32 back = own->window > LEAST_WINDOW ? own->window : LEAST_WINDOW;
	/* Some stacks leave the acknowledgement zero in a RST. */
	bool acknowledges = f->tcp_flags & TCP_ACK && !(f->tcp_flags & TCP_RST && !f->ack);
	bool early = acknowledges && is_before(other->end, f->ack);
	bool late = acknowledges && is_before(f->ack, other->end - back);
	/* How far that direction has come, at least. */
	__u32 sent = own->is_known ? own->end : other->ack;

	/* It goes on exactly where its direction was: it cannot be guessed, and it holds also if the other direction has not been seen for a while. */
	if (own->is_known && f->seq == own->end && (!acknowledges || f->ack == own->ack || (!early && !late)))
		return STANDING_UP;
	/* RFC 5961 section 3.2: none before what was acknowledged. */
	if (f->tcp_flags & TCP_RST && is_before(f->seq, other->ack))
		return STANDING_DROP;
	if (is_before(last, f->seq))
		return f->end - last < window && !early && !late ? stale() : STANDING_DROP;
	if (early)
		return STANDING_DROP;
	return late || is_before(f->end, sent - window) ? stale() : STANDING_UP;
}

/* What is to become of a FIN or RST. `exact` is set for a RST that ends the connection and that the kernel cannot recognise as such. */
static __noinline int classify_end(struct frame *f, int family, __u64 *exact)
{
	struct progress own = {}, other = {};
	const struct nf_conn *conn;
	const struct ip_ct_tcp_state *seen;
	struct key6 tuple = f->key;
	enum standing standing;
	struct flow *flow;

	flow = progress_of(&tuple, family, &own);
	if (!flow)
		return STANDING_UP;
	conn = connection(flow->conn);
	if (IS_MISSING(conn) || (conn->status & STATUS_BITS) != flow->conn_status ||
	    !connection_is(conn, family, flow->direction, &f->key, family == AF_INET ? &flow->saddr : ((struct flow6 *)flow)->saddr,
			   family == AF_INET ? &flow->daddr : ((struct flow6 *)flow)->daddr, flow->ports))
		return STANDING_UP;
	answers_of(&tuple, flow, family);
	progress_of(&tuple, family, &other);
	if (!other.is_known)
		return STANDING_UP;
	standing = place_of(f, &own, &other);
	if (standing != STANDING_UP)
		return standing;
	flow->sequence |= SEQUENCE_ENDING;
	if (!(f->tcp_flags & TCP_RST)) {
		note_sequence(flow, f);
		return STANDING_UP;
	}
	if (conn->proto.tcp.state == TCP_CONNTRACK_ESTABLISHED &&
	    (f->seq == other.ack || f->seq == flow->end || (own.is_known && f->seq == own.end)))
		*exact = flow->conn;
	seen = flow->direction ? &conn->proto.tcp.seen[0] : &conn->proto.tcp.seen[1];
	return is_before(f->seq, seen->td_maxack) ? JUDGED_TAKE : STANDING_UP;
}

/* A frame that no flow is known of may still be of a connection that is taken: with another TOS, or from another interface. */
static __noinline int note_elsewhere(const struct frame *f, int family)
{
	struct progress ignored = {};
	struct key6 tuple = f->key;
	struct flow *flow = progress_of(&tuple, family, &ignored);

	if (flow)
		note_sequence(flow, f);
	return 0;
}

/* Where a flow's numbers begin, from the frame that the kernel just forwarded: in step if the kernel has noted that one itself. */
static __always_inline void begin_sequence(struct flow *flow, const struct frame *f, const struct nf_conn *conn)
{
	const struct ip_ct_tcp_state *seen = flow->direction ? &conn->proto.tcp.seen[1] : &conn->proto.tcp.seen[0];

	flow->end = f->end;
	flow->ack = f->ack;
	flow->window = f->window;
	flow->scale = seen->td_scale;
	flow->sequence = SEQUENCE_TRACKED;
	if (!is_before(seen->td_end, f->end) && !is_before(seen->td_maxack, f->ack) && is_within(seen->td_end, f->end, NEAR))
		flow->sequence |= SEQUENCE_SURE;
}

/* Whether the kernel waits for an acknowledgement of data though it has lost its step: it will not recognise that one. */
static __always_inline bool waits_in_vain(const struct flow *flow, const struct frame *f, const struct nf_conn *conn)
{
	const struct ip_ct_tcp_state *seen = flow->direction ? &conn->proto.tcp.seen[1] : &conn->proto.tcp.seen[0];
	__u8 flags = conn->proto.tcp.seen[0].flags | conn->proto.tcp.seen[1].flags;

	return flags & IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED && is_before(seen->td_end, f->end);
}

/* Has the numbers of a flow that was known go on; where they lost their step, both directions have to agree first. */
static __always_inline void continue_sequence(struct flow *flow, const struct flow *known, int family)
{
	struct progress other = {};
	struct key6 answers;

	if (known && known->conn == flow->conn && known->sequence & SEQUENCE_TRACKED) {
		if (known->sequence & SEQUENCE_SURE && is_near(known, flow->end, flow->ack)) {
			if (is_before(flow->end, known->end))
				flow->end = known->end;
			if (is_before(flow->ack, known->ack)) {
				flow->ack = known->ack;
				flow->window = known->window;
			}
			flow->sequence |= SEQUENCE_SURE;
		}
		flow->sequence |= known->sequence & SEQUENCE_ENDING;
	}
	if (flow->sequence & SEQUENCE_SURE)
		return;
	answers_of(&answers, flow, family);
	/* Any: where neither is sure, each other's word is all there is. */
	known = progress_of(&answers, family, &other);
	if (known && known->conn == flow->conn && is_within(flow->ack, known->end, LEAST_WINDOW) && is_within(known->ack, flow->end, LEAST_WINDOW))
		flow->sequence |= SEQUENCE_SURE;
}

/* The flow is found again by its connection's addresses and ports, with any interface and TOS. */
static __always_inline void guard(const struct key6 *key, int family)
{
	__u32 input = key->iif << 8 | key->tos, free = 0;
	struct variants *v, first = {};
	struct key6 tuple = *key;

	tuple.iif = 0;
	tuple.tos = 0;
	tuple.zero = family;
	v = bpf_map_lookup_elem(&guarded, &tuple);
	if (!v) {
		first.input[0] = input;
		bpf_map_update_elem(&guarded, &tuple, &first, BPF_ANY);
		return;
	}
#pragma unroll
	for (int n = VARIANTS - 1; n >= 0; n--) {
		if (v->input[n] == input)
			return;
		if (!v->input[n])
			free = n;
	}
	/* All in use: the first one is the oldest, or has been used least. */
	v->input[free & (VARIANTS - 1)] = input;
}

#endif
