/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 * What a frame says about itself: destination, port, protocol, RoCEv2 queue pair. No map is read here, nothing written.
 *
 * A frame that can't be read to its transport header is left to the kernel's own stack, which knows better.
 */
#ifndef MODALMESH_PACKET_H
#define MODALMESH_PACKET_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "address.h"

/* RoCEv2's destination port (IANA, InfiniBand Architecture annex A17). */
#define ROCE_V2_PORT 4791
/* Outer and inner tag (802.1ad). */
#define VLAN_DEPTH 2
/* Hop-by-hop, destination options, routing, authentication, destination options: RFC 8200, 4.1 names no longer chain
 * in front of a transport header. */
#define EXTENSION_DEPTH 5

/* "More fragments" and the offset (RFC 791). */
#define IP4_FRAGMENT 0x3fff

struct vlan_tag {
	__be16 control;
	__be16 protocol;
};

/* The part of every IPv6 extension header that tells its length (RFC 8200, 4.2). */
struct extension {
	__u8 next;
	__u8 length; /* in 8 bytes beyond the first 8; of AH in 4 bytes beyond the first 8 */
	__u8 routing_type;
	__u8 segments_left;
};

/* InfiniBand base transport header. */
struct base_transport {
	__u8 opcode;
	__u8 flags;
	__be16 partition;
	__be32 qp; /* 8 bits reserved, 24 bits destination queue pair */
	__be32 sequence;
};

struct packet {
	struct mm_addr destination;
	__be16 port; /* destination; 0 where the protocol has none */
	__u8 protocol;
	__u8 is_roce;
	__u32 qp;
};

/* Reads ports; `left` is what the network layer says is left for the transport. */
static __always_inline int packet_read_transport(struct packet *packet, void *transport, void *end, __u32 left)
{
	if (packet->protocol == IPPROTO_UDP) {
		struct udphdr *udp = transport;

		if ((void *)(udp + 1) > end || left < sizeof(*udp))
			return GPU_PASS_TRUNCATED;
		if (bpf_ntohs(udp->len) < sizeof(*udp) || bpf_ntohs(udp->len) > left)
			return GPU_PASS_MALFORMED;
		packet->port = udp->dest;
		if (udp->dest == bpf_htons(ROCE_V2_PORT)) {
			struct base_transport *base = (void *)(udp + 1);

			if ((void *)(base + 1) > end || bpf_ntohs(udp->len) < sizeof(*udp) + sizeof(*base))
				return GPU_PASS_TRUNCATED;
			packet->is_roce = 1;
			packet->qp = bpf_ntohl(base->qp) & 0xffffff;
		}
	} else if (packet->protocol == IPPROTO_TCP) {
		struct tcphdr *tcp = transport;

		if ((void *)(tcp + 1) > end || left < sizeof(*tcp))
			return GPU_PASS_TRUNCATED;
		packet->port = tcp->dest;
	}
	return -1;
}

static __always_inline int packet_read_ip4(struct packet *packet, void *network, void *end, __u32 length)
{
	struct iphdr *ip = network;
	__u32 header, total;

	if ((void *)(ip + 1) > end)
		return GPU_PASS_TRUNCATED;
	header = ip->ihl * 4;
	total = bpf_ntohs(ip->tot_len);
	if (ip->version != 4 || header < sizeof(*ip) || total < header)
		return GPU_PASS_MALFORMED;
	if (total > length)
		return GPU_PASS_TRUNCATED;
	if (ip->frag_off & bpf_htons(IP4_FRAGMENT))
		return GPU_PASS_FRAGMENT;
	address_from_ip4(&packet->destination, ip->daddr);
	packet->protocol = ip->protocol;
	return packet_read_transport(packet, network + header, end, total - header);
}

static __always_inline int is_extension(__u8 next)
{
	return next == IPPROTO_HOPOPTS || next == IPPROTO_DSTOPTS || next == IPPROTO_ROUTING || next == IPPROTO_AH;
}

static __always_inline int packet_read_ip6(struct packet *packet, void *network, void *end, __u32 length)
{
	struct ipv6hdr *ip = network;
	void *position = ip + 1;
	__u32 left, size;
	__u8 next;
	int i;

	if (position > end)
		return GPU_PASS_TRUNCATED;
	if (ip->version != 6)
		return GPU_PASS_MALFORMED;
	left = bpf_ntohs(ip->payload_len);
	if (left > length - sizeof(*ip))
		return GPU_PASS_TRUNCATED;
	__builtin_memcpy(&packet->destination, &ip->daddr, sizeof(packet->destination));
	next = ip->nexthdr;
#pragma clang loop unroll(full)
	for (i = 0; i < EXTENSION_DEPTH; i++) {
		struct extension *extension = position;

		if (!is_extension(next))
			break;
		if (next == IPPROTO_HOPOPTS && i)
			return GPU_PASS_MALFORMED; /* only ever the first (RFC 8200, 4.3) */
		if ((void *)(extension + 1) > end)
			return GPU_PASS_TRUNCATED;
		if (next == IPPROTO_ROUTING && extension->segments_left)
			return GPU_PASS_EXTENSIONS; /* the destination is a station, not the end */
		size = next == IPPROTO_AH ? (extension->length + 2) * 4 : (extension->length + 1) * 8;
		if (size > left)
			return GPU_PASS_MALFORMED;
		next = extension->next;
		left -= size;
		position += size;
	}
	if (is_extension(next))
		return GPU_PASS_EXTENSIONS;
	if (next == IPPROTO_FRAGMENT)
		return GPU_PASS_FRAGMENT;
	packet->protocol = next;
	return packet_read_transport(packet, position, end, left);
}

/* Fills `packet`, which the caller has zeroed; returns -1, or the reason for which it can't be read.
 * `length` is that of the whole frame: data may hold less of it (tc). */
static __always_inline int packet_read(struct packet *packet, void *data, void *end, __u32 length)
{
	struct ethhdr *ethernet = data;
	void *position = ethernet + 1;
	__be16 protocol;
	int i;

	if (position > end)
		return GPU_PASS_TRUNCATED;
	protocol = ethernet->h_proto;
	length -= sizeof(*ethernet);
#pragma clang loop unroll(full)
	for (i = 0; i < VLAN_DEPTH; i++) {
		struct vlan_tag *tag = position;

		if (protocol != bpf_htons(ETH_P_8021Q) && protocol != bpf_htons(ETH_P_8021AD))
			break;
		if ((void *)(tag + 1) > end)
			return GPU_PASS_TRUNCATED;
		protocol = tag->protocol;
		position = tag + 1;
		length -= sizeof(*tag);
	}
	if (protocol == bpf_htons(ETH_P_IP))
		return packet_read_ip4(packet, position, end, length);
	if (protocol == bpf_htons(ETH_P_IPV6))
		return packet_read_ip6(packet, position, end, length);
	return GPU_PASS_NOT_IP;
}

#endif
