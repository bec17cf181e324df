/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0 */
/*
 * Asks the kernel what no version number tells, since distributions take over parts of later kernels. Run once on a
 * frame of zeroes (BPF_PROG_TEST_RUN), never attached.
 */
#include "kernel.h"

#define CHECK_AT (ETH_HLEN + 40 + 6)

/* 1 if the helper that changes checksums knows the flag for translated IPv6, else 0. */
SEC("classifier")
int ask_ipv6(struct __sk_buff *skb)
{
	return bpf_l4_csum_replace(skb, CHECK_AT, 0, 1, BPF_F_PSEUDO_HDR | F_IPV6) == 0;
}

char licence[] SEC("license") = "GPL";
