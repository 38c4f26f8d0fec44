/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * Maps of the GPU bypass.
 *
 * Order of updates when a function appears: gpu_slots, then gpu_if_map, then rules; when it goes: gpu_if_map first. A
 * rule whose slot has no interface passes packets on.
 */
#ifndef MODALMESH_MAPS_GPU_H
#define MODALMESH_MAPS_GPU_H

#include "maps.h"

MM_SPARSE_MAP(gpu_qp_rules, BPF_MAP_TYPE_HASH, struct gpu_qp_key, __u32, MM_GPU_RULES);
MM_SPARSE_MAP(gpu_flow_rules, BPF_MAP_TYPE_HASH, struct gpu_flow_key, __u32, MM_GPU_RULES);
MM_MAP(gpu_if_map, BPF_MAP_TYPE_DEVMAP_HASH, __u32, struct bpf_devmap_val, MM_GPU_SLOTS);
MM_MAP(gpu_slots, BPF_MAP_TYPE_ARRAY, __u32, struct gpu_slot, MM_GPU_SLOTS);
MM_MAP(gpu_slot_stats, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct gpu_slot_stats, MM_GPU_SLOTS);
MM_MAP(gpu_pass_stats, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct counter, GPU_PASS_REASONS);

#endif
