/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * Reading and altering headers, the same for tcx and XDP.
 *
 * What is taken: untagged IPv4 without options and IPv6 without extension headers, whole (no fragment), carrying TCP, UDP or
 * an ICMP echo or its reply. Everything else has a verdict that sends it up.
 */
#ifndef TOMBOLO_PACKET_H
#define TOMBOLO_PACKET_H

#include "tables.h"

#define IP4_BYTES 20
#define IP6_BYTES 40
/* Of UDP, and of an ICMP echo. */
#define UDP_BYTES 8
#define ECHO4 8
#define ECHO4_REPLY 0
#define ECHO6 128
#define ECHO6_REPLY 129
#define TCP_BYTES 20
#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10
#define TCP_URG 0x20
/* More fragments, and the offset. */
#define IP4_FRAGMENT 0x3fff
/* The offset alone. */
#define IP4_OFFSET 0x1fff

struct ip4 {
	__u8 version_ihl;
	__u8 tos;
	__be16 length;
	__be16 id;
	__be16 fragment;
	__u8 ttl;
	__u8 proto;
	__u16 check;
	__u32 saddr;
	__u32 daddr;
};

struct ip6 {
	__u8 version_class;
	__u8 class_label;
	__be16 label;
	__be16 payload;
	__u8 proto;
	__u8 hops;
	__u32 saddr[4];
	__u32 daddr[4];
};

struct transport {
	__u32 ports;
	union {
		struct {
			__be16 length;
			__u16 check;
		} udp;
		struct {
			__u32 seq;
			__u32 ack;
			__u8 offset;
			__u8 flags;
			__be16 window;
			__u16 check;
		} tcp;
	};
};

/* An ICMP echo. */
struct echo {
	__u8 type;
	__u8 code;
	__u16 check;
	__u16 id;
	__be16 sequence;
};

struct frame {
	struct key6 key;	/* iif is the caller's */
	__u32 length;		/* of the IP packet, as its header says */
	__u32 headers;		/* of IP and the transport */
	__u32 rest;		/* what else of the IP header may differ from frame to frame: id and fragment bits, or class and label */
	__u32 seq;		/* of TCP */
	__u32 end;		/* the sequence number behind its data, and its FIN */
	__u32 ack;
	__u16 window;		/* as in the header, not scaled */
	__u16 check;		/* the transport's checksum */
	__u8 tcp_flags;
	__u8 ttl;
	__u8 tos;
	bool tunnel;		/* a packet may be within, with a checksum of its own */
	bool slow;		/* its flow has no frame a lease: not worth learning */
};

/* Two fields of two bytes each as one word that has them in the order of the wire. */
static __always_inline __u32 pair(__u16 first, __u16 second)
{
	return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? (__u32)second << 16 | first : (__u32)first << 16 | second;
}

static __always_inline __u16 first_of(__u32 pair)
{
	return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? pair & 0xffff : pair >> 16;
}

static __always_inline __u16 second_of(__u32 pair)
{
	return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? pair >> 16 : pair & 0xffff;
}

/* An echo's type and code as conntrack has them, in the place of a destination port; here of its counterpart, the reply. */
static __always_inline __u16 answer_of(__u16 type_and_code, int family)
{
	__u16 other = family == AF_INET ? ECHO4 ^ ECHO4_REPLY : ECHO6 ^ ECHO6_REPLY;

	return type_and_code ^ (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? other : other << 8);
}

static __always_inline bool is_icmp(__u32 proto)
{
	return proto == IPPROTO_ICMP || proto == IPPROTO_ICMPV6;
}

/* parse: not a verdict; the headers are not all in the linear part. */
#define SHORT 255

static __always_inline __u32 fold(__u64 sum)
{
	sum = (sum >> 32) + (sum & 0xffffffff);
	sum = (sum >> 32) + (sum & 0xffffffff);
	sum = (sum >> 16) + (sum & 0xffff);
	sum = (sum >> 16) + (sum & 0xffff);
	return (sum >> 16) + (sum & 0xffff);
}

