/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * How maps are declared. The maps themselves stand by concern in maps_*.h; a map that several programs share has one
 * name and one pin, by which libbpf lets the second object find it.
 *
 * A name has at most 15 characters: the kernel keeps no more (BPF_OBJ_NAME_LEN).
 */
#ifndef MODALMESH_MAPS_H
#define MODALMESH_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"

#define MM_MAP(name, map_type, key_type, value_type, entries)                                                          \
	struct {                                                                                                       \
		__uint(type, map_type);                                                                                \
		__type(key, key_type);                                                                                 \
		__type(value, value_type);                                                                             \
		__uint(max_entries, entries);                                                                          \
	} name SEC(".maps")

/* Memory as it is used: policy maps are sized for the largest mesh. */
#define MM_SPARSE_MAP(name, map_type, key_type, value_type, entries)                                                   \
	struct {                                                                                                       \
		__uint(type, map_type);                                                                                \
		__type(key, key_type);                                                                                 \
		__type(value, value_type);                                                                             \
		__uint(max_entries, entries);                                                                          \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                                  \
	} name SEC(".maps")

/* Lives and dies with a socket. */
#define MM_SOCKET_MAP(name, value_type)                                                                                \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_SK_STORAGE);                                                                 \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                                  \
		__type(key, int);                                                                                      \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

/* Every object has it: one entry, index 0. */
MM_MAP(mesh_config, BPF_MAP_TYPE_ARRAY, __u32, struct mesh_config, 1);

#endif
