/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * Maps of service addresses.
 *
 * A changed table is written as a new generation of backend_slots, then services is updated (one atomic step), then
 * the old generation is removed; a connection that read the old generation just before asks once more.
 */
#ifndef MODALMESH_MAPS_SERVICE_H
#define MODALMESH_MAPS_SERVICE_H

#include "maps.h"

MM_SPARSE_MAP(services, BPF_MAP_TYPE_HASH, struct service_key, struct service, MM_SERVICES);
MM_SPARSE_MAP(backend_slots, BPF_MAP_TYPE_HASH, struct slot_key, struct backend_slot, MM_BACKEND_SLOTS);
MM_MAP(udp_reverse, BPF_MAP_TYPE_LRU_HASH, struct udp_reverse_key, struct service_key, MM_UDP_FLOWS);
/* By service.id and endpoint.id; entries appear with first use, user space removes them with what they count. */
MM_SPARSE_MAP(service_stats, BPF_MAP_TYPE_PERCPU_HASH, __u32, struct service_stats, MM_SERVICES);
MM_SPARSE_MAP(backend_stats, BPF_MAP_TYPE_PERCPU_HASH, __u32, struct backend_stats, MM_BACKEND_SLOTS);

#endif
