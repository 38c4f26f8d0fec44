/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * A service address becomes a backend (or the node proxy) at connect() and sendmsg(), and the application sees the
 * service address again at recvmsg() and getpeername(). No packet is rewritten: a connection costs nothing afterwards.
 *
 * Whatever can't be translated takes the plain way.
 */
#include <linux/bpf.h>
#include <linux/in.h>

#include "address.h"
#include "maps_origin.h"
#include "maps_service.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* A table may be exchanged while we look; twice within one call it isn't. */
#define ATTEMPTS 2

#define PROCEED 1

static __always_inline void read_ip4(const struct bpf_sock_addr *context, struct mm_addr *address)
{
	address_from_ip4(address, context->user_ip4);
}

static __always_inline void read_ip6(const struct bpf_sock_addr *context, struct mm_addr *address)
{
	address->words[0] = context->user_ip6[0];
	address->words[1] = context->user_ip6[1];
	address->words[2] = context->user_ip6[2];
	address->words[3] = context->user_ip6[3];
}

static __always_inline void write_ip6(struct bpf_sock_addr *context, const struct mm_addr *address)
{
	context->user_ip6[0] = address->words[0];
	context->user_ip6[1] = address->words[1];
	context->user_ip6[2] = address->words[2];
	context->user_ip6[3] = address->words[3];
}

static __always_inline int is_proxy(struct bpf_sock *sk)
{
	__u32 zero = 0;
	struct mesh_config *config = bpf_map_lookup_elem(&mesh_config, &zero);

	return config && config->proxy_mask && (sk->mark & config->proxy_mask) == config->proxy_mark;
}