/* Whether UDP's payload begins as VXLAN (RFC 7348 section 5) or Geneve (RFC 8926 section 3.4) do, with a header of eight bytes whose last is
 * zero. */
static __always_inline bool may_be_tunnel(const struct transport *t, const void *end)
{
	const __u8 *head = (const void *)t + UDP_BYTES;
	__u16 protocol;

	if ((void *)(head + 8) > end || head[7])
		return false;
	protocol = head[2] << 8 | head[3];
	/* VXLAN: the I flag, and no bit that none of its extensions sets. Geneve: version 0, and what is within. */
	return (head[0] & 0x78) == 0x08 || (!(head[0] & 0xc0) && (protocol == 0x6558 || protocol == ETH_P_IP || protocol == ETH_P_IPV6));
}

/* The headers of the frame at `data`, whose length on the wire is `bytes`. 0 or why it is not for us. */
static __always_inline int parse(void *data, void *end, int family, __u32 bytes, struct frame *f)
{
	__u32 header = family == AF_INET ? IP4_BYTES : IP6_BYTES;
	struct transport *t = data + ETH_HLEN + header;

	if ((void *)t + UDP_BYTES > end)
		return SHORT;
	if (family == AF_INET) {
		struct ip4 *ip = data + ETH_HLEN;
		__u32 *words = data + ETH_HLEN;

		if (ip->version_ihl != 0x45)
			return UP_OPTIONS;
		if (ip->fragment & bpf_htons(IP4_FRAGMENT))
			return UP_FRAGMENT;
		if (fold((__u64)words[0] + words[1] + words[2] + words[3] + words[4]) != 0xffff)
			return UP_MALFORMED;
		f->key.saddr[0] = ip->saddr;
		f->key.daddr[0] = ip->daddr;
		f->key.proto = ip->proto;
		f->length = bpf_ntohs(ip->length);
		f->rest = words[1];
		f->ttl = ip->ttl;
		f->tos = ip->tos;
	} else {
		struct ip6 *ip = data + ETH_HLEN;

		if (ip->version_class >> 4 != 6)
			return UP_MALFORMED;
		__builtin_memcpy(f->key.saddr, ip->saddr, sizeof(ip->saddr));
		__builtin_memcpy(f->key.daddr, ip->daddr, sizeof(ip->daddr));
		f->key.proto = ip->proto;
		f->length = IP6_BYTES + bpf_ntohs(ip->payload);
		f->rest = *(const __u32 *)ip;
		f->ttl = ip->hops;
		f->tos = ip->version_class << 4 | ip->class_label >> 4;
	}
	f->key.tos = f->tos;
	f->key.ports = t->ports;
	if (ETH_HLEN + f->length > bytes)
		return UP_MALFORMED;
	if (f->key.proto == IPPROTO_TCP) {
		if ((void *)t + TCP_BYTES > end)
			return SHORT;
		f->headers = header + (t->tcp.offset >> 4) * 4;
		f->check = t->tcp.check;
		if (f->headers < header + TCP_BYTES || f->headers > f->length)
			return UP_MALFORMED;
		f->tcp_flags = t->tcp.flags;
		f->seq = bpf_ntohl(t->tcp.seq);
		f->end = f->seq + (f->length - f->headers) + (f->tcp_flags & TCP_FIN);
		f->ack = bpf_ntohl(t->tcp.ack);
		f->window = bpf_ntohs(t->tcp.window);
		/* Without ACK it is of no connection: tracking calls it invalid. */
		if ((t->tcp.flags & (TCP_FIN | TCP_SYN | TCP_RST | TCP_ACK)) != TCP_ACK)
			return UP_HANDSHAKE;
	} else if (f->key.proto == IPPROTO_UDP) {
		f->headers = header + UDP_BYTES;
		f->check = t->udp.check;
		f->tunnel = !f->check || may_be_tunnel(t, end);
		if (f->headers > f->length || bpf_ntohs(t->udp.length) < UDP_BYTES ||
		    header + bpf_ntohs(t->udp.length) > f->length)
			return UP_MALFORMED;
	} else if (f->key.proto == (family == AF_INET ? IPPROTO_ICMP : IPPROTO_ICMPV6)) {
		const struct echo *e = (void *)t;
		__u8 type = e->type;

		if (e->code || (family == AF_INET ? type != ECHO4 && type != ECHO4_REPLY : type != ECHO6 && type != ECHO6_REPLY))
			return UP_TRANSPORT;
		f->headers = header + UDP_BYTES;
		if (f->headers > f->length)
			return UP_MALFORMED;
		f->check = e->check;
		f->key.ports = pair(e->id, *(const __u16 *)e);
	} else {
		/* An IPv6 extension header is no transport; IPv4 has no such thing. */
		if (family == AF_INET6 && (f->key.proto == 0 || f->key.proto == 43 || f->key.proto == 60))
			return UP_OPTIONS;
		if (family == AF_INET6 && f->key.proto == 44)
			return UP_FRAGMENT;
		return UP_TRANSPORT;
	}
	if (f->ttl <= 1)
		return UP_TTL;
	return 0;
}

