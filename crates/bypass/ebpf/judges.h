/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * Whether a firewall rule that judges each frame could apply to a flow: then the flow is not learned, and all its frames
 * take the kernel's path. src/rules finds these rules, and writes the filters that are compared here.
 *
 * The filters are those of one generation of the ruleset. Under another one nothing is learned, so that no flow is taken
 * under rules that were not read yet. Before Linux 6.17 programs cannot read the generation: there the controller's
 * epoch has flows learned again once it has read them.
 */
#ifndef TOMBOLO_JUDGES_H
#define TOMBOLO_JUDGES_H

#include "validate.h"

/* What a frame without a connection has in _nfct where a rule said that it is not to be tracked. */
#define IP_CT_UNTRACKED 7

/* The bit of a kind of flow: its family, its protocol and the state of its connection. src/rules/world.rs, `World::bit`. */
static __always_inline __u32 world_of(int family, __u32 proto, unsigned long nfct)
{
	__u32 protocol = proto == IPPROTO_TCP ? 0 : proto == IPPROTO_UDP ? 1 : 2;
	__u32 info = nfct & NFCT_INFOMASK, state;

	if (nfct & ~NFCT_INFOMASK)
		/* Established, related or new, whichever direction. */
		state = info % IP_CT_IS_REPLY;
	else
		state = info == IP_CT_UNTRACKED ? 3 : 4;
	return 1U << (((family == AF_INET6 ? 3 : 0) + protocol) * 5 + state);
}

/* Not 0 where a word of the two differs in a bit of the mask. `is_out` is all bits or none. */
static __always_inline __u32 other_address(const __u32 *in, const __u32 *out, __u32 is_out, const __u32 *wanted, const __u32 *mask)
{
	__u32 differs = 0;

#pragma unroll
	for (int n = 0; n < 4; n++)
		differs |= (in[n] ^ ((in[n] ^ out[n]) & is_out) ^ wanted[n]) & mask[n];
	return differs;
}

/* The same where the port is not between the two. */
static __always_inline __u32 other_port(__u16 in, __u16 out, __u32 is_out, __u16 first, __u16 last)
{
	__u32 port = bpf_ntohs(in ^ ((in ^ out) & is_out));

	return ((port - first) | (last - port)) >> 31;
}

/* Whether a rule could judge each frame of the flow that is about to be learned under `generation`. `in` and `out` are its addresses as it
 * comes in and goes out. `slots` is the input's << 16 | the output's, since such a function has five arguments at most. It is a function
 * of its own so that the verifier checks it once, and not once per path that leads here. Without branches between what is compared: the
 * verifier follows each. */
__noinline int is_judged(const struct key6 *in, const struct key6 *out, __u32 generation, __u32 slots, __u32 world)
{
	__u32 zero = 0, input = slots >> 16 & (MAX_PORTS - 1), output = slots & (MAX_PORTS - 1);
	const struct judges *all = bpf_map_lookup_elem(&judges, &zero);

	if (!in || !out || !all || all->state == RULES_UNREAD)
		return true;
	if (all->state == RULES_READ && has_rules_counter() && all->generation != generation)
		return true;
#pragma clang loop unroll(disable)
	for (__u32 n = 0; n < MAX_JUDGES; n++) {
		const struct judge *j = &all->judges[n];
		__u32 differs;

		if (n >= all->count)
			break;
		differs = other_address(in->saddr, out->saddr, j->source_is_out, j->source, j->source_mask);
		differs |= other_address(in->daddr, out->daddr, j->destination_is_out, j->destination, j->destination_mask);
		differs |= other_port(first_of(in->ports), first_of(out->ports), j->source_is_out, j->source_first, j->source_last);
		differs |= other_port(second_of(in->ports), second_of(out->ports), j->destination_is_out, j->destination_first,
				      j->destination_last);
		if (!differs && j->worlds & world && j->inputs[input / 32] >> (input % 32) & 1 &&
		    j->outputs[output / 32] >> (output % 32) & 1)
			return true;
	}
	return false;
}

#endif
