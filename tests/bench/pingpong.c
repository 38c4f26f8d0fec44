/* Round trips, one at a time, over many paths in shuffled order; compiled and run by datapath.py.
 *
 *   pingpong serve PROTOCOL:PORT ...
 *   pingpong ask ROUNDS WARMUP SIZE FILE NAME=PROTOCOL:IPV4:PORT ...
 *
 * PROTOCOL is tcp (bytes come back) or h2 (a POST's body comes back, over HTTP/2 with prior knowledge). FILE gets, for
 * each path in order, ROUNDS nanosecond counts as 32-bit integers; round i of every path was measured together.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define LARGEST 65536
#define PATHS 32

enum { DATA = 0, HEADERS = 1, RST_STREAM = 3, SETTINGS = 4, PING = 6, GOAWAY = 7, WINDOW_UPDATE = 8 };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4 };

static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
#define PREFACE 24

struct connection {
	int fd, is_h2, is_listener, greeted;
	size_t have, body;
	uint32_t stream;
	unsigned char in[2 * LARGEST], data[LARGEST];
};

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static int write_all(int fd, const void *data, size_t size)
{
	while (size) {
		ssize_t done = write(fd, data, size);

		if (done <= 0)
			return -1;
		data = (const char *)data + done;
		size -= done;
	}
	return 0;
}

static size_t frame(unsigned char *to, size_t size, int type, int flags, uint32_t stream)
{
	to[0] = size >> 16;
	to[1] = size >> 8;
	to[2] = size;
	to[3] = type;
	to[4] = flags;
	stream = htonl(stream);
	memcpy(to + 5, &stream, 4);
	return 9;
}

/* Windows so large that no round trip waits for one. */
static size_t greeting(unsigned char *to)
{
	size_t at = frame(to, 6, SETTINGS, 0, 0);

	memcpy(to + at, "\0\4\x7f\xff\xff\xff", 6);
	at += 6;
	at += frame(to + at, 4, WINDOW_UPDATE, 0, 0);
	memcpy(to + at, "\x7f\xff\0\0", 4);
	return at + 4;
}

static size_t message(unsigned char *to, uint32_t stream, const char *headers, size_t headers_size, const void *body,
		      size_t size)
{
	size_t at = frame(to, headers_size, HEADERS, END_HEADERS, stream);

	memcpy(to + at, headers, headers_size);
	at += headers_size;
	at += frame(to + at, size, DATA, END_STREAM, stream);
	memcpy(to + at, body, size);
	return at + size;
}

/* Takes one frame, if a whole one is there: 1 taken, 2 taken and the message is complete, 0 not there, -1 broken. */
static int take_frame(struct connection *c)
{
	unsigned char *f = c->in, answer[17];
	size_t size;
	int result = 1;

	if (c->have < 9)
		return 0;
	size = f[0] << 16 | f[1] << 8 | f[2];
	if (size > LARGEST)
		return -1;
	if (c->have < 9 + size)
		return 0;
	if (f[3] == SETTINGS && !(f[4] & ACK)) {
		if (write_all(c->fd, answer, frame(answer, 0, SETTINGS, ACK, 0)))
			return -1;
	} else if (f[3] == PING && !(f[4] & ACK)) {
		memcpy(answer + frame(answer, 8, PING, ACK, 0), f + 9, 8);
		if (write_all(c->fd, answer, 17))
			return -1;
	} else if (f[3] == RST_STREAM || f[3] == GOAWAY) {
		return -1;
	} else if (f[3] == DATA || f[3] == HEADERS) {
		memcpy(&c->stream, f + 5, 4);
		c->stream = ntohl(c->stream);
		if (f[3] == HEADERS)
			c->body = 0;
		else if (c->body + size > LARGEST)
			return -1;
		else {
			memcpy(c->data + c->body, f + 9, size);
			c->body += size;
		}
		if (f[4] & END_STREAM)
			result = 2;
	}
	c->have -= 9 + size;
	memmove(c->in, c->in + 9 + size, c->have);
	return result;
}

static int receive(struct connection *c)
{
	ssize_t got = read(c->fd, c->in + c->have, sizeof(c->in) - c->have);

	if (got <= 0)
		return -1;
	c->have += got;
	return 0;
}

static int answer_h2(struct connection *c)
{
	static unsigned char out[LARGEST + 64];
	int taken;

	if (!c->greeted) {
		if (c->have < PREFACE)
			return 0;
		if (memcmp(c->in, preface, PREFACE) || write_all(c->fd, out, greeting(out)))
			return -1;
		c->have -= PREFACE;
		memmove(c->in, c->in + PREFACE, c->have);
		c->greeted = 1;
	}
	while ((taken = take_frame(c)) > 0)
		/* 0x88: «:status: 200» of HPACK's static table */
		if (taken == 2 && write_all(c->fd, out, message(out, c->stream, "\x88", 1, c->data, c->body)))
			return -1;
	return taken;
}

static int answer(struct connection *c)
{
	if (receive(c))
		return -1;
	if (c->is_h2)
		return answer_h2(c);
	if (write_all(c->fd, c->in, c->have))
		return -1;
	c->have = 0;
	return 0;
}

