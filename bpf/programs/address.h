/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * Addresses as 16 bytes.
 */
#ifndef MODALMESH_ADDRESS_H
#define MODALMESH_ADDRESS_H

#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "layout.h"

/* ::ffff:a.b.c.d (RFC 4291, 2.5.5.2). */
static __always_inline void address_from_ip4(struct mm_addr *address, __be32 ip)
{
	address->words[0] = 0;
	address->words[1] = 0;
	address->words[2] = bpf_htonl(0xffff);
	address->words[3] = ip;
}

static __always_inline int address_is_ip4(const struct mm_addr *address)
{
	return !address->words[0] && !address->words[1] && address->words[2] == bpf_htonl(0xffff);
}

static __always_inline int address_equal(const struct mm_addr *one, const struct mm_addr *other)
{
	return one->words[0] == other->words[0] && one->words[1] == other->words[1] &&
	       one->words[2] == other->words[2] && one->words[3] == other->words[3];
}

/* 127.0.0.0/8 or ::1: every network namespace has its own. */
static __always_inline int address_is_loopback(const struct mm_addr *address)
{
	if (address_is_ip4(address))
		return (bpf_ntohl(address->words[3]) >> 24) == 127;
	return !address->words[0] && !address->words[1] && !address->words[2] && address->words[3] == bpf_htonl(1);
}

#endif
