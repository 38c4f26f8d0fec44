/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * Maps of joined sockets.
 *
 * join_endpoints names listening endpoints ON THIS NODE whose connections may be joined: the value is unused (1). A
 * service opts in by having its local backends (and the node proxy's listener) listed.
 */
#ifndef MODALMESH_MAPS_JOIN_H
#define MODALMESH_MAPS_JOIN_H

#include "maps.h"

MM_SPARSE_MAP(join_endpoints, BPF_MAP_TYPE_HASH, struct service_key, __u32, MM_SERVICES);
MM_MAP(join_sockets, BPF_MAP_TYPE_SOCKHASH, struct join_key, __u64, MM_JOINED_SOCKETS);
MM_MAP(join_peers, BPF_MAP_TYPE_LRU_HASH, struct join_key, struct join_peer, MM_JOINED_SOCKETS);
MM_SOCKET_MAP(join_state, struct join_state);
MM_MAP(join_stats, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct counter, JOIN_EVENTS);

#endif
