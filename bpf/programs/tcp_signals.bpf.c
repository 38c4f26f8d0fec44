/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * Connections, bytes, retransmissions and round-trip times, by tier.
 *
 * Bytes are counted whenever a round trip was measured and when the connection ends: a long-lived connection shows
 * while it lives. TIME_WAIT is not seen from here; user space asks the kernel for it.
 */
#include <linux/bpf.h>
#include <linux/tcp.h>

#include "maps_origin.h"
#include "maps_signals.h"
#include "socket_address.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define PROCEED 1

#define CALLBACKS (BPF_SOCK_OPS_RTT_CB_FLAG | BPF_SOCK_OPS_RETRANS_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG)

/* srtt_us is kept in eighths. */
#define SRTT_SHIFT 3

static __always_inline __u32 valid_tier(__u32 tier)
{
	return tier < MM_TIERS ? tier : 0;
}

static __always_inline __u32 tier_of(struct bpf_sock_ops *context, struct bpf_sock *sk)
{
	struct socket_origin *origin = bpf_sk_storage_get(&socket_origin, sk, 0, 0);
	struct socket_ends ends = {};
	struct service_key key = {};
	__u32 mark = sk->mark, *tier;

	if (origin && origin->tier)
		return valid_tier(origin->tier);
	if (read_socket_ends(context, &ends)) {
		endpoint_key(&key, &ends.remote, ends.remote_port);
		tier = bpf_map_lookup_elem(&tier_addresses, &key);
		if (tier)
			return valid_tier(*tier);
		endpoint_key(&key, &ends.local, ends.local_port);
		tier = bpf_map_lookup_elem(&tier_addresses, &key);
		if (tier)
			return valid_tier(*tier);
	}
	tier = mark ? bpf_map_lookup_elem(&tier_marks, &mark) : 0;
	return tier ? valid_tier(*tier) : 0;
}

static __always_inline void established(struct bpf_sock_ops *context, struct bpf_sock *sk)
{
	struct signal_state *state = bpf_sk_storage_get(&signal_state, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	struct tcp_stats *stats;

	if (!state)
		return;
	state->tier = tier_of(context, sk);
	stats = stats_of_tier(state->tier);
	if (stats) {
		if (context->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB)
			stats->active++;
		else
			stats->passive++;
	}
	/* Other programs' wishes stay. */
	bpf_sock_ops_cb_flags_set(context, context->bpf_sock_ops_cb_flags | CALLBACKS);
}

static __always_inline void count_bytes(struct bpf_sock_ops *context, struct signal_state *state, struct tcp_stats *stats)
{
	__u64 sent = context->bytes_acked, received = context->bytes_received;

	/* bytes_acked counts the SYN and the FIN too; a total that went back is no count. */
	if (sent > state->bytes_sent)
		stats->bytes_sent += sent - state->bytes_sent;
	if (received > state->bytes_received)
		stats->bytes_received += received - state->bytes_received;
	state->bytes_sent = sent;
	state->bytes_received = received;
}

/* The logarithm to base 2, at most the last bucket. */
static __always_inline __u32 bucket_of(__u32 microseconds)
{
	__u32 bucket = 0;
	int step;

#pragma clang loop unroll(full)
	for (step = 16; step; step >>= 1) {
		if (microseconds >> step) {
			microseconds >>= step;
			bucket += step;
		}
	}
	return bucket < MM_RTT_BUCKETS ? bucket : MM_RTT_BUCKETS - 1;
}

static __always_inline void count_round_trip(struct bpf_sock_ops *context, struct signal_state *state,
					     struct tcp_stats *stats)
{
	/* The measured time where the kernel passes it (Linux 6.10), else the smoothed one. */
	__u32 measured = context->args[0], rtt = measured ? measured : context->srtt_us >> SRTT_SHIFT;
	__u32 index = state->tier * MM_RTT_BUCKETS + bucket_of(rtt);
	__u64 *samples = bpf_map_lookup_elem(&rtt_histogram, &index);

	if (samples)
		(*samples)++;
	stats->rtt_samples++;
	stats->rtt_sum_us += rtt;
}

SEC("sockops")
int tcp_signals(struct bpf_sock_ops *context)
{
	struct bpf_sock *sk = context->sk;
	struct signal_state *state;
	struct tcp_stats *stats;
	__u32 op = context->op;

	if (!sk || !context->is_fullsock)
		return PROCEED;
	if (op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB || op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
		established(context, sk);
		return PROCEED;
	}
	if (op != BPF_SOCK_OPS_RTT_CB && op != BPF_SOCK_OPS_RETRANS_CB && op != BPF_SOCK_OPS_STATE_CB)
		return PROCEED;
	state = bpf_sk_storage_get(&signal_state, sk, 0, 0);
	stats = state ? stats_of_tier(state->tier) : 0;
	if (!state || !stats)
		return PROCEED;
	if (op == BPF_SOCK_OPS_RETRANS_CB) {
		stats->retransmissions += context->args[1]; /* segments */
	} else if (op == BPF_SOCK_OPS_RTT_CB) {
		count_round_trip(context, state, stats);
		count_bytes(context, state, stats);
	} else if (context->args[1] == BPF_TCP_CLOSE) {
		count_bytes(context, state, stats);
		stats->closed++;
	}
	return PROCEED;
}
