/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * Maps of TCP signals, per tier.
 *
 * A socket's tier: of the service address it asked for (socket_origin); else of its remote, then local address in
 * tier_addresses; else of its mark in tier_marks; else 0.
 */
#ifndef MODALMESH_MAPS_SIGNALS_H
#define MODALMESH_MAPS_SIGNALS_H

#include "maps_tier.h"

MM_SPARSE_MAP(tier_addresses, BPF_MAP_TYPE_HASH, struct service_key, __u32, MM_SERVICES);
MM_SPARSE_MAP(tier_marks, BPF_MAP_TYPE_HASH, __u32, __u32, MM_MARKS);
/* Index: tier * MM_RTT_BUCKETS + bucket. */
MM_MAP(rtt_histogram, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, MM_TIERS *MM_RTT_BUCKETS);

#endif
