/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * The kernel's own types, as far as the programs read them.
 *
 * Only fields that are read are named; their places are found in the running kernel's BTF when the object is loaded
 * (CO-RE), so the order and the sizes here mean nothing. All of it is read-only: a load from a stale address gives
 * zeroes, never a fault.
 */
#ifndef TOMBOLO_KERNEL_H
#define TOMBOLO_KERNEL_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <stddef.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* tcx (Linux 6.6): hand on to the next program, at last to the kernel. */
#define TCX_NEXT (-1)
#define TCX_DROP 2
/* bpf_l4_csum_replace: a change of IPv6 addresses, for which no header's checksum makes up (Linux 6.16; before, it is refused). */
#define F_IPV6 (1ULL << 7)

#define ETH_HLEN 14
#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define PACKET_HOST 0
#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_ICMP 1
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_ICMPV6 58
#define NF_INET_PRE_ROUTING 0
#define NF_INET_FORWARD 2

/* enum ip_conntrack_status */
#define IPS_SEEN_REPLY (1 << 1)
#define IPS_ASSURED (1 << 2)
#define IPS_CONFIRMED (1 << 3)
#define IPS_SRC_NAT (1 << 4)
#define IPS_DST_NAT (1 << 5)
#define IPS_SEQ_ADJUST (1 << 6)
#define IPS_DYING (1 << 9)
#define IPS_HELPER (1 << 13)
/* ip_conntrack_info: from here on the packet runs against the direction of the first. */
#define IP_CT_IS_REPLY 3
#define NFCT_INFOMASK 7UL
#define TCP_CONNTRACK_ESTABLISHED 3
#define IP_CT_TCP_FLAG_BE_LIBERAL 0x08
/* The direction has sent data that the kernel has seen no acknowledgement of: the entry's timeout is five minutes, not five days. */
#define IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED 0x10
#define SKB_DST_NOREF 1UL
#define SKB_DST_PTRMASK (~SKB_DST_NOREF)
#define DST_METRICS_PTRMASK (~3UL)
#define RTAX_LOCK 1
#define RTAX_MTU 2
#define VLAN_HLEN 4
/* sk_buff.ip_summed: a card, or other code that needs it, finishes the checksum at csum_start + csum_offset. */
#define CHECKSUM_PARTIAL 3

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

typedef struct {
	int counter;
} atomic_t;

struct list_head {
	struct list_head *next;
};

struct nf_hook_entries;

struct netns_ipv4 {
	atomic_t rt_genid;
	__u8 sysctl_ip_fwd_use_pmtu;
};

struct rt6_statistics {
	__u32 fib_discarded_routes;
};

struct netns_ipv6 {
	struct rt6_statistics *rt6_stats;
	atomic_t fib6_sernum;
};

struct nf_hook_entries {
	__u16 num_hook_entries;
};

struct nf_hook_ops {
	int priority;
};

struct netns_nf {
	struct nf_hook_entries *hooks_ipv4[5];
	struct nf_hook_entries *hooks_ipv6[5];
};

/* base_seq counts the rule set's changes from Linux 6.17 on; before, only gencursor flips with each. */
struct netns_nftables {
	unsigned int base_seq;
	__u8 gencursor;
};

struct net {
	struct netns_ipv4 ipv4;
	struct netns_ipv6 ipv6;
	struct netns_nf nf;
	struct netns_nftables nft;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct ipv6_devconf {
	__s32 mtu6;
};

struct inet6_dev {
	struct ipv6_devconf cnf;
};

struct netdev_rx_queue;

struct net_device {
	struct netdev_rx_queue *_rx;
	unsigned int num_rx_queues;
	unsigned int mtu;
	int ifindex;
	possible_net_t nd_net;
	struct list_head ptype_all;
	struct inet6_dev *ip6_ptr;
	unsigned char *dev_addr;
};

struct sk_buff {
	struct net_device *dev;
	unsigned long _skb_refdst;
	unsigned long _nfct;
	unsigned int data_len;
	__u8 ip_summed : 2;
	__u8 encapsulation : 1;
	__u8 active_extensions;
	__u16 csum_start;
	__u16 csum_offset;
	__u16 inner_transport_header;
	__u16 network_header;
	__u16 mac_header;
};

/* Its numbers depend on the kernel's configuration. */
enum skb_ext_id {
	SKB_EXT_SEC_PATH,
};

/* Since Linux 6.1, and in kernels that took it over: what conntrack makes of a frame's place in its windows. */
enum nf_ct_tcp_action {
	NFCT_TCP_IGNORE,
};

struct dst_metrics {
	__u32 metrics[17];
};

struct lwtunnel_state;

struct dst_entry {
	struct net_device *dev;
	unsigned long _metrics;
	struct lwtunnel_state *lwtstate;
};

struct rtable {
	__u32 rt_mtu_locked : 1;
};

struct xdp_rxq_info {
	struct net_device *dev;
};

struct xdp_buff {
	struct xdp_rxq_info *rxq;
};

struct netdev_rx_queue {
	struct xdp_rxq_info xdp_rxq;
};

union nf_inet_addr {
	__u32 all[4];
};

union nf_conntrack_man_proto {
	__be16 all;
};

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union nf_conntrack_man_proto u;
	__u16 l3num;
};

