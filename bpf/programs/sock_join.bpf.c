/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * Two sockets that are ends of one connection on this node hand their bytes to each other past TCP.
 *
 * A connection is joined only if its listening end is listed in join_endpoints and both ends were seen here: the
 * accepting end is added only when the connecting end's sequence numbers are its own crosswise, so that equal
 * addresses in two network namespaces can't meet.
 *
 * sk_msg has no backpressure of its own: bytes handed over are not bounded by the receiver's window. So the sender
 * looks at the reader's queue, and above a mark that direction goes through TCP for good (going back would reorder):
 * what was handed over is read first, what TCP brings after it.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>

#include "maps_join.h"
#include "maps_tier.h"
#include "socket_address.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Plain TCP lets 0.6 to 2.8 MiB queue up on a local connection; below that, bulk transfers would leave needlessly. */
#define HIGHWATER (4 << 20)

#define PROCEED 1

/* The one kernel structure that is read, found in the running kernel's BTF by field names. */
struct sock {
	struct {
		struct {
			int counter;
		} rmem_alloc;
	} sk_backlog;
} __attribute__((preserve_access_index));

static __always_inline void count(__u32 event, __u32 bytes)
{
	struct counter *counter = bpf_map_lookup_elem(&join_stats, &event);

	if (counter) {
		counter->packets++;
		counter->bytes += bytes;
	}
}

static __always_inline void join_keys(struct bpf_sock_ops *context, const struct socket_ends *ends, struct join_key *own,
				      struct join_key *peer)
{
	own->local_address = ends->local;
	own->remote_address = ends->remote;
	own->local_port = ends->local_port;
	own->remote_port = ends->remote_port;
	own->netns = 0;
	if (address_is_loopback(&ends->local) || address_is_loopback(&ends->remote))
		own->netns = bpf_get_netns_cookie(context);
	peer->local_address = own->remote_address;
	peer->remote_address = own->local_address;
	peer->local_port = own->remote_port;
	peer->remote_port = own->local_port;
	peer->netns = own->netns;
}

static __always_inline void join(struct bpf_sock_ops *context, struct join_key *own, const struct join_key *peer)
{
	struct bpf_sock *sk = context->sk;
	struct tcp_sock *tcp = sk ? bpf_skc_to_tcp_sock(sk) : 0;
	struct join_peer entry = { .snd_nxt = context->snd_nxt, .rcv_nxt = context->rcv_nxt };
	struct join_state *state;

	if (!tcp)
		return;
	entry.sock = (__u64)tcp;
	state = bpf_sk_storage_get(&join_state, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!state) {
		count(JOIN_ADD_FAILED, 0);
		return;
	}
	state->peer = *peer;
	state->snd_nxt = entry.snd_nxt;
	state->rcv_nxt = entry.rcv_nxt;
	/* NOEXIST: the socket that has the key keeps it; only who has it may be found by its peer. */
	if (bpf_sock_hash_update(context, &join_sockets, own, BPF_NOEXIST)) {
		count(JOIN_ADD_FAILED, 0);
		return;
	}
	bpf_map_update_elem(&join_peers, own, &entry, BPF_ANY);
	count(JOIN_ADDED, 0);
}

SEC("sockops")
int sock_join_established(struct bpf_sock_ops *context)
{
	struct join_key own = {}, peer = {};
	struct socket_ends ends = {};
	struct service_key listener = {};
	struct join_peer *other;

	if (context->op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB && context->op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
		return PROCEED;
	if (!read_socket_ends(context, &ends))
		return PROCEED;
	if (context->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB) {
		endpoint_key(&listener, &ends.remote, ends.remote_port);
		if (!bpf_map_lookup_elem(&join_endpoints, &listener))
			return PROCEED;
		join_keys(context, &ends, &own, &peer);
		join(context, &own, &peer);
		return PROCEED;
	}
	endpoint_key(&listener, &ends.local, ends.local_port);
	if (!bpf_map_lookup_elem(&join_endpoints, &listener))
		return PROCEED;
	join_keys(context, &ends, &own, &peer);
	/* The connecting end is established first: its entry is there, or it is on another node. */
	other = bpf_map_lookup_elem(&join_peers, &peer);
	if (!other)
		return PROCEED;
	if (other->snd_nxt != context->rcv_nxt || other->rcv_nxt != context->snd_nxt) {
		count(JOIN_MISMATCH, 0);
		return PROCEED;
	}
	join(context, &own, &peer);
	return PROCEED;
}

static __always_inline __u32 highwater(void)
{
	__u32 zero = 0;
	struct mesh_config *config = bpf_map_lookup_elem(&mesh_config, &zero);

	return config && config->join_highwater ? config->join_highwater : HIGHWATER;
}

static __always_inline void count_sent(struct bpf_sock *sk, __u32 bytes)
{
	struct signal_state *signals = bpf_sk_storage_get(&signal_state, sk, 0, 0);
	struct tcp_stats *stats = stats_of_tier(signals ? signals->tier : 0);

	if (stats)
		stats->bytes_sent += bytes;
}

/* Returns what happened; anything but JOIN_REDIRECTED sends the message, and all after it, through TCP. */
static __always_inline __u32 hand_over(struct sk_msg_md *message, struct join_state *state)
{
	struct join_peer *other = bpf_map_lookup_elem(&join_peers, &state->peer);
	struct sock *reader;
	int queued;

	if (!other || other->snd_nxt != state->rcv_nxt || other->rcv_nxt != state->snd_nxt)
		return JOIN_NO_PEER;
	reader = (struct sock *)other->sock;
	queued = BPF_CORE_READ(reader, sk_backlog.rmem_alloc.counter);
	if (queued < 0 || (__u32)queued > highwater())
		return JOIN_HIGHWATER;
	if (bpf_msg_redirect_hash(message, &join_sockets, &state->peer, BPF_F_INGRESS) != SK_PASS)
		return JOIN_FAILED;
	return JOIN_REDIRECTED;
}

SEC("sk_msg")
int sock_join_message(struct sk_msg_md *message)
{
	struct bpf_sock *sk = message->sk;
	__u32 size = message->size, event;
	struct join_state *state;

	if (!sk)
		return SK_PASS;
	state = bpf_sk_storage_get(&join_state, sk, 0, 0);
	if (!state || state->plain) {
		count(JOIN_PLAIN, size);
		return SK_PASS;
	}
	event = hand_over(message, state);
	count(event, size);
	if (event == JOIN_REDIRECTED)
		count_sent(sk, size);
	else
		state->plain = 1;
	return SK_PASS;
}
