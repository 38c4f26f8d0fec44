/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * What is counted by tier, and which tier a socket has: written by tcp_signals, by sock_join for bytes that TCP doesn't see.
 */
#ifndef MODALMESH_MAPS_TIER_H
#define MODALMESH_MAPS_TIER_H

#include "maps.h"

MM_MAP(tcp_stats, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct tcp_stats, MM_TIERS);
MM_SOCKET_MAP(signal_state, struct signal_state);

static __always_inline struct tcp_stats *stats_of_tier(__u32 tier)
{
	return bpf_map_lookup_elem(&tcp_stats, &tier);
}

#endif
