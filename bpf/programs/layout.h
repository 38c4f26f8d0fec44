/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * What user space and the kernel programs agree on: every key and value of every map, byte for byte.
 *
 * bpf/layout.py holds the same structures for Python; a unit test compares the two by the object's BTF. Whoever
 * changes one of them raises MM_LAYOUT_VERSION in both: an agent refuses to take over maps of another version.
 *
 * Addresses are 16 bytes in network order, IPv4 as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2): one map serves both families.
 * Ports are in network order. Structures have no implicit padding: hash maps compare every byte of a key.
 */
#ifndef MODALMESH_LAYOUT_H
#define MODALMESH_LAYOUT_H

#include <linux/types.h>

#define MM_LAYOUT_VERSION 1

/* Slots of gpu_if_map: an SR-IOV NIC has at most 256 functions on one bus number (PCIe base spec, ARI). */
#define MM_GPU_SLOTS 256
/* GPU rules of each kind: 256 functions with 64 addresses, ports or queue pairs each. */
#define MM_GPU_RULES 16384
/* Service addresses: Kubernetes' tested bound is 10 000 services a cluster. */
#define MM_SERVICES 16384
/* Backend slots of all services together: 30 000 backends with both generations of every table in place. */
#define MM_BACKEND_SLOTS 65536
/* Quality-of-service tiers; 0 means «none». */
#define MM_TIERS 16
/* Marks that can name a tier. */
#define MM_MARKS 256
/* Log2 buckets of round-trip times: bucket i counts [2^i, 2^(i+1)) µs, the last one everything above 2^23 µs (8 s). */
#define MM_RTT_BUCKETS 24
/* Sockets joined at one time, two for a connection; above it connections take the plain way. */
#define MM_JOINED_SOCKETS 32768
/* Unconnected datagram sockets whose answers are translated back; the least recently used is forgotten first. */
#define MM_UDP_FLOWS 32768

struct mm_addr {
	__be32 words[4];
};

/* One entry, index 0 of mesh_config. */
struct mesh_config {
	__u32 layout_version; /* MM_LAYOUT_VERSION of who filled the maps; 0: nobody yet */
	__u32 proxy_mark;     /* sockets with (mark & proxy_mask) == proxy_mark are the node proxy's own: */
	__u32 proxy_mask;     /* their connections are not translated (else they would loop); 0: off */
	__u32 join_highwater; /* bytes queued at a reader above which a joined direction goes back to TCP; 0: 4 MiB */
};

/* Packets (or messages) and bytes. */
struct counter {
	__u64 packets;
	__u64 bytes;
};

/* ---- GPU bypass ---- */

/* Rules by queue pair (RoCEv2). address all zero: any address. */
struct gpu_qp_key {
	struct mm_addr address;
	__u32 qp; /* 24 bits, host order */
};

/* Rules by flow. port 0: any port; protocol 0: any protocol (then port is 0 too). */
struct gpu_flow_key {
	struct mm_addr address; /* destination */
	__be16 port;            /* destination */
	__u8 protocol;          /* IPPROTO_* */
	__u8 zero;
};

/* Values of both rule maps are the slot, a __u32 below MM_GPU_SLOTS. */

/* What is written into a frame on its way to a slot. The target interface itself stands in gpu_if_map (XDP) and in
 * ifindex (tc, which can't use a device map). */
struct gpu_slot {
	__u8 destination_mac[6];
	__u8 source_mac[6];
	__u32 ifindex; /* 0: no interface */
};

struct gpu_slot_stats {
	struct counter redirected;
	struct counter no_interface; /* a rule matched, but the slot has no interface: passed */
};

/* Why a packet was left to the plain way; indices of gpu_pass_stats. */
enum gpu_pass_reason {
	GPU_PASS_NO_RULE = 0,     /* well formed, not ours */
	GPU_PASS_NOT_IP = 1,      /* neither IPv4 nor IPv6 under at most two VLAN tags */
	GPU_PASS_TRUNCATED = 2,   /* a header doesn't fit the frame */
	GPU_PASS_MALFORMED = 3,   /* a length or version contradicts itself */
	GPU_PASS_FRAGMENT = 4,    /* ports may be in another packet */
	GPU_PASS_EXTENSIONS = 5,  /* IPv6 extension headers that are too many, unknown or encrypted */
	GPU_PASS_NO_INTERFACE = 6,/* a rule matched, the slot has no interface (also counted at the slot) */
	GPU_PASS_BAD_SLOT = 7,    /* a rule names a slot that can't exist */
	GPU_PASS_REASONS = 8
};

