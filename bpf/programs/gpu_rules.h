/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * Which slot a packet belongs to, and the counting; the same for XDP and tc.
 */
#ifndef MODALMESH_GPU_RULES_H
#define MODALMESH_GPU_RULES_H

#include "maps_gpu.h"
#include "packet.h"

static __always_inline void gpu_count_pass(__u32 reason, __u32 length)
{
	struct counter *counter = bpf_map_lookup_elem(&gpu_pass_stats, &reason);

	if (counter) {
		counter->packets++;
		counter->bytes += length;
	}
}

static __always_inline void gpu_count_slot(__u32 slot, int redirected, __u32 length)
{
	struct gpu_slot_stats *stats = bpf_map_lookup_elem(&gpu_slot_stats, &slot);
	struct counter *counter;

	if (!stats)
		return;
	counter = redirected ? &stats->redirected : &stats->no_interface;
	counter->packets++;
	counter->bytes += length;
}

/* The most specific rule wins: queue pair at an address, queue pair, address with port, with protocol, address. */
static __always_inline __u32 *gpu_find_rule(const struct packet *packet)
{
	struct gpu_flow_key flow = { .address = packet->destination, .port = packet->port, .protocol = packet->protocol };
	__u32 *slot;

	if (packet->is_roce) {
		struct gpu_qp_key key = { .address = packet->destination, .qp = packet->qp };

		slot = bpf_map_lookup_elem(&gpu_qp_rules, &key);
		if (slot)
			return slot;
		__builtin_memset(&key.address, 0, sizeof(key.address));
		slot = bpf_map_lookup_elem(&gpu_qp_rules, &key);
		if (slot)
			return slot;
	}
	if (flow.port) {
		slot = bpf_map_lookup_elem(&gpu_flow_rules, &flow);
		if (slot)
			return slot;
		flow.port = 0;
	}
	slot = bpf_map_lookup_elem(&gpu_flow_rules, &flow);
	if (slot || !flow.protocol)
		return slot;
	flow.protocol = 0;
	return bpf_map_lookup_elem(&gpu_flow_rules, &flow);
}

/* Returns the slot, or -1 after counting why not. */
static __always_inline long gpu_classify(void *data, void *end, __u32 length)
{
	struct packet packet = {};
	int reason = packet_read(&packet, data, end, length);
	__u32 *slot;

	if (reason >= 0) {
		gpu_count_pass(reason, length);
		return -1;
	}
	slot = gpu_find_rule(&packet);
	if (!slot) {
		gpu_count_pass(GPU_PASS_NO_RULE, length);
		return -1;
	}
	if (*slot >= MM_GPU_SLOTS) {
		gpu_count_pass(GPU_PASS_BAD_SLOT, length);
		return -1;
	}
	return *slot;
}

static __always_inline void gpu_count_no_interface(__u32 slot, __u32 length)
{
	gpu_count_slot(slot, 0, length);
	gpu_count_pass(GPU_PASS_NO_INTERFACE, length);
}

/* A slot without a MAC keeps the frame's. */
static __always_inline void gpu_write_macs(struct ethhdr *ethernet, const struct gpu_slot *slot)
{
	const __u8 *mac = slot->destination_mac;

	if (!(mac[0] | mac[1] | mac[2] | mac[3] | mac[4] | mac[5]))
		return;
	__builtin_memcpy(ethernet->h_dest, slot->destination_mac, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, slot->source_mac, ETH_ALEN);
}

#endif
