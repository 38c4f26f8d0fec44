/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * Both ends of the socket that a sockops program is called for.
 */
#ifndef MODALMESH_SOCKET_ADDRESS_H
#define MODALMESH_SOCKET_ADDRESS_H

#include <linux/bpf.h>
#include <linux/in.h>

#include "address.h"

/* sys/socket.h can't be included by a program. */
#define AF_INET 2
#define AF_INET6 10

struct socket_ends {
	struct mm_addr local;
	struct mm_addr remote;
	__u32 local_port;  /* host order */
	__u32 remote_port; /* host order */
};

/* Returns 0 for other families. */
static __always_inline int read_socket_ends(struct bpf_sock_ops *context, struct socket_ends *ends)
{
	if (context->family == AF_INET) {
		address_from_ip4(&ends->local, context->local_ip4);
		address_from_ip4(&ends->remote, context->remote_ip4);
		/* Else clang merges the reads of both branches through a pointer, which the verifier forbids. */
		asm volatile("" ::: "memory");
	} else if (context->family == AF_INET6) {
		ends->local.words[0] = context->local_ip6[0];
		ends->local.words[1] = context->local_ip6[1];
		ends->local.words[2] = context->local_ip6[2];
		ends->local.words[3] = context->local_ip6[3];
		ends->remote.words[0] = context->remote_ip6[0];
		ends->remote.words[1] = context->remote_ip6[1];
		ends->remote.words[2] = context->remote_ip6[2];
		ends->remote.words[3] = context->remote_ip6[3];
	} else {
		return 0;
	}
	ends->local_port = context->local_port;
	ends->remote_port = bpf_ntohl(context->remote_port);
	return 1;
}

static __always_inline void endpoint_key(struct service_key *key, const struct mm_addr *address, __u32 port)
{
	key->address = *address;
	key->port = bpf_htons(port);
	key->protocol = IPPROTO_TCP;
	key->zero = 0;
}

#endif