static void watch(int epoll, int fd, int is_h2, int is_listener)
{
	struct connection *c = calloc(1, sizeof(*c));
	struct epoll_event event = { .events = EPOLLIN, .data.ptr = c };

	if (!c)
		die("calloc");
	c->fd = fd;
	c->is_h2 = is_h2;
	c->is_listener = is_listener;
	if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event))
		die("epoll_ctl");
}

static void serve(int count, char **ends)
{
	int epoll = epoll_create1(0), one = 1, i;
	struct epoll_event events[32];

	for (i = 0; i < count; i++) {
		int is_h2 = !strncmp(ends[i], "h2:", 3), fd = socket(AF_INET, SOCK_STREAM, 0);
		struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(strchr(ends[i], ':') + 1)) };

		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		if (bind(fd, (void *)&address, sizeof(address)) || listen(fd, 64))
			die(ends[i]);
		watch(epoll, fd, is_h2, 1);
	}
	puts("ready");
	fflush(stdout);
	for (;;) {
		int ready = epoll_wait(epoll, events, 32, -1);

		for (i = 0; i < ready; i++) {
			struct connection *c = events[i].data.ptr;

			if (c->is_listener) {
				int fd = accept(c->fd, 0, 0);

				if (fd < 0)
					continue;
				setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
				watch(epoll, fd, c->is_h2, 0);
			} else if (answer(c)) {
				close(c->fd);
				free(c);
			}
		}
	}
}

struct path {
	char name[64], protocol[8];
	struct connection *c;
	uint32_t next_stream, *samples;
};

static void open_path(struct path *p, const char *text, int rounds)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct timeval patience = { 5, 0 };
	unsigned char out[64];
	char ip[64];
	int port, one = 1;

	if (sscanf(text, "%63[^=]=%7[^:]:%63[^:]:%d", p->name, p->protocol, ip, &port) != 4)
		die(text);
	p->c = calloc(1, sizeof(*p->c));
	p->samples = calloc(rounds, sizeof(*p->samples));
	if (!p->c || !p->samples)
		die("calloc");
	p->c->fd = socket(AF_INET, SOCK_STREAM, 0);
	address.sin_port = htons(port);
	inet_aton(ip, &address.sin_addr);
	setsockopt(p->c->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(p->c->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	if (connect(p->c->fd, (void *)&address, sizeof(address)))
		die(text);
	setsockopt(p->c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	p->next_stream = 1;
	if (!strcmp(p->protocol, "h2"))
		if (write_all(p->c->fd, preface, PREFACE) || write_all(p->c->fd, out, greeting(out)))
			die(text);
}

static void broken(const struct path *p)
{
	fprintf(stderr, "%s: ", p->name);
	die("no answer");
}

/* ":method: POST", ":scheme: http", ":path: /" of the static table, ":authority: a" as a literal */
static const char request[] = "\x83\x86\x84\x01\x01" "a";

static uint32_t ask(struct path *p, unsigned char fill, size_t size)
{
	static unsigned char body[LARGEST], out[LARGEST + 64];
	struct connection *c = p->c;
	uint64_t start;

	memset(body, fill, size);
	start = now();
	if (!strcmp(p->protocol, "h2")) {
		int taken = 0;

		if (write_all(c->fd, out, message(out, p->next_stream, request, 6, body, size)))
			broken(p);
		while (taken != 2) {
			taken = take_frame(c);
			if (taken < 0 || (!taken && receive(c)))
				broken(p);
		}
		if (c->stream != p->next_stream || c->body != size || memcmp(c->data, body, size))
			broken(p);
		p->next_stream += 2;
	} else {
		if (write_all(c->fd, body, size))
			broken(p);
		while (c->have < size)
			if (receive(c))
				broken(p);
		if (memcmp(c->in, body, size))
			broken(p);
		c->have = 0;
	}
	return now() - start;
}

int main(int count, char **arguments)
{
	static struct path paths[PATHS];
	int order[PATHS], rounds, warmup, size, amount, round, i;
	FILE *file;

	signal(SIGPIPE, SIG_IGN);
	if (count > 2 && !strcmp(arguments[1], "serve"))
		serve(count - 2, arguments + 2);
	if (count < 7 || count > 6 + PATHS)
		return 2;
	rounds = atoi(arguments[2]);
	warmup = atoi(arguments[3]);
	size = atoi(arguments[4]);
	amount = count - 6;
	if (size < 1 || size > LARGEST / 2)
		return 2;
	for (i = 0; i < amount; i++) {
		open_path(&paths[i], arguments[6 + i], rounds);
		order[i] = i;
	}
	srand(7);
	for (round = -warmup; round < rounds; round++) {
		for (i = amount - 1; i > 0; i--) {
			int other = rand() % (i + 1), kept = order[i];

			order[i] = order[other];
			order[other] = kept;
		}
		for (i = 0; i < amount; i++) {
			uint32_t took = ask(&paths[order[i]], 'a' + (round & 15), size);

			if (round >= 0)
				paths[order[i]].samples[round] = took;
		}
	}
	file = fopen(arguments[5], "wb");
	if (!file)
		die(arguments[5]);
	for (i = 0; i < amount; i++)
		if (fwrite(paths[i].samples, sizeof(uint32_t), rounds, file) != (size_t)rounds)
			die("fwrite");
	return fclose(file) ? 1 : 0;
}