/* ---- service addresses ---- */

struct service_key {
	struct mm_addr address;
	__be16 port;
	__u8 protocol; /* IPPROTO_TCP or IPPROTO_UDP */
	__u8 zero;
};

struct service {
	__u32 id;
	__u32 generation; /* of its table; an update writes a new generation's slots, then this, then removes the old */
	__u32 slots;      /* size of the table; 0: no backend: the connection takes the plain way */
	__u32 tier;
};

struct slot_key {
	__u32 service;
	__u32 generation;
	__u32 index;
};

struct endpoint {
	struct mm_addr address;
	__be16 port;
	__u16 zero;
	__u32 id; /* key of backend_stats; chosen by user space, never 0 */
};

/* One column of an alias table (Vose 1991): a random column, then a random number decides between its two. */
struct backend_slot {
	struct endpoint own;
	struct endpoint other;
	__u32 threshold; /* own if a random 32-bit number is <= threshold; 0xffffffff: always own */
};

/* Kept with a socket (SK_STORAGE) once its connection was translated. */
struct socket_origin {
	struct service_key service; /* what the application asked for */
	struct endpoint backend;    /* what it got: a socket that is reconnected past us shows another peer */
	__u32 tier;
};

/* Answers to unconnected datagram sockets. */
struct udp_reverse_key {
	__u64 cookie;            /* of the socket */
	struct mm_addr address;  /* backend */
	__be16 port;
	__u16 zero;
	__u32 zero2;
};

struct service_stats {
	__u64 connections;  /* connect() translated */
	__u64 datagrams;    /* sendmsg() translated */
	__u64 no_backend;   /* left to the plain way: no slot, or its table was exchanged twice meanwhile */
	__u64 wrong_family; /* left to the plain way: the socket can't reach the backend's address family */
};

/* Value of backend_stats, by endpoint.id. */
struct backend_stats {
	__u64 connections;
	__u64 datagrams;
};

/* ---- joined sockets ---- */

/* From the sending socket's point of view: the key under which its peer lies in join_sockets has both ends swapped. */
struct join_key {
	struct mm_addr local_address;
	struct mm_addr remote_address;
	__u32 local_port;  /* host order */
	__u32 remote_port; /* host order */
	__u64 netns;       /* cookie of the namespace for loopback addresses, which every namespace has; else 0 */
};

struct join_peer {
	__u64 sock;    /* kernel address, only ever read through bpf_probe_read_kernel */
	__u32 snd_nxt; /* both ends' sequence numbers when established: */
	__u32 rcv_nxt; /* equal crosswise only if they are ends of one connection */
};

/* Kept with a socket (SK_STORAGE). */
struct join_state {
	struct join_key peer; /* under which the other end lies in join_sockets and join_peers */
	__u32 snd_nxt;        /* as in join_peer, of this end */
	__u32 rcv_nxt;
	__u32 plain; /* 1: this direction goes through TCP for good; going back would reorder */
	__u32 zero;
};

/* Indices of join_stats. */
enum join_event {
	JOIN_ADDED = 0,       /* a socket entered the map */
	JOIN_ADD_FAILED = 1,  /* it could not (map full, state) */
	JOIN_REDIRECTED = 2,  /* message handed to the peer; packets = messages */
	JOIN_NO_PEER = 3,     /* direction went back to TCP: the peer isn't joined (yet) */
	JOIN_HIGHWATER = 4,   /* direction went back to TCP: the reader doesn't keep up */
	JOIN_FAILED = 5,      /* direction went back to TCP: redirect refused */
	JOIN_PLAIN = 6,       /* message sent by TCP on a joined socket */
	JOIN_MISMATCH = 7,    /* same addresses and ports, other connection: not joined */
	JOIN_EVENTS = 8
};

/* ---- signals ---- */

struct tcp_stats {
	__u64 active;          /* connections opened from here */
	__u64 passive;         /* connections accepted here */
	__u64 closed;
	__u64 retransmissions; /* segments */
	__u64 bytes_sent;      /* acknowledged by the peer, or handed to a joined peer */
	__u64 bytes_received;  /* by TCP; a joined socket's bytes are counted once, at their sender */
	__u64 rtt_samples;
	__u64 rtt_sum_us;
};

/* Kept with a socket (SK_STORAGE). */
struct signal_state {
	__u64 bytes_sent; /* already counted */
	__u64 bytes_received;
	__u32 tier;
	__u32 zero;
};

#endif
