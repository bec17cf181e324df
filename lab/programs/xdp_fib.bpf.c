/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/* The plain way to forward in XDP, for comparison: a FIB lookup per frame, no NAT, no firewall, no offloads. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2

SEC("xdp")
int fib(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct iphdr *ip = data + sizeof(*eth);
	struct bpf_fib_lookup look = { .family = AF_INET };
	__u32 check;

	if ((void *)(ip + 1) > end || eth->h_proto != bpf_htons(ETH_P_IP) || ip->ihl != 5 || ip->ttl <= 1)
		return XDP_PASS;
	look.tos = ip->tos;
	look.l4_protocol = ip->protocol;
	look.tot_len = bpf_ntohs(ip->tot_len);
	look.ipv4_src = ip->saddr;
	look.ipv4_dst = ip->daddr;
	look.ifindex = ctx->ingress_ifindex;
	if (bpf_fib_lookup(ctx, &look, sizeof(look), 0) != BPF_FIB_LKUP_RET_SUCCESS)
		return XDP_PASS;
	check = ip->check + bpf_htons(0x0100);
	ip->check = check + (check >= 0xffff);
	ip->ttl--;
	__builtin_memcpy(eth->h_dest, look.dmac, ETH_ALEN);
	__builtin_memcpy(eth->h_source, look.smac, ETH_ALEN);
	return bpf_redirect(look.ifindex, 0);
}

/* Bounds, for comparison: what a frame that enters a driver costs when nothing is done with it, and when it is sent out without a look. */
SEC("drop")
int bound_drop(struct xdp_md *ctx)
{
	(void)ctx;
	return XDP_DROP;
}

/* To the interface that was made next after this one: workloads/router.py of the lab makes them so. */
SEC("straight")
int bound_straight(struct xdp_md *ctx)
{
	return bpf_redirect(ctx->ingress_ifindex + 1, 0);
}

char licence[] SEC("license") = "GPL";
