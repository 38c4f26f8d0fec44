/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * GPU traffic that arrives on the NIC goes to the interface that faces its function, past TCP/IP and any proxy.
 *
 * Every other packet, and every one whose slot has no interface at the moment, goes on as if we were not there.
 */
#include "gpu_rules.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

SEC("xdp")
int xdp_gpu_bypass(struct xdp_md *context)
{
	void *data = (void *)(long)context->data;
	void *end = (void *)(long)context->data_end;
	__u32 length = end - data;
	struct ethhdr *ethernet = data;
	struct gpu_slot *target;
	__u32 slot;
	long found = gpu_classify(data, end, length);

	if (found < 0)
		return XDP_PASS;
	slot = found;
	target = bpf_map_lookup_elem(&gpu_slots, &slot);
	/* The flags are what is returned when the slot has no interface. */
	if (!target || (void *)(ethernet + 1) > end || bpf_redirect_map(&gpu_if_map, slot, XDP_PASS) != XDP_REDIRECT) {
		gpu_count_no_interface(slot, length);
		return XDP_PASS;
	}
	gpu_write_macs(ethernet, target);
	gpu_count_slot(slot, 1, length);
	return XDP_REDIRECT;
}