/* The kernel's own holds an unnamed struct here; CO-RE matches members by name, so its members stand in one too. */
struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__be16 all;
		} u;
		__u8 protonum;
	} dst;
};

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
};

struct ip_ct_tcp_state {
	__u32 td_end;
	__u32 td_maxack;
	__u8 td_scale;
	__u8 flags;
};

struct ip_ct_tcp {
	struct ip_ct_tcp_state seen[2];
	__u8 state;
};

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
};

struct nf_conntrack_zone {
	__u16 id;
};

struct nf_conn {
	struct nf_conntrack_zone zone;
	struct nf_conntrack_tuple_hash tuplehash[2];
	__u32 timeout;
	unsigned long status;
	union nf_conntrack_proto proto;
};

#pragma clang attribute pop

/*
 * Reading the kernel's structures. FIELD(pointer, member) is for everything that the kernel made; BITFIELD is the same for a bit
 * field. Since Linux 6.2 both are plain loads by pointers that the verifier knows the types of.
 *
 * Older kernels have no way to such pointers. For them the same source is compiled a second time, with OLD_KERNEL: there each
 * read is a call of bpf_probe_read_kernel, and a connection is copied whole (see `connection`).
 */
#ifdef OLD_KERNEL

#define FIELD(pointer, member)                                                                                    \
	({                                                                                                        \
		typeof(pointer) pointer_ = (pointer);                                                             \
		/* Of a statement's value, which has no `const`. */                                               \
		typeof(({ pointer_->member; })) value_;                                                           \
		bpf_probe_read_kernel(&value_, sizeof(value_),                                                    \
				      __builtin_preserve_access_index(&pointer_->member));                        \
		value_;                                                                                           \
	})
#define BITFIELD(pointer, member) BPF_CORE_READ_BITFIELD_PROBED(pointer, member)

/* The sk_buff or xdp_buff behind the context: on every kernel the same address. */
static __always_inline void *kernel_context(void *context)
{
	asm volatile("" : "+r"(context));
	return context;
}

/* A pointer as a number, which tells objects of one kind apart. The verifier allows no arithmetic on a context's pointer, but
 * a copy of its lower half is a plain number. */
static __always_inline __u64 number_of(void *pointer)
{
	register __u64 r0 asm("r0");
	register void *r1 asm("r1") = pointer;

	asm volatile("w0 = w1" : "=r"(r0) : "r"(r1));
	return r0;
}

/* An address as a pointer to a kernel type, for FIELD. */
#define READ_ONLY(type, id, address) ((type *)(address))

#else

#define FIELD(pointer, member) ((pointer)->member)
#define BITFIELD(pointer, member) BPF_CORE_READ_BITFIELD(pointer, member)

/*
 * Kernel functions (kfuncs). The instruction is written out with a place-holder where the function's BTF id belongs; the
 * loader (src/object.rs) puts the id of the running kernel in. CALL with src_reg 2 is "call a kernel function".
 */
#define KFUNC_CAST_TO_KERN_CTX "0x7fb0a001"
#define KFUNC_RDONLY_CAST "0x7fb0a002"
#define KFUNC_CALL(id) ".byte 0x85, 0x20, 0x00, 0x00\n.4byte " id "\n"

/* bpf_cast_to_kern_ctx: the sk_buff or xdp_buff behind the context. */
static __always_inline void *kernel_context(void *context)
{
	register void *r0 asm("r0");
	register void *r1 asm("r1") = context;

	asm volatile(KFUNC_CALL(KFUNC_CAST_TO_KERN_CTX) : "=r"(r0), "+r"(r1) : : "r2", "r3", "r4", "r5", "memory");
	return r0;
}

static __always_inline __u64 number_of(void *pointer)
{
	return (__u64)pointer;
}

/*
 * bpf_rdonly_cast: an address as a pointer to a kernel type, for reading only. The type's id is a place-holder too (MOV r2,
 * imm): CO-RE's own way to it takes nf_conn and the kernel's internal nf_conn___init for one name, and gives up.
 */
#define TYPE_NF_CONN "0x7fb0b001"
#define TYPE_DST_ENTRY "0x7fb0b002"
#define TYPE_DST_METRICS "0x7fb0b003"
#define TYPE_NET_DEVICE "0x7fb0b004"
#define TYPE_RTABLE "0x7fb0b005"
#define READ_ONLY(type, id, address)                                                                              \
	({                                                                                                        \
		register void *r0 asm("r0");                                                                      \
		register __u64 r1 asm("r1") = (address);                                                          \
		asm volatile(".byte 0xb7, 0x02, 0x00, 0x00\n.4byte " id "\n" KFUNC_CALL(KFUNC_RDONLY_CAST)        \
			     : "=r"(r0), "+r"(r1)                                                                 \
			     :                                                                                    \
			     : "r2", "r3", "r4", "r5", "memory");                                                 \
		(type *)r0;                                                                                       \
	})

#endif

/* Whether the transport's checksum is left to the card: its field holds the sum of the pseudo header only. */
static __always_inline bool is_partial(const struct sk_buff *skb)
{
	return BITFIELD(skb, ip_summed) == CHECKSUM_PARTIAL;
}

#endif
