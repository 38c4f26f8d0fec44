/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * The same for traffic of pods on this node, at the host's end of their interfaces: XDP would hand on their unfinished
 * checksums and split no large segments, tc keeps both as the interface needs them.
 */
#include <linux/pkt_cls.h>

#include "gpu_rules.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Ethernet, two tags, the longest IPv4 header, TCP: what must lie in one piece to be read. */
#define HEADERS 128

SEC("tc")
int tc_gpu_bypass(struct __sk_buff *context)
{
	__u32 length = context->len, slot;
	struct ethhdr *ethernet;
	struct gpu_slot *target;
	void *data, *end;
	long found;

	if (context->data_end - context->data < HEADERS)
		bpf_skb_pull_data(context, length < HEADERS ? length : HEADERS);
	data = (void *)(long)context->data;
	end = (void *)(long)context->data_end;
	found = gpu_classify(data, end, length);
	if (found < 0)
		return TC_ACT_UNSPEC; /* the next program decides */
	slot = found;
	target = bpf_map_lookup_elem(&gpu_slots, &slot);
	ethernet = data;
	if (!target || !target->ifindex || (void *)(ethernet + 1) > end) {
		gpu_count_no_interface(slot, length);
		return TC_ACT_UNSPEC;
	}
	gpu_write_macs(ethernet, target);
	gpu_count_slot(slot, 1, length);
	return bpf_redirect(target->ifindex, 0);
}