static __always_inline struct service_stats *stats_of_service(__u32 id)
{
	struct service_stats none = {};
	struct service_stats *stats = bpf_map_lookup_elem(&service_stats, &id);

	if (stats)
		return stats;
	bpf_map_update_elem(&service_stats, &id, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(&service_stats, &id);
}

static __always_inline struct backend_stats *stats_of_backend(__u32 id)
{
	struct backend_stats none = {};
	struct backend_stats *stats = bpf_map_lookup_elem(&backend_stats, &id);

	if (stats)
		return stats;
	bpf_map_update_elem(&backend_stats, &id, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(&backend_stats, &id);
}

/* Steele, Lea, Flood 2014 (splitmix64): neighbouring cookies must not choose neighbouring backends. */
static __always_inline __u64 mix(__u64 value)
{
	value += 0x9e3779b97f4a7c15ULL;
	value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
	value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
	return value ^ (value >> 31);
}

/* Returns 1 and the backend, 0 if nobody serves, -1 if this is no service address. `random` has 64 bits. */
static __always_inline int choose(const struct service_key *key, __u64 random, struct service *service,
				  struct endpoint *backend)
{
	int attempt;

	for (attempt = 0; attempt < ATTEMPTS; attempt++) {
		struct service *found = bpf_map_lookup_elem(&services, key);
		struct backend_slot *column;
		struct slot_key slot;

		if (!found)
			return -1;
		*service = *found;
		if (!service->slots)
			return 0;
		slot.service = service->id;
		slot.generation = service->generation;
		slot.index = ((random >> 32) * service->slots) >> 32;
		column = bpf_map_lookup_elem(&backend_slots, &slot);
		if (column) {
			*backend = (__u32)random <= column->threshold ? column->own : column->other;
			return 1;
		}
	}
	return 0;
}

static __always_inline int same_endpoint(const struct endpoint *backend, const struct mm_addr *address, __be16 port)
{
	return backend->port == port && address_equal(&backend->address, address);
}

static __always_inline void remember_datagram(void *context, const struct service_key *service,
					      const struct endpoint *backend)
{
	struct udp_reverse_key key = { .address = backend->address, .port = backend->port };
	struct service_key *known;

	key.cookie = bpf_get_socket_cookie(context);
	known = bpf_map_lookup_elem(&udp_reverse, &key);
	if (!known || known->port != service->port || !address_equal(&known->address, &service->address))
		bpf_map_update_elem(&udp_reverse, &key, service, BPF_ANY);
}

/* Returns 1 and the backend if the call shall go there. */
static __always_inline int translate(struct bpf_sock_addr *context, struct service_key *key, int is_ip4, int is_datagram,
				     struct endpoint *backend)
{
	struct bpf_sock *sk = context->sk;
	struct socket_origin *origin;
	struct service_stats *stats;
	struct backend_stats *share;
	struct service service = {};
	__u64 random;
	int found;

	if (!sk || is_proxy(sk))
		return 0;
	/* A datagram socket keeps its backend as long as the service keeps its table: protocols on it have state. */
	if (is_datagram)
		random = mix(bpf_get_socket_cookie(context));
	else
		random = (__u64)bpf_get_prandom_u32() << 32 | bpf_get_prandom_u32();
	found = choose(key, random, &service, backend);
	if (found < 0) {
		if (!is_datagram)
			bpf_sk_storage_delete(&socket_origin, sk); /* it is reconnected past us */
		return 0;
	}
	stats = stats_of_service(service.id);
	if (!found) {
		if (stats)
			stats->no_backend++;
		return 0;
	}
	/* An IPv6 socket can connect() to a mapped IPv4 address, but not send a datagram there from IPv6's sendmsg(). */
	if (is_ip4 != address_is_ip4(&backend->address) && (is_ip4 || is_datagram)) {
		if (stats)
			stats->wrong_family++;
		return 0;
	}
	share = stats_of_backend(backend->id);
	if (is_datagram) {
		remember_datagram(context, key, backend);
		if (stats)
			stats->datagrams++;
		if (share)
			share->datagrams++;
		return 1;
	}
	origin = bpf_sk_storage_get(&socket_origin, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (origin) {
		origin->service = *key;
		origin->backend = *backend;
		origin->tier = service.tier;
	}
	if (stats)
		stats->connections++;
	if (share)
		share->connections++;
	return 1;
}

/* Returns what the application asked for, if the peer is what it got for it. */
static __always_inline struct service_key *origin_of(struct bpf_sock_addr *context, const struct mm_addr *address,
						     __be16 port)
{
	struct bpf_sock *sk = context->sk;
	struct socket_origin *origin;

	if (!sk)
		return 0;
	origin = bpf_sk_storage_get(&socket_origin, sk, 0, 0);
	return origin && same_endpoint(&origin->backend, address, port) ? &origin->service : 0;
}

static __always_inline struct service_key *sender_of(struct bpf_sock_addr *context, const struct mm_addr *address,
						     __be16 port)
{
	struct udp_reverse_key key = { .address = *address, .port = port };
	struct service_key *service = origin_of(context, address, port);

	if (service)
		return service;
	key.cookie = bpf_get_socket_cookie(context);
	return bpf_map_lookup_elem(&udp_reverse, &key);
}

SEC("cgroup/connect4")
int sock_lb_connect4(struct bpf_sock_addr *context)
{
	struct service_key key = { .port = context->user_port, .protocol = context->protocol };
	struct endpoint backend = {};

	read_ip4(context, &key.address);
	if (translate(context, &key, 1, 0, &backend)) {
		context->user_ip4 = backend.address.words[3];
		context->user_port = backend.port;
	}
	return PROCEED;
}

SEC("cgroup/connect6")
int sock_lb_connect6(struct bpf_sock_addr *context)
{
	struct service_key key = { .port = context->user_port, .protocol = context->protocol };
	struct endpoint backend = {};

	read_ip6(context, &key.address);
	if (translate(context, &key, 0, 0, &backend)) {
		write_ip6(context, &backend.address);
		context->user_port = backend.port;
	}
	return PROCEED;
}

SEC("cgroup/sendmsg4")
int sock_lb_sendmsg4(struct bpf_sock_addr *context)
{
	struct service_key key = { .port = context->user_port, .protocol = IPPROTO_UDP };
	struct endpoint backend = {};

	read_ip4(context, &key.address);
	if (translate(context, &key, 1, 1, &backend)) {
		context->user_ip4 = backend.address.words[3];
		context->user_port = backend.port;
	}
	return PROCEED;
}

SEC("cgroup/sendmsg6")
int sock_lb_sendmsg6(struct bpf_sock_addr *context)
{
	struct service_key key = { .port = context->user_port, .protocol = IPPROTO_UDP };
	struct endpoint backend = {};

	read_ip6(context, &key.address);
	if (translate(context, &key, 0, 1, &backend)) {
		write_ip6(context, &backend.address);
		context->user_port = backend.port;
	}
	return PROCEED;
}

SEC("cgroup/recvmsg4")
int sock_lb_recvmsg4(struct bpf_sock_addr *context)
{
	__be16 port = context->user_port;
	struct service_key *service;
	struct mm_addr address;

	read_ip4(context, &address);
	service = sender_of(context, &address, port);
	if (service) {
		context->user_ip4 = service->address.words[3];
		context->user_port = service->port;
	}
	return PROCEED;
}

SEC("cgroup/recvmsg6")
int sock_lb_recvmsg6(struct bpf_sock_addr *context)
{
	__be16 port = context->user_port;
	struct service_key *service;
	struct mm_addr address;

	read_ip6(context, &address);
	service = sender_of(context, &address, port);
	if (service) {
		write_ip6(context, &service->address);
		context->user_port = service->port;
	}
	return PROCEED;
}

SEC("cgroup/getpeername4")
int sock_lb_getpeername4(struct bpf_sock_addr *context)
{
	__be16 port = context->user_port;
	struct service_key *service;
	struct mm_addr address;

	read_ip4(context, &address);
	service = origin_of(context, &address, port);
	if (service) {
		context->user_ip4 = service->address.words[3];
		context->user_port = service->port;
	}
	return PROCEED;
}

SEC("cgroup/getpeername6")
int sock_lb_getpeername6(struct bpf_sock_addr *context)
{
	__be16 port = context->user_port;
	struct service_key *service;
	struct mm_addr address;

	read_ip6(context, &address);
	service = origin_of(context, &address, port);
	if (service) {
		write_ip6(context, &service->address);
		context->user_port = service->port;
	}
	return PROCEED;
}