/* Whether connection tracking knows a FIN or RST with these flags. With any other combination it calls the frame invalid, whatever its numbers
 * are (tcp_valid_flags). */
static __always_inline bool is_valid_end(__u8 flags)
{
	__u8 known = flags & (TCP_FIN | TCP_SYN | TCP_RST | TCP_ACK | TCP_URG);

	return known == TCP_RST || known == (TCP_RST | TCP_ACK) || known == (TCP_FIN | TCP_ACK) || known == (TCP_FIN | TCP_ACK | TCP_URG);
}

static __always_inline void key4(struct key4 *k, const struct key6 *key)
{
	__u32 protocol = key->proto == IPPROTO_UDP ? FLOW_UDP : key->proto == IPPROTO_TCP ? FLOW_TCP : FLOW_ICMP;

	k->input = key->iif << 10 | key->tos << 2 | protocol;
	k->saddr = key->saddr[0];
	k->daddr = key->daddr[0];
	k->ports = key->ports;
}

static __always_inline struct flow *look_up(const struct key6 *key, int family)
{
	if (family == AF_INET) {
		struct key4 k;

		key4(&k, key);
		return bpf_map_lookup_elem(&flows4, &k);
	}
	return bpf_map_lookup_elem(&flows6, key);
}

/* Writes what was translated in a frame; its checksums are not this function's. */
static __always_inline void translate(void *ip_header, struct transport *t, const struct flow *flow, __u32 proto, int family)
{
	if (family == AF_INET) {
		struct ip4 *ip = ip_header;

		ip->check = ~fold((__u64)(__u16)~ip->check + flow->addresses_diff);
		ip->saddr = flow->saddr;
		ip->daddr = flow->daddr;
	} else {
		const struct flow6 *flow6 = (const struct flow6 *)flow;
		struct ip6 *ip = ip_header;

		__builtin_memcpy(ip->saddr, flow6->saddr, sizeof(ip->saddr));
		__builtin_memcpy(ip->daddr, flow6->daddr, sizeof(ip->daddr));
	}
	if (is_icmp(proto))
		((struct echo *)t)->id = first_of(flow->ports);
	else
		t->ports = flow->ports;
}

/* One hop less, RFC 1624. The checksum's change is that of the word that holds the TTL. */
static __always_inline void count_hop(void *ip_header, int family)
{
	if (family == AF_INET) {
		struct ip4 *ip = ip_header;
		__u32 check = ip->check + bpf_htons(0x0100);

		ip->check = check + (check >= 0xffff);
		ip->ttl--;
	} else {
		((struct ip6 *)ip_header)->hops--;
	}
}

#endif
